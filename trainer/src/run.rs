//! The loop: steps, validations, logs and checkpoints of one drafter.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::Device;
use burn_train::Interrupter;
use draftsmith_data::hidden::HiddenStateSource;
use draftsmith_models::checkpoint::DrafterCard;
use draftsmith_models::drafter::{AnchorDraw, AnyDrafter, DrafterConfig};
use draftsmith_models::error::ModelError;
use draftsmith_models::objective::{Objective, ObjectiveConfig, Stages, Teacher};
use draftsmith_models::target::TargetEnds;
use serde_json::Value;

use crate::checkpoint::{self, Best, Counters, Identity, RunState};
use crate::config::{LogConfig, OptimizerConfig, TrainConfig};
use crate::error::TrainerError;
use crate::log::RunLog;
use crate::log::jsonl::StepRecord;
use crate::observe::{Observer, Progress};
use crate::order::{DataOrder, MicroBatch, Plan};
use crate::parts::{RowStore, Validation, Validator};
use crate::schedule::learning_rate;
use crate::start::start;
use crate::step::{Learner, StepReport, Update};
use crate::survey::Survey;

/// Consecutive steps with a gradient that is not finite after which a run ends with an error.
pub const MAX_CONSECUTIVE_SKIPS: u64 = 10;

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct RunSettings<'a> {
    /// `[optimizer]`.
    pub optimizer: &'a OptimizerConfig,
    /// `[train]`.
    pub train: &'a TrainConfig,
    /// `[objective]`.
    pub objective: &'a ObjectiveConfig,
    /// `[log]`.
    pub log: &'a LogConfig,
    /// Every setting that shapes the training, sections as keys; a resume is refused when one differs.
    pub resolved: Value,
    /// Folder of this drafter's checkpoints and logs.
    pub folder: &'a Path,
    /// Where to start.
    pub resume: Resume,
}

/// Where a run starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// At the first step; refused when the run folder holds a complete checkpoint.
    Fresh,
    /// At the newest complete checkpoint of the run folder.
    Latest,
    /// At this checkpoint, or at the newest complete one directly below this folder.
    From(PathBuf),
}

/// What a run works with.
pub struct Parts<'a> {
    /// The drafter to start from, on a device that tracks gradients; replaced on resume.
    pub drafter: AnyDrafter,
    /// Its description; also names the draft vocabulary.
    pub card: &'a DrafterCard,
    /// Embedding, final norm and head of the target, on the same device without gradients.
    pub ends: &'a TargetEnds,
    /// The device of `drafter`.
    pub device: &'a Device,
    /// The training rows.
    pub rows: &'a dyn RowStore,
    /// Their target states.
    pub source: &'a dyn HiddenStateSource,
    /// Measures the drafter; without one no checkpoint is the best.
    pub validator: Option<&'a mut dyn Validator>,
    /// Is told about progress.
    pub observer: &'a mut dyn Observer,
    /// Asks the run to stop after the current step.
    pub interrupter: Interrupter,
}

impl std::fmt::Debug for Parts<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts")
            .field("drafter", &self.drafter.family())
            .field("rows", &self.rows.len())
            .finish_non_exhaustive()
    }
}

/// How a run ended without an error.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// All steps were taken.
    Finished(Summary),
    /// It was asked to stop; everything up to its last step is saved.
    Interrupted(Summary),
}

/// Figures of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Steps taken since the first start.
    pub step: u64,
    /// Steps of the whole run.
    pub total: u64,
    /// Sums since the first step.
    pub counters: Counters,
    /// Best validation.
    pub best: Option<Best>,
    /// Newest checkpoint; absent when a run was stopped before its first step.
    pub checkpoint: Option<PathBuf>,
}

/// Length of a run, without starting it.
///
/// # Errors
/// [`TrainerError`] when a setting is out of range or the rows cannot be trained on.
pub fn plan(rows: &dyn RowStore, train: &TrainConfig) -> Result<Plan, TrainerError> {
    train.validate()?;
    let survey = Survey::new(rows, train.batch_tokens)?;
    Ok(DataOrder::new(survey.lens, train).plan(train))
}

/// Trains a drafter, from the start or from a checkpoint.
///
/// # Errors
/// [`TrainerError`]. Nothing is written when a setting, the data or the checkpoint to resume from is at
/// fault, and finished checkpoints stay whole whatever happens.
pub fn train<'a>(settings: RunSettings<'a>, parts: Parts<'a>) -> Result<Outcome, TrainerError> {
    let mut run = Run::prepare(settings, parts)?;
    while !run.is_finished() && !run.interrupter.should_stop() {
        let begin = Instant::now();
        let report = run.take_step()?;
        let seconds = begin.elapsed();
        let validation = run.validate_if_due()?;
        run.log(&report, seconds, validation.as_ref())?;
        run.refuse_to_diverge(&report)?;
        run.save_if_due(validation.as_ref())?;
    }
    run.end()
}

