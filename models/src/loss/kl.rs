//! Forward Kullback-Leibler divergence.

use super::{DraftLoss, LossRows, LossTerms};

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
}
