//! Renyi divergence of order one half.

use super::{DraftLoss, LossRows, LossTerms, SlotRow};
use crate::host::exp::exp;
use crate::host::row::{self, vectorised};

/// `-2 log(sum(sqrt(p q)))` with `p` renormalised on the draft vocabulary: smooth, and on the full
/// vocabulary it bounds TV: with the Bhattacharyya coefficient `B = sum(sqrt(p q))`, `1 - B <= TV <= sqrt(1 - B^2)`.
///
/// Gradient with respect to the draft logits: `q - sqrt(p q) / B`.
#[derive(Clone, Copy, Debug)]
pub struct RenyiHalf;

impl DraftLoss for RenyiHalf {
    fn name(&self) -> &'static str {
        "renyi_half"
    }

    fn evaluate(&self, rows: &LossRows) -> LossTerms {
        // Relative to its largest term, so that two distributions far apart do not underflow.
        let half = (rows.renormalised_log_p() + rows.log_q.clone()).mul_scalar(0.5);
        let max = half.clone().max_dim(1);
        let log_b = (half.clone() - max.clone()).exp().sum_dim(1).log() + max;
        LossTerms {
            grad: rows.q.clone() - (half - log_b.clone()).exp(),
            value: log_b.mul_scalar(-2.0),
        }
    }

    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32 {
        vectorised(|| {
            let half = |log_p: f32, log_q: f32| 0.5 * (log_p - row.log_mass + log_q);
            let mut max = f32::NEG_INFINITY;
            for (&log_p, &log_q) in row.log_p.iter().zip(row.log_q) {
                let value = half(log_p, log_q);
                max = if value > max { value } else { max };
            }
            let sum = row::sum([row.log_p, row.log_q], |[log_p, log_q]| {
                exp(half(log_p, log_q) - max)
            });
            let log_b = sum.ln() + max;
            let rows = row.q.iter().zip(row.log_q).zip(row.log_p);
            for (grad, ((q, &log_q), &log_p)) in grad.iter_mut().zip(rows) {
                *grad += scale * (q - exp(half(log_p, log_q) - log_b));
            }
            -2.0 * log_b
        })
    }
}
