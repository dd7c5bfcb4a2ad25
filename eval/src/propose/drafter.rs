//! [`DrafterProposer`]: a trained drafter of any family, drafting a chain.

use std::sync::Arc;

use draftsmith_models::batch::StateSpec;
use draftsmith_models::drafter::{AnyDrafter, Committed, DraftState};
use draftsmith_models::target::TargetEnds;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::host_values;

use super::choice::choose;
use super::tree::{DraftTree, Grower, TreeShape};
use super::{DraftRule, DraftToken, ProposeRow, Proposer};
use crate::calibration::Calibration;
use crate::error::EvalError;

/// Drafts with a drafter on a device without gradient tracking.
#[derive(Debug)]
pub struct DrafterProposer<'a> {
    name: String,
    drafter: &'a AnyDrafter,
    ends: &'a TargetEnds,
    vocab: Arc<VocabMap>,
    calibration: Option<&'a Calibration>,
    state: Option<DraftState>,
}

impl<'a> DrafterProposer<'a> {
    /// A proposer that appears as `name` in reports.
    pub fn new(
        name: impl Into<String>,
        drafter: &'a AnyDrafter,
        ends: &'a TargetEnds,
        vocab: &VocabMap,
    ) -> Self {
        Self {
            name: name.into(),
            drafter,
            ends,
            vocab: Arc::new(vocab.clone()),
            calibration: None,
            state: None,
        }
    }

    /// Draws drafts as they were calibrated.
    #[must_use]
    pub fn calibrated(self, calibration: Option<&'a Calibration>) -> Self {
        Self {
            calibration,
            ..self
        }
    }

    /// How drafts are drawn at a depth.
    fn rule_at(&self, rule: &DraftRule, depth: usize) -> DraftRule {
        match self.calibration {
            Some(calibration) if rule.choice.is_drawn() => DraftRule {
                sampling: calibration.at(rule.sampling, depth),
                ..*rule
            },
            _ => *rule,
        }
    }

    /// What the drafter remembers, once a batch has begun.
    pub fn state(&self) -> Option<&DraftState> {
        self.state.as_ref()
    }
}

impl Proposer for DrafterProposer<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn state_spec(&self) -> StateSpec {
        self.drafter.state_spec()
    }

    fn begin(&mut self, num_rows: usize, capacity: usize) {
        self.state = Some(self.drafter.open(num_rows, capacity));
    }

    fn propose(
        &mut self,
        rows: &[ProposeRow<'_>],
        rule: &DraftRule,
    ) -> Result<Vec<Vec<DraftToken>>, EvalError> {
        let mut drafts: Vec<Vec<DraftToken>> = vec![Vec::new(); rows.len()];
        let Some(mut state) = self.state.take() else {
            return Ok(drafts);
        };
        let limit = self.drafter.max_depths().unwrap_or(usize::MAX);
        let wanted = |row: &ProposeRow<'_>| row.max_tokens.min(limit);
        let num_depths = rows.iter().map(wanted).max().unwrap_or(0);
        // Rows that want no more drafts go on with their last token: the batch stays rectangular.
        let mut previous: Vec<u32> = vec![0; rows.len()];
        for depth in 0..num_depths {
            let fed = (depth > 0).then_some(previous.as_slice());
            let logits = host_values(&self.drafter.next_logits(&mut state, fed, self.ends));
            let rule = self.rule_at(rule, depth);
            for (index, row) in rows.iter().enumerate() {
                if depth >= row.max_tokens {
                    continue;
                }
                let scores = &logits[index * self.vocab.len()..(index + 1) * self.vocab.len()];
                let token = choose(scores, &self.vocab, &rule, row, depth);
                let token = token.ok_or_else(|| EvalError::NotFinite {
                    what: "the drafter's logits",
                    id: self.name.clone(),
                })?;
                previous[index] = token.id;
                drafts[index].push(token);
            }
        }
        self.state = Some(state);
        Ok(drafts)
    }

    fn propose_trees(
        &mut self,
        rows: &[ProposeRow<'_>],
        rule: &DraftRule,
        shape: TreeShape,
    ) -> Result<Vec<DraftTree>, EvalError> {
        let Some(state) = self.state.clone() else {
            return Ok(vec![DraftTree::default(); rows.len()]);
        };
        let grower = Grower {
            drafter: self.drafter,
            ends: self.ends,
            vocab: &self.vocab,
            rule,
            shape,
        };
        grower
            .grow(state, rows)
            .ok_or_else(|| EvalError::NotFinite {
                what: "the drafter's logits",
                id: self.name.clone(),
            })
    }

    fn commit(&mut self, committed: &Committed) {
        if let Some(state) = &mut self.state {
            self.drafter.observe(state, committed.clone(), self.ends);
        }
    }

    fn keep_rows(&mut self, rows: &[usize]) {
        if let Some(state) = &mut self.state {
            state.select_rows(rows);
        }
    }
}
