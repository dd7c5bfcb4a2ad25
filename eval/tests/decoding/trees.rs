//! Trees of drafts: one target pass over several continuations, and text that does not change by them.

use draftsmith_eval::acceptance::Acceptance;
use draftsmith_eval::decode::{DecodeSettings, SequenceRecord};
use draftsmith_eval::error::EvalError;
use draftsmith_eval::propose::tree::{DraftTree, TreeShape};
use draftsmith_eval::propose::{
    DraftRule, DraftToken, DrafterProposer, NoProposer, ProposeRow, Proposer, SuffixLookup,
};
use draftsmith_models::batch::StateSpec;
use draftsmith_models::drafter::Committed;
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::target::TargetModel;
use draftsmith_models::target::tree::TreeTokens;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::host_values;

use crate::tiny::{VOCAB, drafters, prompts, reduced_vocab, run_by, settings, target, texts};

const WANT: [usize; 2] = [0, 2];

fn want() -> StateSpec {
    StateSpec {
        aux_layer_ids: WANT.to_vec(),
    }
}

/// Final and captured states of the last token of a text, from a pass over all of it.
fn last_states(target: &TargetModel, text: &[u32]) -> Vec<f32> {
    let states = target.forward(&[text], &want());
    let last = text.len() - 1;
    let take = |x: burn::tensor::Tensor<3>| host_values(&x.narrow(1, last, 1));
    [take(states.aux), take(states.final_hidden)].concat()
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        // States of a few hundred terms of size one, summed in two orders.
        assert!(
            (found - expected).abs() < 1e-4,
            "{what}: {found} {expected}"
        );
    }
}

/// Every entry of a tree has the states of its own path, for rows of different length, and so has what follows a path that
/// was committed.
/// Red under: `while at != 0` in `TreeAttention::new` replaced by `while false`; `depths[parent] + 1` replaced by `entry`;
/// `path.get(at).copied().unwrap_or(0)` in `TreePass::commit` replaced by `at.min(path.len() - 1)`.
#[test]
fn every_entry_of_a_tree_is_computed_as_if_alone() {
    let target = target();
    let mut stream = Stream::new(0, Purpose::Check, 77);
    let mut ids =
        |len: usize| -> Vec<u32> { (0..len).map(|_| stream.below(VOCAB) as u32).collect() };
    let texts = [ids(5), ids(9)];
    let rows: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    let mut cache = target.new_cache(2, 40);
    target.forward_cached(&rows, &want(), &mut cache);
    // Entry 0 is the last committed token, which no state exists of yet.
    let parents = vec![vec![0, 0, 0, 1, 1, 3, 2], vec![0, 0, 1, 1, 0]];
    let entries = [ids(7), ids(5)];
    let tokens = TreeTokens {
        ids: entries.to_vec(),
        parents: parents.clone(),
    };
    let pass = target.forward_tree(&tokens, &want(), &cache);
    let path_to = |row: usize, entry: usize| {
        let mut path = vec![entry];
        while path[0] != 0 {
            path.insert(0, parents[row][path[0]]);
        }
        path
    };
    let text_of = |row: usize, path: &[usize]| {
        let tail = path.iter().map(|&entry| entries[row][entry]);
        texts[row].iter().copied().chain(tail).collect::<Vec<u32>>()
    };
    for (row, entries) in entries.iter().enumerate() {
        for entry in 0..entries.len() {
            let take = |x: &burn::tensor::Tensor<3>| {
                host_values(&x.clone().narrow(0, row, 1).narrow(1, entry, 1))
            };
            let found = [take(&pass.states.aux), take(&pass.states.final_hidden)].concat();
            let expected = last_states(&target, &text_of(row, &path_to(row, entry)));
            assert_close(&found, &expected, &format!("row {row}, entry {entry}"));
        }
    }
    let paths = [path_to(0, 5), path_to(1, 2)];
    let states = pass.commit(&paths, &mut cache);
    assert_eq!(cache.lens(), [5 + 4, 9 + 3]);
    assert_eq!(states.final_hidden.dims()[1], 4);
    let next = ids(2);
    let rows = [&next[..1], &next[1..]];
    let after = target.forward_cached(&rows, &want(), &mut cache);
    for row in 0..2 {
        let mut text = text_of(row, &paths[row]);
        text.push(next[row]);
        let take = |x: &burn::tensor::Tensor<3>| host_values(&x.clone().narrow(0, row, 1));
        let found = [take(&after.aux), take(&after.final_hidden)].concat();
        assert_close(
            &found,
            &last_states(&target, &text),
            &format!("behind row {row}"),
        );
    }
}

fn tokens_per_round(records: &[SequenceRecord]) -> f64 {
    let rounds = || records.iter().flat_map(|record| &record.rounds);
    let tokens: usize = rounds().map(|round| round.committed).sum();
    tokens as f64 / rounds().count() as f64
}