/// Refuses an objective over whole turns for a drafter that trains some of their anchors.
///
/// # Errors
/// [`ModelError::Setting`] naming both.
pub fn refuse_missing_anchors(stages: &Stages, drafter: &DrafterConfig) -> Result<(), ModelError> {
    let needs_all = stages.all().any(Objective::needs_every_anchor);
    if !needs_all || !drafter.draws_anchors() {
        return Ok(());
    }
    Err(ModelError::setting(
        format!(
            "`round_count` counts the rounds of whole turns, but `{}` trains drawn anchors",
            drafter.family()
        ),
        "use `expected_length`, which needs whole blocks only",
    ))
}

/// A run between two steps.
struct Run<'a> {
    settings: RunSettings<'a>,
    identity: Identity,
    learner: Learner<'a>,
    stages: Stages,
    rows: &'a dyn RowStore,
    source: &'a dyn HiddenStateSource,
    validator: Option<&'a mut dyn Validator>,
    observer: &'a mut dyn Observer,
    interrupter: Interrupter,
    root: PathBuf,
    order: DataOrder,
    plan: Plan,
    epoch: Option<(u64, Vec<Vec<MicroBatch>>)>,
    state: RunState,
    log: RunLog,
    speed: Speed,
    saved: Option<u64>,
}

impl<'a> Run<'a> {
    fn prepare(settings: RunSettings<'a>, mut parts: Parts<'a>) -> Result<Self, TrainerError> {
        settings.optimizer.validate()?;
        settings.train.validate()?;
        let stages = Stages::new(settings.objective)?;
        refuse_missing_anchors(&stages, &parts.card.drafter)?;
        let survey = Survey::new(parts.rows, settings.train.batch_tokens)?;
        let identity = Identity {
            config: settings.resolved.clone(),
            rows_blake3: survey.blake3,
            card: parts.card.clone(),
        };
        let restored = start(&settings, &identity, &mut parts)?;
        let order = DataOrder::new(survey.lens, settings.train);
        let plan = order.plan(settings.train);
        parts.observer.plan(&plan);
        let (root, log) = open_folder(&settings, restored.state.step, parts.observer)?;
        let learner = Learner {
            drafter: restored.drafter,
            optimizer: restored.optimizer,
            objective: stages.at(0, 1).clone(),
            teacher: Teacher::new(parts.ends, &parts.card.vocab),
            compute: settings.train.compute.dtype(),
            clip_norm: settings.optimizer.clip_norm,
        };
        Ok(Self {
            identity,
            learner,
            stages,
            rows: parts.rows,
            source: parts.source,
            validator: parts.validator,
            observer: parts.observer,
            interrupter: parts.interrupter,
            root,
            order,
            plan,
            epoch: None,
            saved: Some(restored.state.step).filter(|step| *step > 0),
            state: restored.state,
            log,
            speed: Speed::default(),
            settings,
        })
    }

    fn is_finished(&self) -> bool {
        self.state.step >= self.plan.steps
    }

    /// The micro-batches of the next step; the order of an epoch is computed once.
    fn next_batches(&mut self) -> Vec<MicroBatch> {
        let position = self.plan.position(self.state.step);
        if self.epoch.as_ref().map(|(epoch, _)| *epoch) != Some(position.epoch) {
            self.epoch = Some((position.epoch, self.order.epoch(position.epoch)));
        }
        let steps = self.epoch.as_mut().map(|(_, steps)| steps);
        steps
            .and_then(|steps| steps.get_mut(position.step_in_epoch as usize))
            .map(std::mem::take)
            .unwrap_or_default()
    }

    fn take_step(&mut self) -> Result<StepReport, TrainerError> {
        let batches = self.next_batches();
        let rate = self.rate(self.state.step + 1);
        self.learner.objective = self.stages.at(self.state.step, self.plan.steps).clone();
        let draw = AnchorDraw {
            seed: self.settings.train.seed,
            step: self.state.step,
        };
        let report = self
            .learner
            .step(&batches, self.rows, self.source, rate, draw)?;
        let counters = self.state.counters;
        let position = self.plan.position(self.state.step + 1);
        self.state.step += 1;
        self.state.epoch = position.epoch;
        self.state.step_in_epoch = position.step_in_epoch;
        self.state.counters = counted(counters, &report);
        Ok(report)
    }

    fn rate(&self, step: u64) -> f64 {
        learning_rate(self.settings.optimizer, step, self.plan.steps)
    }

    /// Validates on a copy without gradient graph, so that nothing of it reaches the training.
    fn validate_if_due(&mut self) -> Result<Option<Validation>, TrainerError> {
        let due = self.is_due(self.settings.train.validate_every);
        let Some(validator) = self.validator.as_deref_mut().filter(|_| due) else {
            return Ok(None);
        };
        let validation = validator.validate(&self.learner.drafter.valid())?;
        self.observer.validation(self.state.step, &validation);
        Ok(Some(validation))
    }

    /// Whether something done every `interval` steps, and at the end, is due now.
    fn is_due(&self, interval: u64) -> bool {
        self.is_finished() || (interval > 0 && self.state.step.is_multiple_of(interval))
    }

