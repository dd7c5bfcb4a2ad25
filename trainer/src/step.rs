//! One optimizer step: closed-form objective, one backward pass a micro-batch, clipping, AdamW.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::tensor::{FloatDType, Tensor};
use draftsmith_data::hidden::HiddenStateSource;
use draftsmith_models::batch::{DraftBatch, TokenBatch};
use draftsmith_models::drafter::{AnchorDraw, AnyDrafter};
use draftsmith_models::objective::{Objective, ObjectiveInput, ObjectiveOutput, Teacher};
use draftsmith_models::slot::Slot;

use crate::clip::{clip, gradient_norm};
use crate::error::{PartError, TrainerError};
use crate::order::MicroBatch;
use crate::parts::RowStore;

/// A drafter with everything that changes it.
pub struct Learner<'a> {
    /// The drafter, on a device that tracks gradients.
    pub drafter: AnyDrafter,
    /// The optimizer with its moments.
    pub optimizer: ModuleOptimizer,
    /// What is minimised.
    pub objective: Objective,
    /// The frozen target's share of the objective.
    pub teacher: Teacher<'a>,
    /// Number type of the drafter's matrix products.
    pub compute: FloatDType,
    /// Largest norm of the gradient; 0 for no limit.
    pub clip_norm: f64,
}

impl std::fmt::Debug for Learner<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Learner")
            .field("drafter", &self.drafter.family())
            .field("objective", &self.objective)
            .field("compute", &self.compute)
            .field("clip_norm", &self.clip_norm)
            .finish_non_exhaustive()
    }
}

/// Figures of one depth over an optimizer step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DepthFigures {
    /// Slots of this depth.
    pub slots: u64,
    /// Sum of the losses, unweighted.
    pub loss: f64,
    /// Sum of the acceptance probabilities.
    pub alpha: f64,
    /// Slots in which drafter and target have the same most probable token.
    pub argmax_agrees: u64,
}

/// What happened to the parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// They were updated.
    Applied,
    /// No micro-batch had a slot; nothing changed.
    Empty,
    /// The gradient of this parameter, or the loss, was not finite; nothing changed.
    Skipped {
        /// First parameter at fault, or `loss`.
        tensor: String,
    },
}

/// Where the time of a step went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phases {
    /// Target states.
    pub states: Duration,
    /// Drafter forward.
    pub forward: Duration,
    /// Head, losses and their closed-form gradient.
    pub objective: Duration,
    /// Drafter backward.
    pub backward: Duration,
    /// Clipping and optimizer.
    pub update: Duration,
}

/// Report of one optimizer step.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// Weighted sum of losses over the denominator of the step; absent without slots.
    pub loss: Option<f64>,
    /// Each term of the mixture, weighted like the loss but before its coefficient: the loss is the sum of these
    /// times the coefficients. Also `confidence`, of a drafter that is taught one, which is no part of the loss.
    pub terms: BTreeMap<&'static str, f64>,
    /// Figures by depth.
    pub depths: Vec<DepthFigures>,
    /// Norm of the gradient before clipping.
    pub gradient_norm: Option<f64>,
    /// Real tokens of all micro-batches.
    pub tokens: u64,
    /// Micro-batches without a slot.
    pub empty_batches: u64,
    /// What happened to the parameters.
    pub update: Update,
    /// Where the time went.
    pub phases: Phases,
}

impl StepReport {
    /// Slots of all depths.
    pub fn slots(&self) -> u64 {
        self.depths.iter().map(|depth| depth.slots).sum()
    }
}

/// A micro-batch with its slots, known from the marks of its tokens alone.
struct Portion {
    tokens: TokenBatch,
    /// The slots, cut into the passes that bound the memory of one graph.
    passes: Vec<Vec<Slot>>,
}

impl Portion {
    fn is_empty(&self) -> bool {
        self.passes.iter().all(Vec::is_empty)
    }
}

