//! What can be said about text that decoding has produced.

use draftsmith_models::batch::{StateSpec, TargetStates, TokenBatch, TokenRow};
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;

use crate::decode::{Sequence, SequenceRecord};
use crate::error::EvalError;
use crate::exact::{Candidate, ExactSettings, ExactTau, exact_with, has_round};
use crate::surprise::Surprise;
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

/// What was found.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Judgement {
    /// What the exact evaluator expects of the drafter; `None` without a drafter, for rules without exact evaluation, and
    /// where no text has a round.
    pub(crate) exact: Option<ExactTau>,
    /// How surprising the text is beside the target's own; `None` where nothing was drawn.
    pub(crate) text_z: Option<f64>,
    /// Tokens to which the truncated law gives nothing.
    pub(crate) outside: u64,
}

impl Decoded<'_> {
    /// Judges the text of `records`, the continuations of `sequences`, by one pass of the target over it; `goes_on` is asked
    /// between batches.
    pub(crate) fn judge(
        &self,
        candidate: Option<Candidate<'_>>,
        sequences: &[Sequence],
        records: &[SequenceRecord],
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Judgement, EvalError> {
        let candidate = candidate.filter(|_| self.rule.realised().is_some());
        if candidate.is_none() && self.sampling.is_greedy() {
            return Ok(Judgement::default());
        }
        let rows = rows(sequences, records);
        let mut surprise = Surprise::default();
        let spec = candidate.map_or_else(
            || StateSpec {
                aux_layer_ids: Vec::new(),
            },
            |candidate| candidate.drafter.state_spec(),
        );
        let mut states = |tokens: &TokenBatch| {
            if !goes_on() {
                return Err(EvalError::Interrupted);
            }
            let states = self.target.forward(&tokens.ids(), &spec);
            if !self.sampling.is_greedy() {
                let hidden = &states.final_hidden;
                surprise.add_rows(self.target, &self.sampling, &tokens.rows, hidden);
            }
            Ok(states)
        };
        let exact = if let Some(candidate) = candidate {
            self.exact(candidate, &rows, &mut states)?
        } else {
            None
        };
        // Texts that the exact evaluator has not looked at: all of them, or those that ended with their first token.
        let is_left = |row: &&TokenRow| candidate.is_none() || !has_round(row);
        let left: Vec<TokenRow> = rows.iter().filter(is_left).cloned().collect();
        let left = if self.sampling.is_greedy() {
            &[]
        } else {
            left.as_slice()
        };
        for rows in left.chunks(BATCH_ROWS) {
            let rows = rows.to_vec();
            states(&TokenBatch { rows })?;
        }
        Ok(Judgement {
            exact,
            text_z: surprise.z(),
            outside: surprise.outside(),
        })
    }

    fn exact(
        &self,
        candidate: Candidate<'_>,
        rows: &[TokenRow],
        states: impl FnMut(&TokenBatch) -> Result<TargetStates, EvalError>,
    ) -> Result<Option<ExactTau>, EvalError> {
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
        match exact_with(candidate, rows, &settings, states) {
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
