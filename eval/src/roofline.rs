//! What a measured tau is worth on a named device: a roofline model of one round.
//!
//! A pass over `n` new tokens reads all weights once and the keys and values of the context, and multiplies every weight
//! `n` times; it takes the longer of the two, and a fixed time for each layer that has to be launched:
//! `t(n) = max(bytes / (share * bandwidth), operations / (share * peak)) + layers * launch`. The speed-up at `gamma` drafts is
//! `tau(gamma) t(1) / (t_draft(gamma) + t(gamma + 1))` (Leviathan et al. 2211.17192, theorem 3.8, with the cost of verification).
//! Assumptions: weights, keys and values in the device's type, logits stay on the chip, sampling is free, and the drafter
//! takes in committed tokens in its first pass; what a drafter adds token by token to a block (DSpark's bias) is charged once.

use draftsmith_models::drafter::AnyDrafter;
use draftsmith_models::target::TargetSpec;
use serde::{Deserialize, Serialize};

use crate::error::EvalError;
use crate::exact::{ExactReport, ExactTau, ScheduledTau};
use crate::round_dp::mean_cost;

/// A device, as far as the model knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name in run files and reports.
    pub name: String,
    /// Peak memory bandwidth, GB/s.
    pub bandwidth: f64,
    /// Peak dense matrix throughput in `bytes_per_number`, 10^12 operations a second.
    pub teraflops: f64,
    /// Bytes of a weight, key or value.
    pub bytes_per_number: f64,
    /// Share of the peak bandwidth that a pass reaches.
    pub bandwidth_share: f64,
    /// Share of the peak throughput that a pass reaches.
    pub compute_share: f64,
    /// Fixed time of a layer, microseconds: kernels that are launched, or a graph of them replayed.
    pub microseconds_per_layer: f64,
}

/// Peak figures of the vendors' data sheets, bf16 without sparsity; shares and launch times are round assumptions.
const DEVICES: [(&str, f64, f64); 4] = [
    ("h100", 3350.0, 989.0),
    ("h200", 4800.0, 989.0),
    ("a100", 2039.0, 312.0),
    ("l4", 300.0, 121.0),
];

impl Device {
    /// The device of that name, of `own` ones first.
    ///
    /// # Errors
    /// [`EvalError::Setting`] listing the devices.
    pub fn find(name: &str, own: &[Self]) -> Result<Self, EvalError> {
        let built_in = DEVICES.iter().map(|(name, bandwidth, teraflops)| Self {
            name: (*name).to_owned(),
            bandwidth: *bandwidth,
            teraflops: *teraflops,
            bytes_per_number: 2.0,
            bandwidth_share: 0.75,
            compute_share: 0.6,
            microseconds_per_layer: 10.0,
        });
        let all: Vec<Self> = own.iter().cloned().chain(built_in).collect();
        let found = all.iter().find(|device| device.name == name);
        found.cloned().ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|device| device.name.as_str()).collect();
            EvalError::setting(
                format!("`eval.devices` names an unknown device `{name}`"),
                format!(
                    "the devices are: {}; describe others in `eval.device_file`",
                    names.join(", ")
                ),
            )
        })
    }

    /// Checks that every figure is a positive number.
    ///
    /// # Errors
    /// [`EvalError::Setting`] naming the device and the figure.
    pub fn validate(&self) -> Result<(), EvalError> {
        let figures = [
            ("bandwidth", self.bandwidth),
            ("teraflops", self.teraflops),
            ("bytes_per_number", self.bytes_per_number),
            ("bandwidth_share", self.bandwidth_share),
            ("compute_share", self.compute_share),
        ];
        let bad = figures
            .iter()
            .find(|(_, value)| !(value.is_finite() && *value > 0.0));
        let launch = self.microseconds_per_layer;
        let launch =
            (!(launch.is_finite() && launch >= 0.0)).then_some(("microseconds_per_layer", launch));
        match bad.copied().or(launch) {
            None => Ok(()),
            Some((figure, value)) => Err(EvalError::setting(
                format!(
                    "device `{}` has `{figure} = {value}`, expected a positive number",
                    self.name
                ),
                "peak figures stand in the vendor's data sheet; shares of 0.6 to 0.8 are usual",
            )),
        }
    }

    /// Seconds of a pass.
    fn seconds(&self, pass: Pass, load: Load, new_tokens: f64) -> f64 {
        let cached = load.batch * load.context * pass.cached_per_position;
        let bytes = self.bytes_per_number * (pass.weights + cached);
        // Scores and mixing multiply each key and each value once for every query head of the group.
        let attention = 2.0 * load.context * pass.cached_per_position * pass.queries_per_key;
        let operations = load.batch * new_tokens * (2.0 * pass.weights + attention);
        let reading = bytes / (self.bandwidth_share * self.bandwidth * 1e9);
        let computing = operations / (self.compute_share * self.teraflops * 1e12);
        reading.max(computing) + pass.layers * self.microseconds_per_layer * 1e-6
    }
}

