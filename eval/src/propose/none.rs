//! [`NoProposer`]: plain decoding, one token a round.

use draftsmith_models::drafter::Committed;

use super::{DraftRule, DraftToken, ProposeRow, Proposer};
use crate::error::EvalError;

/// Never drafts anything; every round is one plain decoding step.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProposer;

impl Proposer for NoProposer {
    fn name(&self) -> &'static str {
        "none"
    }

    fn begin(&mut self, _num_rows: usize, _capacity: usize) {}

    fn propose(
        &mut self,
        rows: &[ProposeRow<'_>],
        _rule: &DraftRule,
    ) -> Result<Vec<Vec<DraftToken>>, EvalError> {
        Ok(vec![Vec::new(); rows.len()])
    }

    fn commit(&mut self, _committed: &Committed) {}

    fn keep_rows(&mut self, _rows: &[usize]) {}
}
