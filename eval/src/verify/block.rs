//! [`BlockVerification`]: the drafts of a round are accepted or rejected together (Sun et al. 2403.10444, algorithm 2).

use draftsmith_models::sample::Sampling;

use super::sampling::residual;
use super::{Chance, Realised, RowToVerify, Verdict, VerifyRule};
use crate::propose::DraftChoice;

/// Lossless like speculative sampling, and in the mean never accepts fewer drafts: a draft that the target likes less than the
/// drafter does may be made up for by those before it.
///
/// With `pi_0 = 1` and `pi_i = min(1, pi_{i-1} p(x_i) / q(x_i))`, the prefix of length `i` passes with probability
/// `h_i = s / (s + 1 - pi_i)`, `s = sum((pi_i p - q)+)` at the position behind it, and the whole block with `pi_k`. The
/// longest prefix that passes becomes text; behind it the target draws from `(pi p - q)+`.
#[derive(Clone, Copy, Debug)]
pub struct BlockVerification;

impl VerifyRule for BlockVerification {
    fn name(&self) -> &'static str {
        "block"
    }

    fn is_lossless(&self, _sampling: &Sampling) -> bool {
        true
    }

    fn draft_choice(&self) -> DraftChoice {
        DraftChoice::DrawnEachRound // which prefix is taken depends on drafts behind it
    }

    fn realised(&self) -> Option<Realised> {
        None
    }

    fn verify(&self, row: &RowToVerify<'_>, chance: &mut dyn Chance) -> Verdict {
        let mut reach = 1.0; // pi
        let mut weights = weights_behind(row, 0, reach);
        let mut verdict = (0, weights);
        for (index, draft) in row.drafts.iter().enumerate() {
            let p = row.probabilities(index)[draft.id as usize];
            reach = f64::min(1.0, reach * p / draft.probability_of(draft.id));
            let accepted = index + 1;
            weights = weights_behind(row, accepted, reach);
            let passes = if accepted == row.drafts.len() {
                reach
            } else {
                let left: f64 = weights.iter().sum();
                let lost = 1.0 - reach;
                // Nothing left and nothing lost: the next draft has the target's law and is certain to pass.
                if left + lost > 0.0 {
                    left / (left + lost)
                } else {
                    1.0
                }
            };
            // No stop at a failure: a longer prefix may pass all the same.
            if chance.accepts(row.position + index, passes) {
                verdict = (accepted, weights);
            }
        }
        let (accepted, weights) = verdict;
        let position = row.position + accepted;
        let is_nothing_left = weights.iter().all(|&weight| weight <= 0.0);
        let next = if is_nothing_left {
            // Rounding alone comes here.
            chance.picks(position, &row.probabilities(accepted))
        } else {
            chance.picks(position, &weights)
        };
        Verdict { accepted, next }
    }
}

/// What the target's token behind `accepted` drafts is drawn from, `[V]`, not normalised: `(reach p - q)+`, or `p`
/// behind the last draft.
fn weights_behind(row: &RowToVerify<'_>, accepted: usize, reach: f64) -> Vec<f64> {
    let p = row.probabilities(accepted);
    match row.drafts.get(accepted) {
        None => p,
        Some(next) => residual(&p, reach, next),
    }
}
