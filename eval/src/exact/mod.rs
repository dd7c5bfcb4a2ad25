//! [`exact`]: the tau of real decoding, computed from teacher-forced text without decoding it.
//!
//! On text the target generated, the probability that a draft is accepted *and* equals the text is known
//! for every (anchor, depth); the round DP of [`crate::round_dp`] turns them into the expected number of
//! rounds. The figure is exact (given equal numerics) when the text was generated under the measured
//! rule: greedy text for `greedy`, text of the same temperature for `sampling`. It has no coin noise, so
//! it needs far less text than decoding, and it needs no caches. Training validates with it.

use burn::tensor::FloatDType;
use draftsmith_data::hidden::HiddenStateSource;
use draftsmith_models::batch::{DraftBatch, TargetStates, TokenBatch, TokenRow};
use draftsmith_models::drafter::AnyDrafter;
use draftsmith_models::objective::{Objective, ObjectiveInput, SlotScores, Teacher};
use draftsmith_models::sample::Sampling;
use draftsmith_models::slot::{Slot, batch_slots, is_valid};
use draftsmith_models::target::TargetEnds;
use draftsmith_models::vocab::VocabMap;
use serde::{Deserialize, Serialize};

use crate::bootstrap::{Interval, ratio_interval};
use crate::error::EvalError;
use crate::round_dp::{DepthSums, expected_rounds};

/// The drafter under measurement.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The drafter, on a device without gradient tracking.
    pub drafter: &'a AnyDrafter,
    /// Embedding, final norm and head of the target.
    pub ends: &'a TargetEnds,
    /// Draft vocabulary.
    pub vocab: &'a VocabMap,
}

/// Rule and sizes of an exact evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExactSettings {
    /// 0 measures `greedy`, anything else `sampling` at this temperature.
    pub temperature: f64,
    /// How the target drew the text; unset where nobody knows.
    pub text: Option<Sampling>,
    /// Rows processed together.
    pub batch_rows: usize,
    /// Teacher positions whose logits exist at one time.
    pub chunk_positions: usize,
    /// Bootstrap resamples of the interval; 0 gives none.
    pub resamples: usize,
    /// Seed of the resampling.
    pub seed: u64,
}

impl Default for ExactSettings {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            text: Some(Sampling::default()),
            batch_rows: 4,
            chunk_positions: 256,
            resamples: 1000,
            seed: 0,
        }
    }
}

impl ExactSettings {
    /// Whether the text was drawn at the temperature of the rule and without truncation.
    pub fn text_matches_rule(&self) -> bool {
        self.text == Some(Sampling::at(self.temperature))
    }
}

/// What the exact evaluator found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExactReport {
    /// `greedy` or `sampling`.
    pub rule: String,
    /// Temperature of the measured decoding.
    pub temperature: f64,
    /// How the text was drawn; unset where nobody knows.
    pub text: Option<Sampling>,
    /// Whether the text was drawn as the rule decodes, so that the figures are those of real decoding.
    pub text_matches_rule: bool,
    /// Rows with at least one round.
    pub num_rows: usize,
    /// Turns with at least one round.
    pub num_turns: usize,
    /// Tokens committed in rounds: those of each turn but its first.
    pub num_tokens: usize,
    /// One entry for each gamma, `1 ..= num_depths`.
    pub by_gamma: Vec<ExactTau>,
    /// Conditional acceptance per depth over the rounds decoding visits with the largest gamma.
    pub acceptance_by_depth: Vec<Option<f64>>,
    /// Survival per depth over the same rounds.
    pub survival_by_depth: Vec<Option<f64>>,
}

/// Tokens per round with up to `gamma` drafts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExactTau {
    /// Drafts a round, at most.
    pub gamma: usize,
    /// Pooled tokens per round, the target's own token included.
    pub tau: f64,
    /// 95 % bootstrap interval of `tau` over rows.
    pub interval: Option<Interval>,
    /// Expected rounds over all text.
    pub rounds: f64,
    /// Mean tokens of a round over uniformly chosen anchors, as other trainers log it; not the tau of
    /// decoding, because rounds restart after failures and so dwell in hard text.
    pub uniform_anchor_tau: f64,
}

impl ExactReport {
    /// Tau for the largest gamma, the figure that selects checkpoints.
    pub fn tau(&self) -> f64 {
        self.by_gamma.last().map_or(1.0, |entry| entry.tau)
    }
}

