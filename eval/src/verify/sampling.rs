//! [`SpeculativeSampling`]: accept with probability `min(1, p/q)`, else draw from `(p - q)+`
//! (Leviathan et al. 2211.17192, Chen et al. 2302.01318).
//!
//! `p` and `q` are the probabilities after temperature and truncation, and `q` is exactly what the draft
//! was drawn from. The text then has the target's distribution whatever the drafter does.

use draftsmith_models::sample::Sampling;

use super::{RowToVerify, Verdict, VerifyRule};
use crate::propose::{DraftDistribution, DraftToken};

/// Speculative sampling for chains.
#[derive(Clone, Copy, Debug)]
pub struct SpeculativeSampling;

impl VerifyRule for SpeculativeSampling {
    fn name(&self) -> &'static str {
        "sampling"
    }

    fn is_lossless(&self, _sampling: &Sampling) -> bool {
        true
    }

    fn verify(&self, row: &RowToVerify<'_>) -> Verdict {
        for (index, draft) in row.drafts.iter().enumerate() {
            let p = row.sampling.probabilities(row.logits_at(index));
            let position = row.position + index;
            let accept = accept_probability(
                f64::from(p[draft.id as usize]),
                draft.probability_of(draft.id),
            );
            if row.coins.accept(position) >= accept {
                let weights = residual(&p, draft);
                return Verdict {
                    accepted: index,
                    next: draw_weighted(&weights, row.coins.target(position)),
                };
            }
        }
        let accepted = row.drafts.len();
        Verdict {
            accepted,
            next: row.target_token(accepted),
        }
    }
}

/// `min(1, p/q)` for a drafted token; `q` is positive, because the token was drawn from it.
pub fn accept_probability(p: f64, q: f64) -> f64 {
    if p >= q { 1.0 } else { p / q }
}

/// `(p - q)+` over the target's vocabulary `[V]`, not normalised.
///
/// When rounding leaves nothing, `p` itself is returned: then `p` and `q` are equal as far as the
/// numbers can tell.
pub fn residual(p: &[f32], draft: &DraftToken) -> Vec<f64> {
    let mut weights: Vec<f64> = p.iter().map(|&x| f64::from(x)).collect();
    let mut subtract = |id: u32, q: f64| {
        let weight = &mut weights[id as usize];
        *weight = (*weight - q).max(0.0);
    };
    match &draft.distribution {
        DraftDistribution::Certain => subtract(draft.id, 1.0),
        DraftDistribution::Drawn {
            probabilities,
            vocab,
        } => {
            for (&id, &q) in vocab.target_ids().iter().zip(probabilities) {
                subtract(id, f64::from(q));
            }
        }
    }
    if weights.iter().any(|&weight| weight > 0.0) {
        return weights;
    }
    p.iter().map(|&x| f64::from(x)).collect()
}

/// The index at cumulative weight `uniform` in `[0, 1)`; never one of weight zero.
fn draw_weighted(weights: &[f64], uniform: f64) -> u32 {
    let total: f64 = weights.iter().sum();
    let mut left = uniform * total;
    let mut last_possible = 0;
    for (id, &weight) in weights.iter().enumerate() {
        if weight > 0.0 {
            last_possible = id;
            left -= weight;
            if left < 0.0 {
                return id as u32;
            }
        }
    }
    last_possible as u32
}
