//! [`GumbelCoupling`]: target and drafter draw under the same noise (Daliri et al. 2408.07978).

use draftsmith_models::sample::Sampling;

use super::{Chance, RowToVerify, TopTwo, Verdict, VerifyRule, top_two};
use crate::propose::DraftChoice;

/// The target's token is `argmax(log p + g)` and the draft `argmax(log q + g)` with the same noise `g`; a draft is
/// right when the two are equal. The text is the target's own draw whoever drafts, and whatever the length of the
/// draft.
#[derive(Clone, Copy, Debug)]
pub struct GumbelCoupling;

impl VerifyRule for GumbelCoupling {
    fn name(&self) -> &'static str {
        "gumbel"
    }

    fn is_lossless(&self, _sampling: &Sampling) -> bool {
        true
    }

    fn draft_choice(&self) -> DraftChoice {
        DraftChoice::SharedNoise
    }

    fn verify(&self, row: &RowToVerify<'_>, chance: &mut dyn Chance) -> Verdict {
        row.compare(|index| {
            let best = self.own_choice(row, index, chance);
            best.map_or(0, |best| best.first)
        })
    }

    fn own_choice(
        &self,
        row: &RowToVerify<'_>,
        index: usize,
        chance: &mut dyn Chance,
    ) -> Option<TopTwo> {
        let mut scores = chance.noise(row.position + index, row.vocab_size);
        for (score, p) in scores.iter_mut().zip(row.probabilities(index)) {
            *score *= p;
        }
        top_two(&scores, |first, second| (first / second).ln() as f32)
    }

    fn is_drafter_invariant(&self) -> bool {
        true
    }
}
