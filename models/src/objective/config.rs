//! `[objective]`: the settings of the objective.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// `[objective]`: what is minimised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectiveConfig {
    /// Loss names with their coefficients, for example `{ ce = 0.1, tv = 0.9 }`.
    pub losses: BTreeMap<String, f64>,
    /// Weight of a slot by its depth.
    pub slot_weight: SlotWeight,
    /// What the weighted sum is divided by.
    pub normalize: Normalize,
    /// Temperature of teacher and drafter in the losses; serve at the same one.
    pub temperature: f64,
    /// Teacher positions whose logits exist at one time; bounds the memory of the loss.
    pub chunk_positions: usize,
}

impl Default for ObjectiveConfig {
    fn default() -> Self {
        Self {
            losses: BTreeMap::from([("kl".to_owned(), 1.0)]),
            slot_weight: SlotWeight::Uniform,
            normalize: Normalize::Weights,
            temperature: 1.0,
            chunk_positions: 256,
        }
    }
}

/// Weight of a slot as a function of its depth `d`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SlotWeight {
    /// 1.
    Uniform,
    /// `base^d` (EAGLE-3 uses 0.8).
    StepDecay(f64),
    /// `exp(-d / gamma)` (DFlash uses 4 to 7).
    ExpDecay(f64),
}

impl SlotWeight {
    /// The weight at depth `d`.
    pub fn at(self, depth: usize) -> f64 {
        match self {
            Self::Uniform => 1.0,
            Self::StepDecay(base) => base.powi(depth as i32),
            Self::ExpDecay(gamma) => (-(depth as f64) / gamma).exp(),
        }
    }
}

/// Denominator of the loss over an optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Normalize {
    /// The sum of the slot weights: a constant loss of 1 stays 1 under every decay.
    Weights,
    /// The number of valid slots.
    Slots,
}
