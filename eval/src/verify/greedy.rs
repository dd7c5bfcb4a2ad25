//! [`Greedy`]: a draft is right when it is the target's most probable token.

use draftsmith_models::sample::{Sampling, argmax};

use super::{Chance, Realised, RowToVerify, TopTwo, TrainingScore, Verdict, VerifyRule, top_two};
use crate::propose::DraftChoice;

/// Accepts draft `x` iff `x = argmax p`; the text equals plain greedy decoding, up to numerical ties.
#[derive(Clone, Copy, Debug)]
pub struct Greedy;

impl VerifyRule for Greedy {
    fn name(&self) -> &'static str {
        "greedy"
    }

    fn is_lossless(&self, sampling: &Sampling) -> bool {
        sampling.is_greedy()
    }

    fn draft_choice(&self) -> DraftChoice {
        DraftChoice::MostProbable
    }

    fn realised(&self) -> Option<Realised> {
        Some(|law| f64::from(u8::from(law.is_most_probable())))
    }

    fn training_score(&self) -> Option<TrainingScore> {
        Some(TrainingScore::Argmax)
    }

    fn verify(&self, row: &RowToVerify<'_>, _chance: &mut dyn Chance) -> Verdict {
        row.compare(|index| argmax(row.logits_at(index)).unwrap_or(0) as u32)
    }

    fn own_choice(
        &self,
        row: &RowToVerify<'_>,
        index: usize,
        _chance: &mut dyn Chance,
    ) -> Option<TopTwo> {
        top_two(row.logits_at(index), |first, second| first - second)
    }

    fn is_drafter_invariant(&self) -> bool {
        true
    }
}
