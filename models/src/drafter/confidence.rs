//! [`Confidence`]: what a drafter says about its own drafts, and how it is taught.

use burn::tensor::{Tensor, activation};

use crate::weights::host_values;

/// How likely drafts are accepted, in a drafter's own view.
#[derive(Clone, Debug)]
pub struct Confidence {
    /// Logits of the acceptance probability, `[N]`; part of the gradient graph.
    pub logits: Tensor<1>,
    /// Weight of its loss beside the losses of the objective.
    pub weight: f64,
}

impl Confidence {
    /// The acceptance probabilities, `[N]`.
    pub fn probabilities(&self) -> Vec<f32> {
        host_values(&activation::sigmoid(self.logits.clone().inner()))
    }

    /// `sum(scale * BCE(sigmoid(c), alpha))`, without `weight`; `BCE = log(1 + exp(c)) - alpha c`.
    pub fn value(&self, alpha: &[f32], scale: &[f32]) -> f64 {
        let logits = host_values(&self.logits.clone().inner());
        let bce =
            |logit: f64, alpha: f64| logit.max(0.0) + (-logit.abs()).exp().ln_1p() - alpha * logit;
        let slots = logits.iter().zip(alpha).zip(scale);
        slots
            .map(|((&logit, &alpha), &scale)| f64::from(scale) * bce(logit.into(), alpha.into()))
            .sum()
    }

    /// A scalar `[1]` whose gradient is that of `weight * sum(scale * BCE(sigmoid(c), alpha))`, with the overlap
    /// `alpha` of each slot as the label: `weight * scale * (sigmoid(c) - alpha)` (DSpark, 2607.05147).
    pub fn surrogate(self, alpha: &[f32], scale: &[f32]) -> Tensor<1> {
        let logits = self.logits.clone().inner();
        let device = logits.device();
        let error = activation::sigmoid(logits) - Tensor::from_floats(alpha, &device);
        let gradient = error * Tensor::from_floats(scale, &device);
        (self.logits * gradient.mul_scalar(self.weight).autodiff()).sum()
    }
}
