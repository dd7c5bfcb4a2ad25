//! The objective: mixture of losses, slot weights and the chunked, closed-form head gradient.
//!
//! `loss = sum(weight x per-slot loss) / denominator`. Numerator and denominator stay apart: the caller
//! knows the weights of all slots of an optimizer step before it starts and passes their sum. Head and
//! loss are fused: logits exist for one chunk of slots at a time, and the gradient with respect to the
//! hidden rows and to the head weight is the closed form of each loss, not a tape through `[N, V]`.
//!
//! A chunk goes through [`fused`] on the CPU in f32 and through [`composed`] everywhere else; a test holds
//! the two together for every loss.

mod composed;
mod config;
mod fused;

use std::ops::Range;

use burn::tensor::{FloatDType, Tensor};

pub use self::config::{Normalize, ObjectiveConfig, SlotWeight};
use crate::batch::{DraftBatch, index_tensor};
use crate::error::ModelError;
use crate::loss::{self, DraftLoss};
use crate::slot::Slot;
use crate::target::TargetEnds;
use crate::vocab::VocabMap;

/// A validated objective.
#[derive(Clone, Debug)]
pub struct Objective {
    terms: Vec<(&'static dyn DraftLoss, f64)>,
    config: ObjectiveConfig,
}

/// What the frozen target contributes to the objective of one batch.
#[derive(Clone, Debug)]
pub struct Teacher<'a> {
    /// Final norm and head.
    pub ends: &'a TargetEnds,
    /// Draft vocabulary.
    pub vocab: &'a VocabMap,
}

/// Value, gradient and per-slot figures of one batch.
#[derive(Clone, Debug)]
pub struct ObjectiveOutput {
    /// Gradient of the normalised loss with respect to the hidden rows, `[N, H]`.
    pub grad_hidden: Tensor<2>,
    /// Gradient with respect to the head weight `[V_draft, H]`, when asked for.
    pub grad_head: Option<Tensor<2>>,
    /// Loss of each slot before weighting.
    pub loss: Vec<f32>,
    /// Figures of each slot.
    pub scores: SlotScores,
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
    /// Whether drafter and target have the same most probable token.
    pub argmax_agrees: Vec<bool>,
    /// Whether the drafter's most probable token is the data token.
    pub argmax_is_token: Vec<bool>,
}

impl SlotScores {
    fn extend(&mut self, other: Self) {
        self.alpha.extend(other.alpha);
        self.log_p_token.extend(other.log_p_token);
        self.log_q_token.extend(other.log_q_token);
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
        let mut terms = Vec::new();
        for (name, &coefficient) in &config.losses {
            let loss = loss::find(name).ok_or_else(|| {
                ModelError::setting(
                    format!("`objective.losses` names an unknown loss `{name}`"),
                    format!("the losses are: {}", loss::names().join(", ")),
                )
            })?;
            if !coefficient.is_finite() || coefficient < 0.0 {
                return Err(out_of_range(
                    "losses",
                    "coefficients of at least 0",
                    coefficient,
                ));
            }
            terms.push((loss, coefficient));
        }
        if terms.iter().all(|(_, coefficient)| *coefficient == 0.0) {
            return Err(ModelError::setting(
                "`objective.losses` is empty or all zero, expected at least one loss",
                "for example `losses = { kl = 1.0 }`",
            ));
        }
        if !(config.temperature.is_finite() && config.temperature > 0.0) {
            return Err(out_of_range(
                "temperature",
                "a positive number",
                config.temperature,
            ));
        }
        if config.chunk_positions == 0 {
            return Err(out_of_range("chunk_positions", "a positive number", 0.0));
        }
        match config.slot_weight {
            SlotWeight::StepDecay(x) | SlotWeight::ExpDecay(x) if !(x.is_finite() && x > 0.0) => {
                Err(out_of_range("slot_weight", "a positive decay", x))
            }
            _ => Ok(Self {
                terms,
                config: config.clone(),
            }),
        }
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
        let mut total = Accumulator::default();
        for range in chunks(input.slots, self.config.chunk_positions) {
            let scale = self.row_scale(&input.slots[range.clone()], denominator);
            let chunk = Chunk {
                input: &input,
                range: range.clone(),
                temperature: self.config.temperature,
                terms: &self.terms,
                scale: &scale,
            };
            total.push(chunk.evaluate(), &input, range);
        }
        total.finish(&input)
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

/// Consecutive slots whose logits exist at one time.
struct Chunk<'a> {
    input: &'a ObjectiveInput<'a>,
    range: Range<usize>,
    temperature: f64,
    /// Losses with their coefficients; none when only the figures are wanted.
    terms: &'a [(&'static dyn DraftLoss, f64)],
    /// Factor of each slot's gradient; empty without terms.
    scale: &'a [f32],
}

