//! [`Branches`]: every answer of chance in turn.

use draftsmith_models::sample::draw;

use crate::verify::{Chance, Coins};

/// Answers the questions of a whole round: those of verification, and what is drafted.
pub trait RoundChance: Chance {
    /// The draft for `position`, as an entry of its law `[V_draft]`.
    fn drafts(&mut self, position: usize, law: &[f64]) -> usize;
}

impl RoundChance for Coins {
    fn drafts(&mut self, position: usize, law: &[f64]) -> usize {
        draw(law, self.draft(position)) as usize
    }
}

/// Answers questions of chance so that, over several calls, every combination of answers is given once.
#[derive(Debug, Default)]
pub struct Branches {
    /// Answer to each question so far with the weights of all answers.
    path: Vec<(usize, Vec<f64>)>,
    asked: usize,
}

impl Branches {
    /// Calls `run` once for every combination of answers that has a probability, and `visit` with what it returned
    /// and this probability.
    pub fn every<T>(mut run: impl FnMut(&mut Self) -> T, mut visit: impl FnMut(T, f64)) {
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

    /// An answer in proportion to `weights`, not all of which are zero.
    #[expect(clippy::expect_used, reason = "no rule draws from nothing")]
    pub fn choose(&mut self, weights: &[f64]) -> usize {
        if self.asked == self.path.len() {
            let first = weights.iter().position(|&weight| weight > 0.0);
            self.path
                .push((first.expect("a positive weight"), weights.to_vec()));
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

    #[expect(clippy::panic, reason = "rules that ask for noise are not enumerated")]
    fn noise(&mut self, _position: usize, _vocab_size: usize) -> Vec<f64> {
        panic!("noise cannot be enumerated")
    }
}

impl RoundChance for Branches {
    fn drafts(&mut self, _position: usize, law: &[f64]) -> usize {
        self.choose(law)
    }
}
