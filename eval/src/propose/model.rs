//! [`ModelProposer`]: a smaller language model with the target's tokenizer, drafting a chain (2211.17192).

use std::sync::Arc;

use draftsmith_models::batch::{StateSpec, index_tensor};
use draftsmith_models::drafter::Committed;
use draftsmith_models::target::{KvCache, TargetModel};
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::host_values;

use super::choice::choose;
use super::{DraftRule, DraftToken, ProposeRow, Proposer};
use crate::error::EvalError;

/// Drafts with a language model of its own.
#[derive(Debug)]
pub struct ModelProposer<'a> {
    model: &'a TargetModel,
    vocab: Arc<VocabMap>,
    state: Option<State>,
}

/// What the model has read of each sequence.
#[derive(Debug)]
struct State {
    cache: KvCache,
    /// Tokens whose keys and values the cache holds; drafts that became no text are still among them.
    read: Vec<Vec<u32>>,
}

impl<'a> ModelProposer<'a> {
    /// A proposer whose token ids are those of a target with `target_vocab` tokens; ids that only one of the two has are
    /// never drafted.
    ///
    /// # Errors
    /// [`EvalError::Setting`] when the model has more tokens than the target.
    pub fn new(model: &'a TargetModel, target_vocab: usize) -> Result<Self, EvalError> {
        let own = model.spec().vocab_size;
        let ids = (0..own as u32).collect();
        let vocab = VocabMap::new(ids, target_vocab).map_err(|_too_few| {
            EvalError::setting(
                format!("`eval.draft_model` has {own} tokens, the target has {target_vocab}"),
                "a draft model must have the target's tokenizer",
            )
        })?;
        Ok(Self {
            model,
            vocab: Arc::new(vocab),
            state: None,
        })
    }

    /// Logits behind the new tokens of every row, flat `[B * V]`.
    fn read(&self, state: &mut State, new: &[&[u32]]) -> Vec<f32> {
        for (read, new) in state.read.iter_mut().zip(new) {
            read.extend_from_slice(new);
        }
        let len = new.iter().map(|new| new.len()).max().unwrap_or(0);
        let last = new
            .iter()
            .enumerate()
            .map(|(row, new)| row * len + new.len() - 1);
        let last = index_tensor(last, self.model.device());
        let want = StateSpec {
            aux_layer_ids: Vec::new(),
        };
        let states = self.model.forward_cached(new, &want, &mut state.cache);
        let rows = states.final_hidden.flatten::<2>(0, 1).select(0, last);
        host_values(&self.model.ends().logits(rows))
    }
}

impl State {
    /// Forgets drafts that became no text, and always the last token, so that every row has something to read.
    fn roll_back(&mut self, rows: &[ProposeRow<'_>]) {
        for (index, (read, row)) in self.read.iter_mut().zip(rows).enumerate() {
            let same = read.iter().zip(row.tokens).take_while(|(a, b)| a == b);
            let kept = same.count().min(row.tokens.len() - 1);
            read.truncate(kept);
            self.cache.truncate(index, kept);
        }
    }
}

impl Proposer for ModelProposer<'_> {
    fn name(&self) -> &'static str {
        "model"
    }

    fn begin(&mut self, num_rows: usize, capacity: usize) {
        self.state = Some(State {
            cache: self.model.new_cache(num_rows, capacity),
            read: vec![Vec::new(); num_rows],
        });
    }

    fn propose(
        &mut self,
        rows: &[ProposeRow<'_>],
        rule: &DraftRule,
    ) -> Result<Vec<Vec<DraftToken>>, EvalError> {
        let mut drafts: Vec<Vec<DraftToken>> = vec![Vec::new(); rows.len()];
        let num_depths = rows.iter().map(|row| row.max_tokens).max().unwrap_or(0);
        if num_depths == 0 {
            return Ok(drafts);
        }
        let Some(mut state) = self.state.take() else {
            return Ok(drafts);
        };
        state.roll_back(rows);
        let mut new: Vec<Vec<u32>> = rows
            .iter()
            .zip(&state.read)
            .map(|(row, read)| row.tokens[read.len()..].to_vec())
            .collect();
        for depth in 0..num_depths {
            let fed: Vec<&[u32]> = new.iter().map(Vec::as_slice).collect();
            let logits = self.read(&mut state, &fed);
            for (index, scores) in logits.chunks_exact(self.vocab.len()).enumerate() {
                let token = choose(scores, &self.vocab, rule, &rows[index], depth);
                let token = token.ok_or_else(|| EvalError::NotFinite {
                    what: "the draft model's logits",
                    id: self.name().to_owned(),
                })?;
                // Rows that want no more drafts go on all the same: the batch stays rectangular.
                new[index] = vec![token.id];
                if depth < rows[index].max_tokens {
                    drafts[index].push(token);
                }
            }
        }
        self.state = Some(state);
        Ok(drafts)
    }

    fn commit(&mut self, _committed: &Committed) {}

    fn keep_rows(&mut self, rows: &[usize]) {
        if let Some(state) = &mut self.state {
            state.cache.select_rows(rows);
            state.read = rows.iter().map(|&row| state.read[row].clone()).collect();
        }
    }
}
