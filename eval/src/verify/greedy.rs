//! [`Greedy`]: a draft is right when it is the target's most probable token.

use draftsmith_models::sample::{Sampling, argmax};

use super::{RowToVerify, Verdict, VerifyRule};

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

    fn verify(&self, row: &RowToVerify<'_>) -> Verdict {
        for (index, draft) in row.drafts.iter().enumerate() {
            let best = argmax(row.logits_at(index)).unwrap_or(0) as u32;
            if best != draft.id {
                return Verdict {
                    accepted: index,
                    next: best,
                };
            }
        }
        let accepted = row.drafts.len();
        let next = argmax(row.logits_at(accepted)).unwrap_or(0) as u32;
        Verdict { accepted, next }
    }
}
