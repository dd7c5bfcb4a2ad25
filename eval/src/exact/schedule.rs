//! Confidence-scheduled drafting, replayed on given text: a round verifies only the drafts that the drafter believes in.
//!
//! The confidence of a draft is what the drafter's own confidence head says, where it was taught one (DSpark), else the
//! probability of its most probable token. Their product is its estimate that all drafts so far will be accepted; a round
//! verifies the leading drafts for which that reaches a threshold. Whether it does is known before the draft is drawn, so the
//! text keeps its law. Tau is exact: only drafts that equal the text decide it. The number of verified drafts is
//! exact for drafters that fill a block at once (DFlash); where a draft depends on those before it, the drafter's own, they are
//! taken to be the text here.

use serde::{Deserialize, Serialize};

use super::ratios::SlotRatio;
use super::sums::add;
use crate::round_dp::{mean_cost, rounds_by_drafts, summed_over_rounds};

/// Thresholds that are replayed.
pub const THRESHOLDS: [f64; 9] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9];

/// Tokens per round when a round verifies the drafts that are believed in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduledTau {
    /// Least estimated probability that all drafts up to this one are accepted.
    pub threshold: f64,
    /// Tokens per round, the target's own token included.
    pub tau: f64,
    /// Verified drafts per round.
    pub drafts: f64,
    /// Drafts whose confidence is computed in a round: the first one that is not believed in too.
    pub drafted: f64,
    /// Expected rounds that verify 0, 1, .. drafts.
    pub rounds_by_drafts: Vec<f64>,
}

/// Expected sums for each of [`THRESHOLDS`].
#[derive(Clone, Debug, Default)]
pub(super) struct ScheduleSums([ScheduleSum; THRESHOLDS.len()]);

#[derive(Clone, Debug, Default)]
struct ScheduleSum {
    rounds_by_drafts: Vec<f64>,
    drafted: f64,
}

impl ScheduleSums {
    /// Adds the rounds of one turn.
    pub(super) fn add(&mut self, anchors: &[Vec<SlotRatio>], gamma: usize) {
        for (threshold, sum) in THRESHOLDS.into_iter().zip(&mut self.0) {
            let believed = |slots: &Vec<SlotRatio>| {
                let kept = slots.iter().take(believed(slots, threshold));
                kept.map(|slot| slot.realised).collect()
            };
            let ratios: Vec<Vec<f64>> = anchors.iter().map(believed).collect();
            sum.rounds_by_drafts.resize(gamma + 1, 0.0);
            add(&mut sum.rounds_by_drafts, &rounds_by_drafts(&ratios, gamma));
            let drafted = |at: usize| (ratios[at].len() + 1).min(anchors[at].len()).min(gamma);
            sum.drafted += summed_over_rounds(&ratios, gamma, drafted);
        }
    }

    /// The figures of a text of `tokens` tokens.
    pub(super) fn report(&self, tokens: f64) -> Vec<ScheduledTau> {
        let entry = |(threshold, sum): (f64, &ScheduleSum)| {
            let rounds: f64 = sum.rounds_by_drafts.iter().sum();
            ScheduledTau {
                threshold,
                tau: tokens / rounds,
                drafts: mean_cost(&sum.rounds_by_drafts, |drafts| drafts),
                drafted: sum.drafted / rounds,
                rounds_by_drafts: sum.rounds_by_drafts.clone(),
            }
        };
        THRESHOLDS.into_iter().zip(&self.0).map(entry).collect()
    }
}

/// Leading drafts of an anchor that are believed in.
fn believed(slots: &[SlotRatio], threshold: f64) -> usize {
    let mut survival = 1.0;
    let reaches = |slot: &&SlotRatio| {
        survival *= slot.confidence;
        survival >= threshold
    };
    slots.iter().take_while(reaches).count()
}
