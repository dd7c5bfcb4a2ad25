//! Batched decoding: draft a chain or a tree, verify with one target forward, commit, roll back.
//!
//! A *round* is one target forward over the last committed token and the drafts that follow it; it
//! commits the accepted drafts and one token of the target's own. The prompt's prefill and the token
//! drawn from it are no round. Rows differ in length and leave the batch when they end; what a sequence
//! becomes depends on its prompt, its id and the settings only, not on its neighbours (up to
//! floating-point rounding of batched matrix products).

mod batch;
mod tree;

use draftsmith_models::generate::FinishReason;
use draftsmith_models::rng::stable_hash;
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;
use serde::{Deserialize, Serialize};

use crate::error::EvalError;
use crate::propose::Proposer;
use crate::propose::tree::TreeShape;
use crate::verify::{TopTwo, VerifyRule};

/// A prompt to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Identity; all random numbers of the sequence derive from it.
    pub id: String,
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
}

impl Sequence {
    /// The sequence's stream of random numbers.
    pub fn stream(&self) -> u64 {
        stable_hash(&self.id)
    }
}

/// How sequences are continued.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeSettings {
    /// Temperature and truncation of target and drafter.
    pub sampling: Sampling,
    /// Tokens drafted in a round, at most; 0 is plain decoding.
    pub gamma: usize,
    /// Most new tokens, the stop token included.
    pub max_new_tokens: usize,
    /// Tokens that end a continuation; they are part of it.
    pub stop_ids: Vec<u32>,
    /// Sequences decoded together, at most.
    pub batch_rows: usize,
    /// Compute the target's scores of every token by itself, so that they are the same to the last bit whatever is drafted
    /// and decoded beside it; slow, for tests of losslessness.
    pub batch_invariant: bool,
    /// Verify trees of drafts instead of chains; only under rules by which the target draws for itself.
    pub tree: Option<TreeShape>,
    /// Seed of all draws.
    pub seed: u64,
}

/// What verifies, and how.
#[derive(Clone, Copy, Debug)]
pub struct Decoder<'a> {
    /// The frozen target.
    pub target: &'a TargetModel,
    /// The verification rule.
    pub rule: &'static dyn VerifyRule,
    /// How sequences are continued.
    pub settings: &'a DecodeSettings,
}

/// One round of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Round {
    /// Drafts that were verified.
    pub proposed: usize,
    /// Leading drafts that became text.
    pub accepted: usize,
    /// Tokens that became text: `accepted + 1`, or `accepted` when the last accepted draft ended it.
    pub committed: usize,
}

/// A finished sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SequenceRecord {
    /// Identity, as given.
    pub id: String,
    /// New token ids, the stop token included; the first one comes from prefill.
    pub ids: Vec<u32>,
    /// Its rounds, in order.
    pub rounds: Vec<Round>,
    /// The target's two best tokens for each entry of `ids`; empty where the text depends on the drafts.
    pub top_two: Vec<TopTwo>,
    /// Why it ended.
    pub finish: FinishReason,
}

/// Where the time of a run went, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimeSplit {
    /// Target forward over the prompts, and the drafter's first look at them.
    pub prefill: f64,
    /// Drafting, and the drafter's intake of committed tokens.
    pub draft: f64,
    /// Target forward over the drafts, with its logits.
    pub verify: f64,
    /// Acceptance of drafts, and the draws of the target.
    pub sample: f64,
    /// Bookkeeping: inputs of the passes, rows that ended.
    pub other: f64,
}

impl TimeSplit {
    /// Seconds spent in rounds, prefill excluded.
    pub fn rounds(&self) -> f64 {
        self.draft + self.verify + self.sample + self.other
    }

