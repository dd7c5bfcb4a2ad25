//! `metrics.jsonl`: one JSON object a step.
//!
//! The file grows line by line and is therefore the one file of a run that is not written under a
//! temporary name; a line torn by a crash is dropped when the run is resumed.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use serde::{Deserialize, Serialize};

use crate::checkpoint::RunState;
use crate::error::TrainerError;
use crate::parts::Validation;
use crate::step::{DepthFigures, StepReport};

/// Version of the lines.
pub const SCHEMA: u32 = 2;

/// One line: the figures of one optimizer step. Absent figures are `null`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRecord {
    /// Version of this format.
    pub schema: u32,
    /// Optimizer step, from 1.
    pub step: u64,
    /// Pass over the data, from 1.
    pub epoch: u64,
    /// Real tokens trained on since the first step.
    pub tokens: u64,
    /// Slots of this step.
    pub slots: u64,
    /// Loss of this step; null when it had no slot or is not finite.
    pub loss: Option<f64>,
    /// The terms of the mixture before their coefficients, and `confidence` of a drafter that is taught one.
    pub terms: BTreeMap<String, Option<f64>>,
    /// Figures by depth.
    pub depths: Vec<DepthRecord>,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Norm of the gradient before clipping; null when there was none or it is not finite.
    pub grad_norm: Option<f64>,
    /// Real tokens of this step per second of wall time.
    pub tokens_per_second: f64,
    /// Wall time of this step by phase, in seconds.
    pub seconds: BTreeMap<String, f64>,
    /// Micro-batches without a slot since the first step.
    pub empty_batches: u64,
    /// Steps without an update because the gradient was not finite, since the first step.
    pub skipped_steps: u64,
    /// Figures of the validation after this step, if there was one.
    pub validation: Option<BTreeMap<String, Option<f64>>>,
}

/// Means over the slots of one depth; null without slots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DepthRecord {
    /// Slots of this depth.
    pub slots: u64,
    /// Mean loss.
    pub loss: Option<f64>,
    /// Mean acceptance probability.
    pub alpha: Option<f64>,
    /// Share of slots in which drafter and target have the same most probable token.
    pub argmax_agreement: Option<f64>,
}

impl StepRecord {
    /// The record of the step that led to `state`; epoch and learning rate are left to the caller.
    pub(crate) fn new(
        report: &StepReport,
        state: &RunState,
        elapsed: Duration,
        validation: Option<&Validation>,
    ) -> Self {
        let finite = |value: f64| Some(value).filter(|value| value.is_finite());
        let phases = &report.phases;
        let seconds = [
            ("states", phases.states),
            ("forward", phases.forward),
            ("objective", phases.objective),
            ("backward", phases.backward),
            ("update", phases.update),
            ("step", elapsed),
        ];
        Self {
            schema: SCHEMA,
            step: state.step,
            epoch: 0,
            tokens: state.counters.tokens,
            slots: report.slots(),
            loss: report.loss.and_then(finite),
            terms: report
                .terms
                .iter()
                .map(|(name, value)| ((*name).to_owned(), finite(*value)))
                .collect(),
            depths: report.depths.iter().map(DepthRecord::new).collect(),
            learning_rate: 0.0,
            grad_norm: report.gradient_norm.and_then(finite),
            tokens_per_second: report.tokens as f64 / elapsed.as_secs_f64().max(1e-9),
            seconds: seconds
                .map(|(name, time)| (name.to_owned(), time.as_secs_f64()))
                .into(),
            empty_batches: state.counters.empty_batches,
            skipped_steps: state.counters.skipped_steps,
            validation: validation.map(|validation| {
                let figures = validation.figures.iter();
                figures
                    .map(|(name, value)| (name.clone(), finite(*value)))
                    .collect()
            }),
        }
    }
}

impl DepthRecord {
    fn new(figures: &DepthFigures) -> Self {
        let mean = |sum: f64| Some(sum / figures.slots as f64).filter(|mean| mean.is_finite());
        Self {
            slots: figures.slots,
            loss: mean(figures.loss),
            alpha: mean(figures.alpha),
            argmax_agreement: mean(figures.argmax_agrees as f64),
        }
    }
}

/// The open file.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    writer: BufWriter<fs_err::File>,
}

impl MetricsLog {
    /// Opens the file for the steps after `completed` and removes lines of later steps.
    ///
    /// # Errors
    /// [`TrainerError::Model`] when the file cannot be read or written.
    pub fn open(
        path: &Path,
        completed: u64,
        notices: &mut Vec<String>,
    ) -> Result<Self, TrainerError> {
        let kept = if completed == 0 || !path.exists() {
            String::new()
        } else {
            let text = String::from_utf8_lossy(&file::read(path)?).into_owned();
            kept_lines(&text, completed, path, notices)
        };
        file::write_atomic(path, kept.as_bytes())?;
        let file = fs_err::OpenOptions::new()
            .append(true)
            .open(path)
            .map_err(|e| ModelError::io(path, e))?;
        Ok(Self {
            path: path.to_owned(),
            writer: BufWriter::new(file),
        })
    }

    /// Adds a line to the buffer.
    ///
    /// # Errors
    /// [`TrainerError::Model`] when a full buffer cannot be written.
    pub fn append(&mut self, record: &StepRecord) -> Result<(), TrainerError> {
        let result = serde_json::to_writer(&mut self.writer, record)
            .map_err(std::io::Error::from)
            .and_then(|()| self.writer.write_all(b"\n"));
        result.map_err(|e| ModelError::io(&self.path, e).into())
    }

    /// Writes the buffer.
    ///
    /// # Errors
    /// [`TrainerError::Model`] naming the file.
    pub fn flush(&mut self) -> Result<(), TrainerError> {
        let result = self.writer.flush();
        result.map_err(|e| ModelError::io(&self.path, e).into())
    }
}

/// The records of a file, in order.
///
/// # Errors
/// [`TrainerError::Model`] naming the line that is not a record of this version.
pub fn read(path: &Path) -> Result<Vec<StepRecord>, TrainerError> {
    let text = file::read_text(path)?;
    let records = text.lines().enumerate().map(|(index, line)| {
        serde_json::from_str(line).map_err(|e| {
            let reason = format!("line {}: {e}", index + 1);
            ModelError::malformed(path, "metrics file", reason).into()
        })
    });
    records.collect()
}

#[derive(Deserialize)]
struct StepOnly {
    step: u64,
}

/// The lines of steps up to `completed`, each once.
fn kept_lines(text: &str, completed: u64, path: &Path, notices: &mut Vec<String>) -> String {
    let mut kept = String::new();
    let mut last = 0;
    let mut damaged = 0;
    for line in text.lines() {
        match serde_json::from_str::<StepOnly>(line) {
            Ok(StepOnly { step }) if step > last && step <= completed => {
                kept.push_str(line);
                kept.push('\n');
                last = step;
            }
            Ok(_) => {}
            Err(_) => damaged += 1,
        }
    }
    if damaged > 0 {
        notices.push(format!(
            "dropped {damaged} damaged lines of `{}`",
            path.display()
        ));
    }
    kept
}