/// What a chunk contributes.
struct ChunkOutput {
    /// Gradient of the normalised loss with respect to the draft logits, `[n, V_draft]`; absent without
    /// terms.
    grad_logits: Option<Tensor<2>>,
    /// Loss of each slot before weighting; empty without terms.
    loss: Vec<f32>,
    scores: SlotScores,
}

impl Chunk<'_> {
    fn evaluate(&self) -> ChunkOutput {
        if fused::applies(self.input) {
            fused::evaluate(self)
        } else {
            composed::evaluate(self)
        }
    }

    fn slots(&self) -> &[Slot] {
        &self.input.slots[self.range.clone()]
    }

    /// Drafter output rows of the chunk, `[n, H]`.
    fn hidden(&self) -> Tensor<2> {
        let hidden = self.input.hidden.clone();
        hidden.narrow(0, self.range.start, self.range.len())
    }

    /// Draft logits over the temperature, `[n, V_draft]`, f32.
    fn draft_logits(&self) -> Tensor<2> {
        // Dividing the rows instead of the logits spares a pass over `[n, V]`.
        let rows = self.hidden().div_scalar(self.temperature);
        let logits = rows.matmul(self.input.head.clone().transpose());
        logits.cast(FloatDType::F32)
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
    /// Whether the gradient with respect to the head weight is wanted.
    pub head_gradient: bool,
}

impl ObjectiveInput<'_> {
    /// Teacher logits over the temperature at `(row, position)` places, `[P, V]`, f32.
    fn teacher_logits(&self, places: &[(usize, usize)], temperature: f64) -> Tensor<2> {
        let states = self.batch.states.final_hidden.clone();
        let [_, padded_len, _] = states.dims();
        let at = places.iter().map(|(row, t)| row * padded_len + t);
        let at = index_tensor(at, &self.hidden.device());
        let rows = states.flatten::<2>(0, 1).select(0, at);
        self.teacher.ends.scaled_logits(rows, temperature)
    }

    /// The data token that follows each `(row, position)`.
    fn tokens_after(&self, places: &[(usize, usize)]) -> Vec<u32> {
        let token = |&(row, t): &(usize, usize)| self.batch.tokens.rows[row].ids[t + 1];
        places.iter().map(token).collect()
    }
}

fn out_of_range(key: &str, expected: &str, found: f64) -> ModelError {
    ModelError::setting(
        format!("`objective.{key}` is {found}, expected {expected}"),
        "see the comments in `configs/quickstart.toml`",
    )
}

/// Consecutive ranges of slots that touch at most `positions` different teacher positions.
fn chunks(slots: &[Slot], positions: usize) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut start = 0;
    let mut seen = 0;
    for index in 0..slots.len() {
        if index == 0 || place(&slots[index]) != place(&slots[index - 1]) {
            if seen == positions {
                ranges.push(start..index);
                start = index;
                seen = 0;
            }
            seen += 1;
        }
    }
    if start < slots.len() {
        ranges.push(start..slots.len());
    }
    ranges
}

fn place(slot: &Slot) -> (usize, usize) {
    (slot.row, slot.teacher_position())
}

/// The teacher positions of slots in their order, and for each slot the index of its own.
fn distinct_places(slots: &[Slot]) -> (Vec<(usize, usize)>, Vec<usize>) {
    let mut places: Vec<(usize, usize)> = Vec::new();
    let mut place_of_slot = Vec::with_capacity(slots.len());
    for slot in slots {
        if places.last() != Some(&place(slot)) {
            places.push(place(slot));
        }
        place_of_slot.push(places.len() - 1);
    }
    (places, place_of_slot)
}

#[derive(Default)]
struct Accumulator {
    grad_hidden: Vec<Tensor<2>>,
    grad_head: Option<Tensor<2>>,
    loss: Vec<f32>,
    scores: SlotScores,
}

impl Accumulator {
    fn push(&mut self, chunk: ChunkOutput, input: &ObjectiveInput<'_>, range: Range<usize>) {
        self.loss.extend(chunk.loss);
        self.scores.extend(chunk.scores);
        let Some(grad_logits) = chunk.grad_logits else {
            return;
        };
        let grad_logits = grad_logits.cast(input.head.dtype());
        self.grad_hidden
            .push(grad_logits.clone().matmul(input.head.clone()));
        if input.head_gradient {
            let hidden = input.hidden.clone().narrow(0, range.start, range.len());
            let grad = grad_logits.transpose().matmul(hidden);
            let grad = grad.cast(FloatDType::F32);
            self.grad_head = Some(match self.grad_head.take() {
                Some(sum) => sum + grad,
                None => grad,
            });
        }
    }

