//! What the trainer is given beside rows and states: a validator and an observer.

use std::path::Path;
use std::sync::Arc;

use draftsmith_data::hidden::HiddenStateSource;
use draftsmith_eval::calibration::{Calibration, calibrate};
use draftsmith_eval::error::EvalError;
use draftsmith_eval::exact::{Candidate, ExactReport, ExactSettings, exact};
use draftsmith_eval::verify::{self, Greedy, SpeculativeSampling, VerifyRule};
use draftsmith_models::batch::TokenRow;
use draftsmith_models::checkpoint::DrafterCard;
use draftsmith_models::drafter::AnyDrafter;
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetEnds;
use draftsmith_models::vocab::VocabMap;
use draftsmith_trainer::Summary;
use draftsmith_trainer::error::PartError;
use draftsmith_trainer::observe::{Observer, Progress as StepProgress};
use draftsmith_trainer::order::Plan;
use draftsmith_trainer::parts::{Validation, Validator};

use crate::console::Console;
use crate::progress::Progress;
use crate::run_file::DrafterRun;
use crate::session::Session;

/// The exact evaluator on the validation rows.
pub(crate) struct ExactValidator<'a> {
    source: Box<dyn HiddenStateSource + 'a>,
    ends: &'a TargetEnds,
    vocab: VocabMap,
    rows: Vec<TokenRow>,
    settings: ExactSettings,
}

impl<'a> ExactValidator<'a> {
    /// A validator, unless no row was set aside.
    pub(crate) fn new(
        session: &'a Session,
        drafter: &DrafterRun,
        rows: Vec<TokenRow>,
        card: &DrafterCard,
    ) -> anyhow::Result<Option<Self>> {
        if rows.is_empty() {
            session
                .console()
                .warn("no validation row was set aside: the newest checkpoint counts as the best");
            return Ok(None);
        }
        let settings = exact_settings(session, drafter);
        if !settings.text_matches_rule() {
            session.console().warn(&format!(
                "validation at temperature {} reads text that was not drawn so, or nobody says how: its tau \
                 compares checkpoints but is not that of decoding; set `data.text_temperature`",
                settings.sampling.temperature
            ));
        }
        Ok(Some(Self {
            source: super::capture::source(session, &card.aux_layer_ids)?,
            ends: session.target()?.ends(),
            vocab: card.vocab.clone(),
            rows,
            settings,
        }))
    }
}

/// Temperature and truncation are those of the text, because the evaluator is exact on text drawn as it decodes; of
/// text drawn nobody knows how, the temperature of the objective. Checkpoints
/// are compared under `sampling`, whatever rule a report measures.
fn exact_settings(session: &Session, drafter: &DrafterRun) -> ExactSettings {
    let objective = session.run_file().objective_of(drafter);
    let text = super::regenerate::text_sampling(session);
    let sampling = text.unwrap_or(Sampling::at(objective.temperature));
    let rule: &dyn VerifyRule = if sampling.is_greedy() {
        &Greedy
    } else {
        &SpeculativeSampling
    };
    ExactSettings {
        rule,
        sampling,
        text,
        chunk_positions: objective.chunk_positions,
        ..ExactSettings::default()
    }
}

