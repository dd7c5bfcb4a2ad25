//! `[objective]`: the settings of the objective.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::ModelError;

/// `[objective]`: what is minimised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectiveConfig {
    /// Loss names with their coefficients, for example `{ ce = 0.1, tv = 0.9 }`.
    pub losses: BTreeMap<String, f64>,
    /// Weight of a slot by its depth.
    pub slot_weight: SlotWeight,
    /// Other mixtures for the first parts of the run; after them `losses` and `slot_weight` hold.
    pub stages: Vec<Stage>,
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
            stages: Vec::new(),
            normalize: Normalize::Weights,
            temperature: 1.0,
            chunk_positions: 256,
        }
    }
}

/// One of `stages`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Share of the run at which the stage ends.
    pub until: f64,
    /// Loss names with their coefficients.
    pub losses: BTreeMap<String, f64>,
    /// Weight of a slot; unset means that of the objective.
    #[serde(default)]
    pub slot_weight: Option<SlotWeight>,
}

impl ObjectiveConfig {
    /// Checks everything but the names of the losses.
    pub(super) fn validate_ranges(&self) -> Result<(), ModelError> {
        let is_coefficient = |c: &f64| c.is_finite() && *c >= 0.0;
        if let Some(found) = self.losses.values().find(|c| !is_coefficient(c)) {
            let expected = "coefficients of at least 0";
            return Err(out_of_range("losses", expected, *found));
        }
        if !(self.temperature.is_finite() && self.temperature > 0.0) {
            let expected = "a positive number";
            return Err(out_of_range("temperature", expected, self.temperature));
        }
        if self.chunk_positions == 0 {
            return Err(out_of_range("chunk_positions", "a positive number", 0.0));
        }
        match self.slot_weight {
            SlotWeight::StepDecay(x) | SlotWeight::ExpDecay(x) if !(x.is_finite() && x > 0.0) => {
                Err(out_of_range("slot_weight", "a positive decay", x))
            }
            SlotWeight::Dpace(a) if !(a > 0.0 && a <= 1.0) => Err(out_of_range(
                "slot_weight.dpace",
                "a share above 0 and at most 1",
                a,
            )),
            _ => Ok(()),
        }
    }
}

fn out_of_range(key: &str, expected: &str, found: f64) -> ModelError {
    ModelError::setting(
        format!("`objective.{key}` is {found}, expected {expected}"),
        "see the comments in `configs/quickstart.toml`",
    )
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
    /// By how many accepted drafts hang on the slot, with this smoothing (D-PACE; 0.5 as published). The
    /// denominator counts slots.
    Dpace(f64),
}

impl SlotWeight {
    /// The weight at depth `d`, as far as the depth alone decides it.
    pub fn at(self, depth: usize) -> f64 {
        match self {
            Self::Uniform | Self::Dpace(_) => 1.0,
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
