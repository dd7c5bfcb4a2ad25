//! Forward Kullback-Leibler divergence.

use super::{DraftLoss, LossRows, LossTerms, SlotRow};
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
        let p = rows.renormalised_p();
        let log_ratio = rows.log_p.clone() - rows.kept_mass.clone().log() - rows.log_q.clone();
        LossTerms {
            value: (p.clone() * log_ratio).sum_dim(1),
            grad: rows.q.clone() - p,
        }
    }

    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32 {
        vectorised(|| {
            for ((grad, q), p) in grad.iter_mut().zip(row.q).zip(row.p) {
                *grad += scale * (q - p / row.kept_mass);
            }
            let log_mass = row.kept_mass.ln();
            row::sum([row.p, row.log_p, row.log_q], |[p, log_p, log_q]| {
                p / row.kept_mass * (log_p - log_mass - log_q)
            })
        })
    }
}
