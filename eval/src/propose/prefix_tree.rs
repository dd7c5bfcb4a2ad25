//! [`best_prefixes`]: the tree of a drafter whose probabilities at a depth do not depend on the path.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::tree::DraftTree;

/// Drafts of one depth with their probabilities, the largest first.
pub(super) type Candidates = Vec<(u32, f64)>;

/// An entry that could be taken next.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    /// Product of the probabilities along the path.
    value: f64,
    /// That of its parent.
    before: f64,
    parent: Option<usize>,
    depth: usize,
    /// Place among the candidates of its depth.
    rank: usize,
}

impl Eq for Choice {}

impl Ord for Choice {
    /// By value; of equal ones the shallower, then the earlier.
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |choice: &Self| (choice.depth, choice.parent, choice.rank);
        let by_value = self.value.total_cmp(&other.value);
        by_value.then_with(|| key(other).cmp(&key(self)))
    }
}

impl PartialOrd for Choice {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The `nodes` most probable prefixes of `depths`, best first: the set of paths that a target with these very probabilities
/// would follow farthest. Nothing is drafted behind a stop token.
///
/// An entry taken opens two others, the next candidate beside it and the first one behind it; every prefix is reached so, and
/// never before those that are at least as probable. With as many candidates a depth as there are nodes none is missed.
pub(super) fn best_prefixes(depths: &[Candidates], nodes: usize, stop_ids: &[u32]) -> DraftTree {
    let mut tree = DraftTree::default();
    let mut open = BinaryHeap::new();
    let choice = |before: f64, parent: Option<usize>, depth: usize, rank: usize| {
        let (_, share) = *depths.get(depth)?.get(rank)?;
        Some(Choice {
            value: before * share,
            before,
            parent,
            depth,
            rank,
        })
    };
    open.extend(choice(1.0, None, 0, 0));
    while tree.ids.len() < nodes {
        let Some(taken) = open.pop() else { break };
        let (id, _) = depths[taken.depth][taken.rank];
        let place = tree.ids.len();
        tree.ids.push(id);
        tree.parents.push(taken.parent);
        open.extend(choice(
            taken.before,
            taken.parent,
            taken.depth,
            taken.rank + 1,
        ));
        if !stop_ids.contains(&id) {
            open.extend(choice(taken.value, Some(place), taken.depth + 1, 0));
        }
    }
    tree
}

#[cfg(test)]
mod tests {
    use draftsmith_models::rng::{Purpose, Stream};

    use super::*;

    /// All prefixes with their values, by brute force.
    fn all_prefixes(depths: &[Candidates], stop: u32) -> Vec<(Vec<u32>, f64)> {
        let mut all: Vec<(Vec<u32>, f64)> = Vec::new();
        let mut level = vec![(Vec::new(), 1.0)];
        for candidates in depths {
            let mut next = Vec::new();
            for (path, value) in &level {
                for (id, share) in candidates {
                    let longer: Vec<u32> = path.iter().copied().chain([*id]).collect();
                    all.push((longer.clone(), value * share));
                    if *id != stop {
                        next.push((longer, value * share));
                    }
                }
            }
            level = next;
        }
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    }

    fn path(tree: &DraftTree, node: usize) -> Vec<u32> {
        let mut path = tree.parents[node].map_or(Vec::new(), |parent| path(tree, parent));
        path.push(tree.ids[node]);
        path
    }

    /// Red under: `taken.rank + 1` replaced by `taken.rank + 2`; `choice(taken.value, ..)` by `choice(taken.before, ..)`.
    #[test]
    fn the_tree_holds_the_most_probable_prefixes() {
        for world in 0..50 {
            let mut stream = Stream::new(world, Purpose::Check, 0);
            let depths: Vec<Candidates> = (0..3)
                .map(|_| {
                    let weights: Vec<f64> = (0..6).map(|_| stream.uniform().powi(3)).collect();
                    let total: f64 = weights.iter().sum();
                    let mut candidates: Candidates = (0..6).zip(weights).collect();
                    candidates.sort_by(|a, b| b.1.total_cmp(&a.1));
                    candidates.iter().map(|(id, w)| (*id, w / total)).collect()
                })
                .collect();
            let stop = 3;
            let expected = all_prefixes(&depths, stop);
            for nodes in [1, 2, 5, 9, 30] {
                let tree = best_prefixes(&depths, nodes, &[stop]);
                let paths: Vec<Vec<u32>> =
                    (0..tree.ids.len()).map(|node| path(&tree, node)).collect();
                let best: Vec<Vec<u32>> = expected[..nodes]
                    .iter()
                    .map(|(path, _)| path.clone())
                    .collect();
                assert_eq!(paths, best, "world {world}, {nodes} nodes");
            }
        }
    }

    #[test]
    fn a_tree_ends_where_nothing_is_left() {
        let depths = vec![vec![(7, 0.6), (9, 0.4)], vec![(7, 1.0)]];
        let tree = best_prefixes(&depths, 10, &[9]);
        assert_eq!(tree.ids, [7, 7, 9]);
        assert_eq!(tree.parents, [None, Some(0), None]);
        assert_eq!(best_prefixes(&[], 10, &[]), DraftTree::default());
    }
}
