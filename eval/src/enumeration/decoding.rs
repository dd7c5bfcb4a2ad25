//! [`Decoding`]: one world under one rule, its law enumerated or its texts drawn.

use std::collections::BTreeMap;

use draftsmith_models::rng::{Purpose, Stream};

use super::chance::{Branches, RoundChance};
use super::world::{LENGTH, TEXTS, TOKENS, World, code, last};
use crate::propose::DraftToken;
use crate::propose::tree::DraftTree;
use crate::verify::VerifyRule;

/// What is drafted in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drafts {
    /// A chain of so many.
    Chain(usize),
    /// A random tree that depends on this seed and the text: up to three children at each node, up to three deep.
    Tree(u64),
}

/// What decoding does in one world under one rule.
#[derive(Clone, Copy, Debug)]
pub struct Decoding<'a> {
    /// Target and drafter.
    pub world: &'a World,
    /// The rule, by its own code.
    pub rule: &'a dyn VerifyRule,
    /// What it verifies.
    pub drafts: Drafts,
}

impl Decoding<'_> {
    /// Tokens that a round adds behind `text`.
    pub fn round(&self, text: &[usize], chance: &mut dyn RoundChance) -> Vec<usize> {
        match self.drafts {
            Drafts::Chain(gamma) => {
                let drafts = self.chain(text, gamma, chance);
                self.world.verified(self.rule, text, &drafts, chance)
            }
            Drafts::Tree(seed) => {
                let tree = tree_behind(text, seed);
                self.world.walked(self.rule, text, &tree, chance)
            }
        }
    }

    fn chain(&self, text: &[usize], gamma: usize, chance: &mut dyn RoundChance) -> Vec<DraftToken> {
        let choice = self.rule.draft_choice();
        let mut last = last(text);
        let mut draft = |position| {
            let draft = self.world.draft(last, position, choice, chance);
            last = draft.id as usize;
            draft
        };
        (text.len()..text.len() + gamma).map(&mut draft).collect()
    }

    /// Law of the first tokens, by [`code`], every answer of chance considered.
    pub fn law(&self) -> Vec<f64> {
        let mut law = vec![0.0; TEXTS];
        // Shares of texts by length. Rounds only lengthen a text, so the share of the shortest is complete.
        let mut open = BTreeMap::from([((0, Vec::new()), 1.0)]);
        while let Some(((len, text), share)) = open.pop_first() {
            if len == LENGTH {
                law[code(&text)] += share;
                continue;
            }
            let round = |branches: &mut Branches| self.round(&text, branches);
            Branches::every(round, |new, probability| {
                let mut longer = [&text[..], &new].concat();
                longer.truncate(LENGTH);
                *open.entry((longer.len(), longer)).or_insert(0.0) += share * probability;
            });
        }
        law
    }

    /// Largest difference of the enumerated law to the target's over all texts.
    pub fn error(&self) -> f64 {
        largest_difference(&self.law(), &self.world.target_law())
    }

    /// Mean tokens of a round behind token 0.
    pub fn tokens(&self) -> f64 {
        let mut mean = 0.0;
        let round = |branches: &mut Branches| self.round(&[], branches);
        Branches::every(round, |new, probability| {
            mean += probability * new.len() as f64;
        });
        mean
    }

    /// Code of a text that is drawn; `chance` answers in the round that begins at a position.
    pub fn text<C: RoundChance>(&self, chance: impl Fn(usize) -> C) -> usize {
        let mut text = Vec::new();
        while text.len() < LENGTH {
            let new = self.round(&text, &mut chance(text.len()));
            text.extend(new);
        }
        code(&text)
    }
}

/// Largest difference of two laws.
pub fn largest_difference(found: &[f64], expected: &[f64]) -> f64 {
    let differences = found.iter().zip(expected);
    differences.fold(0.0, |most, (found, expected)| {
        f64::max(most, (found - expected).abs())
    })
}

fn tree_behind(text: &[usize], seed: u64) -> DraftTree {
    let place = text
        .iter()
        .fold(1, |place, token| place * (TOKENS + 1) + token);
    let mut stream = Stream::new(seed, Purpose::Check, place as u64);
    let mut tree = DraftTree::default();
    let mut level = vec![None];
    for _ in 0..3 {
        let mut next = Vec::new();
        for parent in level {
            for id in stream.permutation(TOKENS).into_iter().take(stream.below(4)) {
                next.push(Some(tree.ids.len()));
                tree.ids.push(id as u32);
                tree.parents.push(parent);
            }
        }
        level = next;
    }
    tree
}