/// How busy the device is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// Sequences decoded together.
    pub batch: f64,
    /// Tokens of each that lie in the cache.
    pub context: f64,
}

/// What a pass of a model costs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pass {
    /// Weights read, the head included, the embedding not.
    weights: f64,
    /// Keys and values of one position.
    cached_per_position: f64,
    queries_per_key: f64,
    /// Layers launched, the head counted as one.
    layers: f64,
}

impl Pass {
    fn of_target(spec: &TargetSpec) -> Self {
        let size = |x: usize| x as f64;
        let (heads, kv_heads) = (size(spec.num_heads), size(spec.num_kv_heads));
        let layers = size(spec.num_layers);
        Self {
            weights: size(spec.num_block_weights() + spec.vocab_size * spec.hidden_size),
            cached_per_position: 2.0 * layers * kv_heads * size(spec.head_dim),
            queries_per_key: heads / kv_heads,
            layers: layers + 1.0,
        }
    }

    /// A drafter of the target's head shape.
    fn of_drafter(drafter: &AnyDrafter, weights: usize, spec: &TargetSpec) -> Self {
        let target = Self::of_target(spec);
        let layers = drafter.num_layers() as f64;
        Self {
            weights: weights as f64,
            cached_per_position: target.cached_per_position * layers / spec.num_layers as f64,
            layers: layers + 1.0,
            ..target
        }
    }
}

/// The speed-up of one drafter on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// Name of the drafter.
    pub drafter: String,
    /// The device with everything that is assumed of it.
    pub device: Device,
    /// The load.
    pub load: Load,
    /// One entry for each number of drafts.
    pub by_gamma: Vec<PredictedSpeed>,
    /// The same where a round verifies only drafts that the drafter believes in, one entry for each threshold.
    pub by_confidence: Vec<PredictedSchedule>,
    /// The number of drafts with the largest speed-up; 0 where plain decoding is fastest.
    pub best_gamma: usize,
}

/// Predicted times of a round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PredictedSpeed {
    /// Drafts a round.
    pub gamma: usize,
    /// Tokens a round, from the exact evaluator.
    pub tau: f64,
    /// Milliseconds of a token without drafts.
    pub plain_ms: f64,
    /// Milliseconds of drafting.
    pub draft_ms: f64,
    /// Milliseconds of verification.
    pub verify_ms: f64,
    /// Speed against plain decoding.
    pub speed_up: f64,
}

/// Predicted speed of confidence-scheduled drafting.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PredictedSchedule {
    /// Least estimated probability that all drafts up to a verified one are accepted.
    pub threshold: f64,
    /// Tokens a round, from the exact evaluator.
    pub tau: f64,
    /// Verified drafts a round.
    pub drafts: f64,
    /// Speed against plain decoding.
    pub speed_up: f64,
}

/// A drafter whose speed is predicted.
#[derive(Clone, Copy, Debug)]
pub struct Measured<'a> {
    /// Name in the report.
    pub name: &'a str,
    /// The drafter.
    pub drafter: &'a AnyDrafter,
    /// Its tau at every gamma.
    pub report: &'a ExactReport,
}

