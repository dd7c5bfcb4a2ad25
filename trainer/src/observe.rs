//! Progress of a run, for whoever prints it.

use std::path::Path;

use crate::order::Plan;
use crate::parts::Validation;

/// Told about every event of a run; all methods do nothing by default.
pub trait Observer {
    /// The length of the run, before its first step.
    fn plan(&mut self, _plan: &Plan) {}
    /// A finished optimizer step.
    fn step(&mut self, _progress: &Progress) {}
    /// A finished validation after step `step`.
    fn validation(&mut self, _step: u64, _validation: &Validation) {}
    /// A saved checkpoint.
    fn checkpoint(&mut self, _step: u64, _path: &Path) {}
    /// Something the user should know that does not end the run.
    fn notice(&mut self, _message: &str) {}
}

/// An observer that looks away.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {}

/// Where a run stands.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Finished steps.
    pub step: u64,
    /// Steps of the whole run.
    pub total: u64,
    /// Current pass over the data, from 1.
    pub epoch: u64,
    /// Loss of the step; absent when it had no slot.
    pub loss: Option<f64>,
    /// Mean acceptance probability at depth 0; absent when the step had no slot.
    pub alpha: Option<f64>,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Real tokens trained on per second, smoothed over recent steps.
    pub tokens_per_second: f64,
}