impl ExactValidator<'_> {
    /// The whole report under the rule of that name, with an interval from `resamples` resamples. A rule that does not fit
    /// the text, or does not judge each draft by itself, gives way to `sampling`, which bounds the latter from below.
    pub(crate) fn report_of(
        &self,
        rule: &str,
        drafter: &AnyDrafter,
        calibration: Option<&Calibration>,
        resamples: usize,
    ) -> Result<ExactReport, EvalError> {
        let rule = verify::for_sampling(rule, &self.settings.sampling).ok();
        let rule = rule.filter(|rule| rule.realised().is_some());
        let settings = ExactSettings {
            rule: rule.unwrap_or(&SpeculativeSampling),
            resamples,
            ..self.settings
        };
        let candidate = Candidate {
            calibration,
            ..self.candidate(drafter)
        };
        exact(candidate, self.source.as_ref(), &self.rows, &settings)
    }

    /// How drafts are drawn best, for the text's own temperature and truncation; `goes_on` is asked between batches.
    pub(crate) fn calibrate(
        &self,
        drafter: &AnyDrafter,
        goes_on: impl Fn() -> bool,
    ) -> Result<Calibration, EvalError> {
        let candidate = self.candidate(drafter);
        calibrate(candidate, &self.rows, &self.settings, |tokens| {
            if !goes_on() {
                return Err(EvalError::Interrupted);
            }
            Ok(self.source.states(tokens)?)
        })
    }

    fn candidate<'a>(&'a self, drafter: &'a AnyDrafter) -> Candidate<'a> {
        Candidate {
            drafter,
            ends: self.ends,
            vocab: &self.vocab,
            calibration: None,
        }
    }
}

impl Validator for ExactValidator<'_> {
    fn validate(&mut self, drafter: &AnyDrafter) -> Result<Validation, PartError> {
        let settings = ExactSettings {
            resamples: 0,
            ..self.settings
        };
        let candidate = self.candidate(drafter);
        let report = exact(candidate, self.source.as_ref(), &self.rows, &settings);
        let report = report.map_err(PartError::new)?;
        let taus = report
            .by_gamma
            .iter()
            .map(|entry| (format!("tau_gamma_{}", entry.gamma), entry.tau));
        let accepted = report.acceptance_by_depth.iter().enumerate();
        let accepted = accepted
            .filter_map(|(depth, share)| Some((format!("acceptance/depth_{depth}"), (*share)?)));
        Ok(Validation {
            figures: taus.chain(accepted).collect(),
            score: report.tau(),
        })
    }
}

/// Shows a training run as a bar or as lines.
pub(super) struct BarObserver<'a> {
    console: &'a Console,
    family: Arc<str>,
    bar: Option<Progress<'a>>,
}

impl<'a> BarObserver<'a> {
    /// An observer of the training of one family.
    pub(super) fn new(console: &'a Console, family: &str) -> Self {
        Self {
            console,
            family: Arc::from(family),
            bar: None,
        }
    }

    /// Ends with a line on the whole run.
    pub(super) fn finish(self, summary: &Summary) {
        if let Some(bar) = self.bar {
            bar.finish(summary.step);
        }
        if let Some(best) = summary.best {
            self.console.say(&format!(
                "train {}: best validation tau {:.3} after step {}",
                self.family, best.score, best.step
            ));
        }
    }
}

impl Observer for BarObserver<'_> {
    fn plan(&mut self, plan: &Plan) {
        let label = format!("train {}", self.family);
        self.console.say(&format!(
            "{label}: {} rows, {} tokens an epoch, {} steps",
            plan.rows, plan.tokens_per_epoch, plan.steps
        ));
        self.bar = Some(Progress::new(
            self.console,
            label,
            Some(plan.steps),
            "steps",
        ));
    }

    fn step(&mut self, progress: &StepProgress) {
        let figure = |value: Option<f64>| value.map_or("-".to_owned(), |x| format!("{x:.3}"));
        let note = format!(
            "loss {}, acceptance {}, {:.0} tok/s",
            figure(progress.loss),
            figure(progress.alpha),
            progress.tokens_per_second
        );
        if let Some(bar) = &self.bar {
            bar.begin(progress.step - 1);
            bar.set_with(progress.step, &note);
        }
    }

    fn validation(&mut self, step: u64, validation: &Validation) {
        self.console.say(&format!(
            "train {}: step {step}, validation tau {:.3}",
            self.family, validation.score
        ));
    }

    fn checkpoint(&mut self, step: u64, path: &Path) {
        self.console.detail(&format!(
            "train {}: step {step} saved in `{}`",
            self.family,
            path.display()
        ));
    }

    fn notice(&mut self, message: &str) {
        self.console.warn(message);
    }
}