    /// The mean of several decodes, of which this is the sum.
    pub(crate) fn of_each(&self, decodes: usize) -> Self {
        let each = |seconds: f64| seconds / decodes.max(1) as f64;
        Self {
            prefill: each(self.prefill),
            draft: each(self.draft),
            verify: each(self.verify),
            sample: each(self.sample),
            other: each(self.other),
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.prefill += other.prefill;
        self.draft += other.draft;
        self.verify += other.verify;
        self.sample += other.sample;
        self.other += other.other;
    }
}

/// All sequences of a run.
#[derive(Clone, Debug)]
pub struct DecodeOutput {
    /// One record a sequence, in the order given.
    pub records: Vec<SequenceRecord>,
    /// Where the time went.
    pub time: TimeSplit,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeProgress {
    /// New tokens so far.
    pub tokens: usize,
    /// Sequences that have ended.
    pub finished: usize,
    /// Sequences in all.
    pub total: usize,
}

/// Continues all sequences and records every round.
///
/// `progress` is called after each prefill and round and may end the run by returning false.
///
/// # Errors
/// [`EvalError`] when a prompt does not fit the target, a model computes NaN or infinity, the rule does
/// not fit the temperature, or the run is interrupted.
pub fn decode(
    decoder: &Decoder<'_>,
    proposer: &mut dyn Proposer,
    sequences: &[Sequence],
    progress: &mut dyn FnMut(DecodeProgress) -> bool,
) -> Result<DecodeOutput, EvalError> {
    check_settings(decoder)?;
    check_sequences(decoder.target, decoder.settings, sequences)?;
    // Neighbours in length share a batch, so that little is padded.
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_by_key(|&index| (sequences[index].prompt.len(), index));
    let mut records: Vec<Option<SequenceRecord>> = vec![None; sequences.len()];
    let mut time = TimeSplit::default();
    let mut so_far = DecodeProgress {
        tokens: 0,
        finished: 0,
        total: sequences.len(),
    };
    for indices in order.chunks(decoder.settings.batch_rows.max(1)) {
        let members: Vec<&Sequence> = indices.iter().map(|&index| &sequences[index]).collect();
        let mut report = |tokens: usize, finished: usize| {
            so_far.tokens += tokens;
            so_far.finished += finished;
            progress(so_far)
        };
        let (finished, spent) = batch::decode_batch(decoder, proposer, &members, &mut report)?;
        time.add(&spent);
        for (&index, record) in indices.iter().zip(finished) {
            records[index] = Some(record);
        }
    }
    Ok(DecodeOutput {
        records: records.into_iter().flatten().collect(),
        time,
    })
}

fn check_settings(decoder: &Decoder<'_>) -> Result<(), EvalError> {
    let settings = decoder.settings;
    if !decoder.rule.is_lossless(&settings.sampling) {
        return Err(EvalError::setting(
            format!(
                "the verification rule `{}` is not lossless at temperature {}",
                decoder.rule.name(),
                settings.sampling.temperature
            ),
            "use `sampling` at temperatures above 0",
        ));
    }
    if settings.tree.is_some() && !decoder.rule.walks_trees() {
        return Err(EvalError::setting(
            format!(
                "the verification rule `{}` knows no trees of drafts",
                decoder.rule.name()
            ),
            "`greedy`, `gumbel` and `target_only` walk them",
        ));
    }
    if settings.max_new_tokens == 0 {
        return Err(EvalError::setting(
            "`eval.max_new_tokens` is 0, expected at least 1",
            "the first new token comes from the prompt's own forward pass",
        ));
    }
    Ok(())
}

/// Checks that every prompt fits the target with its continuation and drafts.
///
/// # Errors
/// [`EvalError::PromptLength`] or [`EvalError::UnknownToken`] naming the first prompt that does not.
pub fn check_sequences(
    target: &TargetModel,
    settings: &DecodeSettings,
    sequences: &[Sequence],
) -> Result<(), EvalError> {
    let spec = target.spec();
    let reserved = settings.max_new_tokens + settings.gamma;
    let most = spec.max_position_embeddings.saturating_sub(reserved);
    for sequence in sequences {
        let len = sequence.prompt.len();
        if len == 0 || len > most {
            return Err(EvalError::PromptLength {
                id: sequence.id.clone(),
                len,
                most,
            });
        }
        let unknown = |token: &&u32| **token as usize >= spec.vocab_size;
        if let Some(&token) = sequence.prompt.iter().find(unknown) {
            return Err(EvalError::UnknownToken {
                id: sequence.id.clone(),
                token,
                vocab_size: spec.vocab_size,
            });
        }
    }
    Ok(())
}
