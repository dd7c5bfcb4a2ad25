//! Forward Kullback-Leibler divergence.

use super::{DraftLoss, LossRows, LossTerms, SlotRow};
use crate::host::exp::exp;
use crate::host::row::{self, vectorised};

/// `KL(p || q) = sum p log(p / q)` with `p` renormalised on the draft vocabulary.
///
/// Gradient with respect to the draft logits: `q - p` (theory of softmax cross entropy).
#[derive(Clone, Copy, Debug)]
pub struct Kl;

impl DraftLoss for Kl {
    fn name(&self) -> &'static str {
        "kl"
    }

    fn evaluate(&self, rows: &LossRows) -> LossTerms {
        let log_p = rows.renormalised_log_p();
        let p = log_p.clone().exp();
        LossTerms {
            value: (p.clone() * (log_p - rows.log_q.clone())).sum_dim(1),
            grad: rows.q.clone() - p,
        }
    }

    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32 {
        vectorised(|| {
            let log_mass = row.log_mass;
            for ((grad, q), log_p) in grad.iter_mut().zip(row.q).zip(row.log_p) {
                *grad += scale * (q - exp(log_p - log_mass));
            }
            row::sum([row.log_p, row.log_q], |[log_p, log_q]| {
                let log_p = log_p - log_mass;
                exp(log_p) * (log_p - log_q)
            })
        })
    }
}
