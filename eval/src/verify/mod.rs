//! [`VerifyRule`]: which drafts become text, and which token the target adds.

pub mod block;
mod chance;
pub mod greedy;
pub mod gumbel;
pub mod sampling;
pub mod target_only;
mod top_two;
mod tree;

use std::fmt::Debug;

use draftsmith_models::sample::{Sampling, argmax};
use draftsmith_models::vocab::VocabMap;

use crate::error::EvalError;
use crate::propose::{DraftChoice, DraftToken};

pub use block::BlockVerification;
pub use chance::{Chance, Coins};
pub use greedy::Greedy;
pub use gumbel::GumbelCoupling;
pub use sampling::SpeculativeSampling;
pub use target_only::TargetOnly;
pub use top_two::{TopTwo, top_two};
pub use tree::{TreeToVerify, Walk, walk_tree};

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
    /// Absolute position of the first draft.
    pub position: usize,
}

impl<'a> RowToVerify<'a> {
    /// Target logits that predict draft `index`, or the bonus token for `index = k`.
    pub fn logits_at(&self, index: usize) -> &'a [f32] {
        &self.logits[index * self.vocab_size..(index + 1) * self.vocab_size]
    }

    /// The target's distribution there after temperature and truncation, `[V]`.
    pub fn probabilities(&self, index: usize) -> Vec<f64> {
        self.sampling.probabilities(self.logits_at(index))
    }

    /// Accepts drafts as long as they are the token that the target takes for itself.
    fn compare(&self, mut own_token: impl FnMut(usize) -> u32) -> Verdict {
        for (index, draft) in self.drafts.iter().enumerate() {
            let next = own_token(index);
            if next != draft.id {
                let accepted = index;
                return Verdict { accepted, next };
            }
        }
        let accepted = self.drafts.len();
        Verdict {
            accepted,
            next: own_token(accepted),
        }
    }
}

/// Target and drafter at one slot of a given text, after temperature and truncation.
#[derive(Clone, Copy, Debug)]
pub struct SlotLaw<'a> {
    /// The target's distribution, `[V]`.
    pub p: &'a [f64],
    /// The drafter's, `[V_draft]`.
    pub q: &'a [f64],
    /// Which target token each entry of `q` stands for.
    pub vocab: &'a VocabMap,
    /// The token of the text.
    pub token: u32,
}

/// Probability that the draft of a slot is accepted and is the token of the text, given the text.
pub type Realised = fn(&SlotLaw<'_>) -> f64;

impl SlotLaw<'_> {
    /// The drafter's probability of the token of the text.
    fn q_of_token(&self) -> f64 {
        let draft = self.vocab.to_draft(self.token);
        draft.map_or(0.0, |draft| self.q[draft as usize])
    }

    /// Whether the drafter's most probable token is that of the text.
    fn is_most_probable(&self) -> bool {
        let best = argmax(self.q).map(|best| self.vocab.to_target(best as u32));
        best == Some(self.token)
    }
}

/// What training computes of every slot, and what acceptance is without truncation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainingScore {
    /// Whether drafter and target have one most probable token.
    Argmax,
    /// `sum(min(p, q))`, and `min(1, q / p)` of the token of the text.
    Overlap,
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

    /// How drafts must be chosen.
    fn draft_choice(&self) -> DraftChoice;

    /// Accepts a prefix of the drafts and adds one token.
    fn verify(&self, row: &RowToVerify<'_>, chance: &mut dyn Chance) -> Verdict;

    /// The target's token after `index` drafts and its runner-up, for rules under which the text does not depend on
    /// the drafts; text of such a rule can be compared token by token with plain decoding.
    fn own_choice(
        &self,
        _row: &RowToVerify<'_>,
        _index: usize,
        _chance: &mut dyn Chance,
    ) -> Option<TopTwo> {
        None
    }

    /// How likely a draft is accepted and is the token of the text, given the text; `None` where drafts are not judged
    /// one by one.
    fn realised(&self) -> Option<Realised>;

    /// The score of training that says how likely a draft is accepted, where one does: faster than whole distributions.
    fn training_score(&self) -> Option<TrainingScore> {
        None
    }

    /// Whether the target chooses for itself and drafts are right when they are its choice, so that several may be tried.
    fn walks_trees(&self) -> bool {
        self.is_drafter_invariant()
    }

    /// Whether [`VerifyRule::own_choice`] has an answer.
    fn is_drafter_invariant(&self) -> bool {
        false
    }
}

/// Every rule, in the order shown in messages.
pub const RULES: &[&dyn VerifyRule] = &[
    &Greedy,
    &SpeculativeSampling,
    &GumbelCoupling,
    &TargetOnly,
    &BlockVerification,
];

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
