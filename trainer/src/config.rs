//! `[optimizer]`, `[train]` and `[log]`: settings of a run, with their ranges.

use burn::tensor::FloatDType;
use serde::{Deserialize, Serialize};

use crate::error::TrainerError;

/// `[optimizer]`: AdamW or Muon with global-norm clipping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// How matrices move; norm gains and a trained head always move by AdamW.
    pub kind: OptimizerKind,
    /// Highest learning rate of the schedule.
    pub learning_rate: f64,
    /// Decay rates of the first and second moment of AdamW.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices; norm gains are never decayed.
    pub weight_decay: f64,
    /// Largest norm of the whole gradient; 0 switches clipping off.
    pub clip_norm: f64,
    /// Shape of the learning rate after the warm-up.
    pub schedule: Schedule,
    /// Share of all steps over which the learning rate rises from 0.
    pub warmup_fraction: f64,
    /// Number of warm-up steps; when set it is used instead of `warmup_fraction`.
    pub warmup_steps: Option<u64>,
    /// Learning rate of the last step as a share of `learning_rate` (cosine and linear).
    pub final_fraction: f64,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::Adamw,
            learning_rate: 1e-4,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.0,
            clip_norm: 1.0,
            schedule: Schedule::Cosine,
            warmup_fraction: 0.04,
            warmup_steps: None,
            final_fraction: 0.0,
        }
    }
}

/// The rule by which matrices move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// AdamW (Loshchilov and Hutter 2019, 1711.05101).
    Adamw,
    /// Muon: momentum 0.95, orthogonalised by five Newton-Schulz steps, scaled to AdamW's size (Jordan et
    /// al. 2024; Liu et al. 2025, 2502.16982).
    Muon,
}

/// Shape of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Half a cosine period from the peak to `final_fraction` of it.
    Cosine,
    /// A straight line from the peak to `final_fraction` of it.
    Linear,
    /// The peak until the end.
    Constant,
}

impl OptimizerConfig {
    /// Checks the range of every value.
    ///
    /// # Errors
    /// [`TrainerError::Setting`] naming key, expected range and value found.
    pub fn validate(&self) -> Result<(), TrainerError> {
        let share = |x: f64| (0.0..=1.0).contains(&x);
        let decay = |x: f64| (0.0..1.0).contains(&x);
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let not_negative = |x: f64| x.is_finite() && x >= 0.0;
        let rate = "a positive number";
        let checks = [
            (
                "optimizer.learning_rate",
                self.learning_rate,
                positive(self.learning_rate),
                rate,
            ),
            ("optimizer.eps", self.eps, positive(self.eps), rate),
            (
                "optimizer.betas[0]",
                self.betas[0],
                decay(self.betas[0]),
                "at least 0 and below 1",
            ),
            (
                "optimizer.betas[1]",
                self.betas[1],
                decay(self.betas[1]),
                "at least 0 and below 1",
            ),
            (
                "optimizer.weight_decay",
                self.weight_decay,
                not_negative(self.weight_decay),
                "a number of at least 0",
            ),
            (
                "optimizer.clip_norm",
                self.clip_norm,
                not_negative(self.clip_norm),
                "a number of at least 0 (0 switches clipping off)",
            ),
            (
                "optimizer.warmup_fraction",
                self.warmup_fraction,
                share(self.warmup_fraction),
                "a share between 0 and 1",
            ),
            (
                "optimizer.final_fraction",
                self.final_fraction,
                share(self.final_fraction),
                "a share between 0 and 1",
            ),
        ];
        match checks.iter().find(|(_, _, fits, _)| !fits) {
            None => Ok(()),
            Some((key, found, _, expected)) => Err(setting(key, expected, found)),
        }
    }

    /// Number of warm-up steps in a run of `total` steps.
    pub fn warmup(&self, total: u64) -> u64 {
        self.warmup_steps
            .unwrap_or_else(|| (self.warmup_fraction * total as f64).round() as u64)
    }
}

