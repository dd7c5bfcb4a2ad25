//! [`RunFile`]: everything a run does, read from TOML so that nothing is silently ignored.
//!
//! This file lists the sections; each section's struct lives beside the component that reads it.

mod drafters;
mod fields;
mod message;
mod overrides;
mod source;

use std::path::{Path, PathBuf};

use draftsmith_data::cache::CaptureConfig;
use draftsmith_data::prepare::DataConfig;
use draftsmith_data::regenerate::RegenerateConfig;
use draftsmith_eval::config::EvalConfig;
use draftsmith_export::ExportConfig;
use draftsmith_models::error::Diagnose;
use draftsmith_models::file;
use draftsmith_models::objective::{ObjectiveConfig, Stages};
use draftsmith_trainer::config::{LogConfig, OptimizerConfig, TrainConfig};
use draftsmith_trainer::refuse_missing_anchors;
use serde::{Deserialize, Serialize};

pub(crate) use drafters::{DraftVocab, DrafterRun, Drafters};

use crate::args::RunArgs;
use crate::device::DeviceChoice;
use crate::errors::CliError;
use overrides::Override;
use source::Source;

/// A run file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RunFile {
    /// Folder and device.
    pub(crate) run: RunConfig,
    /// The frozen large model.
    pub(crate) target: TargetConfig,
    /// Where the text comes from and how it becomes tokens.
    pub(crate) data: DataConfig,
    /// Answers written by the target; without this table the answers of the data are used.
    pub(crate) regenerate: Option<RegenerateConfig>,
    /// Hidden states of the target.
    pub(crate) capture: CaptureConfig,
    /// The drafters to train.
    pub(crate) drafter: Drafters,
    /// What is minimised.
    pub(crate) objective: ObjectiveConfig,
    /// How parameters move.
    pub(crate) optimizer: OptimizerConfig,
    /// How long and in which pieces.
    pub(crate) train: TrainConfig,
    /// What is measured.
    pub(crate) eval: EvalConfig,
    /// Scalars and files while training.
    pub(crate) log: LogConfig,
    /// What the machine may be asked for.
    pub(crate) limits: LimitsConfig,
    /// Layouts for serving engines.
    pub(crate) export: ExportConfig,
}

/// `[run]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RunConfig {
    /// Run folder; relative paths start at the current folder. Default `runs/run`.
    pub(crate) out: PathBuf,
    /// `cpu` or `cuda:N`. Default `cpu`.
    pub(crate) device: DeviceChoice,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            out: PathBuf::from("runs/run"),
            device: DeviceChoice::Cpu,
        }
    }
}

/// `[target]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TargetConfig {
    /// Hugging Face folder: `config.json`, safetensors, `tokenizer.json`. Required.
    pub(crate) path: PathBuf,
    /// Number type of the frozen weights. Default `f32`.
    pub(crate) dtype: TargetDtype,
}

/// Number type of the frozen weights on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TargetDtype {
    /// 32 bits: exact, and the fastest type of most processors.
    #[default]
    F32,
    /// 16 bits with the range of f32: for cards.
    Bf16,
}

/// `[limits]`: what `plan` refuses to exceed; unset means no limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LimitsConfig {
    /// Most disk space of the cached states, in GiB.
    pub(crate) disk_gib: Option<f64>,
    /// Most memory of target, drafter and optimizer, in GiB.
    pub(crate) memory_gib: Option<f64>,
}

impl TargetDtype {
    /// The name as written in run files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

impl RunFile {
    /// Reads and checks the run file of a command, with its overrides.
    ///
    /// # Errors
    /// [`CliError::RunFile`] for anything that is not understood, with place and hint;
    /// [`draftsmith_models::error::ModelError::Io`] when the file cannot be read.
    pub(crate) fn load(args: &RunArgs) -> anyhow::Result<Self> {
        let text = file::read_text(&args.file)?;
        let name = args.file.display().to_string();
        let mut run_file = Self::read(name, text, &args.overrides)?;
        if let Some(out) = &args.out {
            run_file.run.out.clone_from(out);
        }
        if let Some(device) = args.device {
            run_file.run.device = device;
        }
        Ok(run_file)
    }

    /// Reads and checks the text of a run file with overrides `section.key=value`.
    pub(crate) fn read(name: String, text: String, typed: &[String]) -> Result<Self, CliError> {
        let source = Source { name, text };
        let overrides: Vec<Override> = typed
            .iter()
            .map(|typed| Override::parse(typed))
            .collect::<Result<_, _>>()?;
        // An override that the file does not go with is read on its own, too: so a mistake keeps its place.
        let mut run_file = Self::parse(&source)?;
        if !overrides.is_empty() {
            let mut document = source
                .text
                .parse::<toml::Table>()
                .map_err(|error| message::refuse(&source, &error))?;
            for change in &overrides {
                change.apply(&mut document);
                run_file = Self::deserialize(document.clone()).map_err(|error| {
                    let alone = Self::parse(&change.source).err();
                    alone.unwrap_or_else(|| CliError::RunFile {
                        message: format!("run file refused: {}", error.message()),
                        snippet: String::new(),
                        hint: Some(
                            "the file and each `--set` are fine alone, not together".to_owned(),
                        ),
                    })
                })?;
            }
        }
        let sources: Vec<&Source> = std::iter::once(&source)
            .chain(overrides.iter().map(|change| &change.source))
            .collect();
        run_file.validate(&sources)?;
        Ok(run_file)
    }

