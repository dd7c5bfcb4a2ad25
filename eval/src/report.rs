//! [`Report`]: `report.json`, everything measured about the drafters and baselines of a run.

use std::path::Path;

use draftsmith_models::checkpoint::TemplateRecord;
use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use serde::{Deserialize, Serialize};

use crate::acceptance::Acceptance;
use crate::bootstrap::Interval;
use crate::calibration::Calibration;
use crate::config::EvalConfig;
use crate::decode::TimeSplit;
use crate::error::EvalError;
use crate::exact::{ExactReport, ExactTau};
use crate::lossless::LosslessCheck;
use crate::roofline::Prediction;

/// Version of `report.json`; readers refuse others.
pub const FORMAT_VERSION: u32 = 4;

/// The whole report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Version of this format.
    pub format_version: u32,
    /// Program and version that wrote it.
    pub generator: String,
    /// Device the figures were measured on, in words.
    pub device: String,
    /// The target.
    pub target: TargetRecord,
    /// How prompts were rendered.
    pub template: TemplateRecord,
    /// The resolved `[eval]` section.
    pub settings: EvalConfig,
    /// Trained drafters that appear in `entries`.
    pub drafters: Vec<DrafterRecord>,
    /// Real decoding: one entry for each suite, temperature, rule, gamma and proposer.
    pub entries: Vec<Entry>,
    /// Exact evaluation on given text.
    pub exact: Vec<ExactEntry>,
    /// What the first exact evaluation of each drafter is worth on the devices of the settings.
    pub predictions: Vec<Prediction>,
}

/// Which target was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetRecord {
    /// Fingerprint of the folder.
    pub fingerprint: String,
    /// `model_type` of its configuration.
    pub model_type: String,
    /// Compute type while measuring.
    pub dtype: String,
    /// Number of blocks.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of tokens.
    pub vocab_size: usize,
    /// Tokens that ended a continuation.
    pub stop_ids: Vec<u32>,
}

/// A trained drafter of the report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrafterRecord {
    /// Name in `entries`.
    pub name: String,
    /// Family.
    pub family: String,
    /// Optimizer steps taken; 0 is untrained.
    pub step: u64,
    /// Size of the draft vocabulary.
    pub draft_vocab: usize,
    /// blake3 of the weights, hex; empty when they never were in a file.
    pub weights_blake3: String,
    /// How its drafts were drawn, if it was calibrated.
    pub calibration: Option<Calibration>,
}

/// Real decoding of one suite at one temperature with one proposer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Suite.
    pub suite: String,
    /// Temperature of target and drafter.
    pub temperature: f64,
    /// Name of the drafter or baseline.
    pub proposer: String,
    /// Verification rule.
    pub rule: String,
    /// Drafts a round, at most; 0 for plain decoding.
    pub gamma: usize,
    /// Sequences decoded together, at most.
    pub batch_rows: usize,
    /// Tokens per target forward, the target's own included, pooled; prefill and its token excluded.
    pub tau: f64,
    /// 95 % bootstrap interval of `tau` over conversations.
    pub tau_interval: Option<Interval>,
    /// The same for each category, where the suite has any.
    pub by_category: Vec<CategoryFigures>,
    /// The exact evaluator on the text that was produced, for trained drafters under a rule that judges each draft by
    /// itself: the same figure without the noise of coins.
    pub exact: Option<ExactTau>,
    /// Rounds of decoding less those that the exact evaluator expects for this text, over the standard deviation that
    /// the coins leave; standard normal if both are right. Absent where their variance is below 10.
    pub rounds_z: Option<f64>,
    /// How surprising the text is beside text of the target's own law, standard normal if the rule is lossless; absent
    /// where nothing is drawn.
    pub text_z: Option<f64>,
    /// Tokens of the text that top-k, top-p or min-p would not allow in another pass: those at the very cut, which rounding
    /// moves. They are no part of `text_z`; more than one in a thousand is a fault.
    pub outside_truncation: u64,
    /// Mean over prompts of each prompt's own tau.
    pub tau_mean_of_prompts: Option<f64>,
    /// The length serving engines print: 1 + accepted / rounds with a draft.
    pub engine_length: Option<f64>,
    /// Accepted / verified at depth `d`, given that all drafts before were accepted.
    pub acceptance_by_depth: Vec<Option<f64>>,
    /// Share of rounds that proposed depth `d` whose first `d + 1` drafts were all accepted.
    pub survival_by_depth: Vec<Option<f64>>,
    /// The counts behind the figures, with the histogram of accepted lengths.
    pub counts: Acceptance,
    /// Tokens and rounds of each prompt, in the order of the suite.
    pub prompts: Vec<PromptFigures>,
    /// Tokens committed in rounds per second of rounds, prefill excluded.
    pub tokens_per_second: f64,
    /// `tokens_per_second` over that of plain decoding for the same suite and temperature, under shared noise too where the
    /// rule has it.
    pub speed_up: Option<f64>,
    /// Where the time went, in seconds.
    pub time: TimeSplit,
    /// Comparison with plain decoding, under rules whose text does not depend on the drafts.
    pub lossless: Option<LosslessCheck>,
}

/// What one prompt contributed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptFigures {
    /// Identity of the prompt.
    pub id: String,
    /// Its conversation: that of a first turn bears the prompt's name.
    pub conversation: String,
    /// What kind of prompt it is, where the suite says so.
    pub category: Option<String>,
    /// Hash of its token ids.
    pub prompt: String,
    /// Tokens committed in rounds.
    pub tokens: u64,
    /// Rounds.
    pub rounds: u64,
}

/// tau of the prompts of one category.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CategoryFigures {
    /// Its name.
    pub category: String,
    /// Its prompts.
    pub prompts: usize,
    /// Tokens committed in rounds.
    pub tokens: u64,
    /// Rounds.
    pub rounds: u64,
    /// Tokens per round, pooled; 0 without a round.
    pub tau: f64,
    /// Its 95 % bootstrap interval over conversations.
    pub tau_interval: Option<Interval>,
}

/// An exact evaluation of one drafter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExactEntry {
    /// Name of the drafter.
    pub drafter: String,
    /// Which text, for example `validation`.
    pub text: String,
    /// What was found.
    pub report: ExactReport,
}

impl Report {
    /// Writes the report as JSON.
    ///
    /// # Errors
    /// [`EvalError::Model`] naming the path.
    pub fn write(&self, path: &Path) -> Result<(), EvalError> {
        Ok(file::write_json(path, self)?)
    }

    /// Reads a report.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the file is missing, malformed or of another version.
    pub fn read(path: &Path) -> Result<Self, EvalError> {
        // The version decides before the fields do: another version has other fields.
        let value: serde_json::Value = file::read_json(path)?;
        let version = value
            .get("format_version")
            .and_then(serde_json::Value::as_u64);
        if version != Some(u64::from(FORMAT_VERSION)) {
            let found = version.map_or("none".to_owned(), |version| version.to_string());
            return Err(malformed(
                path,
                format!("format version {found}, expected {FORMAT_VERSION}"),
            ));
        }
        serde_json::from_value(value).map_err(|error| malformed(path, error))
    }
}

fn malformed(path: &Path, reason: impl std::fmt::Display) -> EvalError {
    EvalError::Model(ModelError::malformed(path, "evaluation report", reason))
}
