//! [`BlockPlan`]: which blocks of a batch are computed together.

use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor};

use crate::batch::index_tensor;
use crate::layers::ragged::Ragged;
use crate::slot::Slot;

/// The blocks of one pass, and the context they see: the positions of each row before its last anchor.
///
/// What works on single positions runs over the real ones, `[1, M, X]` for the context and `[N, n, X]` for the
/// blocks; attention pads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BlockPlan {
    /// Batch row and ascending anchors, for rows that have any.
    anchors: Vec<(usize, Vec<usize>)>,
    /// Context positions of each of these rows.
    pub(super) context: Ragged,
    /// Blocks of each of these rows.
    pub(super) blocks: Ragged,
}

impl BlockPlan {
    /// The blocks that `slots` read.
    pub(super) fn new(slots: &[Slot]) -> Self {
        let anchors: Vec<_> = anchors_of(slots).into_iter().collect();
        let lens = |len: fn(&[usize]) -> usize| {
            Ragged::new(anchors.iter().map(|(_, anchors)| len(anchors)).collect())
        };
        Self {
            context: lens(|anchors| anchors.last().copied().unwrap_or(0)),
            blocks: lens(<[usize]>::len),
            anchors,
        }
    }

    /// The context rows of states `[B, S, X]` of the whole batch, `[1, M, X]`.
    pub(super) fn context_of(&self, states: &Tensor<3>) -> Tensor<3> {
        let [num_rows, len, width] = states.dims();
        let rows = self.anchors.iter().map(|(row, _)| *row);
        let places = rows
            .zip(self.context.lens())
            .flat_map(|(row, seen)| row * len..row * len + seen);
        let places = index_tensor(places, &states.device());
        let flat = states.clone().reshape([1, num_rows * len, width]);
        flat.select(1, places)
    }

    /// Positions of the context rows, `[1, M]`.
    pub(super) fn context_positions(&self, device: &Device) -> Tensor<2, Int> {
        let positions = self.context.lens().iter().flat_map(|&len| 0..len);
        index_tensor(positions, device).unsqueeze()
    }

    /// Anchors of each row, padded by blocks that see no context.
    pub(super) fn padded_anchors(&self) -> Vec<Vec<usize>> {
        let padded = |(_, anchors): &(usize, Vec<usize>)| {
            let mut anchors = anchors.clone();
            anchors.resize(self.blocks.padded_len(), 0);
            anchors
        };
        self.anchors.iter().map(padded).collect()
    }

    /// Batch row and anchor of every block.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let rows = self.anchors.iter();
        rows.flat_map(|(row, anchors)| anchors.iter().map(move |&anchor| (*row, anchor)))
    }

    /// Position of the first token of every block.
    pub(super) fn starts(&self) -> Vec<usize> {
        self.blocks().map(|(_, anchor)| anchor).collect()
    }

    /// Index of the block of each slot among all.
    #[expect(clippy::expect_used, reason = "the plan was made from these slots")]
    pub(super) fn blocks_of(&self, slots: &[Slot]) -> Vec<usize> {
        let blocks: Vec<(usize, usize)> = self.blocks().collect();
        let block_of = |slot: &Slot| blocks.binary_search(&(slot.row, slot.anchor));
        let found = slots.iter().map(block_of);
        found
            .map(|block| block.expect("every slot has its block"))
            .collect()
    }

    /// The tokens that open the blocks, given the ids of a batch row.
    pub(super) fn anchor_ids<'a>(&self, ids_of: impl Fn(usize) -> &'a [u32]) -> Vec<u32> {
        self.blocks()
            .map(|(row, anchor)| ids_of(row)[anchor])
            .collect()
    }
}

/// Cuts slots into passes of at most `limit` blocks, padding included; an anchor is never cut.
pub(super) fn passes(slots: Vec<Slot>, limit: usize) -> Vec<Vec<Slot>> {
    let anchors = anchors_of(&slots);
    let mut passes: Vec<Vec<(usize, &[usize])>> = Vec::new();
    let mut longest = 0;
    for (row, anchors) in &anchors {
        for part in anchors.chunks(limit) {
            let padded = longest.max(part.len());
            let fits = |pass: &Vec<(usize, &[usize])>| (pass.len() + 1) * padded <= limit;
            if let Some(pass) = passes.last_mut().filter(|pass| fits(pass)) {
                pass.push((*row, part));
                longest = padded;
            } else {
                passes.push(vec![(*row, part)]);
                longest = part.len();
            }
        }
    }
    if passes.len() <= 1 {
        return vec![slots];
    }
    let slots_of = |pass: &Vec<(usize, &[usize])>| {
        let of_pass = |slot: &&Slot| {
            pass.iter()
                .any(|(row, part)| *row == slot.row && part.binary_search(&slot.anchor).is_ok())
        };
        slots.iter().filter(of_pass).copied().collect()
    };
    passes.iter().map(slots_of).collect()
}

/// The ascending anchors of each row that has any.
pub(super) fn anchors_of(slots: &[Slot]) -> BTreeMap<usize, Vec<usize>> {
    let mut rows: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for slot in slots {
        rows.entry(slot.row).or_default().push(slot.anchor);
    }
    for anchors in rows.values_mut() {
        anchors.sort_unstable();
        anchors.dedup();
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(rows: &[(usize, usize)]) -> Vec<Slot> {
        let slot = |row, anchor, depth| Slot { row, anchor, depth };
        rows.iter()
            .flat_map(|&(row, count)| {
                (1..=count).flat_map(move |a| [slot(row, a, 0), slot(row, a, 1)])
            })
            .collect()
    }

    /// Seen red with `(pass.len() + 1) * padded` replaced by the number of anchors: padding went uncounted.
    #[test]
    fn no_pass_holds_more_blocks_than_allowed_and_every_slot_has_one() {
        for rows in [
            &[(0, 3), (1, 50), (4, 2), (5, 2), (6, 2)][..],
            &[(0, 7)],
            &[(2, 1), (3, 1), (9, 40), (11, 8)],
            &[(0, 3), (1, 1), (2, 1), (3, 1)],
        ] {
            let all = slots(rows);
            for limit in [1, 4, 5, 8, 1000] {
                let passes = passes(all.clone(), limit);
                for pass in &passes {
                    let plan = BlockPlan::new(pass);
                    let padded = plan.blocks.num_lists() * plan.blocks.padded_len();
                    assert!(padded <= limit.max(1), "{rows:?} {limit}");
                }
                let mut again: Vec<Slot> = passes.into_iter().flatten().collect();
                again.sort_unstable();
                assert_eq!(again, all, "{limit}");
            }
        }
    }

    #[test]
    fn rows_without_a_block_are_no_part_of_a_plan() {
        let plan = BlockPlan::new(&slots(&[(1, 3), (4, 1)]));
        let slot = |row, anchor| Slot {
            row,
            anchor,
            depth: 1,
        };
        assert_eq!(plan.blocks_of(&[slot(1, 3), slot(4, 1)]), [2, 3]);
        assert_eq!(plan.starts(), [1, 2, 3, 1]);
        assert_eq!(plan.padded_anchors(), [[1, 2, 3], [1, 0, 0]]);
        assert_eq!(plan.context.lens(), [3, 1]);
    }
}
