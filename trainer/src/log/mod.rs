//! Logs of a run: `metrics.jsonl` and TensorBoard events, one entry a step in both.

mod event_file;
pub mod jsonl;
pub mod tensorboard;

use std::path::Path;

use crate::config::LogConfig;
use crate::error::TrainerError;
use jsonl::{MetricsLog, StepRecord};
use tensorboard::TensorBoard;

/// File of the metrics in a run folder.
pub const METRICS: &str = "metrics.jsonl";
/// Folder of the event files in a run folder.
pub const EVENTS: &str = "tensorboard";

/// All logs of a run.
#[derive(Debug)]
pub struct RunLog {
    metrics: MetricsLog,
    events: Option<TensorBoard>,
}

impl RunLog {
    /// Opens the logs of `folder` after `completed` steps; entries of later steps, which a resumed run
    /// takes again, are removed first. Also returns what could not be kept.
    ///
    /// # Errors
    /// [`TrainerError::Model`] when `metrics.jsonl` cannot be written; never because of event files.
    pub fn open(
        folder: &Path,
        config: &LogConfig,
        completed: u64,
    ) -> Result<(Self, Vec<String>), TrainerError> {
        let mut notices = Vec::new();
        let metrics = MetricsLog::open(&folder.join(METRICS), completed, &mut notices)?;
        let root = folder.join(EVENTS);
        let events = config.tensorboard.then(|| {
            notices.extend(event_file::forget_after(&root, completed));
            TensorBoard::open(&root)
        });
        Ok((Self { metrics, events }, notices))
    }

    /// Adds the record of a step; returns a warning when the event file has just failed.
    ///
    /// # Errors
    /// [`TrainerError::Model`] when `metrics.jsonl` cannot be written.
    pub fn record(&mut self, record: &StepRecord) -> Result<Option<String>, TrainerError> {
        self.metrics.append(record)?;
        let Some(events) = &mut self.events else {
            return Ok(None);
        };
        for (tag, value) in scalars(record) {
            events.scalar(&tag, value, record.step);
        }
        Ok(events.take_warning())
    }

    /// Hands everything recorded so far to the operating system.
    ///
    /// # Errors
    /// [`TrainerError::Model`] when `metrics.jsonl` cannot be written.
    pub fn flush(&mut self) -> Result<(), TrainerError> {
        if let Some(events) = &mut self.events {
            events.flush();
        }
        self.metrics.flush()
    }
}

/// TensorBoard tags of a record with their values.
fn scalars(record: &StepRecord) -> Vec<(String, f64)> {
    let mut scalars = vec![
        ("train/lr".to_owned(), record.learning_rate),
        (
            "train/tokens_per_second".to_owned(),
            record.tokens_per_second,
        ),
        ("train/epoch".to_owned(), record.epoch as f64),
        ("train/tokens".to_owned(), record.tokens as f64),
        (
            "train/skipped_steps".to_owned(),
            record.skipped_steps as f64,
        ),
        (
            "train/empty_batches".to_owned(),
            record.empty_batches as f64,
        ),
    ];
    scalars.extend(record.loss.map(|loss| ("train/loss".to_owned(), loss)));
    let norm = record.grad_norm;
    scalars.extend(norm.map(|norm| ("train/grad_norm".to_owned(), norm)));
    for (name, value) in &record.terms {
        scalars.extend(value.map(|value| (format!("train/term/{name}"), value)));
    }
    for (depth, figures) in record.depths.iter().enumerate() {
        for (name, value) in [
            ("loss", figures.loss),
            ("alpha", figures.alpha),
            ("argmax_agreement", figures.argmax_agreement),
        ] {
            let tag = format!("train/{name}/depth_{depth}");
            scalars.extend(value.map(|value| (tag, value)));
        }
    }
    for (name, value) in record.validation.iter().flatten() {
        scalars.extend(value.map(|value| (format!("validation/{name}"), value)));
    }
    scalars
}