/// Predicts the speed-up of a drafter of a target on a device.
pub fn predict(
    measured: Measured<'_>,
    spec: &TargetSpec,
    device: &Device,
    load: Load,
) -> Prediction {
    let target = Pass::of_target(spec);
    let drafter = measured.drafter;
    let pass = Pass::of_drafter(drafter, drafter.num_weights(), spec);
    let plain = device.seconds(target, load, 1.0);
    let draft = |drafts: f64| match drafter.max_depths() {
        // A block is filled in one pass, whatever part of it is verified.
        Some(block) => device.seconds(pass, load, block as f64 + 1.0),
        None => drafts * device.seconds(pass, load, 1.0),
    };
    // Round by round: where texts end or doubts stop a round, fewer drafts are verified, and time is no straight line in them.
    let verify =
        |rounds: &[f64]| mean_cost(rounds, |drafts| device.seconds(target, load, drafts + 1.0));
    let speed = |(entry, rounds): (&ExactTau, &Vec<f64>)| {
        let (gamma, tau) = (entry.gamma, entry.tau);
        let draft = mean_cost(rounds, draft);
        let verify = verify(rounds);
        PredictedSpeed {
            gamma,
            tau,
            plain_ms: 1e3 * plain,
            draft_ms: 1e3 * draft,
            verify_ms: 1e3 * verify,
            speed_up: tau * plain / (draft + verify),
        }
    };
    let entries = measured.report.by_gamma.iter();
    let entries = entries.zip(&measured.report.rounds_by_drafts);
    let by_gamma: Vec<PredictedSpeed> = entries.map(speed).collect();
    let schedule = |entry: &ScheduledTau| {
        let seconds = draft(entry.drafted) + verify(&entry.rounds_by_drafts);
        PredictedSchedule {
            threshold: entry.threshold,
            tau: entry.tau,
            drafts: entry.drafts,
            speed_up: entry.tau * plain / seconds,
        }
    };
    let by_confidence = measured.report.by_confidence.iter().map(schedule).collect();
    let best = by_gamma
        .iter()
        .max_by(|a, b| a.speed_up.total_cmp(&b.speed_up));
    let best_gamma = best
        .filter(|best| best.speed_up > 1.0)
        .map_or(0, |best| best.gamma);
    Prediction {
        drafter: measured.name.to_owned(),
        device: device.clone(),
        load,
        by_gamma,
        by_confidence,
        best_gamma,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> Device {
        Device::find("h100", &[]).unwrap()
    }

    fn pass() -> Pass {
        Pass {
            weights: 1e9,
            cached_per_position: 1e4,
            queries_per_key: 4.0,
            layers: 0.0,
        }
    }

    #[test]
    fn few_tokens_cost_the_reading_and_many_the_computing() {
        let load = Load {
            batch: 1.0,
            context: 1000.0,
        };
        let one = device().seconds(pass(), load, 1.0);
        // 2 bytes a number over 3350 GB/s at three quarters.
        let expected = 2.0 * (1e9 + 1e7) / (0.75 * 3.35e12);
        assert!((one - expected).abs() < 1e-9 * expected);
        let eight = device().seconds(pass(), load, 8.0);
        assert!(
            (eight - one).abs() < 1e-12,
            "eight tokens are read for the price of one"
        );
        let many = device().seconds(pass(), load, 4096.0);
        let operations = 4096.0 * (2e9 + 2.0 * 1e3 * 1e4 * 4.0);
        let expected = operations / (0.6 * 9.89e14);
        assert!((many - expected).abs() < 1e-9 * expected);
        let launched = Pass {
            layers: 30.0,
            ..pass()
        };
        let more = device().seconds(launched, load, 1.0) - one;
        assert!((more - 300e-6).abs() < 1e-12);
    }

    #[test]
    fn own_devices_come_first_and_unknown_ones_are_named() {
        let own = Device {
            name: "h100".to_owned(),
            bandwidth: 1.0,
            ..device()
        };
        assert!(Device::find("h100", std::slice::from_ref(&own)).unwrap() == own);
        let message = Device::find("h900", &[]).unwrap_err().to_string();
        assert_eq!(message, "`eval.devices` names an unknown device `h900`");
        let faulty = Device {
            bandwidth: 0.0,
            ..device()
        };
        let message = faulty.validate().unwrap_err().to_string();
        assert_eq!(
            message,
            "device `h100` has `bandwidth = 0`, expected a positive number"
        );
    }
}
