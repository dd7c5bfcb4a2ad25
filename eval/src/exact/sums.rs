//! What rows of ratios add up to.

use draftsmith_models::batch::TokenRow;
use draftsmith_models::slot::is_valid;

use super::ratios::SlotRatio;
use super::schedule::ScheduleSums;
use super::{ExactReport, ExactSettings, ExactTau};
use crate::bootstrap::ratio_interval;
use crate::round_dp::{
    DepthSums, expected_rounds, mean_cost, rounds_by_drafts, variance_of_rounds,
};

/// Tokens and expected rounds of one row, for each gamma.
struct RowSums {
    tokens: f64,
    rounds: Vec<f64>,
    variance: Vec<f64>,
}

/// Everything that the rows of an evaluation add up to.
pub(super) struct Sums {
    num_depths: usize,
    rows: Vec<RowSums>,
    num_turns: usize,
    num_anchors: usize,
    /// Sum over all anchors of the expected accepted drafts, for each gamma.
    uniform_accepted: Vec<f64>,
    depths: DepthSums,
    /// Expected rounds by the number of verified drafts, for each gamma.
    rounds_by_drafts: Vec<Vec<f64>>,
    scheduled: ScheduleSums,
}

impl Sums {
    pub(super) fn new(num_depths: usize) -> Self {
        Self {
            num_depths,
            rows: Vec::new(),
            num_turns: 0,
            num_anchors: 0,
            uniform_accepted: vec![0.0; num_depths],
            depths: DepthSums::new(num_depths),
            rounds_by_drafts: (1..=num_depths).map(|gamma| vec![0.0; gamma + 1]).collect(),
            scheduled: ScheduleSums::default(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn add_row(&mut self, row: &TokenRow, anchors: &[Vec<SlotRatio>]) {
        let mut sums = RowSums {
            tokens: 0.0,
            rounds: vec![0.0; self.num_depths],
            variance: vec![0.0; self.num_depths],
        };
        for turn in turns(&row.turns) {
            let anchors = &anchors[turn];
            let realised = |slots: &Vec<SlotRatio>| slots.iter().map(|s| s.realised).collect();
            let ratios: Vec<Vec<f64>> = anchors.iter().map(realised).collect();
            self.num_turns += 1;
            self.num_anchors += anchors.len();
            sums.tokens += anchors.len() as f64;
            for gamma in 1..=self.num_depths {
                let expected = expected_rounds(&ratios, gamma);
                sums.rounds[gamma - 1] += expected[0];
                sums.variance[gamma - 1] += variance_of_rounds(&ratios, &expected, gamma)[0];
                let found = rounds_by_drafts(&ratios, gamma);
                add(&mut self.rounds_by_drafts[gamma - 1], &found);
            }
            self.depths.add(&ratios);
            self.scheduled.add(anchors, self.num_depths);
            self.add_uniform(anchors);
        }
        self.rows.push(sums);
    }

    /// `S_k = r_1 .. r_{k-1} alpha_k` (theory: realised ratios, last factor averaged over the draft).
    fn add_uniform(&mut self, anchors: &[Vec<SlotRatio>]) {
        for slots in anchors {
            let mut survival = 1.0;
            let mut accepted = 0.0;
            for (depth, total) in self.uniform_accepted.iter_mut().enumerate() {
                if let Some(slot) = slots.get(depth) {
                    accepted += survival * slot.marginal;
                    survival *= slot.realised;
                }
                *total += accepted;
            }
        }
    }

    pub(super) fn report(&self, settings: &ExactSettings) -> ExactReport {
        let tokens: f64 = self.rows.iter().map(|row| row.tokens).sum();
        let entry = |index: usize| {
            let pairs: Vec<(f64, f64)> = self
                .rows
                .iter()
                .map(|row| (row.tokens, row.rounds[index]))
                .collect();
            let rounds: f64 = pairs.iter().map(|(_, rounds)| rounds).sum();
            ExactTau {
                gamma: index + 1,
                tau: tokens / rounds,
                interval: ratio_interval(&pairs, settings.resamples, settings.seed),
                drafts: mean_cost(&self.rounds_by_drafts[index], |drafts| drafts),
                rounds,
                rounds_variance: self.rows.iter().map(|row| row.variance[index]).sum(),
                uniform_anchor_tau: 1.0 + self.uniform_accepted[index] / self.num_anchors as f64,
            }
        };
        ExactReport {
            rule: settings.rule.name().to_owned(),
            sampling: settings.sampling,
            text: settings.text,
            text_matches_rule: settings.text_matches_rule(),
            num_rows: self.rows.len(),
            num_turns: self.num_turns,
            num_tokens: tokens as usize,
            by_gamma: (0..self.num_depths).map(entry).collect(),
            rounds_by_drafts: self.rounds_by_drafts.clone(),
            by_confidence: self.scheduled.report(tokens),
            acceptance_by_depth: shares(&self.depths.accepted, &self.depths.reached),
            survival_by_depth: shares(&self.depths.accepted, &self.depths.proposed),
        }
    }
}

/// Adds numbers to those at the same place.
pub(super) fn add(sums: &mut [f64], more: &[f64]) {
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum += more;
    }
}

fn shares(numerators: &[f64], denominators: &[f64]) -> Vec<Option<f64>> {
    numerators
        .iter()
        .zip(denominators)
        .map(|(n, d)| (*d > 0.0).then(|| n / d))
        .collect()
}

/// Ranges of anchors `s .. e`, one a turn `x_s ..= x_e` that has a round.
pub(super) fn turns(turns: &[u32]) -> Vec<std::ops::Range<usize>> {
    let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
    for anchor in 1..turns.len() {
        if !is_valid(turns, anchor, 0) {
            continue;
        }
        match ranges.last_mut() {
            Some(range) if range.end == anchor && turns[anchor] == turns[anchor - 1] => {
                range.end += 1;
            }
            _ => ranges.push(anchor..anchor + 1),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_runs_of_anchors() {
        assert_eq!(turns(&[0, 0, 0, 1, 1, 1, 1, 0]), vec![3..6]);
        assert_eq!(turns(&[0, 1, 1, 2, 2, 2]), vec![1..2, 3..5]);
        assert_eq!(turns(&[1, 1, 0, 2, 0, 3, 3]), vec![5..6]);
        assert!(turns(&[0, 1, 0]).is_empty());
        assert!(turns(&[]).is_empty());
    }
}
