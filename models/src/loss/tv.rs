//! Total variation distance.

use burn::tensor::FloatDType;

use super::{DraftLoss, LossRows, LossTerms, SlotRow};
use crate::host::row::{self, vectorised};

/// `TV = 1 - alpha = 1 - sum min(p, q)`, with the mass outside the draft vocabulary counted as lost.
///
/// Gradient with respect to the draft logits: `-q (1[q <= p] - sum(q 1[q <= p]))`
/// (LK losses, 2602.23881).
#[derive(Clone, Copy, Debug)]
pub struct Tv;

impl DraftLoss for Tv {
    fn name(&self) -> &'static str {
        "tv"
    }

    fn evaluate(&self, rows: &LossRows) -> LossTerms {
        let below = rows
            .q
            .clone()
            .lower_equal(rows.p.clone())
            .float()
            .cast(FloatDType::F32);
        let below_mass = (rows.q.clone() * below.clone()).sum_dim(1);
        let alpha = rows.alpha();
        LossTerms {
            value: alpha.clone().neg().add_scalar(1.0),
            grad: rows.q.clone() * (below_mass - below) + alpha.mul_scalar(0.0),
        }
    }

    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32 {
        if row.alpha.is_nan() {
            grad.fill(f32::NAN);
            return f32::NAN;
        }
        vectorised(|| {
            let below_mass = row::sum([row.p, row.q], |[p, q]| if q <= p { q } else { 0.0 });
            for ((grad, &q), &p) in grad.iter_mut().zip(row.q).zip(row.p) {
                let below = if q <= p { 1.0 } else { 0.0 };
                *grad += scale * (q * (below_mass - below));
            }
        });
        1.0 - row.alpha
    }
}
