//! Reverse Kullback-Leibler divergence.

use super::{DraftLoss, LossRows, LossTerms, SlotRow};
use crate::host::row::{self, vectorised};

/// `KL(q || p) = sum q log(q / p)` with `p` renormalised on the draft vocabulary: seeks modes of `p`, and
/// hardly moves where `q` is near zero.
///
/// Gradient with respect to the draft logits: `q (log(q / p) - KL(q || p))`.
#[derive(Clone, Copy, Debug)]
pub struct ReverseKl;

impl DraftLoss for ReverseKl {
    fn name(&self) -> &'static str {
        "reverse_kl"
    }

    fn evaluate(&self, rows: &LossRows) -> LossTerms {
        let log_ratio = rows.log_q.clone() - rows.renormalised_log_p();
        let value = (rows.q.clone() * log_ratio.clone()).sum_dim(1);
        LossTerms {
            grad: rows.q.clone() * (log_ratio - value.clone()),
            value,
        }
    }

    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32 {
        vectorised(|| {
            let log_ratio = |log_q: f32, log_p: f32| log_q - (log_p - row.log_mass);
            let value = row::sum([row.q, row.log_q, row.log_p], |[q, log_q, log_p]| {
                q * log_ratio(log_q, log_p)
            });
            let rows = row.q.iter().zip(row.log_q).zip(row.log_p);
            for (grad, ((q, &log_q), &log_p)) in grad.iter_mut().zip(rows) {
                *grad += scale * q * (log_ratio(log_q, log_p) - value);
            }
            value
        })
    }
}
