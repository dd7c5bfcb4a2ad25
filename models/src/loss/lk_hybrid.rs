//! The hybrid of KL and TV whose mixture follows the overlap.

use super::{DraftLoss, Kl, LossRows, LossTerms, SlotRow, Tv};

/// `lambda KL + (1 - lambda) TV` with `lambda = exp(-eta alpha)` per slot, detached
/// (LK losses, 2602.23881, section 4; `eta = 3` as published for EAGLE-style drafters).
#[derive(Clone, Copy, Debug)]
pub struct LkHybrid;

/// Decay of the KL share with the overlap.
const ETA: f64 = 3.0;

impl DraftLoss for LkHybrid {
    fn name(&self) -> &'static str {
        "lk_hybrid"
    }

    fn evaluate(&self, rows: &LossRows) -> LossTerms {
        let lambda = rows.alpha().mul_scalar(-ETA).exp(); // [n, 1]
        let rest = lambda.clone().neg().add_scalar(1.0);
        let (kl, tv) = (Kl.evaluate(rows), Tv.evaluate(rows));
        LossTerms {
            value: lambda.clone() * kl.value + rest.clone() * tv.value,
            grad: lambda * kl.grad + rest * tv.grad,
        }
    }

    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32 {
        let lambda = (-ETA as f32 * row.alpha).exp();
        let kl = Kl.evaluate_row(row, scale * lambda, grad);
        let tv = Tv.evaluate_row(row, scale * (1.0 - lambda), grad);
        lambda * kl + (1.0 - lambda) * tv
    }
}
