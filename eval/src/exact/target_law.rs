//! [`TargetLaw`]: the target's distribution at a position, computed once for the slots that share it.

use draftsmith_models::objective::SlotLogits;
use draftsmith_models::sample::Sampling;

/// The distribution of the last position that was asked for.
#[derive(Debug, Default)]
pub(super) struct TargetLaw {
    /// Row and position with their distribution, `[V]`.
    known: Option<((usize, usize), Vec<f64>)>,
}

impl TargetLaw {
    /// The distribution `[V]` that judges a slot; `None` where a score is not a number.
    pub(super) fn at(&mut self, logits: &SlotLogits<'_>, sampling: &Sampling) -> Option<&[f64]> {
        let place = (logits.slot.row, logits.slot.teacher_position());
        if self.known.as_ref().is_none_or(|(at, _)| *at != place) {
            if !is_finite(logits.target) {
                return None;
            }
            self.known = Some((place, sampling.probabilities(logits.target)));
        }
        self.known.as_ref().map(|(_, p)| p.as_slice())
    }
}

pub(super) fn is_finite(logits: &[f32]) -> bool {
    logits.iter().all(|logit| logit.is_finite())
}
