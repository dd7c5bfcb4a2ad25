//! Chunks: the part of a batch whose logits exist at one time.

use std::ops::Range;

use burn::tensor::{FloatDType, Tensor};

use super::terms::SlotTerm;
use super::{ObjectiveInput, SlotScores, composed, fused};
use crate::batch::{TeacherFigures, index_tensor};
use crate::slot::Slot;

/// Consecutive slots whose logits exist at one time.
pub(super) struct Chunk<'a> {
    pub(super) input: &'a ObjectiveInput<'a>,
    pub(super) range: Range<usize>,
    pub(super) temperature: f64,
    /// The terms of the mixture, for all slots of the batch; none when only the figures are wanted.
    pub(super) terms: &'a [SlotTerm],
    /// Factor of the gradient of each slot of the batch; empty without terms.
    pub(super) scale: &'a [f32],
}

/// What a chunk contributes.
pub(super) struct ChunkOutput {
    /// Gradient of the normalised loss with respect to the draft logits, `[n, V_draft]`; absent without
    /// terms.
    pub(super) grad_logits: Option<Tensor<2>>,
    /// Each term of the mixture, before its coefficient and weighting, at each slot of the chunk.
    pub(super) terms: Vec<Vec<f32>>,
    pub(super) scores: SlotScores,
}

impl Chunk<'_> {
    pub(super) fn evaluate(&self) -> ChunkOutput {
        if fused::applies(self.input) {
            fused::evaluate(self)
        } else {
            composed::evaluate(self)
        }
    }

    pub(super) fn slots(&self) -> &[Slot] {
        &self.input.slots[self.range.clone()]
    }

    /// Drafter output rows of the chunk, `[n, H]`.
    pub(super) fn hidden(&self) -> Tensor<2> {
        let hidden = self.input.hidden.clone();
        hidden.narrow(0, self.range.start, self.range.len())
    }

    /// Draft logits over the temperature, `[n, V_draft]`, f32.
    pub(super) fn draft_logits(&self) -> Tensor<2> {
        // Dividing the rows instead of the logits spares a pass over `[n, V]`.
        let rows = self.hidden().div_scalar(self.temperature);
        let logits = rows.matmul(self.input.head.clone().transpose());
        logits.cast(FloatDType::F32)
    }
}

impl ObjectiveInput<'_> {
    /// Teacher logits over the temperature at `(row, position)` places, `[P, V]`, f32.
    pub(super) fn teacher_logits(&self, places: &[(usize, usize)], temperature: f64) -> Tensor<2> {
        let rows = self.final_hidden(places);
        self.teacher.ends.scaled_logits(rows, temperature)
    }

    /// Teacher logits of the draft vocabulary alone, `[P, V_draft]`, f32, with the figures of the whole one, where
    /// the batch knows those: they are of temperature 1, and a full draft vocabulary leaves nothing to spare.
    pub(super) fn kept_teacher(
        &self,
        places: &[(usize, usize)],
        temperature: f64,
    ) -> Option<(Tensor<2>, Vec<TeacherFigures>)> {
        let known = self.batch.states.teacher.as_ref()?;
        if temperature.to_bits() != 1.0_f64.to_bits() || self.teacher.vocab.is_full() {
            return None;
        }
        let figures = places.iter().map(|&(row, t)| known[row][t]).collect();
        let logits = self.teacher.kept_logits(self.final_hidden(places));
        Some((logits, figures))
    }

    /// Final hidden rows at `(row, position)` places, `[P, H]`.
    fn final_hidden(&self, places: &[(usize, usize)]) -> Tensor<2> {
        let states = self.batch.states.final_hidden.clone();
        let [_, padded_len, _] = states.dims();
        let at = places.iter().map(|(row, t)| row * padded_len + t);
        let at = index_tensor(at, &self.hidden.device());
        states.flatten::<2>(0, 1).select(0, at)
    }

    /// The data token that follows each `(row, position)`.
    pub(super) fn tokens_after(&self, places: &[(usize, usize)]) -> Vec<u32> {
        let token = |&(row, t): &(usize, usize)| self.batch.tokens.rows[row].ids[t + 1];
        places.iter().map(token).collect()
    }
}

/// Consecutive ranges of slots that touch at most `positions` different teacher positions.
pub(super) fn chunks(slots: &[Slot], positions: usize) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut start = 0;
    let mut seen = 0;
    for index in 0..slots.len() {
        if index == 0 || place(&slots[index]) != place(&slots[index - 1]) {
            if seen == positions {
                ranges.push(start..index);
                start = index;
                seen = 0;
            }
            seen += 1;
        }
    }
    if start < slots.len() {
        ranges.push(start..slots.len());
    }
    ranges
}

fn place(slot: &Slot) -> (usize, usize) {
    (slot.row, slot.teacher_position())
}

/// The teacher positions of slots in their order, and for each slot the index of its own.
pub(super) fn distinct_places(slots: &[Slot]) -> (Vec<(usize, usize)>, Vec<usize>) {
    let mut places: Vec<(usize, usize)> = Vec::new();
    let mut place_of_slot = Vec::with_capacity(slots.len());
    for slot in slots {
        if places.last() != Some(&place(slot)) {
            places.push(place(slot));
        }
        place_of_slot.push(places.len() - 1);
    }
    (places, place_of_slot)
}