    fn parse(source: &Source) -> Result<Self, CliError> {
        toml::from_str(&source.text).map_err(|error| message::refuse(source, &error))
    }

    /// The objective of a drafter: its own table or the common one.
    pub(crate) fn objective_of<'a>(&'a self, drafter: &'a DrafterRun) -> &'a ObjectiveConfig {
        drafter.objective.as_ref().unwrap_or(&self.objective)
    }

    /// The optimizer of a drafter: its own table or the common one.
    pub(crate) fn optimizer_of<'a>(&'a self, drafter: &'a DrafterRun) -> &'a OptimizerConfig {
        drafter.optimizer.as_ref().unwrap_or(&self.optimizer)
    }

    /// The training table of a drafter: its own or the common one.
    pub(crate) fn train_of<'a>(&'a self, drafter: &'a DrafterRun) -> &'a TrainConfig {
        drafter.train.as_ref().unwrap_or(&self.train)
    }

    /// The file with every default written out.
    ///
    /// # Errors
    /// When a value has no form in TOML; that would be a fault of this program.
    pub(crate) fn to_toml(&self) -> anyhow::Result<String> {
        Ok(toml::to_string(&toml::Table::try_from(self)?)?)
    }

    /// Answers of the target take the place of those in the data, with their ids and their temperature.
    fn refuse_what_regenerate_replaces(&self) -> Result<(), CliError> {
        if !self.data.ids_files.is_empty() {
            let why = "answers that the target writes bring their own ids";
            return Err(without_effect("data.ids_files", why));
        }
        if self.data.text_temperature.is_some() {
            let why = "answers are drawn at `regenerate.sampling`";
            return Err(without_effect("data.text_temperature", why));
        }
        Ok(())
    }

    /// Texts that only measure need prompts that only measure.
    fn refuse_texts_of_no_prompt(&self, regenerate: &RegenerateConfig) -> Result<(), CliError> {
        if regenerate.validation_sampling.is_empty() || self.data.validation_fraction > 0.0 {
            return Ok(());
        }
        Err(CliError::RunFile {
            message: "run file refused: `regenerate.validation_sampling` has no effect while \
                      `data.validation_fraction` is 0"
                .to_owned(),
            snippet: String::new(),
            hint: Some("set a share of the prompts aside, 0.05 for example".to_owned()),
        })
    }

    /// Ranges and names that types cannot express.
    fn validate(&self, sources: &[&Source]) -> Result<(), CliError> {
        let refuse = |prefix: Option<&str>, error: &dyn Diagnose| {
            message::place(sources, prefix, &error.to_string(), error.hint())
        };
        if self.target.path == Path::new("") {
            return Err(missing(
                "target.path",
                "a Hugging Face folder, for example `assets/tiny-target`",
            ));
        }
        if self.drafter.0.is_empty() {
            let families = draftsmith_models::drafter::FAMILIES.join("]`, `[drafter.");
            return Err(missing(
                "drafter",
                &format!("at least one of `[drafter.{families}]`"),
            ));
        }
        self.data.validate().map_err(|e| refuse(None, &e))?;
        if let Some(regenerate) = &self.regenerate {
            regenerate.validate().map_err(|e| refuse(None, &e))?;
            self.refuse_what_regenerate_replaces()?;
            self.refuse_texts_of_no_prompt(regenerate)?;
        }
        self.capture.validate().map_err(|e| refuse(None, &e))?;
        self.eval.validate().map_err(|e| refuse(None, &e))?;
        self.export.validate().map_err(|e| refuse(None, &e))?;
        for drafter in &self.drafter.0 {
            let prefix = format!("drafter.{}", drafter.family());
            let prefix = Some(prefix.as_str());
            Stages::new(self.objective_of(drafter))
                .and_then(|stages| refuse_missing_anchors(&stages, &drafter.config))
                .map_err(|e| refuse(prefix, &e))?;
            self.optimizer_of(drafter)
                .validate()
                .map_err(|e| refuse(prefix, &e))?;
            self.train_of(drafter)
                .validate()
                .map_err(|e| refuse(prefix, &e))?;
        }
        Ok(())
    }
}

fn without_effect(key: &str, why: &str) -> CliError {
    CliError::RunFile {
        message: format!("run file refused: `{key}` has no effect beside `[regenerate]`"),
        snippet: String::new(),
        hint: Some(format!("{why}: leave one of the two out")),
    }
}

fn missing(key: &str, expected: &str) -> CliError {
    CliError::RunFile {
        message: format!("run file refused: `{key}` is not set"),
        snippet: String::new(),
        hint: Some(format!("expected {expected}")),
    }
}

/// Sections with the keys they know, for hints about misplaced keys.
fn sections() -> Vec<(String, &'static [&'static str])> {
    use message::section;
    vec![
        section::<RunConfig>("run"),
        section::<TargetConfig>("target"),
        section::<DataConfig>("data"),
        section::<RegenerateConfig>("regenerate"),
        section::<CaptureConfig>("capture"),
        section::<ObjectiveConfig>("objective"),
        section::<OptimizerConfig>("optimizer"),
        section::<TrainConfig>("train"),
        section::<EvalConfig>("eval"),
        section::<LogConfig>("log"),
        section::<LimitsConfig>("limits"),
        section::<ExportConfig>("export"),
    ]
}

#[cfg(test)]
mod tests;
