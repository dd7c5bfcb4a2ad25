//! [`World`]: four tokens whose target and drafter are tables, in which the next token depends on the last one.

use std::sync::Arc;

use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::sample::{Sampling, argmax};
use draftsmith_models::vocab::VocabMap;

use super::chance::RoundChance;
use crate::propose::choice::under_noise;
use crate::propose::tree::DraftTree;
use crate::propose::{DraftChoice, DraftDistribution, DraftToken};
use crate::verify::{Chance, RowToVerify, TreeToVerify, VerifyRule, walk_tree};

/// Tokens of the world.
pub const TOKENS: usize = 4;
/// Tokens of the texts whose law is looked at.
pub const LENGTH: usize = 3;
/// Number of these texts.
pub const TEXTS: usize = TOKENS.pow(LENGTH as u32);

/// Logits of the next token for every last token: `[V, V]` of the target, `[V, V_draft]` of the drafter.
pub type Table = Vec<Vec<f32>>;

/// Target, drafter and how tokens are drawn from both. A text begins behind token 0.
#[derive(Clone, Debug)]
pub struct World {
    /// The target's logits.
    pub p: Table,
    /// The drafter's.
    pub q: Table,
    /// Which target token each of the drafter's stands for.
    pub vocab: Arc<VocabMap>,
    /// Temperature and truncation of both.
    pub sampling: Sampling,
}

fn table(seed: u64, width: usize) -> Table {
    let mut stream = Stream::new(seed, Purpose::Check, 2);
    let mut row = || -> Vec<f32> {
        let mut row: Vec<f32> = (0..width).map(|_| 1.5 * stream.normal() as f32).collect();
        if stream.uniform() < 0.5 {
            row[stream.below(width)] = f32::NEG_INFINITY; // impossible there
        }
        if row.iter().all(|logit| logit.is_infinite()) {
            row[0] = 0.0;
        }
        row
    };
    (0..TOKENS).map(|_| row()).collect()
}

impl World {
    /// A random one whose drafter knows the target tokens `ids`.
    #[expect(clippy::expect_used, reason = "callers name tokens of the world")]
    pub fn new(seed: u64, ids: &[u32]) -> Self {
        Self {
            p: table(seed, TOKENS),
            q: table(seed + 100, ids.len()),
            vocab: Arc::new(VocabMap::new(ids.to_vec(), TOKENS).expect("ids of the world")),
            sampling: Sampling::default(),
        }
    }

    /// Several of them, with full and reduced draft vocabularies.
    pub fn several(sampling: Sampling) -> Vec<Self> {
        let vocabs: [&[u32]; 3] = [&[0, 1, 2, 3], &[0, 2, 3], &[1]];
        let of_seed = |seed| vocabs.map(|ids| Self::new(seed, ids));
        let with = |world| Self { sampling, ..world };
        (0..5).flat_map(of_seed).map(with).collect()
    }

    /// One at each of several temperatures and truncations.
    pub fn at_several_settings() -> Vec<Self> {
        let vocabs: [&[u32]; 2] = [&[0, 1, 2, 3], &[0, 2, 3]];
        let cases = [
            (vocabs[0], 1.0, 1.0),
            (vocabs[0], 0.5, 0.9),
            (vocabs[1], 1.0, 0.8),
            (vocabs[1], 0.5, 1.0),
        ];
        let world = |(ids, temperature, top_p)| Self {
            sampling: Sampling {
                top_p,
                ..Sampling::at(temperature)
            },
            ..Self::new(1, ids)
        };
        cases.map(world).to_vec()
    }

    /// The target's law of the token behind `last`, `[V]`.
    pub fn target(&self, last: usize) -> Vec<f64> {
        self.sampling.probabilities(&self.p[last])
    }

    /// The drafter's law of the token behind `last`, over its own vocabulary, `[V_draft]`.
    pub fn drafter(&self, last: usize) -> Vec<f64> {
        self.sampling.probabilities(&self.q[last])
    }

    /// The drafter's law as that of target tokens, `[V]`.
    pub fn drafter_of_target(&self, last: usize) -> Vec<f64> {
        let mut law = vec![0.0; TOKENS];
        for (&id, q) in self.vocab.target_ids().iter().zip(self.drafter(last)) {
            law[id as usize] = q;
        }
        law
    }

