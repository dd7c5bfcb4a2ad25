//! What can be said about text that decoding has produced.

use draftsmith_models::batch::TokenRow;
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;

use crate::decode::{Sequence, SequenceRecord};
use crate::error::EvalError;
use crate::exact::{Candidate, ExactSettings, ExactTau, exact_with};
use crate::surprise::text_z;
use crate::verify::VerifyRule;

/// Rows that go through the target together, at most: their states are all in memory.
const BATCH_ROWS: usize = 8;

/// How the text was decoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoded<'a> {
    pub(crate) target: &'a TargetModel,
    pub(crate) rule: &'static dyn VerifyRule,
    pub(crate) sampling: Sampling,
    pub(crate) gamma: usize,
    pub(crate) seed: u64,
    pub(crate) resamples: usize,
}

impl Decoded<'_> {
    /// How surprising the text of `records`, the continuations of `sequences`, is beside the target's own.
    pub(crate) fn text_z(
        &self,
        sequences: &[Sequence],
        records: &[SequenceRecord],
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Option<f64> {
        if self.sampling.is_greedy() {
            return None;
        }
        let rows = rows(sequences, records);
        text_z(self.target, &self.sampling, &rows, BATCH_ROWS, goes_on)
    }

    /// What the exact evaluator expects of a drafter on the text of `records`, the continuations of `sequences`; `None`
    /// for rules without one, and where no text has a round. `goes_on` is asked between batches.
    pub(crate) fn exact(
        &self,
        candidate: Candidate<'_>,
        sequences: &[Sequence],
        records: &[SequenceRecord],
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<ExactTau>, EvalError> {
        if self.rule.realised().is_none() {
            return Ok(None);
        }
        let settings = ExactSettings {
            rule: self.rule,
            sampling: self.sampling,
            depths: Some(self.gamma),
            text: Some(self.sampling),
            batch_rows: BATCH_ROWS,
            resamples: self.resamples,
            seed: self.seed,
            ..ExactSettings::default()
        };
        let rows = rows(sequences, records);
        let spec = candidate.drafter.state_spec();
        let report = exact_with(candidate, &rows, &settings, |tokens| {
            if !goes_on() {
                return Err(EvalError::Interrupted);
            }
            let ids = tokens.ids(self.target.device());
            Ok(self.target.forward(ids, &spec))
        });
        match report {
            Ok(report) => Ok(report.by_gamma.last().copied()),
            Err(EvalError::NothingToMeasure { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Neighbours in length share a batch, so that little is padded.
fn rows(sequences: &[Sequence], records: &[SequenceRecord]) -> Vec<TokenRow> {
    let mut rows: Vec<TokenRow> = sequences.iter().zip(records).map(row).collect();
    rows.sort_by_key(TokenRow::len);
    rows
}

/// A continuation as a row whose new tokens the target generated.
fn row((sequence, record): (&Sequence, &SequenceRecord)) -> TokenRow {
    let ids: Vec<u32> = [sequence.prompt.as_slice(), &record.ids].concat();
    let mut turns = vec![0; sequence.prompt.len()];
    turns.resize(ids.len(), 1);
    TokenRow {
        key: sequence.id.clone(),
        ids,
        turns,
    }
}
