//! Every slot of a batch with how likely a round of decoding reaches it.

use draftsmith_models::batch::{DraftBatch, TokenRow};
use draftsmith_models::objective::{Teacher, for_each_slot_logits};
use draftsmith_models::slot::batch_slots;

use super::ratios::{self, RatioTable};
use super::sums::turns;
use super::target_law::TargetLaw;
use super::{Candidate, ExactSettings};
use crate::error::EvalError;
use crate::round_dp::reach_probabilities;

/// A slot of a given text.
pub(crate) struct ReachedSlot<'a> {
    pub(crate) depth: usize,
    /// Probability that a round starts at its anchor and accepts all drafts before it, given the text.
    pub(crate) weight: f64,
    /// The target's law, `[V]`.
    pub(crate) p: &'a [f64],
    /// The drafter's logits, `[V_draft]`.
    pub(crate) draft: &'a [f32],
}

/// Calls `visit` for every slot of a batch that the drafter was trained for.
///
/// # Errors
/// [`EvalError::NotFinite`] naming the row whose scores are not numbers.
pub(crate) fn for_each_reached_slot(
    candidate: Candidate<'_>,
    batch: &DraftBatch,
    settings: &ExactSettings,
    mut visit: impl FnMut(ReachedSlot<'_>),
) -> Result<(), EvalError> {
    let drafter = candidate.drafter;
    let teacher = Teacher::new(candidate.ends, candidate.vocab);
    let depths = drafter.num_depths();
    let table = ratios::of_batch(candidate, &teacher, batch, depths, settings)?;
    let reach = reach(batch, &table, depths);
    for slots in drafter.passes(batch_slots(&batch.tokens, depths)) {
        let input = ratios::input(drafter, &teacher, batch, &slots);
        let mut target = TargetLaw::default();
        for_each_slot_logits(&input, settings.chunk_positions, |logits| {
            let slot = logits.slot;
            // Scores that are no numbers have ended the table above.
            let Some(p) = target.at(&logits, &settings.sampling) else {
                return;
            };
            visit(ReachedSlot {
                depth: slot.depth,
                weight: reach[slot.row][slot.anchor][slot.depth],
                p,
                draft: logits.draft,
            });
        });
    }
    Ok(())
}

/// By row, anchor and depth.
fn reach(batch: &DraftBatch, table: &RatioTable, depths: usize) -> Vec<Vec<Vec<f64>>> {
    let rows = batch.tokens.rows.iter().zip(table);
    let of_row = |(row, anchors): (&TokenRow, &Vec<Vec<_>>)| {
        let mut reach: Vec<Vec<f64>> = vec![Vec::new(); anchors.len()];
        for turn in turns(&row.turns) {
            let realised =
                |slots: &Vec<ratios::SlotRatio>| slots.iter().map(|s| s.realised).collect();
            let realised: Vec<Vec<f64>> = anchors[turn.clone()].iter().map(realised).collect();
            reach[turn].clone_from_slice(&reach_probabilities(&realised, depths));
        }
        reach
    };
    rows.map(of_row).collect()
}
