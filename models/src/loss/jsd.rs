//! Jensen-Shannon divergence.

use burn::tensor::Tensor;

use super::{DraftLoss, LossRows, LossTerms, SlotRow};
use crate::host::exp::exp;
use crate::host::row::{self, vectorised};

/// `(KL(p || m) + KL(q || m)) / 2` with `m = (p + q) / 2` and `p` renormalised on the draft vocabulary;
/// at most `ln 2`.
///
/// Gradient with respect to the draft logits: `q (log(q / m) - KL(q || m)) / 2`.
#[derive(Clone, Copy, Debug)]
pub struct Jsd;

impl DraftLoss for Jsd {
    fn name(&self) -> &'static str {
        "jsd"
    }

    fn evaluate(&self, rows: &LossRows) -> LossTerms {
        let (log_p, log_q) = (rows.renormalised_log_p(), rows.log_q.clone());
        let log_m = log_mean_exp(log_p.clone(), log_q.clone());
        let to_q = log_q - log_m.clone();
        let from_q = (rows.q.clone() * to_q.clone()).sum_dim(1);
        let from_p = (log_p.clone().exp() * (log_p - log_m)).sum_dim(1);
        LossTerms {
            grad: (rows.q.clone() * (to_q - from_q.clone())).mul_scalar(0.5),
            value: (from_p + from_q).mul_scalar(0.5),
        }
    }

    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32 {
        let log_m = |log_p: f32, log_q: f32| {
            let max = if log_p > log_q { log_p } else { log_q };
            max + (0.5 * (exp(log_p - max) + exp(log_q - max))).ln()
        };
        vectorised(|| {
            let from_q = row::sum([row.q, row.log_q, row.log_p], |[q, log_q, log_p]| {
                q * (log_q - log_m(log_p - row.log_mass, log_q))
            });
            let from_p = row::sum([row.log_q, row.log_p], |[log_q, log_p]| {
                let log_p = log_p - row.log_mass;
                exp(log_p) * (log_p - log_m(log_p, log_q))
            });
            let rows = row.q.iter().zip(row.log_q).zip(row.log_p);
            for (grad, ((q, &log_q), &log_p)) in grad.iter_mut().zip(rows) {
                let to_q = log_q - log_m(log_p - row.log_mass, log_q);
                *grad += scale * 0.5 * q * (to_q - from_q);
            }
            0.5 * (from_p + from_q)
        })
    }
}

/// `log((exp(a) + exp(b)) / 2)`, element by element; finite wherever one of them is.
fn log_mean_exp(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    let max = a.clone().max_pair(b.clone());
    let sum = (a - max.clone()).exp() + (b - max.clone()).exp();
    sum.mul_scalar(0.5).log() + max
}
