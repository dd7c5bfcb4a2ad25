//! Per-slot losses between the teacher `p` and the drafter `q`, with their closed-form gradients.
//!
//! A loss knows no mask, no weight and no reduction: it maps rows of distributions to one value a row
//! and one gradient with respect to the (temperature-scaled) draft logits a row. [`LOSSES`] lists all.

mod cross_entropy;
mod jsd;
mod kl;
mod l1;
mod lk_hybrid;
mod neg_log_acceptance;
mod renyi_half;
mod reverse_kl;
mod tv;

use std::fmt::Debug;

use burn::tensor::{Int, Tensor};

pub use cross_entropy::CrossEntropy;
pub use jsd::Jsd;
pub use kl::Kl;
pub use l1::L1;
pub use lk_hybrid::LkHybrid;
pub use neg_log_acceptance::NegLogAcceptance;
pub use renyi_half::RenyiHalf;
pub use reverse_kl::ReverseKl;
pub use tv::Tv;

/// Teacher and drafter on the draft vocabulary, for `n` slots; everything in f32.
#[derive(Clone, Debug)]
pub struct LossRows {
    /// `log q`, `[n, V_draft]`.
    pub log_q: Tensor<2>,
    /// `q`, `[n, V_draft]`.
    pub q: Tensor<2>,
    /// `p` on the draft vocabulary, *not* renormalised: mass outside is lost. `[n, V_draft]`.
    pub p: Tensor<2>,
    /// `log p`, `[n, V_draft]`.
    pub log_p: Tensor<2>,
    /// `log(sum(p))` over the draft vocabulary, `[n, 1]`; from `log p`, so that it stays finite where
    /// every `p` underflows.
    pub log_mass: Tensor<2>,
    /// Draft id of the data token, 0 where it is outside the draft vocabulary. `[n, 1]`.
    pub label: Tensor<2, Int>,
    /// 1 where the data token is in the draft vocabulary, else 0. `[n, 1]`.
    pub label_known: Tensor<2>,
}

impl LossRows {
    /// `log p` renormalised on the draft vocabulary, `[n, V_draft]`; for KL-like terms only.
    pub fn renormalised_log_p(&self) -> Tensor<2> {
        self.log_p.clone() - self.log_mass.clone()
    }

    /// The overlap `alpha = sum(min(p, q))`, with lost mass lost. `[n, 1]`.
    pub fn alpha(&self) -> Tensor<2> {
        let overlap = self.p.clone().min_pair(self.q.clone()).sum_dim(1);
        // The smaller of two values passes over one that is not a number; their sum does not.
        let sum = (self.p.clone() + self.q.clone()).sum_dim(1);
        overlap + sum.mul_scalar(0.0)
    }
}

/// Teacher and drafter on the draft vocabulary for one slot, in host memory.
#[derive(Clone, Copy, Debug)]
pub struct SlotRow<'a> {
    /// `log q`, `[V_draft]`.
    pub log_q: &'a [f32],
    /// `q`, `[V_draft]`.
    pub q: &'a [f32],
    /// `p`, not renormalised, `[V_draft]`.
    pub p: &'a [f32],
    /// `log p`, `[V_draft]`.
    pub log_p: &'a [f32],
    /// `log(sum(p))` over the draft vocabulary.
    pub log_mass: f32,
    /// Draft id of the data token, if it has one.
    pub label: Option<usize>,
    /// The overlap `sum(min(p, q))`.
    pub alpha: f32,
}

/// Value and gradient of a loss, row by row.
#[derive(Clone, Debug)]
pub struct LossTerms {
    /// Loss of each slot, `[n, 1]`.
    pub value: Tensor<2>,
    /// Its gradient with respect to the draft logits, `[n, V_draft]`.
    pub grad: Tensor<2>,
}

/// A divergence between teacher and drafter, as a pure function of rows.
///
/// Where a distribution that a loss reads is not a number, neither is its value nor its gradient: a
/// comparison that passes over such a row would train on nothing and show a healthy curve.
pub trait DraftLoss: Debug + Send + Sync {
    /// Name in run files.
    fn name(&self) -> &'static str;
    /// Value and gradient for each row; the formula and its source are in the type's documentation.
    fn evaluate(&self, rows: &LossRows) -> LossTerms;
    /// The same for one row in host memory: adds `scale` times the gradient to `grad` `[V_draft]` and
    /// returns the value.
    fn evaluate_row(&self, row: &SlotRow<'_>, scale: f32, grad: &mut [f32]) -> f32;
}

/// Every loss, in the order shown in messages.
pub const LOSSES: &[&dyn DraftLoss] = &[
    &Kl,
    &ReverseKl,
    &Jsd,
    &RenyiHalf,
    &Tv,
    &L1,
    &NegLogAcceptance,
    &LkHybrid,
    &CrossEntropy::DataToken,
    &CrossEntropy::TargetArgmax,
];

/// The loss of that name.
pub fn find(name: &str) -> Option<&'static dyn DraftLoss> {
    LOSSES.iter().copied().find(|loss| loss.name() == name)
}

/// Names of all losses.
pub fn names() -> Vec<&'static str> {
    LOSSES.iter().map(|loss| loss.name()).collect()
}
