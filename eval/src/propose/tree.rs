//! [`DraftTree`]: several continuations drafted at once, and how a drafter grows one.
//!
//! The tree is grown level by level as in EAGLE-2 (2406.16858): the most promising entries of a level are drafted behind, each
//! by a copy of the drafter's state, and in the end the entries of the largest value are kept, where the value of an entry is
//! the product of the drafter's probabilities along its path. Values fall along a path, so an entry is never kept without its
//! parent. Where the probabilities of a depth do not depend on the path, one pass knows them all, and the tree is that of
//! `prefix_tree.rs`.

use std::sync::Arc;

use draftsmith_models::drafter::{AnyDrafter, DraftState};
use draftsmith_models::gumbel::NoiseAt;
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetEnds;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::host_values;
use serde::{Deserialize, Serialize};

use super::prefix_tree::{Candidates, best_prefixes};
use super::{DraftChoice, DraftRule, ProposeRow};

/// How trees are grown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreeShape {
    /// Entries that are drafted behind at each depth, and drafts behind each of them, where the drafter reads its drafts.
    pub width: usize,
    /// Drafts that are verified, at most.
    pub nodes: usize,
}

/// Drafts of one row; a draft's parent comes before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftTree {
    /// Target ids.
    pub ids: Vec<u32>,
    /// Parent of each draft; none for those behind the last committed token.
    pub parents: Vec<Option<usize>>,
}

impl DraftTree {
    /// The draft `id` behind `parent`.
    pub fn child(&self, parent: Option<usize>, id: u32) -> Option<usize> {
        (0..self.ids.len()).find(|&at| self.parents[at] == parent && self.ids[at] == id)
    }

    /// Depth of each draft, from 0.
    pub fn depths(&self) -> Vec<usize> {
        let mut depths = Vec::with_capacity(self.ids.len());
        for parent in &self.parents {
            depths.push(parent.map_or(0, |parent| depths[parent] + 1));
        }
        depths
    }

    /// Without drafts that could not become text: those behind a stop token, and those at `max_depth` or deeper.
    #[must_use]
    pub fn cut(&self, max_depth: usize, is_stop: impl Fn(u32) -> bool) -> Self {
        let depths = self.depths();
        let mut place: Vec<Option<usize>> = Vec::with_capacity(self.ids.len());
        let mut kept = Self::default();
        for (at, (&id, &parent)) in self.ids.iter().zip(&self.parents).enumerate() {
            let parent_place = match parent {
                None => Some(None),
                Some(parent) if is_stop(self.ids[parent]) => None,
                Some(parent) => place[parent].map(Some),
            };
            let is_kept = parent_place.filter(|_| depths[at] < max_depth);
            place.push(is_kept.map(|_| kept.ids.len()));
            if let Some(parent) = is_kept {
                kept.ids.push(id);
                kept.parents.push(parent);
            }
        }
        kept
    }
}

/// A draft while the tree grows.
#[derive(Clone, Copy, Debug)]
struct Node {
    id: u32,
    parent: Option<usize>,
    value: f64,
}

/// What drafts behind what.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Row of the batch.
    row: usize,
    /// Node of the row's tree; none for the last committed token.
    node: Option<usize>,
    /// Row of the drafter's state that has drafted the node.
    state: usize,
}

/// Grows the trees of a batch.
pub(super) struct Grower<'a> {
    pub(super) drafter: &'a AnyDrafter,
    pub(super) ends: &'a TargetEnds,
    pub(super) vocab: &'a Arc<VocabMap>,
    pub(super) rule: &'a DraftRule,
    pub(super) shape: TreeShape,
}

