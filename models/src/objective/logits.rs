//! Whole rows of logits, for figures that no loss needs.

use super::ObjectiveInput;
use super::chunk::{Chunk, chunks, distinct_places};
use crate::slot::Slot;
use crate::weights::host_values;

/// Logits at one slot, in f32, before any temperature.
#[derive(Clone, Copy, Debug)]
pub struct SlotLogits<'a> {
    /// The slot.
    pub slot: &'a Slot,
    /// The target's, `[V]`; slots of one teacher position follow each other and have the same row.
    pub target: &'a [f32],
    /// The drafter's, `[V_draft]`.
    pub draft: &'a [f32],
}

/// Calls `visit` for every slot of a batch, in order; logits exist for `chunk_positions` teacher positions at a time.
pub fn for_each_slot_logits(
    input: &ObjectiveInput<'_>,
    chunk_positions: usize,
    mut visit: impl FnMut(SlotLogits<'_>),
) {
    for range in chunks(input.slots, chunk_positions) {
        let chunk = Chunk {
            input,
            range,
            temperature: 1.0,
            terms: &[],
            scale: &[],
        };
        let (places, place_of_slot) = distinct_places(chunk.slots());
        let target = input.teacher_logits(&places, 1.0);
        let [_, width] = target.dims();
        let target = host_values(&target);
        let draft = host_values(&chunk.draft_logits());
        let drafts = draft.chunks_exact(input.teacher.vocab.len());
        for ((slot, draft), place) in chunk.slots().iter().zip(drafts).zip(place_of_slot) {
            let target = &target[place * width..(place + 1) * width];
            visit(SlotLogits {
                slot,
                target,
                draft,
            });
        }
    }
}
