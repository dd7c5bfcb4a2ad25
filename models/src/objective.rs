//! The objective: mixture of losses, slot weights and the chunked, closed-form head gradient.
//!
//! `loss = sum(weight x per-slot loss) / denominator`. Numerator and denominator stay apart: the caller
//! knows the weights of all slots of an optimizer step before it starts and passes their sum. Head and
//! loss are fused: logits exist for one chunk of slots at a time, and the gradient with respect to the
//! hidden rows and to the head weight is the closed form of each loss, not a tape through `[N, V]`.

use std::collections::BTreeMap;

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::batch::{DraftBatch, index_tensor};
use crate::error::ModelError;
use crate::loss::{self, DraftLoss, LossRows};
use crate::slot::Slot;
use crate::target::TargetEnds;
use crate::vocab::VocabMap;

/// `[objective]`: what is minimised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectiveConfig {
    /// Loss names with their coefficients, for example `{ ce = 0.1, tv = 0.9 }`.
    pub losses: BTreeMap<String, f64>,
    /// Weight of a slot by its depth.
    pub slot_weight: SlotWeight,
    /// What the weighted sum is divided by.
    pub normalize: Normalize,
    /// Temperature of teacher and drafter in the losses; serve at the same one.
    pub temperature: f64,
    /// Teacher positions whose logits exist at one time; bounds the memory of the loss.
    pub chunk_positions: usize,
}

impl Default for ObjectiveConfig {
    fn default() -> Self {
        Self {
            losses: BTreeMap::from([("kl".to_owned(), 1.0)]),
            slot_weight: SlotWeight::Uniform,
            normalize: Normalize::Weights,
            temperature: 1.0,
            chunk_positions: 256,
        }
    }
}

/// Weight of a slot as a function of its depth `d`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SlotWeight {
    /// 1.
    Uniform,
    /// `base^d` (EAGLE-3 uses 0.8).
    StepDecay(f64),
    /// `exp(-d / gamma)` (DFlash uses 4 to 7).
    ExpDecay(f64),
}

impl SlotWeight {
    /// The weight at depth `d`.
    pub fn at(self, depth: usize) -> f64 {
        match self {
            Self::Uniform => 1.0,
            Self::StepDecay(base) => base.powi(depth as i32),
            Self::ExpDecay(gamma) => (-(depth as f64) / gamma).exp(),
        }
    }
}

