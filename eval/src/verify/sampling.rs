//! [`SpeculativeSampling`]: accept with probability `min(1, p/q)`, else draw from `(p - q)+`
//! (Leviathan et al. 2211.17192, Chen et al. 2302.01318).
//!
//! `p` and `q` are the probabilities after temperature and truncation, and `q` is exactly what the draft
//! was drawn from. The text then has the target's distribution whatever the drafter does.

use draftsmith_models::sample::Sampling;

use super::{Chance, Realised, RowToVerify, TrainingScore, Verdict, VerifyRule};
use crate::propose::{DraftChoice, DraftDistribution, DraftToken};

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

    fn draft_choice(&self) -> DraftChoice {
        DraftChoice::Drawn
    }

    /// `min(1, q/p)` of the token.
    fn realised(&self) -> Option<Realised> {
        Some(|law| match law.p[law.token as usize] {
            p if p > 0.0 => accept_probability(law.q_of_token(), p),
            _ => 0.0, // rounding moved the cut of a truncation: the draft would not pass here
        })
    }

    fn training_score(&self) -> Option<TrainingScore> {
        Some(TrainingScore::Overlap)
    }

    fn verify(&self, row: &RowToVerify<'_>, chance: &mut dyn Chance) -> Verdict {
        for (index, draft) in row.drafts.iter().enumerate() {
            let p = row.probabilities(index);
            let position = row.position + index;
            let accept = accept_probability(p[draft.id as usize], draft.probability_of(draft.id));
            if !chance.accepts(position, accept) {
                let mut weights = residual(&p, 1.0, draft);
                if weights.iter().all(|&weight| weight <= 0.0) {
                    weights = p; // `p` and `q` are equal as far as the numbers can tell
                }
                return Verdict {
                    accepted: index,
                    next: chance.picks(position, &weights),
                };
            }
        }
        let accepted = row.drafts.len();
        Verdict {
            accepted,
            next: chance.picks(row.position + accepted, &row.probabilities(accepted)),
        }
    }
}

/// `min(1, p/q)`; with `q` positive, because the draft was drawn from it.
pub fn accept_probability(p: f64, q: f64) -> f64 {
    if p >= q { 1.0 } else { p / q }
}

/// `(scale p - q)+` over the target's vocabulary `[V]`, not normalised.
pub fn residual(p: &[f64], scale: f64, draft: &DraftToken) -> Vec<f64> {
    let mut weights: Vec<f64> = p.iter().map(|p| scale * p).collect();
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
                subtract(id, q);
            }
        }
    }
    weights
}
