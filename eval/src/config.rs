//! `[eval]`: which prompts, temperatures and proposers are measured, and how.

use std::collections::BTreeSet;
use std::path::PathBuf;

use draftsmith_models::error::ModelError;
use draftsmith_models::sample::Sampling;
use serde::{Deserialize, Serialize};

use crate::error::EvalError;
use crate::one_or_more::OneOrMore;
use crate::propose::prompt_lookup::LookupConfig;
use crate::propose::tree::TreeShape;
use crate::propose::{BASELINES, MODEL, UNTRAINED};
use crate::verify;

/// `[eval]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Draw drafts as `draftsmith calibrate` has found best, where it has run.
    pub calibrated: bool,
    /// Prompt files; report suites never select a checkpoint.
    pub suites: Vec<SuiteConfig>,
    /// Temperatures of target and drafter; 0 is greedy.
    pub temperatures: Vec<f64>,
    /// Keep the k most probable tokens of target and drafter; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most probable tokens with at least this mass; 1 keeps all.
    pub top_p: f64,
    /// Drop tokens below this share of the most probable one; 0 keeps all.
    pub min_p: f64,
    /// Tokens drafted in a round, at most; a list measures each.
    pub gamma: OneOrMore<usize>,
    /// Drafts of a tree that are verified, at most; 0 measures chains only. `gamma` is the depth then.
    pub tree_nodes: usize,
    /// Entries of a tree that are drafted behind at each depth, and drafts behind each of them.
    pub tree_width: usize,
    /// Most new tokens for a prompt, the stop token included.
    pub max_new_tokens: usize,
    /// Sequences decoded together; speed depends on it, acceptance does not. A list measures each.
    pub batch_rows: OneOrMore<usize>,
    /// Further decodes that are only timed, in turn with plain ones, so that a slow hour hits both; 0 takes the times of the
    /// first decode.
    pub timing_repeats: usize,
    /// Compute the target's scores of every token by itself: slow, and the same to the last bit whatever is drafted and
    /// decoded beside it.
    pub batch_invariant: bool,
    /// Verification rule at temperatures above 0, or a list of them; at 0 it is always `greedy`.
    pub rule: OneOrMore<String>,
    /// Proposers measured beside the trained drafters.
    pub baselines: Vec<String>,
    /// Folder of the baseline `model`: a smaller model in Hugging Face layout with the target's tokenizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model: Option<PathBuf>,
    /// Devices for which a speed-up is predicted.
    pub devices: Vec<String>,
    /// TOML file of further devices, `[[device]]` each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_file: Option<PathBuf>,
    /// Sequences decoded together in these predictions.
    pub predicted_batch: usize,
    /// Tokens of each sequence in the cache in these predictions.
    pub predicted_context: usize,
    /// Seed of all draws while decoding.
    pub seed: u64,
    /// Shortest suffix that `prompt_lookup` looks for.
    pub lookup_min: usize,
    /// Shortest suffix behind which `suffix` drafts.
    pub suffix_min: usize,
    /// Longest suffix that `prompt_lookup` looks for.
    pub lookup_max: usize,
    /// A divergence of text that does not depend on the drafts is called numerical when the target's two best logits are closer than this.
    /// The default is for a target in f32; in bf16, whose numbers have 8 bits, each of the two moves by up to 2^-8 of itself.
    pub near_tie_tolerance: f64,
}

/// One entry of `suites`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteConfig {
    /// Name in the report.
    pub name: String,
    /// JSONL file of prompts.
    pub file: PathBuf,
    /// Use only the first prompts of the file; unset means all.
    #[serde(default)]
    pub limit: Option<usize>,
    /// User turns of a conversation that are asked, at most, each behind the target's own answers to those before.
    #[serde(default = "one_turn")]
    pub turns: usize,
}

fn one_turn() -> usize {
    1
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self {
            calibrated: true,
            suites: Vec::new(),
            temperatures: vec![0.0, 1.0],
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            gamma: OneOrMore::one(5),
            tree_nodes: 0,
            tree_width: 4,
            max_new_tokens: 128,
            batch_rows: OneOrMore::one(4),
            timing_repeats: 0,
            batch_invariant: false,
            rule: OneOrMore::one("sampling".to_owned()),
            baselines: ["none", "prompt_lookup", UNTRAINED]
                .map(str::to_owned)
                .into(),
            draft_model: None,
            devices: ["h100", "h200", "a100", "l4"].map(str::to_owned).into(),
            device_file: None,
            predicted_batch: 1,
            predicted_context: 1024,
            seed: 0,
            lookup_min: 2,
            lookup_max: 4,
            suffix_min: 2,
            // Logits of small models in f32 move by about 1e-4 between batch shapes.
            near_tie_tolerance: 1e-3,
        }
    }
}