/// Denominator of the loss over an optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Normalize {
    /// The sum of the slot weights: a constant loss of 1 stays 1 under every decay.
    Weights,
    /// The number of valid slots.
    Slots,
}

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
        for chunk in chunks(input.slots, self.config.chunk_positions) {
            let rows = self.chunk_rows(&input, &chunk);
            let mut value: Option<Tensor<2>> = None;
            let mut grad: Option<Tensor<2>> = None;
            for (loss, coefficient) in &self.terms {
                let terms = loss.evaluate(&rows.loss_rows);
                value = Some(plus(value, terms.value.mul_scalar(*coefficient)));
                grad = Some(plus(grad, terms.grad.mul_scalar(*coefficient)));
            }
            if let (Some(value), Some(grad)) = (value, grad) {
                let scaled = grad * self.row_scale(&input.slots[chunk.clone()], denominator, &rows);
                total.push(scaled, &input, &rows, value);
            }
            total.scores.extend(rows.scores());
        }
        total.finish(&input)
    }

    /// Per-slot figures without any gradient; `temperature` applies to teacher and drafter.
    pub fn score(input: &ObjectiveInput<'_>, temperature: f64, chunk: usize) -> SlotScores {
        let mut scores = SlotScores::default();
        for range in chunks(input.slots, chunk) {
            scores.extend(ChunkRows::new(input, &range, temperature).scores());
        }
        scores
    }

    fn chunk_rows(&self, input: &ObjectiveInput<'_>, chunk: &std::ops::Range<usize>) -> ChunkRows {
        ChunkRows::new(input, chunk, self.config.temperature)
    }

    /// Weight / (denominator x temperature) of each slot, `[n, 1]`.
    fn row_scale(&self, slots: &[Slot], denominator: f64, rows: &ChunkRows) -> Tensor<2> {
        let scale: Vec<f32> = slots
            .iter()
            .map(|slot| {
                (self.config.slot_weight.at(slot.depth) / denominator / self.config.temperature)
                    as f32
            })
            .collect();
        let len = scale.len();
        Tensor::from_data(TensorData::new(scale, [len, 1]), &rows.hidden.device())
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

fn plus(sum: Option<Tensor<2>>, term: Tensor<2>) -> Tensor<2> {
    match sum {
        Some(sum) => sum + term,
        None => term,
    }
}

fn out_of_range(key: &str, expected: &str, found: f64) -> ModelError {
    ModelError::setting(
        format!("`objective.{key}` is {found}, expected {expected}"),
        "see the comments in `configs/quickstart.toml`",
    )
}

/// Consecutive ranges of slots that touch at most `positions` different teacher positions.
fn chunks(slots: &[Slot], positions: usize) -> Vec<std::ops::Range<usize>> {
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

/// The target's share of a chunk, one row a distinct teacher position.
struct TeacherRows {
    /// `[P, V_draft]`.
    log_p: Tensor<2>,
    /// Log-probability of the data token that follows, `[P]`.
    log_p_token: Tensor<1>,
    /// Most probable token, absolute id, `[P]`.
    argmax: Tensor<1, Int>,
    /// The data token that follows.
    tokens: Vec<u32>,
}

impl TeacherRows {
    fn new(input: &ObjectiveInput<'_>, places: &[(usize, usize)], temperature: f64) -> Self {
        let device = input.hidden.device();
        let [_, padded_len, _] = input.batch.states.final_hidden.dims();
        let flat = input.batch.states.final_hidden.clone().flatten::<2>(0, 1);
        let at = index_tensor(places.iter().map(|(row, t)| row * padded_len + t), &device);
        let ends = input.teacher.ends;
        let logits = ends.scaled_logits(flat.select(0, at), temperature); // [P, V]
        let log_z = log_sum_exp(logits.clone()); // [P, 1]
        let tokens: Vec<u32> = places
            .iter()
            .map(|&(row, t)| input.batch.tokens.rows[row].ids[t + 1])
            .collect();
        let token_ids = ids(&tokens, &device).unsqueeze_dim(1);
        let log_p_token = logits.clone().gather(1, token_ids) - log_z.clone();
        let argmax = logits.clone().argmax(1).squeeze_dim::<1>(1);
        let vocab = input.teacher.vocab;
        let kept = if vocab.is_full() {
            logits
        } else {
            logits.select(1, ids(vocab.target_ids(), &device))
        };
        Self {
            log_p: kept - log_z,
            log_p_token: log_p_token.squeeze_dim::<1>(1),
            argmax,
            tokens,
        }
    }

    /// Draft ids of the data tokens (0 where unknown) and 1 or 0 for known or not, `[P, 1]` each.
    fn labels(&self, vocab: &VocabMap, device: &Device) -> (Tensor<2, Int>, Tensor<2>) {
        let draft = |token: &u32| vocab.to_draft(*token);
        let label: Vec<u32> = self.tokens.iter().map(|x| draft(x).unwrap_or(0)).collect();
        let is_known = |token: &u32| f32::from(u8::from(draft(token).is_some()));
        let known: Vec<f32> = self.tokens.iter().map(is_known).collect();
        let known = Tensor::<1>::from_floats(known.as_slice(), device);
        (ids(&label, device).unsqueeze_dim(1), known.unsqueeze_dim(1))
    }
}

/// Distributions of one chunk of slots.
struct ChunkRows {
    loss_rows: LossRows,
    hidden: Tensor<2>,
    log_p_token: Tensor<1>,
    draft_argmax: Tensor<1, Int>,
    target_argmax: Tensor<1, Int>,
    token: Tensor<1, Int>,
}

impl ChunkRows {
    fn new(input: &ObjectiveInput<'_>, range: &std::ops::Range<usize>, temperature: f64) -> Self {
        let device = input.hidden.device();
        let vocab = input.teacher.vocab;
        let (places, place_of_slot) = distinct_places(&input.slots[range.clone()]);
        let teacher = TeacherRows::new(input, &places, temperature);
        let (label, known) = teacher.labels(vocab, &device);
        let hidden = input.hidden.clone().narrow(0, range.start, range.len());
        // Dividing the rows instead of the logits spares a pass over `[n, V]`.
        let scaled = hidden.clone().div_scalar(temperature);
        let draft_logits = scaled.matmul(input.head.clone().transpose());
        let draft_logits = draft_logits.cast(FloatDType::F32);
        // The same formula as the teacher's: a drafter that agrees has q = p to the last bit, and only
        // then is the gradient of TV zero.
        let log_q = draft_logits.clone() - log_sum_exp(draft_logits);
        let draft_argmax = absolute(log_q.clone().argmax(1).squeeze_dim::<1>(1), vocab);

        // Several slots share a teacher position: spread its row after the costly functions.
        let spread = index_tensor(place_of_slot, &device);
        let p = teacher.log_p.clone().exp();
        Self {
            loss_rows: LossRows {
                q: log_q.clone().exp(),
                log_q,
                kept_mass: p.clone().sum_dim(1).select(0, spread.clone()),
                p: p.select(0, spread.clone()),
                log_p: teacher.log_p.select(0, spread.clone()),
                label: label.select(0, spread.clone()),
                label_known: known.select(0, spread.clone()),
            },
            hidden,
            log_p_token: teacher.log_p_token.select(0, spread.clone()),
            draft_argmax,
            target_argmax: teacher.argmax.select(0, spread.clone()),
            token: ids(&teacher.tokens, &device).select(0, spread),
        }
    }

    fn scores(&self) -> SlotScores {
        let rows = &self.loss_rows;
        let unknown = rows.label_known.clone().equal_scalar(0.0);
        let log_q_token = rows.log_q.clone().gather(1, rows.label.clone());
        let log_q_token = log_q_token.mask_fill(unknown, f32::NEG_INFINITY);
        let same = |left: &Tensor<1, Int>, right: &Tensor<1, Int>| {
            let equal = left.clone().equal(right.clone()).int();
            equal
                .to_data()
                .iter::<i64>()
                .map(|value| value != 0)
                .collect::<Vec<bool>>()
        };
        SlotScores {
            alpha: crate::weights::host_values(&rows.alpha()),
            log_p_token: crate::weights::host_values(&self.log_p_token),
            log_q_token: crate::weights::host_values(&log_q_token),
            argmax_agrees: same(&self.draft_argmax, &self.target_argmax),
            argmax_is_token: same(&self.draft_argmax, &self.token),
        }
    }
}

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

fn ids(values: &[u32], device: &Device) -> Tensor<1, Int> {
    index_tensor(values.iter().map(|&id| id as usize), device)
}

fn absolute(draft_ids: Tensor<1, Int>, vocab: &VocabMap) -> Tensor<1, Int> {
    if vocab.is_full() {
        return draft_ids;
    }
    let table = ids(vocab.target_ids(), &draft_ids.device());
    table.select(0, draft_ids)
}

/// `log(sum(exp(x)))` over the last axis, `[n, V]` to `[n, 1]`.
fn log_sum_exp(x: Tensor<2>) -> Tensor<2> {
    let max = x.clone().max_dim(1);
    (x - max.clone()).exp().sum_dim(1).log() + max
}

#[derive(Default)]
struct Accumulator {
    grad_hidden: Vec<Tensor<2>>,
    grad_head: Option<Tensor<2>>,
    loss: Vec<f32>,
    scores: SlotScores,
}

impl Accumulator {
    fn push(
        &mut self,
        grad_logits: Tensor<2>,
        input: &ObjectiveInput<'_>,
        rows: &ChunkRows,
        value: Tensor<2>,
    ) {
        let grad_logits = grad_logits.cast(input.head.dtype());
        self.grad_hidden
            .push(grad_logits.clone().matmul(input.head.clone()));
        if input.head_gradient {
            let grad = grad_logits.transpose().matmul(rows.hidden.clone());
            self.grad_head = Some(plus(self.grad_head.take(), grad.cast(FloatDType::F32)));
        }
        self.loss.extend(crate::weights::host_values(&value));
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
