//! A world of four tokens whose target and drafter are tables: the next token depends on the last one.

use std::sync::Arc;

use draftsmith_eval::propose::{DraftChoice, DraftDistribution, DraftToken};
use draftsmith_eval::verify::{Chance, RowToVerify, VerifyRule};
use draftsmith_models::gumbel::NoiseAt;
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::sample::{Sampling, argmax, draw};
use draftsmith_models::vocab::VocabMap;

/// Tokens of the world.
pub(crate) const TOKENS: usize = 4;
/// Tokens of the texts whose law is looked at.
pub(crate) const LENGTH: usize = 3;

/// Logits of the next token for every last token.
pub(crate) type Table = Vec<Vec<f32>>;

/// Target, drafter and how tokens are drawn from both.
pub(crate) struct World {
    pub(crate) p: Table,
    pub(crate) q: Table,
    pub(crate) vocab: Arc<VocabMap>,
    pub(crate) sampling: Sampling,
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
    pub(crate) fn new(seed: u64, ids: &[u32]) -> Self {
        Self {
            p: table(seed, TOKENS),
            q: table(seed + 100, ids.len()),
            vocab: Arc::new(VocabMap::new(ids.to_vec(), TOKENS).unwrap()),
            sampling: Sampling::default(),
        }
    }

    /// Several of them, with full and reduced draft vocabularies.
    pub(crate) fn several() -> Vec<Self> {
        let vocabs: [&[u32]; 3] = [&[0, 1, 2, 3], &[0, 2, 3], &[1]];
        let seeds = 0..5;
        seeds
            .flat_map(|seed| vocabs.map(|ids| Self::new(seed, ids)))
            .collect()
    }

    /// The target's law of the token behind `last`.
    pub(crate) fn target(&self, last: usize) -> Vec<f64> {
        self.sampling.probabilities(&self.p[last])
    }

    /// The drafter's law of the token behind `last`, over its own vocabulary.
    pub(crate) fn drafter(&self, last: usize) -> Vec<f64> {
        self.sampling.probabilities(&self.q[last])
    }

    /// The drafter's law as that of target tokens.
    pub(crate) fn drafter_of_target(&self, last: usize) -> Vec<f64> {
        let mut law = vec![0.0; TOKENS];
        for (&id, q) in self.vocab.target_ids().iter().zip(self.drafter(last)) {
            law[id as usize] = q;
        }
        law
    }

    /// The target's law of whole texts, by their code.
    pub(crate) fn target_law(&self) -> Vec<f64> {
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
    pub(crate) fn drawn(&self, last: usize, index: usize) -> DraftToken {
        DraftToken {
            id: self.vocab.to_target(index as u32),
            distribution: DraftDistribution::Drawn {
                probabilities: self.drafter(last),
                vocab: Arc::clone(&self.vocab),
            },
        }
    }

    /// A draft behind `last` for `position`, as a rule wants it chosen; `coin` answers where it is drawn.
    pub(crate) fn draft(
        &self,
        last: usize,
        choice: DraftChoice,
        at: NoiseAt,
        coin: impl FnOnce(&[f64]) -> usize,
    ) -> DraftToken {
        match choice {
            DraftChoice::MostProbable => {
                let best = argmax(&self.q[last]).unwrap() as u32;
                DraftToken::certain(self.vocab.to_target(best))
            }
            DraftChoice::SharedNoise => {
                let law = self.drafter_of_target(last);
                let scores: Vec<f32> = at
                    .weights(TOKENS)
                    .iter()
                    .zip(law)
                    .map(|(noise, q)| (noise * q) as f32)
                    .collect();
                DraftToken::certain(argmax(&scores).unwrap() as u32)
            }
            DraftChoice::Drawn | DraftChoice::DrawnEachRound => {
                self.drawn(last, coin(&self.drafter(last)))
            }
        }
    }

    /// Tokens that a round adds behind `text`, given its drafts.
    pub(crate) fn verified(
        &self,
        rule: &dyn VerifyRule,
        text: &[usize],
        drafts: &[DraftToken],
        chance: &mut dyn Chance,
    ) -> Vec<usize> {
        let last = text.last().copied().unwrap_or(0);
        let ids = drafts.iter().map(|draft| draft.id as usize);
        let lasts = std::iter::once(last).chain(ids.clone());
        let logits: Vec<f32> = lasts.flat_map(|last| self.p[last].clone()).collect();
        let row = RowToVerify {
            drafts,
            logits: &logits,
            vocab_size: TOKENS,
            sampling: &self.sampling,
            position: text.len(),
        };
        let verdict = rule.verify(&row, chance);
        let next = std::iter::once(verdict.next as usize);
        ids.take(verdict.accepted).chain(next).collect()
    }
}

/// Code of the first tokens of a text.
pub(crate) fn code(text: &[usize]) -> usize {
    text[..LENGTH]
        .iter()
        .fold(0, |code, token| code * TOKENS + token)
}

pub(crate) fn all_texts() -> impl Iterator<Item = [usize; LENGTH]> {
    (0..TOKENS.pow(LENGTH as u32)).map(|code| {
        [
            code / (TOKENS * TOKENS),
            code / TOKENS % TOKENS,
            code % TOKENS,
        ]
    })
}

/// Answers questions of chance so that, over several calls, every combination of answers is given once.
#[derive(Debug, Default)]
pub(crate) struct Branches {
    /// Answer to each question so far with the weights of all answers.
    path: Vec<(usize, Vec<f64>)>,
    asked: usize,
}

impl Branches {
    /// Calls `run` once for every combination of answers that has a probability, and `visit` with what it returned
    /// and this probability.
    pub(crate) fn every<T>(mut run: impl FnMut(&mut Self) -> T, mut visit: impl FnMut(T, f64)) {
        let mut branches = Self::default();
        loop {
            branches.asked = 0;
            let outcome = run(&mut branches);
            assert_eq!(branches.asked, branches.path.len(), "the same questions");
            visit(outcome, branches.probability());
            if !branches.advance() {
                break;
            }
        }
    }

    /// An answer in proportion to `weights`.
    pub(crate) fn choose(&mut self, weights: &[f64]) -> usize {
        if self.asked == self.path.len() {
            let first = weights.iter().position(|&weight| weight > 0.0);
            self.path.push((first.unwrap(), weights.to_vec()));
        }
        self.asked += 1;
        self.path[self.asked - 1].0
    }

    fn probability(&self) -> f64 {
        let share =
            |(answer, weights): &(usize, Vec<f64>)| weights[*answer] / weights.iter().sum::<f64>();
        self.path.iter().map(share).product()
    }

    /// Goes to the next combination; false behind the last.
    fn advance(&mut self) -> bool {
        while let Some((answer, weights)) = self.path.pop() {
            let next = (answer + 1..weights.len()).find(|&other| weights[other] > 0.0);
            if let Some(next) = next {
                self.path.push((next, weights));
                return true;
            }
        }
        false
    }
}

impl Chance for Branches {
    fn accepts(&mut self, _position: usize, probability: f64) -> bool {
        self.choose(&[1.0 - probability, probability]) == 1
    }

    fn picks(&mut self, _position: usize, weights: &[f64]) -> u32 {
        self.choose(weights) as u32
    }

    #[expect(clippy::panic, reason = "no test asks for it")]
    fn noise(&mut self, _position: usize, _vocab_size: usize) -> Vec<f64> {
        panic!("noise cannot be enumerated")
    }
}

/// A token of a distribution by a coin, as an index.
pub(crate) fn by_coin(coin: f64) -> impl FnOnce(&[f64]) -> usize {
    move |law| draw(law, coin) as usize
}