impl EvalConfig {
    /// Checks ranges and names.
    ///
    /// # Errors
    /// [`EvalError::Setting`] naming the key, what was expected and what was found.
    pub fn validate(&self) -> Result<(), EvalError> {
        for (key, value) in [
            ("gamma", self.gamma.iter().copied().min().unwrap_or(0)),
            ("max_new_tokens", self.max_new_tokens),
            ("tree_width", self.tree_width),
            (
                "batch_rows",
                self.batch_rows.iter().copied().min().unwrap_or(0),
            ),
            ("suffix_min", self.suffix_min),
            ("predicted_batch", self.predicted_batch),
        ] {
            if value == 0 {
                return Err(out_of_range(key, "0", "at least 1"));
            }
        }
        self.validate_temperatures()?;
        let setting = |error: ModelError| {
            EvalError::setting(error.to_string(), "1 keeps all for `top_p`, 0 for `min_p`")
        };
        self.sampling(1.0).validate("eval").map_err(setting)?;
        let tolerance = self.near_tie_tolerance;
        if !(tolerance.is_finite() && tolerance >= 0.0) {
            return Err(out_of_range(
                "near_tie_tolerance",
                &tolerance.to_string(),
                "a number of at least 0",
            ));
        }
        let unknown = self
            .baselines
            .iter()
            .find(|name| !BASELINES.contains(&name.as_str()));
        if let Some(name) = unknown {
            return Err(EvalError::setting(
                format!("`eval.baselines` names an unknown proposer `{name}`"),
                format!("the baselines are: {}", BASELINES.join(", ")),
            ));
        }
        if self.has_baseline(MODEL) != self.draft_model.is_some() {
            return Err(EvalError::setting(
                "`eval.draft_model` and the baseline `model` belong together, but only one is given",
                "add \"model\" to `eval.baselines`, or leave `draft_model` out",
            ));
        }
        if self.batch_invariant && self.tree_nodes > 0 {
            return Err(EvalError::setting(
                "`eval.batch_invariant` and `eval.tree_nodes` are both set, but a tree is one pass over many tokens",
                "leave one of them out",
            ));
        }
        self.lookup().validate()?;
        for rule in &self.rule {
            for &temperature in &self.temperatures {
                verify::for_sampling(rule, &self.sampling(temperature))?;
            }
        }
        self.validate_suites()
    }

    /// How tokens are drawn at a temperature.
    pub fn sampling(&self, temperature: f64) -> Sampling {
        Sampling {
            temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
        }
    }

    /// How trees are grown, if they are measured.
    pub fn tree(&self) -> Option<TreeShape> {
        (self.tree_nodes > 0).then_some(TreeShape {
            width: self.tree_width,
            nodes: self.tree_nodes,
        })
    }

    /// Whether the baseline of that name is to be measured.
    pub fn has_baseline(&self, name: &str) -> bool {
        self.baselines.iter().any(|listed| listed == name)
    }

    /// The settings of `prompt_lookup`.
    pub fn lookup(&self) -> LookupConfig {
        LookupConfig {
            min: self.lookup_min,
            max: self.lookup_max,
        }
    }

    fn validate_temperatures(&self) -> Result<(), EvalError> {
        let bad = self
            .temperatures
            .iter()
            .find(|t| !t.is_finite() || **t < 0.0);
        match bad {
            Some(t) => Err(out_of_range(
                "temperatures",
                &t.to_string(),
                "numbers of at least 0",
            )),
            None if self.temperatures.is_empty() => Err(out_of_range(
                "temperatures",
                "empty",
                "at least one temperature",
            )),
            None => Ok(()),
        }
    }

    fn validate_suites(&self) -> Result<(), EvalError> {
        let mut seen = BTreeSet::new();
        for suite in &self.suites {
            if suite.name.is_empty() || !seen.insert(&suite.name) {
                return Err(out_of_range(
                    "suites",
                    &format!("a suite named `{}`", suite.name),
                    "different names that are not empty",
                ));
            }
            if suite.limit == Some(0) {
                return Err(out_of_range("suites.limit", "0", "at least 1, or no limit"));
            }
            if suite.turns == 0 {
                return Err(out_of_range("suites.turns", "0", "at least 1"));
            }
        }
        Ok(())
    }
}

fn out_of_range(key: &str, found: &str, expected: &str) -> EvalError {
    EvalError::setting(
        format!("`eval.{key}` is {found}, expected {expected}"),
        "leave the key out to get its default",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid_and_faults_are_named() {
        EvalConfig::default().validate().unwrap();
        let faulty = |change: fn(&mut EvalConfig)| {
            let mut config = EvalConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert_eq!(
            faulty(|c| c.gamma = OneOrMore::one(0)),
            "`eval.gamma` is 0, expected at least 1"
        );
        assert_eq!(
            faulty(|c| c.baselines = vec!["ngram".to_owned()]),
            "`eval.baselines` names an unknown proposer `ngram`"
        );
        assert_eq!(
            faulty(|c| c.rule = OneOrMore::one("samplin".to_owned())),
            "`eval.rule` names an unknown verification rule `samplin`"
        );
        assert_eq!(
            faulty(|c| c.temperatures = vec![0.0, -1.0]),
            "`eval.temperatures` is -1, expected numbers of at least 0"
        );
    }
}
