//! L1 distance.

use super::{DraftLoss, LossRows, LossTerms, SlotRow, Tv};

/// `2 TV`: the sum of absolute differences over the whole vocabulary, as DeepSpec weighs it (2607.05147).
#[derive(Clone, Copy, Debug)]
pub struct L1;

impl DraftLoss for L1 {
    fn name(&self) -> &'static str {
        "l1"
    }

    fn evaluate(&self, rows: &LossRows) -> LossTerms {
        let tv = Tv.evaluate(rows);
        LossTerms {
            value: tv.value.mul_scalar(2.0),
            grad: tv.grad.mul_scalar(2.0),
        }
    }

    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32 {
        2.0 * Tv.evaluate_row(row, 2.0 * scale, grad)
    }
}