    /// The target's law of whole texts, by their [`code`].
    pub fn target_law(&self) -> Vec<f64> {
        all_texts()
            .map(|text| {
                let lasts = [0, text[0], text[1]];
                let steps = lasts.iter().zip(text);
                steps
                    .map(|(&last, token)| self.target(last)[token])
                    .product()
            })
            .collect()
    }

    /// A draft behind `last`, drawn as entry `index` of the draft vocabulary.
    pub fn drawn(&self, last: usize, index: usize) -> DraftToken {
        DraftToken {
            id: self.vocab.to_target(index as u32),
            distribution: DraftDistribution::Drawn {
                probabilities: self.drafter(last),
                vocab: Arc::clone(&self.vocab),
            },
        }
    }

    /// A draft behind `last` for `position`, as a rule wants it chosen.
    #[expect(clippy::expect_used, reason = "no draft vocabulary is empty")]
    pub(super) fn draft(
        &self,
        last: usize,
        position: usize,
        choice: DraftChoice,
        chance: &mut dyn RoundChance,
    ) -> DraftToken {
        match choice {
            DraftChoice::MostProbable => {
                let best = argmax(&self.q[last]).expect("a row of logits") as u32;
                DraftToken::certain(self.vocab.to_target(best))
            }
            DraftChoice::SharedNoise => {
                let noise = chance.noise(position, TOKENS);
                under_noise(&self.drafter(last), &self.vocab, &noise).expect("a row of logits")
            }
            DraftChoice::Drawn | DraftChoice::DrawnEachRound => {
                let law = self.drafter(last);
                self.drawn(last, chance.drafts(position, &law))
            }
        }
    }

    /// Tokens that a round adds behind `text`, given its drafts.
    pub fn verified(
        &self,
        rule: &dyn VerifyRule,
        text: &[usize],
        drafts: &[DraftToken],
        chance: &mut dyn Chance,
    ) -> Vec<usize> {
        let ids = drafts.iter().map(|draft| draft.id as usize);
        let row = RowToVerify {
            drafts,
            logits: &self.logits(text, ids.clone()),
            vocab_size: TOKENS,
            sampling: &self.sampling,
            position: text.len(),
        };
        let verdict = rule.verify(&row, chance);
        let next = std::iter::once(verdict.next as usize);
        ids.take(verdict.accepted).chain(next).collect()
    }

    /// Tokens that a round adds behind `text`, given its tree of drafts.
    pub(super) fn walked(
        &self,
        rule: &dyn VerifyRule,
        text: &[usize],
        tree: &DraftTree,
        chance: &mut dyn Chance,
    ) -> Vec<usize> {
        let row = TreeToVerify {
            tree,
            logits: &self.logits(text, tree.ids.iter().map(|&id| id as usize)),
            vocab_size: TOKENS,
            sampling: &self.sampling,
            stop_ids: &[],
            position: text.len(),
        };
        let walk = walk_tree(rule, &row, chance);
        assert_eq!(walk.tokens.len(), walk.accepted + 1, "one is the target's");
        walk.tokens.iter().map(|&token| token as usize).collect()
    }

    /// The target's logits `[k + 1, V]` behind the text and behind each of k drafts.
    fn logits(&self, text: &[usize], drafts: impl Iterator<Item = usize>) -> Vec<f32> {
        let lasts = std::iter::once(last(text)).chain(drafts);
        lasts.flat_map(|last| self.p[last].clone()).collect()
    }
}

/// The token that the next one depends on.
pub(super) fn last(text: &[usize]) -> usize {
    text.last().copied().unwrap_or(0)
}

/// Code of the first tokens of a text.
pub fn code(text: &[usize]) -> usize {
    text[..LENGTH]
        .iter()
        .fold(0, |code, token| code * TOKENS + token)
}

fn all_texts() -> impl Iterator<Item = [usize; LENGTH]> {
    (0..TEXTS).map(|code| {
        [
            code / (TOKENS * TOKENS),
            code / TOKENS % TOKENS,
            code % TOKENS,
        ]
    })
}