/// `[train]`: how long, in which portions, and how often to look and save.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Passes over the data.
    pub epochs: u64,
    /// Ends the run, and its learning-rate schedule, earlier than `epochs` would.
    pub max_steps: Option<u64>,
    /// Most tokens of one micro-batch, padding included; bounds the memory of a step.
    pub batch_tokens: usize,
    /// Most tokens of one optimizer step, as a multiple of `batch_tokens`; padding is not counted.
    pub accumulate: usize,
    /// Seed of the initial parameters and of the data order.
    pub seed: u64,
    /// Number type of the drafter's matrix products; parameters and losses stay f32.
    pub compute: Compute,
    /// Steps between checkpoints; 0 saves only at the end.
    pub checkpoint_every: u64,
    /// Newest checkpoints that are kept, beside the best one.
    pub keep_checkpoints: usize,
    /// Steps between validations; 0 validates only at the end.
    pub validate_every: u64,
    /// Rows that a validation, the exact report of an evaluation and a calibration read, at most, spread over those set
    /// aside; 0 reads all.
    pub validation_rows: usize,
    /// Steps between flushes of the logs.
    pub log_every: u64,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            epochs: 1,
            max_steps: None,
            batch_tokens: 2048,
            accumulate: 1,
            seed: 0,
            compute: Compute::F32,
            checkpoint_every: 200,
            keep_checkpoints: 2,
            validate_every: 200,
            validation_rows: 128,
            log_every: 10,
        }
    }
}

impl TrainConfig {
    /// Checks the range of every value.
    ///
    /// # Errors
    /// [`TrainerError::Setting`] naming key, expected range and value found.
    pub fn validate(&self) -> Result<(), TrainerError> {
        let counts = [
            ("train.epochs", self.epochs),
            ("train.max_steps", self.max_steps.unwrap_or(1)),
            ("train.batch_tokens", self.batch_tokens as u64),
            ("train.accumulate", self.accumulate as u64),
            ("train.keep_checkpoints", self.keep_checkpoints as u64),
            ("train.log_every", self.log_every),
        ];
        match counts.iter().find(|(_, count)| *count == 0) {
            None => Ok(()),
            Some((key, found)) => Err(setting(key, "at least 1", found)),
        }
    }
}

/// Number type of matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compute {
    /// 32-bit floats.
    F32,
    /// bfloat16; faster on GPUs, slower on CPUs.
    Bf16,
}

impl Compute {
    /// The tensor library's name of the type.
    pub fn dtype(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
        }
    }
}

/// `[log]`: what is written beside `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Whether TensorBoard event files are written.
    pub tensorboard: bool,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { tensorboard: true }
    }
}

fn setting(key: &'static str, expected: &str, found: impl ToString) -> TrainerError {
    TrainerError::Setting {
        key,
        expected: expected.to_owned(),
        found: found.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        OptimizerConfig::default().validate().unwrap();
        TrainConfig::default().validate().unwrap();
    }

    #[test]
    fn a_value_out_of_range_is_named_with_its_range() {
        let config = OptimizerConfig {
            betas: [0.9, 1.0],
            ..OptimizerConfig::default()
        };
        assert_eq!(
            config.validate().unwrap_err().to_string(),
            "`optimizer.betas[1]` is 1, expected at least 0 and below 1"
        );
        let config = TrainConfig {
            accumulate: 0,
            ..TrainConfig::default()
        };
        assert_eq!(
            config.validate().unwrap_err().to_string(),
            "`train.accumulate` is 0, expected at least 1"
        );
    }

    #[test]
    fn unknown_keys_are_refused() {
        let error = serde_json::from_str::<TrainConfig>(r#"{"epoch": 3}"#).unwrap_err();
        assert!(
            error.to_string().contains("unknown field `epoch`"),
            "{error}"
        );
    }
}
