//! The objective: mixture of losses, slot weights and the chunked, closed-form head gradient.
//!
//! `loss = sum(weight x per-slot loss) / denominator`. Numerator and denominator stay apart: the caller
//! knows the weights of all slots of an optimizer step before it starts and passes their sum. Head and
//! loss are fused: logits exist for one chunk of slots at a time, and the gradient with respect to the
//! hidden rows and to the head weight is the closed form of each loss, not a tape through `[N, V]`.
//!
//! A chunk goes through `fused` on the CPU in f32 and through `composed` everywhere else; a test holds
//! the two together for every loss. `teacher` says when the teacher's logits are computed for the draft
//! vocabulary alone.

mod chunk;
mod composed;
mod config;
mod coupled;
mod fused;
mod logits;
pub mod rounds;
mod stages;
mod teacher;
mod terms;

use std::ops::Range;

use burn::tensor::{FloatDType, Tensor};

use self::chunk::{Chunk, ChunkOutput, chunks};
pub use self::config::{Normalize, ObjectiveConfig, SlotWeight, Stage};
pub use self::logits::{SlotLogits, for_each_slot_logits};
pub use self::stages::Stages;
pub use self::teacher::{Teacher, teacher_figures};
use self::terms::{SlotTerm, Term};
use crate::batch::DraftBatch;
use crate::error::ModelError;
use crate::slot::Slot;

/// A validated objective.
#[derive(Clone, Debug)]
pub struct Objective {
    terms: Vec<(Term, f64)>,
    config: ObjectiveConfig,
}

/// Value, gradient and per-slot figures of one batch.
#[derive(Clone, Debug)]
pub struct ObjectiveOutput {
    /// Gradient of the normalised loss with respect to the hidden rows, `[N, H]`.
    pub grad_hidden: Tensor<2>,
    /// Gradient with respect to the wanted columns of the head weight `[V_draft, H]`.
    pub grad_head: Option<Tensor<2>>,
    /// Loss of each slot before weighting: the sum of the terms times their coefficients.
    pub loss: Vec<f32>,
    /// The terms of the mixture that weigh something.
    pub terms: Vec<TermOutput>,
    /// Figures of each slot.
    pub scores: SlotScores,
}

/// One term of a mixture.
#[derive(Clone, Debug)]
pub struct TermOutput {
    /// Name in run files.
    pub name: &'static str,
    /// Its value at each slot, before its coefficient and the slot's weight.
    pub value: Vec<f32>,
}

/// Figures of each slot, in the order of the slots; computed without gradient.
#[derive(Clone, Debug, Default)]
pub struct SlotScores {
    /// Overlap `sum(min(p, q))`: acceptance probability under speculative sampling.
    pub alpha: Vec<f32>,
    /// `log p(x)` of the data token under the target, whole vocabulary.
    pub log_p_token: Vec<f32>,
    /// `log q(x)` of the data token; minus infinity outside the draft vocabulary.
    pub log_q_token: Vec<f32>,
    /// `log q` of the drafter's most probable token.
    pub log_q_best: Vec<f32>,
    /// Whether drafter and target have the same most probable token.
    pub argmax_agrees: Vec<bool>,
    /// Whether the drafter's most probable token is the data token.
    pub argmax_is_token: Vec<bool>,
}

impl SlotScores {
    /// Appends the figures of further slots.
    pub fn extend(&mut self, other: Self) {
        self.alpha.extend(other.alpha);
        self.log_p_token.extend(other.log_p_token);
        self.log_q_token.extend(other.log_q_token);
        self.log_q_best.extend(other.log_q_best);
        self.argmax_agrees.extend(other.argmax_agrees);
        self.argmax_is_token.extend(other.argmax_is_token);
    }
}

impl Objective {
    /// Checks names, coefficients and ranges.
    ///
    /// # Errors
    /// [`ModelError::Setting`] naming the key and the valid names or range.
    pub fn new(config: &ObjectiveConfig) -> Result<Self, ModelError> {
        config.validate_ranges()?;
        let mut terms = Vec::new();
        for (name, &coefficient) in &config.losses {
            let term = Term::find(name).ok_or_else(|| {
                ModelError::setting(
                    format!("`objective.losses` names an unknown loss `{name}`"),
                    format!("the losses are: {}", Term::names().join(", ")),
                )
            })?;
            // A term that weighs nothing must not decide whether the loss is finite.
            if coefficient > 0.0 {
                terms.push((term, coefficient));
            }
        }
        if terms.is_empty() {
            return Err(ModelError::setting(
                "`objective.losses` is empty or all zero, expected at least one loss",
                "for example `losses = { kl = 1.0 }`",
            ));
        }
        let objective = Self {
            terms,
            config: config.clone(),
        };
        if objective.needs_every_anchor() && config.slot_weight != SlotWeight::Uniform {
            return Err(ModelError::setting(
                "`objective.slot_weight` has no effect on `round_count`, expected \"uniform\"",
                "it weighs every slot by the rounds that hang on it",
            ));
        }
        Ok(objective)
    }

    /// The settings it was built from.
    pub fn config(&self) -> &ObjectiveConfig {
        &self.config
    }

    /// Contribution of `slots` to the denominator of an optimizer step.
    pub fn denominator(&self, slots: &[Slot]) -> f64 {
        match self.config.normalize {
            Normalize::Slots => slots.len() as f64,
            Normalize::Weights => slots
                .iter()
                .map(|s| self.config.slot_weight.at(s.depth))
                .sum(),
        }
    }

