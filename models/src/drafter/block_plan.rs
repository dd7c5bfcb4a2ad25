//! [`BlockPlan`]: which blocks of a batch are computed together.

use std::collections::BTreeMap;

use crate::slot::Slot;

/// Anchor of a padding block: it sees no context, only itself, and no slot reads it.
const NO_ANCHOR: usize = 0;

/// The blocks of one pass: A for each of the rows that have any, rows with fewer padded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BlockPlan {
    /// Rows of the batch that own blocks, ascending.
    pub(super) rows: Vec<usize>,
    /// Ascending anchors of each of these rows, then padding, A each.
    pub(super) anchors: Vec<Vec<usize>>,
    /// Anchors of each of these rows that are no padding.
    lens: Vec<usize>,
}

impl BlockPlan {
    /// The blocks that `slots` read.
    pub(super) fn new(slots: &[Slot]) -> Self {
        let (rows, mut anchors): (Vec<usize>, Vec<Vec<usize>>) =
            anchors_of(slots).into_iter().unzip();
        let lens: Vec<usize> = anchors.iter().map(Vec::len).collect();
        let per_row = lens.iter().max().copied().unwrap_or(0);
        for row in &mut anchors {
            row.resize(per_row, NO_ANCHOR);
        }
        Self {
            rows,
            anchors,
            lens,
        }
    }

    /// Blocks of each row, A.
    pub(super) fn per_row(&self) -> usize {
        self.anchors.first().map_or(0, Vec::len)
    }

    /// Context positions that some block sees, at least 1.
    pub(super) fn context_len(&self) -> usize {
        self.anchors
            .iter()
            .flatten()
            .max()
            .map_or(1, |&last| last.max(1))
    }

    /// Index of the block of a slot among all.
    #[expect(clippy::expect_used, reason = "the plan was made from these slots")]
    pub(super) fn block_of(&self, slot: &Slot) -> usize {
        let row = self
            .rows
            .binary_search(&slot.row)
            .expect("every slot has its row");
        let real = &self.anchors[row][..self.lens[row]];
        let place = real
            .binary_search(&slot.anchor)
            .expect("every slot has its block");
        row * self.per_row() + place
    }

    /// Position of the first token of every block.
    pub(super) fn starts(&self) -> Vec<usize> {
        self.anchors.iter().flatten().copied().collect()
    }

    /// The tokens that open the blocks, given the ids of a batch row.
    pub(super) fn anchor_ids<'a>(&self, ids_of: impl Fn(usize) -> &'a [u32]) -> Vec<u32> {
        let rows = self.rows.iter().zip(&self.anchors);
        rows.flat_map(|(&row, anchors)| anchors.iter().map(move |&anchor| (row, anchor)))
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
                    assert!(
                        plan.rows.len() * plan.per_row() <= limit.max(1),
                        "{rows:?} {limit}"
                    );
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
        assert_eq!(plan.rows, [1, 4]);
        assert_eq!(plan.anchors, [[1, 2, 3], [1, NO_ANCHOR, NO_ANCHOR]]);
        let at = |row, anchor| {
            plan.block_of(&Slot {
                row,
                anchor,
                depth: 1,
            })
        };
        assert_eq!((at(1, 3), at(4, 1), plan.context_len()), (2, 3, 3));
        assert_eq!(plan.starts(), [1, 2, 3, 1, 0, 0]);
    }
}