/// Whatever tree is verified, the text is what the target writes alone: it chooses for itself, and a tree only says how far one pass
/// reaches. Trees commit more a round than chains as deep.
/// Red under: `walk.path.push(node + 1)` replaced by `walk.path.push(node)`; `usize::from(was_tried)` left out.
#[test]
fn trees_change_no_text_and_reach_further_than_chains() {
    let target = target();
    let sequences = prompts(8);
    let vocabs = [VocabMap::full(VOCAB), reduced_vocab()];
    let all = vocabs.each_ref().map(|vocab| drafters(&target, vocab));
    let mut gains = Vec::new();
    for (rule, temperature) in [("greedy", 0.0), ("gumbel", 1.0), ("target_only", 1.0)] {
        let base = DecodeSettings {
            stop_ids: vec![3],
            ..settings(temperature, 1)
        };
        let expected = run_by(rule, &target, &mut NoProposer, &sequences, &base).records;
        for (width, nodes, batch_rows) in [(1, 4, 8), (2, 3, 1), (3, 12, 8)] {
            let tree = DecodeSettings {
                tree: Some(TreeShape { width, nodes }),
                batch_rows,
                ..base.clone()
            };
            let found = run_by(rule, &target, &mut SuffixLookup::new(1), &sequences, &tree);
            assert_eq!(texts(&found.records), texts(&expected), "{rule} suffix");
            for (drafters, vocab) in all.iter().zip(&vocabs) {
                for drafter in drafters {
                    let what = format!("{rule} {} {width}x{nodes}", drafter.family());
                    let decode = |settings| {
                        let name = drafter.family();
                        let mut proposer =
                            DrafterProposer::new(name, drafter, target.ends(), vocab);
                        run_by(rule, &target, &mut proposer, &sequences, settings).records
                    };
                    let (found, chain) = (decode(&tree), decode(&base));
                    assert_eq!(texts(&found), texts(&expected), "{what}");
                    let (tree, chain_tau) = (tokens_per_round(&found), tokens_per_round(&chain));
                    match width {
                        // One child each, four deep: the chain itself. A width means nothing to a drafter that does not
                        // read its drafts.
                        1 if drafter.reads_drafts() => {
                            assert!(
                                (tree - chain_tau).abs() < 1e-9,
                                "{what}: {tree} {chain_tau}"
                            );
                            let [tree, chain] = [&found, &chain]
                                .map(|records| Acceptance::new(records, 4).acceptance_by_depth());
                            assert_eq!(tree, chain, "{what}");
                        }
                        3 => gains.push(tree - chain_tau),
                        _ => {}
                    }
                }
            }
        }
    }
    let mean = gains.iter().sum::<f64>() / gains.len() as f64;
    assert!(
        gains.iter().all(|gain| *gain > 0.0) && mean > 0.1,
        "{gains:?}"
    );
}

/// Looks at the trees of a proposer.
#[derive(Debug)]
struct Watched<'a> {
    inner: DrafterProposer<'a>,
    stop_ids: &'a [u32],
    stops: usize,
}

impl Proposer for Watched<'_> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn state_spec(&self) -> StateSpec {
        self.inner.state_spec()
    }

    fn begin(&mut self, num_rows: usize, capacity: usize) {
        self.inner.begin(num_rows, capacity);
    }

    fn propose(
        &mut self,
        rows: &[ProposeRow<'_>],
        rule: &DraftRule,
    ) -> Result<Vec<Vec<DraftToken>>, EvalError> {
        self.inner.propose(rows, rule)
    }

    fn propose_trees(
        &mut self,
        rows: &[ProposeRow<'_>],
        rule: &DraftRule,
        shape: TreeShape,
    ) -> Result<Vec<DraftTree>, EvalError> {
        let trees = self.inner.propose_trees(rows, rule, shape)?;
        for tree in &trees {
            let is_stop = |id: &u32| self.stop_ids.contains(id);
            self.stops += tree.ids.iter().filter(|id| is_stop(id)).count();
            let parents = tree.parents.iter().flatten();
            assert!(!parents.map(|&at| tree.ids[at]).any(|id| is_stop(&id)));
        }
        Ok(trees)
    }

    fn commit(&mut self, committed: &Committed) {
        self.inner.commit(committed);
    }

    fn keep_rows(&mut self, rows: &[usize]) {
        self.inner.keep_rows(rows);
    }
}

/// Drafts behind a stop token could never become text, and would take the place of those that could.
/// Red under: the condition on `stop_ids` in `Grower::grow` left out.
#[test]
fn nothing_is_drafted_behind_a_stop_token() {
    let target = target();
    let sequences = prompts(8);
    let vocab = reduced_vocab();
    let stop_ids: Vec<u32> = vocab.target_ids().iter().copied().step_by(3).collect();
    let settings = DecodeSettings {
        stop_ids: stop_ids.clone(),
        tree: Some(TreeShape {
            width: 4,
            nodes: 16,
        }),
        ..settings(0.0, 4)
    };
    for drafter in &drafters(&target, &vocab) {
        let inner = DrafterProposer::new(drafter.family(), drafter, target.ends(), &vocab);
        let mut watched = Watched {
            inner,
            stop_ids: &stop_ids,
            stops: 0,
        };
        run_by("greedy", &target, &mut watched, &sequences, &settings);
        assert!(watched.stops > 0, "{}: none was drafted", drafter.family());
    }
}
