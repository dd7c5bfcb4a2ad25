//! Negative logarithm of the acceptance probability.

use super::{DraftLoss, LossRows, LossTerms, SlotRow, Tv};

/// `-log(alpha)` with `alpha = sum min(p, q)`, mass outside the draft vocabulary lost (the `LK-alpha` loss of
/// 2602.23881): the gradient of TV scaled so that it does not vanish at low overlap.
///
/// Gradient with respect to the draft logits: that of TV over `alpha`. An overlap below 1e-9 counts as
/// that, which keeps both finite.
#[derive(Clone, Copy, Debug)]
pub struct NegLogAcceptance;

/// Smallest overlap; its logarithm is -20.7.
const LEAST: f32 = 1e-9;

impl DraftLoss for NegLogAcceptance {
    fn name(&self) -> &'static str {
        "neg_log_acceptance"
    }

    fn evaluate(&self, rows: &LossRows) -> LossTerms {
        let alpha = rows.alpha();
        // The larger of two values passes over one that is not a number; the sum does not.
        let alpha = alpha.clone().clamp_min(LEAST) + alpha.mul_scalar(0.0);
        LossTerms {
            value: alpha.clone().log().neg(),
            grad: Tv.evaluate(rows).grad / alpha,
        }
    }

    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32 {
        let alpha = if row.alpha < LEAST { LEAST } else { row.alpha };
        let _tv = Tv.evaluate_row(row, scale / alpha, grad);
        -alpha.ln()
    }
}