/// Measures a drafter on `rows`, whose marked tokens the target generated.
///
/// All gammas from 1 to the drafter's number of depths are computed at once. Rows without a round are
/// skipped.
///
/// # Errors
/// [`EvalError`] when the states cannot be had, a score is not a number, or no row has a round.
pub fn exact(
    candidate: Candidate<'_>,
    source: &dyn HiddenStateSource,
    rows: &[TokenRow],
    settings: &ExactSettings,
) -> Result<ExactReport, EvalError> {
    let wanted = candidate.drafter.state_spec();
    if *source.spec() != wanted {
        return Err(EvalError::setting(
            format!(
                "the states hold layers {:?}, but the drafter reads {:?}",
                source.spec().aux_layer_ids,
                wanted.aux_layer_ids
            ),
            "capture the states again for this drafter, or set its `aux_layer_ids`",
        ));
    }
    exact_with(candidate, rows, settings, |tokens| {
        Ok(source.states(tokens)?)
    })
}

/// [`exact`] with states from any function of the tokens.
///
/// # Errors
/// As [`exact`].
pub fn exact_with(
    candidate: Candidate<'_>,
    rows: &[TokenRow],
    settings: &ExactSettings,
    mut states: impl FnMut(&TokenBatch) -> Result<TargetStates, EvalError>,
) -> Result<ExactReport, EvalError> {
    let teacher = Teacher::new(candidate.ends, candidate.vocab);
    let mut sums = Sums::new(candidate.drafter.num_depths());
    let measurable: Vec<&TokenRow> = rows.iter().filter(|row| has_round(row)).collect();
    for chunk in measurable.chunks(settings.batch_rows.max(1)) {
        let tokens = TokenBatch {
            rows: chunk.iter().map(|row| (*row).clone()).collect(),
        };
        let batch = DraftBatch {
            states: states(&tokens)?,
            tokens,
        };
        let (slots, scores) = score(candidate.drafter, &teacher, &batch, settings);
        sums.add_batch(&batch, &slots, &scores, settings)?;
    }
    if sums.rows.is_empty() {
        return Err(EvalError::NothingToMeasure {
            num_rows: rows.len(),
        });
    }
    Ok(sums.report(settings))
}

fn has_round(row: &TokenRow) -> bool {
    (1..row.len()).any(|anchor| is_valid(&row.turns, anchor, 0))
}

fn score(
    drafter: &AnyDrafter,
    teacher: &Teacher<'_>,
    batch: &DraftBatch,
    settings: &ExactSettings,
) -> (Vec<Slot>, SlotScores) {
    // Greedy acceptance reads argmaxes only, which no temperature moves.
    let temperature = if settings.temperature == 0.0 {
        1.0
    } else {
        settings.temperature
    };
    let mut all = (Vec::new(), SlotScores::default());
    for slots in drafter.passes(batch_slots(&batch.tokens, drafter.num_depths())) {
        let input = ObjectiveInput {
            slots: &slots,
            hidden: drafter.draft_slots(batch, &slots, teacher.ends, FloatDType::F32),
            head: drafter.head(),
            batch,
            teacher: teacher.clone(),
            head_gradient: None,
        };
        let chunk = settings.chunk_positions;
        all.1.extend(Objective::score(&input, temperature, chunk));
        all.0.extend(slots);
    }
    all
}

/// One slot: how likely its draft is accepted.
#[derive(Clone, Copy, Debug, Default)]
struct SlotRatio {
    /// Accepted and equal to the text, given the text: `r`.
    realised: f64,
    /// Accepted, whatever the text: `alpha`.
    marginal: f64,
}

impl SlotRatio {
    /// `None` when the scores are not numbers.
    fn new(scores: &SlotScores, index: usize, is_greedy: bool) -> Option<Self> {
        // Argmaxes of rows that are not numbers would look like figures.
        if is_greedy {
            return scores.alpha[index].is_finite().then(|| Self {
                realised: f64::from(u8::from(scores.argmax_is_token[index])),
                marginal: f64::from(u8::from(scores.argmax_agrees[index])),
            });
        }
        let log_ratio = f64::from(scores.log_q_token[index]) - f64::from(scores.log_p_token[index]);
        let marginal = f64::from(scores.alpha[index]);
        // A token outside the draft vocabulary has log q = -inf and is never accepted.
        (!log_ratio.is_nan() && marginal.is_finite()).then(|| Self {
            realised: log_ratio.exp().min(1.0),
            marginal,
        })
    }
}