impl Learner<'_> {
    /// Takes one optimizer step over all micro-batches.
    ///
    /// The denominator is the sum over the whole step, known before the first forward pass, so that
    /// every slot weighs the same wherever the step was cut. `draw` decides which anchors are trained.
    ///
    /// # Errors
    /// [`TrainerError::Part`] when the states cannot be had.
    pub fn step(
        &mut self,
        micro_batches: &[MicroBatch],
        rows: &dyn RowStore,
        source: &dyn HiddenStateSource,
        learning_rate: f64,
        draw: AnchorDraw,
    ) -> Result<StepReport, TrainerError> {
        let portions: Vec<Portion> = micro_batches
            .iter()
            .map(|indices| self.portion(indices, rows, draw))
            .collect();
        let mut report = self.empty_report(&portions);
        let mut sum = GradientsAccumulator::new();
        let denominator = self.denominator(&portions);
        for portion in portions.into_iter().filter(|p| !p.is_empty()) {
            self.micro_batch(portion, denominator, source, &mut report, &mut sum)?;
        }
        if report.slots() > 0 {
            self.update(sum.grads(), learning_rate, &mut report);
        }
        Ok(report)
    }

    /// Gradients of one micro-batch, normalised by its own slots, and its figures.
    pub(crate) fn gradients(
        &self,
        indices: &[usize],
        rows: &dyn RowStore,
        source: &dyn HiddenStateSource,
        draw: AnchorDraw,
    ) -> Result<(GradientsParams, StepReport), TrainerError> {
        let portion = self.portion(indices, rows, draw);
        let mut report = self.empty_report(std::slice::from_ref(&portion));
        if portion.is_empty() {
            return Ok((GradientsParams::new(), report));
        }
        let mut sum = GradientsAccumulator::new();
        let denominator = self.denominator(std::slice::from_ref(&portion));
        self.micro_batch(portion, denominator, source, &mut report, &mut sum)?;
        Ok((sum.grads(), report))
    }

    fn portion(&self, indices: &[usize], rows: &dyn RowStore, draw: AnchorDraw) -> Portion {
        let tokens = TokenBatch {
            rows: indices.iter().map(|&index| rows.row(index)).collect(),
        };
        let slots = self.drafter.training_slots(&tokens, draw);
        Portion {
            passes: self.drafter.passes(slots),
            tokens,
        }
    }

    fn denominator(&self, portions: &[Portion]) -> f64 {
        let passes = portions.iter().flat_map(|portion| &portion.passes);
        passes.map(|slots| self.objective.denominator(slots)).sum()
    }

    fn empty_report(&self, portions: &[Portion]) -> StepReport {
        let tokens = portions.iter().flat_map(|portion| &portion.tokens.rows);
        StepReport {
            loss: None,
            terms: BTreeMap::new(),
            depths: vec![DepthFigures::default(); self.drafter.num_depths()],
            gradient_norm: None,
            tokens: tokens.map(|row| row.len() as u64).sum(),
            empty_batches: portions.iter().filter(|p| p.is_empty()).count() as u64,
            update: Update::Empty,
            phases: Phases::default(),
        }
    }

    /// Adds the gradient of one micro-batch; the graph of a pass is consumed before the next begins.
    fn micro_batch(
        &self,
        portion: Portion,
        denominator: f64,
        source: &dyn HiddenStateSource,
        report: &mut StepReport,
        sum: &mut GradientsAccumulator<AnyDrafter>,
    ) -> Result<(), TrainerError> {
        let mut clock = Clock(Instant::now());
        let batch = DraftBatch {
            states: source.states(&portion.tokens).map_err(PartError::new)?,
            tokens: portion.tokens,
        };
        clock.lap(&mut report.phases.states);
        for slots in portion.passes {
            let ends = self.teacher.ends;
            let hidden = self.drafter.draft_slots(&batch, &slots, ends, self.compute);
            clock.lap(&mut report.phases.forward);
            let output = self.evaluate(&batch, &slots, hidden.clone().inner(), denominator);
            self.count(&slots, &output, denominator, report);
            clock.lap(&mut report.phases.objective);
            let confidence = self.confidence(&hidden, &slots, &output, denominator, report);
            sum.accumulate(&self.drafter, self.backward(hidden, output, confidence));
            clock.lap(&mut report.phases.backward);
        }
        Ok(())
    }

    fn evaluate(
        &self,
        batch: &DraftBatch,
        slots: &[Slot],
        hidden: Tensor<2>,
        denominator: f64,
    ) -> ObjectiveOutput {
        let input = ObjectiveInput {
            slots,
            hidden,
            head: self.drafter.head(),
            batch,
            teacher: self.teacher.clone(),
            head_gradient: self.drafter.trained_head().map(|head| head.columns),
        };
        self.objective.evaluate(input, denominator)
    }

    /// Layer gradients by one backward pass of `sum(hidden * d loss / d hidden)`; the head's gradient
    /// is already known in closed form.
    fn backward(
        &self,
        hidden: Tensor<2>,
        output: ObjectiveOutput,
        confidence: Option<Tensor<1>>,
    ) -> GradientsParams {
        let mut surrogate = (hidden * output.grad_hidden.autodiff()).sum();
        if let Some(confidence) = confidence {
            surrogate = surrogate + confidence;
        }
        let mut gradients = GradientsParams::from_grads(surrogate.backward(), &self.drafter);
        if let (Some(gradient), Some(head)) = (output.grad_head, self.drafter.trained_head()) {
            gradients.register(head.id, gradient);
        }
        gradients
    }

    /// The share of the drafter's confidence in the backward pass, weighted as the losses are.
    fn confidence(
        &self,
        rows: &Tensor<2>,
        slots: &[Slot],
        output: &ObjectiveOutput,
        denominator: f64,
        report: &mut StepReport,
    ) -> Option<Tensor<1>> {
        let confidence = self.drafter.confidence(rows.clone())?;
        let slot_weight = self.objective.config().slot_weight;
        let scale = |slot: &Slot| (slot_weight.at(slot.depth) / denominator) as f32;
        let scale: Vec<f32> = slots.iter().map(scale).collect();
        *report.terms.entry("confidence").or_default() +=
            confidence.value(&output.scores.alpha, &scale);
        Some(confidence.surrogate(&output.scores.alpha, &scale))
    }

    fn count(
        &self,
        slots: &[Slot],
        output: &ObjectiveOutput,
        denominator: f64,
        report: &mut StepReport,
    ) {
        let weight = self.objective.config().slot_weight;
        let mut numerator = 0.0;
        for (index, slot) in slots.iter().enumerate() {
            let loss = f64::from(output.loss[index]);
            numerator += weight.at(slot.depth) * loss;
            let depth = &mut report.depths[slot.depth];
            depth.slots += 1;
            depth.loss += loss;
            depth.alpha += f64::from(output.scores.alpha[index]);
            depth.argmax_agrees += u64::from(output.scores.argmax_agrees[index]);
        }
        *report.loss.get_or_insert(0.0) += numerator / denominator;
        for term in &output.terms {
            let weighted = slots.iter().zip(&term.value);
            let sum: f64 = weighted
                .map(|(slot, &value)| weight.at(slot.depth) * f64::from(value))
                .sum();
            *report.terms.entry(term.name).or_default() += sum / denominator;
        }
    }

    fn update(&mut self, gradients: GradientsParams, learning_rate: f64, report: &mut StepReport) {
        let mut clock = Clock(Instant::now());
        let norm = gradient_norm(&self.drafter, &gradients);
        report.gradient_norm = Some(norm.norm);
        // A loss may be broken where the gradient happens to be finite.
        let is_loss_finite = report.loss.is_none_or(f64::is_finite);
        let loss = (!is_loss_finite).then(|| "loss".to_owned());
        report.update = if let Some(tensor) = norm.not_finite.or(loss) {
            Update::Skipped { tensor }
        } else {
            let gradients = clip(&self.drafter, gradients, norm.norm, self.clip_norm);
            self.drafter = self
                .optimizer
                .step(learning_rate, self.drafter.clone(), gradients);
            Update::Applied
        };
        clock.lap(&mut report.phases.update);
    }
}

struct Clock(Instant);

impl Clock {
    fn lap(&mut self, phase: &mut Duration) {
        let now = Instant::now();
        *phase += now - self.0;
        self.0 = now;
    }
}
