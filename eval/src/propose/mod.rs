//! [`Proposer`]: where draft tokens come from.
//!
//! A proposer serves a batch of B sequences that are decoded together. It is told what was committed,
//! asked for drafts, and told which rows go on. Every drafted token comes with the distribution it was
//! drawn from; the acceptance test uses exactly those numbers.

pub(crate) mod choice;
pub mod drafter;
pub mod model;
pub mod none;
mod prefix_tree;
pub mod prompt_lookup;
pub mod suffix;
mod suffix_automaton;
pub mod tree;

use std::fmt::Debug;
use std::sync::Arc;

use draftsmith_models::batch::StateSpec;
use draftsmith_models::drafter::Committed;
use draftsmith_models::sample::Sampling;
use draftsmith_models::vocab::VocabMap;

use crate::error::EvalError;

pub use drafter::DrafterProposer;
pub use model::ModelProposer;
pub use none::NoProposer;
pub use prompt_lookup::PromptLookup;
pub use suffix::SuffixLookup;

use tree::{DraftTree, TreeShape};

/// What trained drafters are measured against, as written in run files: plain decoding, prompt lookup, the suffix
/// automaton, a smaller language model, and each drafter as it was before its first step.
pub const BASELINES: &[&str] = &["none", "prompt_lookup", "suffix", MODEL, UNTRAINED];

/// The baseline that needs `eval.draft_model`.
pub const MODEL: &str = "model";

/// The baseline whose proposers the caller supplies, because it depends on the trained drafters.
pub const UNTRAINED: &str = "untrained";

/// One drafted token.
#[derive(Clone, Debug)]
pub struct DraftToken {
    /// Target id.
    pub id: u32,
    /// What it was drawn from.
    pub distribution: DraftDistribution,
}

/// The distribution a draft token was drawn from.
#[derive(Clone, Debug)]
pub enum DraftDistribution {
    /// All mass on the token itself: the proposer had no choice.
    Certain,
    /// Probabilities over a draft vocabulary; other target tokens have probability 0.
    Drawn {
        /// `[V_draft]`.
        probabilities: Vec<f64>,
        /// Which target token each entry stands for.
        vocab: Arc<VocabMap>,
    },
}

impl DraftToken {
    /// A token that the proposer was certain of.
    pub fn certain(id: u32) -> Self {
        Self {
            id,
            distribution: DraftDistribution::Certain,
        }
    }

    /// Probability under which target token `id` would have been drafted here.
    pub fn probability_of(&self, id: u32) -> f64 {
        match &self.distribution {
            DraftDistribution::Certain => f64::from(u8::from(id == self.id)),
            DraftDistribution::Drawn {
                probabilities,
                vocab,
            } => vocab
                .to_draft(id)
                .map_or(0.0, |draft| probabilities[draft as usize]),
        }
    }
}

/// What is asked of one sequence in one round.
#[derive(Clone, Copy, Debug)]
pub struct ProposeRow<'a> {
    /// Committed tokens: prompt and continuation; the last one is the anchor.
    pub tokens: &'a [u32],
    /// Most drafts wanted, possibly 0.
    pub max_tokens: usize,
    /// Stream of random numbers of the sequence.
    pub stream: u64,
    /// Tokens that end the text: nothing behind one can become text.
    pub stop_ids: &'a [u32],
}

/// How a verification rule wants its drafts to be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftChoice {
    /// The most probable token.
    MostProbable,
    /// Drawn from the draft distribution; drafted again in a later round, a position draws the same number.
    Drawn,
    /// Drawn from the draft distribution, with new numbers in each round.
    DrawnEachRound,
    /// The largest probability under the noise that the target draws with too.
    SharedNoise,
}

impl DraftChoice {
    /// Whether the draft distribution itself decides, so that it may be another than the target's would be.
    pub fn is_drawn(self) -> bool {
        matches!(self, Self::Drawn | Self::DrawnEachRound)
    }
}

/// How drafts are drawn.
#[derive(Clone, Copy, Debug)]
pub struct DraftRule {
    /// Temperature and truncation, the same as the target's.
    pub sampling: Sampling,
    /// How the verification rule wants them.
    pub choice: DraftChoice,
    /// Seed of the run.
    pub seed: u64,
}

/// A source of draft tokens for B sequences.
pub trait Proposer: Debug {
    /// Name in reports.
    fn name(&self) -> &str;

    /// Target states that [`Proposer::commit`] must be given.
    fn state_spec(&self) -> StateSpec {
        StateSpec {
            aux_layer_ids: Vec::new(),
        }
    }

    /// Starts `num_rows` new sequences of up to `capacity` positions and forgets all earlier ones.
    fn begin(&mut self, num_rows: usize, capacity: usize);

    /// Drafts for every row, at most `max_tokens` each; fewer or none are allowed.
    ///
    /// # Errors
    /// [`EvalError::NotFinite`] when the drafter computed NaN or infinity.
    fn propose(
        &mut self,
        rows: &[ProposeRow<'_>],
        rule: &DraftRule,
    ) -> Result<Vec<Vec<DraftToken>>, EvalError>;

    /// A tree of drafts for every row, at most `max_tokens` deep; the chain of [`Proposer::propose`] where a proposer knows
    /// no other.
    ///
    /// # Errors
    /// As [`Proposer::propose`].
    fn propose_trees(
        &mut self,
        rows: &[ProposeRow<'_>],
        rule: &DraftRule,
        _shape: TreeShape,
    ) -> Result<Vec<DraftTree>, EvalError> {
        let chain = |drafts: Vec<DraftToken>| DraftTree {
            ids: drafts.iter().map(|draft| draft.id).collect(),
            parents: (0..drafts.len()).map(|at| at.checked_sub(1)).collect(),
        };
        let drafts = self.propose(rows, rule)?;
        Ok(drafts.into_iter().map(chain).collect())
    }

    /// Takes in newly committed positions, whose target states are now known.
    fn commit(&mut self, committed: &Committed);

    /// Goes on with only the given rows, in the given order.
    fn keep_rows(&mut self, rows: &[usize]);
}
