//! [`walk_tree`]: how far one target pass over a tree of drafts reaches.

use draftsmith_models::sample::Sampling;

use super::{Chance, RowToVerify, TopTwo, VerifyRule};
use crate::propose::tree::DraftTree;

/// One sequence's tree of drafts with the target's logits for it.
#[derive(Clone, Copy, Debug)]
pub struct TreeToVerify<'a> {
    /// The drafts, k of them.
    pub tree: &'a DraftTree,
    /// Target logits `[k + 1, V]`, row-major: those behind the last committed token, then those behind each draft.
    pub logits: &'a [f32],
    /// Target tokens, V.
    pub vocab_size: usize,
    /// Temperature and truncation.
    pub sampling: &'a Sampling,
    /// Tokens that end the text.
    pub stop_ids: &'a [u32],
    /// Absolute position of the drafts of depth 0.
    pub position: usize,
}

/// What became of the tree.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Walk {
    /// The tokens that became text, the last of them the target's own unless it was drafted and ended the text.
    pub tokens: Vec<u32>,
    /// Their two best, as [`VerifyRule::own_choice`] says.
    pub top_two: Vec<TopTwo>,
    /// Drafts that became text.
    pub accepted: usize,
    /// Entries of the pass whose states are committed: 0 for the last committed token, then a draft's place plus one.
    pub path: Vec<usize>,
    /// Whether a draft was tried that did not become text.
    pub was_tried: bool,
}

/// Follows the target's own tokens through the tree. The rule is one under which the target chooses for itself
/// ([`VerifyRule::walks_trees`]): the text is then that of decoding without drafts, whatever tree there is.
pub fn walk_tree(rule: &dyn VerifyRule, row: &TreeToVerify<'_>, chance: &mut dyn Chance) -> Walk {
    let mut walk = Walk {
        path: vec![0],
        ..Walk::default()
    };
    let mut at = None;
    loop {
        let entry = at.map_or(0, |node: usize| node + 1);
        let here = RowToVerify {
            drafts: &[],
            logits: &row.logits[entry * row.vocab_size..(entry + 1) * row.vocab_size],
            vocab_size: row.vocab_size,
            sampling: row.sampling,
            position: row.position + walk.tokens.len(),
        };
        let token = rule.verify(&here, chance).next;
        walk.top_two.extend(rule.own_choice(&here, 0, chance));
        walk.tokens.push(token);
        let Some(node) = row.tree.child(at, token) else {
            walk.was_tried = row.tree.parents.contains(&at);
            return walk;
        };
        walk.accepted += 1;
        if row.stop_ids.contains(&token) {
            return walk;
        }
        walk.path.push(node + 1);
        at = Some(node);
    }
}
