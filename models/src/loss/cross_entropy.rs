//! Cross entropy against one token.

use burn::tensor::{IndexingUpdateOp, Int, Tensor};

use super::{DraftLoss, LossRows, LossTerms, SlotRow};
use crate::host::row::{self, vectorised};

/// `-log q(y)`; a slot whose token is outside the draft vocabulary contributes zero.
///
/// Gradient with respect to the draft logits: `q - 1_y`.
#[derive(Clone, Copy, Debug)]
pub enum CrossEntropy {
    /// `y` is the token in the data.
    DataToken,
    /// `y` is the target's most probable token inside the draft vocabulary.
    TargetArgmax,
}

impl DraftLoss for CrossEntropy {
    fn name(&self) -> &'static str {
        match self {
            Self::DataToken => "ce",
            Self::TargetArgmax => "ce_argmax",
        }
    }

    fn evaluate(&self, rows: &LossRows) -> LossTerms {
        let (label, known) = self.label(rows);
        let value = rows.log_q.clone().gather(1, label.clone()).neg() * known.clone();
        let minus_one = known.clone().neg();
        let grad = (rows.q.clone() * known).scatter(1, label, minus_one, IndexingUpdateOp::Add);
        LossTerms { value, grad }
    }

    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32 {
        let label = match self {
            Self::DataToken => row.label,
            Self::TargetArgmax if row.log_mass.is_nan() => {
                grad.fill(f32::NAN);
                return f32::NAN;
            }
            // Of `log p`: every `p` may have underflowed.
            Self::TargetArgmax => Some(vectorised(|| row::argmax(row.log_p))),
        };
        let Some(label) = label else {
            return 0.0;
        };
        for (grad, q) in grad.iter_mut().zip(row.q) {
            *grad += scale * q;
        }
        grad[label] -= scale;
        -row.log_q[label]
    }
}

impl CrossEntropy {
    fn label(self, rows: &LossRows) -> (Tensor<2, Int>, Tensor<2>) {
        match self {
            Self::DataToken => (rows.label.clone(), rows.label_known.clone()),
            Self::TargetArgmax => {
                // Of `log p`: every `p` may have underflowed. Adding the mass keeps what is not a number.
                let ones = rows.log_mass.clone().mul_scalar(0.0).add_scalar(1.0);
                (rows.log_p.clone().argmax(1), ones)
            }
        }
    }
}
