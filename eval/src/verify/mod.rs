//! [`VerifyRule`]: which drafts become text, and which token the target adds.

pub mod greedy;
pub mod sampling;

use std::fmt::Debug;

use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::sample::{Sampling, argmax, draw};

use crate::error::EvalError;
use crate::propose::DraftToken;

pub use greedy::Greedy;
pub use sampling::SpeculativeSampling;

/// Random numbers of one sequence: pure functions of (seed, sequence, absolute position, purpose).
///
/// A position may be drafted in several rounds, but its coin and its draw are looked at once only:
/// a round that rejects an earlier draft never looks at later ones, and a round that looks settles
/// the position.
#[derive(Clone, Copy, Debug)]
pub struct Coins {
    /// Seed of the run.
    pub seed: u64,
    /// Stream of the sequence.
    pub stream: u64,
}

impl Coins {
    /// Accept or reject the draft for `position`; uniform in `[0, 1)`.
    pub fn accept(&self, position: usize) -> f64 {
        self.uniform(Purpose::Accept, position)
    }

    /// The draw of the target's own token for `position`; uniform in `[0, 1)`.
    pub fn target(&self, position: usize) -> f64 {
        self.uniform(Purpose::Target, position)
    }

    fn uniform(&self, purpose: Purpose, position: usize) -> f64 {
        Stream::at(self.seed, purpose, self.stream, position as u64).uniform()
    }
}

/// One sequence's drafts with the target's logits for them.
#[derive(Clone, Copy, Debug)]
pub struct RowToVerify<'a> {
    /// The drafts, k of them.
    pub drafts: &'a [DraftToken],
    /// Target logits `[k + 1, V]`, row-major: entry `i` predicts draft `i`, the last the bonus token.
    pub logits: &'a [f32],
    /// Target tokens, V.
    pub vocab_size: usize,
    /// Temperature and truncation.
    pub sampling: &'a Sampling,
    /// Random numbers of the sequence.
    pub coins: Coins,
    /// Absolute position of the first draft.
    pub position: usize,
}

impl<'a> RowToVerify<'a> {
    /// Target logits that predict draft `index`, or the bonus token for `index = k`.
    pub fn logits_at(&self, index: usize) -> &'a [f32] {
        &self.logits[index * self.vocab_size..(index + 1) * self.vocab_size]
    }

    /// The target's own token after `index` accepted drafts, drawn from its distribution there.
    pub fn target_token(&self, index: usize) -> u32 {
        let logits = self.logits_at(index);
        if self.sampling.is_greedy() {
            return argmax(logits).unwrap_or(0) as u32;
        }
        let probabilities = self.sampling.probabilities(logits);
        draw(&probabilities, self.coins.target(self.position + index))
    }
}

/// What became of the drafts of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Leading drafts that became text.
    pub accepted: usize,
    /// The token that follows them: a correction, or the bonus token when all were accepted.
    pub next: u32,
}

/// A rule that turns drafts and target logits into text.
pub trait VerifyRule: Debug + Send + Sync {
    /// Name in run files and reports.
    fn name(&self) -> &'static str;
    /// Whether the text has the target's own distribution under these settings.
    fn is_lossless(&self, sampling: &Sampling) -> bool;
    /// Accepts a prefix of the drafts and adds one token.
    fn verify(&self, row: &RowToVerify<'_>) -> Verdict;
}

/// Every rule, in the order shown in messages.
pub const RULES: &[&dyn VerifyRule] = &[&Greedy, &SpeculativeSampling];

/// The rule of that name.
///
/// # Errors
/// [`EvalError::Setting`] listing the rules.
pub fn find(name: &str) -> Result<&'static dyn VerifyRule, EvalError> {
    let rule = RULES.iter().copied().find(|rule| rule.name() == name);
    rule.ok_or_else(|| {
        let names: Vec<&str> = RULES.iter().map(|rule| rule.name()).collect();
        EvalError::setting(
            format!("`eval.rule` names an unknown verification rule `{name}`"),
            format!("the rules are: {}", names.join(", ")),
        )
    })
}

/// The rule for a temperature: `greedy` at 0, else the one named.
///
/// # Errors
/// [`EvalError::Setting`] when the name is unknown or the rule would change the target's distribution.
pub fn for_sampling(name: &str, sampling: &Sampling) -> Result<&'static dyn VerifyRule, EvalError> {
    let rule = find(name)?;
    if sampling.is_greedy() {
        return Ok(&Greedy);
    }
    if rule.is_lossless(sampling) {
        return Ok(rule);
    }
    Err(EvalError::setting(
        format!(
            "`eval.rule` is `{name}`, which is not lossless at temperature {}",
            sampling.temperature
        ),
        "use `sampling`, or temperature 0 only",
    ))
}