    /// Value and gradient for one batch.
    ///
    /// `hidden` `[N, H]` are the drafter's output rows for `slots` (no gradient graph), `head`
    /// `[V_draft, H]` its head weight, `denominator` the sum over the whole optimizer step.
    pub fn evaluate(&self, input: ObjectiveInput<'_>, denominator: f64) -> ObjectiveOutput {
        let terms = self.slot_terms(&input);
        let mut total = Accumulator::new(&terms);
        let scale = self.row_scale(input.slots, denominator);
        for range in chunks(input.slots, self.config.chunk_positions) {
            let chunk = Chunk {
                input: &input,
                range: range.clone(),
                temperature: self.config.temperature,
                terms: &terms,
                scale: &scale,
            };
            total.push(chunk.evaluate(), &input, range);
        }
        total.finish(&input, &terms)
    }

    /// Whether the coefficients of some slots depend on others, which takes a first pass without gradient.
    fn is_coupled(&self) -> bool {
        matches!(self.config.slot_weight, SlotWeight::Dpace(_))
            || self.terms.iter().any(|(term, _)| term.is_coupled())
    }

    /// Whether every anchor of a turn must be there, as they are not where anchors are drawn.
    pub fn needs_every_anchor(&self) -> bool {
        self.terms
            .iter()
            .any(|(term, _)| matches!(term, Term::RoundCount))
    }

    /// The terms with their coefficients for each slot, detached.
    fn slot_terms(&self, input: &ObjectiveInput<'_>) -> Vec<SlotTerm> {
        let scores = if self.is_coupled() {
            Self::score(input, self.config.temperature, self.config.chunk_positions)
        } else {
            SlotScores::default()
        };
        let slots = input.slots;
        let weight = self.config.slot_weight;
        let dpace = match weight {
            SlotWeight::Dpace(smoothing) => Some(coupled::dpace(slots, &scores, smoothing)),
            _ => None,
        };
        self.terms
            .iter()
            .map(|&(term, coefficient)| {
                term.for_slots(coefficient, slots, &scores, weight, dpace.as_deref())
            })
            .collect()
    }

    /// Per-slot figures without any gradient; `temperature` applies to teacher and drafter.
    pub fn score(input: &ObjectiveInput<'_>, temperature: f64, chunk: usize) -> SlotScores {
        let mut scores = SlotScores::default();
        for range in chunks(input.slots, chunk) {
            let chunk = Chunk {
                input,
                range,
                temperature,
                terms: &[],
                scale: &[],
            };
            scores.extend(chunk.evaluate().scores);
        }
        scores
    }

    /// Weight / (denominator x temperature) of each slot.
    fn row_scale(&self, slots: &[Slot], denominator: f64) -> Vec<f32> {
        let weight = |slot: &Slot| self.config.slot_weight.at(slot.depth);
        let scale = |slot| (weight(slot) / denominator / self.config.temperature) as f32;
        slots.iter().map(scale).collect()
    }
}

/// Everything the objective reads for one batch.
#[derive(Clone, Debug)]
pub struct ObjectiveInput<'a> {
    /// Slots in the order of [`crate::slot::valid_slots`], row after row.
    pub slots: &'a [Slot],
    /// Drafter output rows of the slots, `[N, H]`, without gradient graph.
    pub hidden: Tensor<2>,
    /// Head weight `[V_draft, H]`, without gradient graph.
    pub head: Tensor<2>,
    /// The batch the slots come from.
    pub batch: &'a DraftBatch,
    /// The frozen target's share.
    pub teacher: Teacher<'a>,
    /// The columns of the head weight whose gradient is wanted.
    pub head_gradient: Option<Range<usize>>,
}

struct Accumulator {
    grad_hidden: Vec<Tensor<2>>,
    grad_head: Option<Tensor<2>>,
    terms: Vec<TermOutput>,
    scores: SlotScores,
}

impl Accumulator {
    fn new(terms: &[SlotTerm]) -> Self {
        let empty = |term: &SlotTerm| TermOutput {
            name: term.name,
            value: Vec::new(),
        };
        Self {
            grad_hidden: Vec::new(),
            grad_head: None,
            terms: terms.iter().map(empty).collect(),
            scores: SlotScores::default(),
        }
    }

    fn push(&mut self, chunk: ChunkOutput, input: &ObjectiveInput<'_>, range: Range<usize>) {
        for (term, value) in self.terms.iter_mut().zip(chunk.terms) {
            term.value.extend(value);
        }
        self.scores.extend(chunk.scores);
        let Some(grad_logits) = chunk.grad_logits else {
            return;
        };
        let grad_logits = grad_logits.cast(input.head.dtype());
        self.grad_hidden
            .push(grad_logits.clone().matmul(input.head.clone()));
        if let Some(columns) = &input.head_gradient {
            let hidden = input.hidden.clone().narrow(0, range.start, range.len());
            let hidden = hidden.narrow(1, columns.start, columns.len());
            let grad = grad_logits.transpose().matmul(hidden);
            let grad = grad.cast(FloatDType::F32);
            self.grad_head = Some(match self.grad_head.take() {
                Some(sum) => sum + grad,
                None => grad,
            });
        }
    }

    fn finish(self, input: &ObjectiveInput<'_>, terms: &[SlotTerm]) -> ObjectiveOutput {
        let mut loss = vec![0.0; input.slots.len()];
        for (term, output) in terms.iter().zip(&self.terms) {
            for (loss, value) in loss.iter_mut().zip(&output.value) {
                *loss += term.coefficient as f32 * value;
            }
        }
        let grad_hidden = if self.grad_hidden.is_empty() {
            input.hidden.zeros_like()
        } else {
            Tensor::cat(self.grad_hidden, 0)
        };
        ObjectiveOutput {
            grad_hidden,
            grad_head: self.grad_head,
            loss,
            terms: self.terms,
            scores: self.scores,
        }
    }
}

#[cfg(test)]
mod tests;