    fn finish(self, input: &ObjectiveInput<'_>) -> ObjectiveOutput {
        let grad_hidden = if self.grad_hidden.is_empty() {
            input.hidden.zeros_like()
        } else {
            Tensor::cat(self.grad_hidden, 0)
        };
        ObjectiveOutput {
            grad_hidden,
            grad_head: self.grad_head,
            loss: self.loss,
            scores: self.scores,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::batch::{TargetStates, TokenBatch, TokenRow};
    use crate::host;
    use crate::rng::{Purpose, Stream};
    use crate::slot::valid_slots;

    const VOCAB: usize = 37;
    const HIDDEN: usize = 6;

    fn random<const D: usize>(shape: [usize; D], stream: u64) -> Tensor<D> {
        let mut stream = Stream::new(7, Purpose::Check, stream);
        let len = shape.iter().product();
        let values: Vec<f32> = (0..len)
            .map(|_| stream.uniform() as f32 * 2.0 - 1.0)
            .collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex())
    }

    fn assert_close(fused: &[f32], composed: &[f32], what: &str) {
        assert_eq!(fused.len(), composed.len(), "{what}");
        let largest = composed.iter().filter(|x| x.is_finite());
        let largest = largest.fold(0.0_f32, |sum, x| sum.max(x.abs()));
        for (a, b) in fused.iter().zip(composed) {
            // Both are f32; exponentials within 3e-7, sums of 37 terms in another order.
            let is_close = (a - b).abs() <= 3e-6 * largest.max(1e-3);
            assert!(is_close || a.to_bits() == b.to_bits(), "{what}: {a} {b}");
        }
    }

    /// Seen red with `q <= p` turned into `q < p - 0.01` in the row form of TV, with the scale of CE's
    /// label doubled, and with `p` not divided by the kept mass in the row form of KL.
    #[test]
    fn the_fused_chunk_equals_the_composed_one_for_every_loss_and_vocabulary() {
        let ends = TargetEnds {
            embedding: random([VOCAB, HIDDEN], 0),
            final_norm: random([HIDDEN], 1),
            head: random([VOCAB, HIDDEN], 2) * 4.0,
            rms_norm_eps: 1e-5,
        };
        let tokens = TokenBatch {
            rows: vec![TokenRow {
                key: "row".to_owned(),
                ids: (0..12).map(|i| (i * 5 + 3) % VOCAB as u32).collect(),
                turns: (0..12).map(|i| u32::from(i > 2)).collect(),
            }],
        };
        let slots = valid_slots(&tokens.rows[0].turns, 0, 3);
        let batch = DraftBatch {
            states: TargetStates {
                aux: random([1, 12, 1], 3),
                final_hidden: random([1, 12, HIDDEN], 4),
            },
            tokens,
        };
        let reduced = (0..VOCAB as u32).filter(|id| id % 3 != 1).collect();
        for vocab in [
            VocabMap::full(VOCAB),
            VocabMap::new(reduced, VOCAB).expect("distinct ids"),
        ] {
            let input = ObjectiveInput {
                slots: &slots,
                hidden: random([slots.len(), HIDDEN], 5) * 3.0,
                head: random([vocab.len(), HIDDEN], 6) * 2.0,
                batch: &batch,
                teacher: Teacher {
                    ends: &ends,
                    vocab: &vocab,
                },
                head_gradient: false,
            };
            assert!(fused::applies(&input));
            for loss in loss::names() {
                let config = ObjectiveConfig {
                    losses: BTreeMap::from([(loss.to_owned(), 0.7), ("kl".to_owned(), 0.3)]),
                    temperature: 0.8,
                    ..ObjectiveConfig::default()
                };
                let objective = Objective::new(&config).expect("known losses");
                let scale = objective.row_scale(&slots, 9.0);
                let chunk = Chunk {
                    input: &input,
                    range: 1..slots.len() - 2,
                    temperature: 0.8,
                    terms: &objective.terms,
                    scale: &scale[1..slots.len() - 2],
                };
                compare(fused::evaluate(&chunk), composed::evaluate(&chunk), loss);
            }
        }
    }

    fn compare(fused: ChunkOutput, composed: ChunkOutput, loss: &str) {
        let grad = |output: &ChunkOutput| host::take(output.grad_logits.clone().expect("terms"));
        assert_close(&grad(&fused), &grad(&composed), &format!("{loss} gradient"));
        assert_close(&fused.loss, &composed.loss, &format!("{loss} value"));
        let (fused, composed) = (fused.scores, composed.scores);
        assert_close(&fused.alpha, &composed.alpha, "alpha");
        assert_close(&fused.log_p_token, &composed.log_p_token, "log p");
        assert_close(&fused.log_q_token, &composed.log_q_token, "log q");
        assert_eq!(fused.argmax_agrees, composed.argmax_agrees);
        assert_eq!(fused.argmax_is_token, composed.argmax_is_token);
    }
}