/// Tokens and expected rounds of one row, for each gamma.
struct RowSums {
    tokens: f64,
    rounds: Vec<f64>,
}

struct Sums {
    num_depths: usize,
    rows: Vec<RowSums>,
    num_turns: usize,
    num_anchors: usize,
    /// Sum over all anchors of the expected accepted drafts, for each gamma.
    uniform_accepted: Vec<f64>,
    depths: DepthSums,
}

impl Sums {
    fn new(num_depths: usize) -> Self {
        Self {
            num_depths,
            rows: Vec::new(),
            num_turns: 0,
            num_anchors: 0,
            uniform_accepted: vec![0.0; num_depths],
            depths: DepthSums::new(num_depths),
        }
    }

    fn add_batch(
        &mut self,
        batch: &DraftBatch,
        slots: &[Slot],
        scores: &SlotScores,
        settings: &ExactSettings,
    ) -> Result<(), EvalError> {
        let rows = &batch.tokens.rows;
        let empty = |row: &TokenRow| vec![Vec::new(); row.len()];
        let mut table: Vec<Vec<Vec<SlotRatio>>> = rows.iter().map(empty).collect();
        for (index, slot) in slots.iter().enumerate() {
            let ratio = SlotRatio::new(scores, index, settings.temperature == 0.0);
            let ratio = ratio.ok_or_else(|| EvalError::NotFinite {
                what: "the acceptance scores",
                id: rows[slot.row].key.clone(),
            })?;
            let depths = &mut table[slot.row][slot.anchor];
            depths.resize(depths.len().max(slot.depth + 1), SlotRatio::default());
            depths[slot.depth] = ratio;
        }
        for (row, anchors) in rows.iter().zip(&table) {
            self.add_row(row, anchors);
        }
        Ok(())
    }

    fn add_row(&mut self, row: &TokenRow, anchors: &[Vec<SlotRatio>]) {
        let mut sums = RowSums {
            tokens: 0.0,
            rounds: vec![0.0; self.num_depths],
        };
        for turn in turns(&row.turns) {
            let anchors = &anchors[turn];
            let realised = |slots: &Vec<SlotRatio>| slots.iter().map(|s| s.realised).collect();
            let ratios: Vec<Vec<f64>> = anchors.iter().map(realised).collect();
            self.num_turns += 1;
            self.num_anchors += anchors.len();
            sums.tokens += anchors.len() as f64;
            for (index, total) in sums.rounds.iter_mut().enumerate() {
                *total += expected_rounds(&ratios, index + 1)[0];
            }
            self.depths.add(&ratios);
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

    fn report(&self, settings: &ExactSettings) -> ExactReport {
        let tokens: f64 = self.rows.iter().map(|row| row.tokens).sum();
        let is_greedy = settings.temperature == 0.0;
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
                rounds,
                uniform_anchor_tau: 1.0 + self.uniform_accepted[index] / self.num_anchors as f64,
            }
        };
        ExactReport {
            rule: if is_greedy { "greedy" } else { "sampling" }.to_owned(),
            temperature: settings.temperature,
            text: settings.text,
            text_matches_rule: settings.text_matches_rule(),
            num_rows: self.rows.len(),
            num_turns: self.num_turns,
            num_tokens: tokens as usize,
            by_gamma: (0..self.num_depths).map(entry).collect(),
            acceptance_by_depth: shares(&self.depths.accepted, &self.depths.reached),
            survival_by_depth: shares(&self.depths.accepted, &self.depths.proposed),
        }
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
fn turns(turns: &[u32]) -> Vec<std::ops::Range<usize>> {
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

    #[test]
    fn a_token_outside_the_draft_vocabulary_is_never_accepted() {
        let scores = SlotScores {
            alpha: vec![0.7, 0.7],
            log_p_token: vec![-1.0, -1.0],
            log_q_token: vec![f32::NEG_INFINITY, f32::NAN],
            argmax_agrees: vec![false; 2],
            argmax_is_token: vec![false; 2],
        };
        let ratio = SlotRatio::new(&scores, 0, false).unwrap();
        assert!(ratio.realised.abs() < f64::EPSILON);
        assert!(SlotRatio::new(&scores, 1, false).is_none());
    }
}
