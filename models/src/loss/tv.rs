//! Total variation distance.

use burn::tensor::FloatDType;

use super::{DraftLoss, LossRows, LossTerms};

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
        LossTerms {
            value: rows.alpha().neg().add_scalar(1.0),
            grad: rows.q.clone() * (below_mass - below),
        }
    }
}