    fn log(
        &mut self,
        report: &StepReport,
        elapsed: Duration,
        validation: Option<&Validation>,
    ) -> Result<(), TrainerError> {
        self.speed.add(report.tokens, elapsed);
        let mut record = StepRecord::new(report, &self.state, elapsed, validation);
        record.epoch = self.plan.position(self.state.step - 1).epoch + 1;
        record.learning_rate = self.rate(self.state.step);
        if let Some(warning) = self.log.record(&record)? {
            self.observer.notice(&warning);
        }
        if self.is_due(self.settings.train.log_every) {
            self.log.flush()?;
        }
        self.observer.step(&Progress {
            step: self.state.step,
            total: self.plan.steps,
            epoch: record.epoch,
            loss: record.loss,
            alpha: record.depths.first().and_then(|depth| depth.alpha),
            learning_rate: record.learning_rate,
            tokens_per_second: self.speed.tokens_per_second(),
        });
        Ok(())
    }

    fn refuse_to_diverge(&mut self, report: &StepReport) -> Result<(), TrainerError> {
        let Update::Skipped { tensor } = &report.update else {
            return Ok(());
        };
        let step = self.state.step;
        self.observer.notice(&format!(
            "step {step} left the parameters unchanged: the gradient of `{tensor}` is not finite"
        ));
        let count = self.state.counters.consecutive_skips;
        if count < MAX_CONSECUTIVE_SKIPS {
            return Ok(());
        }
        self.log.flush()?;
        Err(TrainerError::NonFiniteGradient {
            tensor: tensor.clone(),
            count,
            step,
        })
    }

    fn save_if_due(&mut self, validation: Option<&Validation>) -> Result<(), TrainerError> {
        let step = self.state.step;
        let is_best = validation.is_some_and(|new| {
            new.score.is_finite() && self.state.best.is_none_or(|best| new.score > best.score)
        });
        if let Some(validation) = validation.filter(|_| is_best) {
            self.state.best = Some(Best {
                step,
                score: validation.score,
            });
        }
        if is_best || self.is_due(self.settings.train.checkpoint_every) {
            self.save()?;
        }
        if is_best {
            checkpoint::point(&self.root, checkpoint::BEST, step)?;
        }
        Ok(())
    }

    fn save(&mut self) -> Result<(), TrainerError> {
        // The log is ahead of the checkpoint, never behind: a resumed run can only cut it back.
        self.log.flush()?;
        let step = self.state.step;
        let card = DrafterCard {
            step,
            ..self.identity.card.clone()
        };
        let Learner {
            drafter, optimizer, ..
        } = &self.learner;
        let folder = checkpoint::save(&self.root, drafter, optimizer, &card, self.state.clone())?;
        let best = self.state.best.map(|best| best.step);
        checkpoint::prune(&self.root, self.settings.train.keep_checkpoints, best)?;
        self.saved = Some(step);
        self.observer.checkpoint(step, &folder);
        Ok(())
    }

    fn end(mut self) -> Result<Outcome, TrainerError> {
        if self.state.step > 0 && self.saved != Some(self.state.step) {
            self.save()?;
        }
        self.log.flush()?;
        let summary = Summary {
            step: self.state.step,
            total: self.plan.steps,
            counters: self.state.counters,
            best: self.state.best,
            checkpoint: self
                .saved
                .map(|step| self.root.join(checkpoint::name(step))),
        };
        Ok(if self.is_finished() {
            Outcome::Finished(summary)
        } else {
            Outcome::Interrupted(summary)
        })
    }
}

/// Prepares the run folder; the first moment at which anything is written.
fn open_folder(
    settings: &RunSettings<'_>,
    completed: u64,
    observer: &mut dyn Observer,
) -> Result<(PathBuf, RunLog), TrainerError> {
    let root = settings.folder.join(checkpoint::FOLDER);
    checkpoint::remove_leftovers(&root)?;
    let (log, notices) = RunLog::open(settings.folder, settings.log, completed)?;
    for notice in notices {
        observer.notice(&notice);
    }
    Ok((root, log))
}

fn counted(before: Counters, report: &StepReport) -> Counters {
    let skipped = u64::from(matches!(report.update, Update::Skipped { .. }));
    Counters {
        tokens: before.tokens + report.tokens,
        slots: before.slots + report.slots(),
        empty_batches: before.empty_batches + report.empty_batches,
        empty_steps: before.empty_steps + u64::from(report.update == Update::Empty),
        skipped_steps: before.skipped_steps + skipped,
        consecutive_skips: skipped * (before.consecutive_skips + 1),
    }
}

/// Speed, smoothed over recent steps.
#[derive(Default)]
struct Speed {
    tokens: f64,
    seconds: f64,
}

impl Speed {
    /// Share of the past that counts after each further step.
    const MEMORY: f64 = 0.95;

    fn add(&mut self, tokens: u64, elapsed: Duration) {
        self.tokens = self.tokens * Self::MEMORY + tokens as f64;
        self.seconds = self.seconds * Self::MEMORY + elapsed.as_secs_f64();
    }

    fn tokens_per_second(&self) -> f64 {
        self.tokens / self.seconds.max(1e-9)
    }
}
