//! One round with trees of drafts: one target pass over all of them, a walk through each, a path committed.

use std::time::Instant;

use draftsmith_models::batch::{TargetStates, padded_ids};
use draftsmith_models::drafter::Committed;
use draftsmith_models::target::tree::TreeTokens;

use super::Round;
use super::batch::Batch;
use crate::error::EvalError;
use crate::propose::tree::{DraftTree, TreeShape};
use crate::verify::{Coins, TreeToVerify, walk_tree};

impl Batch<'_, '_> {
    /// One round for every row; returns the number of new tokens.
    pub(super) fn tree_round(&mut self, shape: TreeShape) -> Result<usize, EvalError> {
        let start = Instant::now();
        let trees = self.propose_trees(shape)?;
        let drafted = Instant::now();
        let tokens = self.tree_tokens(&trees);
        let begun = Instant::now();
        let pass = self
            .decoder
            .target
            .forward_tree(&tokens, &self.want, &self.cache);
        let entries: Vec<usize> = trees.iter().map(|tree| tree.ids.len() + 1).collect();
        let logits = self.logits(&pass.states, &vec![0; trees.len()], &entries);
        let verified = Instant::now();
        let vocab_size = self.decoder.target.spec().vocab_size;
        let mut rest = logits.as_slice();
        let mut paths = Vec::with_capacity(trees.len());
        for (index, tree) in trees.iter().enumerate() {
            let (scores, after) = rest.split_at(entries[index] * vocab_size);
            rest = after;
            paths.push(self.walk(index, tree, scores)?);
        }
        let settled = Instant::now();
        let states = pass.commit(&paths, &mut self.cache);
        let committed: Vec<usize> = paths.iter().map(Vec::len).collect();
        self.tell_proposer(states, &committed);
        self.time.draft += (drafted - start + settled.elapsed()).as_secs_f64();
        self.time.other += (begun - drafted).as_secs_f64();
        self.time.verify += (verified - begun).as_secs_f64();
        self.time.sample += (settled - verified).as_secs_f64();
        Ok(committed.iter().sum())
    }

    fn propose_trees(&mut self, shape: TreeShape) -> Result<Vec<DraftTree>, EvalError> {
        let rule = self.draft_rule();
        let settings = self.decoder.settings;
        let (rows, proposer) = self.rows_to_propose();
        let mut trees = proposer.propose_trees(&rows, &rule, shape)?;
        for (tree, row) in trees.iter_mut().zip(&rows) {
            *tree = tree.cut(row.max_tokens, |id| settings.stop_ids.contains(&id));
        }
        Ok(trees)
    }

    fn tree_tokens(&self, trees: &[DraftTree]) -> TreeTokens {
        let ids = self
            .rows
            .iter()
            .zip(trees)
            .map(|(row, tree)| {
                row.ids
                    .last()
                    .into_iter()
                    .chain(&tree.ids)
                    .copied()
                    .collect()
            })
            .collect();
        let parents = |tree: &DraftTree| {
            let entry = |parent: &Option<usize>| parent.map_or(0, |parent| parent + 1);
            std::iter::once(0)
                .chain(tree.parents.iter().map(entry))
                .collect()
        };
        TreeTokens {
            ids,
            parents: trees.iter().map(parents).collect(),
        }
    }

    /// Walks through the tree of one row with logits `[entries, V]` and appends what becomes text; returns the entries of
    /// the pass that are committed.
    fn walk(
        &mut self,
        index: usize,
        tree: &DraftTree,
        logits: &[f32],
    ) -> Result<Vec<usize>, EvalError> {
        let settings = self.decoder.settings;
        let row = &mut self.rows[index];
        if logits.iter().any(|value| !value.is_finite()) {
            return Err(EvalError::NotFinite {
                what: "the target's logits",
                id: row.id.clone(),
            });
        }
        let mut coins = Coins {
            seed: settings.seed,
            stream: row.stream,
            round: None,
        };
        let to_verify = TreeToVerify {
            tree,
            logits,
            vocab_size: self.decoder.target.spec().vocab_size,
            sampling: &settings.sampling,
            stop_ids: &settings.stop_ids,
            position: row.ids.len(),
        };
        let walk = walk_tree(self.decoder.rule, &to_verify, &mut coins);
        row.rounds.push(Round {
            proposed: walk.accepted + usize::from(walk.was_tried),
            accepted: walk.accepted,
            committed: walk.path.len(),
        });
        row.ids.extend(walk.tokens);
        row.top_two.extend(walk.top_two);
        Ok(walk.path)
    }

    /// Gives the proposer the states of newly committed positions.
    pub(super) fn tell_proposer(&mut self, states: TargetStates, committed: &[usize]) {
        let longest = committed.iter().max().copied().unwrap_or(0);
        let next: Vec<&[u32]> = self
            .rows
            .iter()
            .zip(committed)
            .map(|(row, new)| &row.ids[row.ids.len() - new..])
            .collect();
        self.proposer.commit(&Committed {
            aux: states.aux.narrow(1, 0, longest),
            final_hidden: states.final_hidden.narrow(1, 0, longest),
            next_ids: padded_ids(&next, self.decoder.target.device()),
            lens: committed.to_vec(),
        });
    }
}
