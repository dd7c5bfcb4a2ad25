//! [`Teacher`]: the frozen target's share of the objective, and its figures over the whole vocabulary.
//!
//! The losses need the target's distribution on the draft vocabulary. Of the rest of the vocabulary they need the
//! log-sum-exp only, and the scores the most probable token: figures that do not change from step to step. Where
//! the batch brings them, the product with the whole head is spared.

use std::sync::{Arc, OnceLock};

use burn::tensor::Tensor;

use super::{composed, fused};
use crate::batch::{TeacherFigures, index_tensor};
use crate::host;
use crate::target::TargetEnds;
use crate::vocab::VocabMap;

/// Positions whose logits over the whole vocabulary exist at one time.
const POSITIONS: usize = 256;

/// What the frozen target contributes to the objective of one batch.
#[derive(Clone, Debug)]
pub struct Teacher<'a> {
    /// Final norm and head.
    pub ends: &'a TargetEnds,
    /// Draft vocabulary.
    pub vocab: &'a VocabMap,
    /// Rows of the target's head that belong to the draft vocabulary, `[V_draft, H]`; taken out of it once,
    /// when they are first asked for.
    kept_head: Arc<OnceLock<Tensor<2>>>,
}

impl<'a> Teacher<'a> {
    /// The teacher of a drafter that proposes the tokens of `vocab`. Make it once: it and its clones share the
    /// kept rows of the head.
    pub fn new(ends: &'a TargetEnds, vocab: &'a VocabMap) -> Self {
        Self {
            ends,
            vocab,
            kept_head: Arc::default(),
        }
    }

    /// Logits in f32 of the draft vocabulary alone, for final hidden rows `[P, H]`: `[P, V_draft]`.
    pub(super) fn kept_logits(&self, final_hidden: Tensor<2>) -> Tensor<2> {
        let kept_head = self.kept_head.get_or_init(|| {
            let head = self.ends.head.clone();
            let ids = self.vocab.target_ids().iter().map(|&id| id as usize);
            let ids = index_tensor(ids, &head.device());
            head.select(0, ids)
        });
        self.ends.logits_of(kept_head, final_hidden)
    }
}

/// Figures of the target over its whole vocabulary at temperature 1, for final hidden rows `[N, H]` and the data
/// token that follows each.
pub fn teacher_figures(
    ends: &TargetEnds,
    final_hidden: Tensor<2>,
    next_tokens: &[u32],
) -> Vec<TeacherFigures> {
    let mut figures = Vec::with_capacity(next_tokens.len());
    for tokens in next_tokens.chunks(POSITIONS) {
        let rows = final_hidden.clone().narrow(0, figures.len(), tokens.len());
        let logits = ends.logits(rows); // [n, V]
        figures.extend(if host::is_host(&logits) {
            fused::figures(logits, tokens)
        } else {
            composed::figures(&logits, tokens)
        });
    }
    figures
}
