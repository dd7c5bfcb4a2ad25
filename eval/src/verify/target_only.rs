//! [`TargetOnly`]: the target draws its own token, and a draft is right when it is that token.

use draftsmith_models::sample::Sampling;

use super::{Chance, Realised, RowToVerify, Verdict, VerifyRule};
use crate::propose::DraftChoice;

/// Accepts the drafter's most probable token with the target's probability of it. Needs no draft probabilities, and
/// accepts at most `max p`: what many engines do at temperatures above 0, and what hides how well a drafter matches the
/// whole distribution.
#[derive(Clone, Copy, Debug)]
pub struct TargetOnly;

impl VerifyRule for TargetOnly {
    fn name(&self) -> &'static str {
        "target_only"
    }

    fn is_lossless(&self, _sampling: &Sampling) -> bool {
        true
    }

    fn draft_choice(&self) -> DraftChoice {
        DraftChoice::MostProbable
    }

    fn realised(&self) -> Option<Realised> {
        Some(|law| f64::from(u8::from(law.is_most_probable())))
    }

    fn walks_trees(&self) -> bool {
        true
    }

    fn verify(&self, row: &RowToVerify<'_>, chance: &mut dyn Chance) -> Verdict {
        row.compare(|index| chance.picks(row.position + index, &row.probabilities(index)))
    }
}
