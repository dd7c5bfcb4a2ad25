//! [`Chance`]: the random decisions of verification, apart from the rules that take them.
//!
//! A rule asks for events of a probability and for tokens in proportion to weights. Decoding answers from counters;
//! [`crate::enumeration`] answers with every possibility in turn and so learns the exact law of the text from the rule's own code.

use std::fmt::Debug;

use draftsmith_models::gumbel::NoiseAt;
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::sample::draw;

/// Decides what is left to chance while one sequence is verified.
pub trait Chance: Debug {
    /// Whether the draft for `position` is accepted, given the probability of it.
    fn accepts(&mut self, position: usize, probability: f64) -> bool;

    /// The target's own token for `position`, in proportion to `weights` `[V]`.
    fn picks(&mut self, position: usize, weights: &[f64]) -> u32;

    /// Gumbel noise for `position`, `exp(g)` of each token, `[V]`.
    fn noise(&mut self, position: usize, vocab_size: usize) -> Vec<f64>;
}

/// Random numbers of one sequence: pure functions of (seed, sequence, absolute position, purpose).
///
/// A position may be drafted in several rounds. Where a rule looks at the draft and the coin of a position only if it
/// settles the position, both may be the same in every round; a rule that looks further ahead needs new ones in each.
#[derive(Clone, Copy, Debug)]
pub struct Coins {
    /// Seed of the run.
    pub seed: u64,
    /// Stream of the sequence.
    pub stream: u64,
    /// First position of the round, for rules that need new drafts and coins in each.
    pub round: Option<usize>,
}

impl Coins {
    /// Coin by which the token for `position` is drafted; uniform in `[0, 1)`.
    pub fn draft(&self, position: usize) -> f64 {
        self.uniform(Purpose::Draft, self.index(position))
    }

    fn index(&self, position: usize) -> u64 {
        match self.round {
            None => position as u64,
            // A round is shorter than 2^16 tokens, so no two rounds share a number.
            Some(first) => ((first as u64) << 16) + (position - first) as u64,
        }
    }

    fn uniform(&self, purpose: Purpose, index: u64) -> f64 {
        Stream::at(self.seed, purpose, self.stream, index).uniform()
    }
}

impl Chance for Coins {
    fn accepts(&mut self, position: usize, probability: f64) -> bool {
        self.uniform(Purpose::Accept, self.index(position)) < probability
    }

    fn picks(&mut self, position: usize, weights: &[f64]) -> u32 {
        // Only the round that settles a position draws its token.
        draw(weights, self.uniform(Purpose::Target, position as u64))
    }

    fn noise(&mut self, position: usize, vocab_size: usize) -> Vec<f64> {
        let at = NoiseAt {
            seed: self.seed,
            stream: self.stream,
            position,
        };
        at.weights(vocab_size)
    }
}
