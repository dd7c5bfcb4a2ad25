//! [`GumbelCoupling`]: target and drafter draw under the same noise (Daliri et al. 2408.07978).

use draftsmith_models::sample::Sampling;

use super::{Chance, Realised, RowToVerify, SlotLaw, TopTwo, Verdict, VerifyRule, top_two};
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

    fn realised(&self) -> Option<Realised> {
        Some(match_probability)
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
        // Without a second choice the gap is as wide as it can be written down.
        top_two(&scores, |first, second| {
            ((first / second).ln() as f32).min(f32::MAX)
        })
    }

    fn is_drafter_invariant(&self) -> bool {
        true
    }
}

/// `1 / sum_i max(p_i, q_i p_x / q_x)` for the token `x`: both draw it with probability
/// `1 / sum_i max(p_i / p_x, q_i / q_x)`, the target with `p_x`.
fn match_probability(law: &SlotLaw<'_>) -> f64 {
    let (p, q) = (law.p[law.token as usize], law.q_of_token());
    if p <= 0.0 || q <= 0.0 {
        return 0.0;
    }
    let scale = p / q;
    // Tokens outside the draft vocabulary have q = 0 and count with p alone.
    let mut total: f64 = law.p.iter().sum();
    for (&id, q) in law.vocab.target_ids().iter().zip(law.q) {
        total += (q * scale - law.p[id as usize]).max(0.0);
    }
    1.0 / total
}