impl Grower<'_> {
    /// The trees of all rows; `None` when the drafter computed what is not a number. `state` is a copy that is used up.
    pub(super) fn grow(
        &self,
        mut state: DraftState,
        rows: &[ProposeRow<'_>],
    ) -> Option<Vec<DraftTree>> {
        if !self.drafter.reads_drafts() {
            return self.best_prefixes(state, rows);
        }
        let mut trees: Vec<Vec<Node>> = vec![Vec::new(); rows.len()];
        let mut open: Vec<Open> = (0..rows.len())
            .filter(|&row| rows[row].max_tokens > 0)
            .map(|row| Open {
                row,
                node: None,
                state: row,
            })
            .collect();
        let limit = self.drafter.max_depths().unwrap_or(usize::MAX);
        let depths = rows.iter().map(|row| row.max_tokens).max().unwrap_or(0);
        for depth in 0..depths.min(limit) {
            if open.is_empty() {
                break;
            }
            let fed: Option<Vec<u32>> = (depth > 0).then(|| {
                let id = |open: &Open| open.node.map_or(0, |node| trees[open.row][node].id);
                open.iter().map(id).collect()
            });
            state.select_rows(&open.iter().map(|open| open.state).collect::<Vec<_>>());
            let logits = host_values(&self.drafter.next_logits(
                &mut state,
                fed.as_deref(),
                self.ends,
            ));
            let mut next: Vec<Open> = Vec::new();
            for (place, scores) in logits.chunks_exact(self.vocab.len()).enumerate() {
                let at = open[place];
                let tree = &mut trees[at.row];
                let value = at.node.map_or(1.0, |node| tree[node].value);
                for (id, share) in self.best(scores, &rows[at.row], depth, self.shape.width)? {
                    if !rows[at.row].stop_ids.contains(&id) {
                        next.push(Open {
                            row: at.row,
                            node: Some(tree.len()),
                            state: place,
                        });
                    }
                    tree.push(Node {
                        id,
                        parent: at.node,
                        value: value * share,
                    });
                }
            }
            open = self.widest(next, &trees, rows, depth);
        }
        Some(trees.iter().map(|tree| self.kept(tree)).collect())
    }

    /// The trees of a drafter that does not read its drafts: every depth is known before the first choice.
    fn best_prefixes(
        &self,
        mut state: DraftState,
        rows: &[ProposeRow<'_>],
    ) -> Option<Vec<DraftTree>> {
        let mut candidates: Vec<Vec<Candidates>> = vec![Vec::new(); rows.len()];
        let limit = self.drafter.max_depths().unwrap_or(usize::MAX);
        let depths = rows.iter().map(|row| row.max_tokens).max().unwrap_or(0);
        let unread = vec![0; rows.len()];
        for depth in 0..depths.min(limit) {
            let fed = (depth > 0).then_some(unread.as_slice());
            let logits = host_values(&self.drafter.next_logits(&mut state, fed, self.ends));
            let of_rows = logits.chunks_exact(self.vocab.len()).zip(rows);
            for ((scores, row), candidates) in of_rows.zip(&mut candidates) {
                if depth < row.max_tokens {
                    candidates.push(self.best(scores, row, depth, self.shape.nodes)?);
                }
            }
        }
        let trees = candidates.iter().zip(rows);
        let tree = |(depths, row): (&Vec<Candidates>, &ProposeRow<'_>)| {
            best_prefixes(depths, self.shape.nodes, row.stop_ids)
        };
        Some(trees.map(tree).collect())
    }

    /// The `count` most probable tokens behind an entry with their shares, as the rule wants drafts to be chosen.
    fn best(
        &self,
        logits: &[f32],
        row: &ProposeRow<'_>,
        depth: usize,
        count: usize,
    ) -> Option<Candidates> {
        if logits.iter().any(|logit| !logit.is_finite()) {
            return None;
        }
        let sampling = if self.rule.sampling.is_greedy() {
            Sampling::at(1.0) // values need probabilities
        } else {
            self.rule.sampling
        };
        let mut shares = sampling.probabilities(logits);
        if self.rule.choice == DraftChoice::SharedNoise {
            let at = NoiseAt {
                seed: self.rule.seed,
                stream: row.stream,
                position: row.tokens.len() + depth,
            };
            let noise = at.weights(self.vocab.target_vocab());
            for (share, &id) in shares.iter_mut().zip(self.vocab.target_ids()) {
                *share *= noise[id as usize];
            }
            let total: f64 = shares.iter().sum();
            for share in &mut shares {
                *share /= total;
            }
        }
        let mut order: Vec<usize> = (0..shares.len()).collect();
        let count = count.min(order.len());
        let larger = |a: &usize, b: &usize| shares[*b].total_cmp(&shares[*a]).then(a.cmp(b));
        if count < order.len() {
            order.select_nth_unstable_by(count - 1, larger);
            order.truncate(count);
        }
        order.sort_by(larger);
        let token = |index: &usize| (self.vocab.to_target(*index as u32), shares[*index]);
        Some(order.iter().map(token).collect())
    }

    /// The most valuable new entries of each row, to be drafted behind.
    fn widest(
        &self,
        mut next: Vec<Open>,
        trees: &[Vec<Node>],
        rows: &[ProposeRow<'_>],
        depth: usize,
    ) -> Vec<Open> {
        let value = |open: &Open| open.node.map_or(1.0, |node| trees[open.row][node].value);
        next.sort_by(|a, b| a.row.cmp(&b.row).then(value(b).total_cmp(&value(a))));
        let mut taken = vec![0; rows.len()];
        next.retain(|open| {
            taken[open.row] += 1;
            taken[open.row] <= self.shape.width && depth + 1 < rows[open.row].max_tokens
        });
        next
    }

    /// The most valuable entries of a tree, in their order.
    fn kept(&self, tree: &[Node]) -> DraftTree {
        let mut order: Vec<usize> = (0..tree.len()).collect();
        // A parent was pushed first and has at least its child's value: ties keep it before.
        order.sort_by(|&a, &b| tree[b].value.total_cmp(&tree[a].value).then(a.cmp(&b)));
        order.truncate(self.shape.nodes);
        order.sort_unstable();
        let place = |node: usize| order.binary_search(&node).ok();
        DraftTree {
            ids: order.iter().map(|&node| tree[node].id).collect(),
            parents: order
                .iter()
                .map(|&node| tree[node].parent.and_then(place))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_tree_keeps_what_can_become_text() {
        // 0 - 1 - 2 and 0 - 3, 4 - 5; token 9 ends the text.
        let tree = DraftTree {
            ids: vec![7, 9, 8, 6, 9, 5],
            parents: vec![None, Some(0), Some(1), Some(0), None, Some(4)],
        };
        assert_eq!(tree.depths(), [0, 1, 2, 1, 0, 1]);
        let cut = tree.cut(2, |id| id == 9);
        assert_eq!(cut.ids, [7, 9, 6, 9]);
        assert_eq!(cut.parents, [None, Some(0), Some(0), None]);
        assert_eq!(tree.cut(1, |_| false).ids, [7, 9]);
        assert_eq!(cut.child(Some(0), 6), Some(2));
        assert_eq!(cut.child(None, 6), None);
    }
}
