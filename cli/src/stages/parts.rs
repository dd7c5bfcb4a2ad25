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
use draftsmith_models::objective::ObjectiveConfig;
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetEnds;
use draftsmith_models::vocab::VocabMap;
use draftsmith_trainer::Summary;
use draftsmith_trainer::error::PartError;
use draftsmith_trainer::observe::{Observer, Progress as StepProgress};
use draftsmith_trainer::order::Plan;
use draftsmith_trainer::parts::{Validation, Validator};

use super::ValidationText;
use crate::console::Console;
use crate::progress::Progress;
use crate::run_file::DrafterRun;
use crate::session::Session;

/// The exact evaluator on the validation texts.
pub(crate) struct ExactValidator<'a> {
    source: Box<dyn HiddenStateSource + 'a>,
    ends: &'a TargetEnds,
    vocab: VocabMap,
    texts: Vec<MeasuredText>,
}

/// A text with the settings under which the evaluator is exact on it.
pub(crate) struct MeasuredText {
    rows: Vec<TokenRow>,
    settings: ExactSettings,
}

impl MeasuredText {
    /// Number of rows.
    pub(crate) fn num_rows(&self) -> usize {
        self.rows.len()
    }
}

impl<'a> ExactValidator<'a> {
    /// A validator, unless no row was set aside.
    pub(crate) fn new(
        session: &'a Session,
        drafter: &DrafterRun,
        texts: Vec<ValidationText>,
        card: &DrafterCard,
    ) -> anyhow::Result<Option<Self>> {
        if texts.is_empty() {
            session
                .console()
                .warn("no validation row was set aside: the newest checkpoint counts as the best");
            return Ok(None);
        }
        let objective = session.run_file().objective_of(drafter);
        let texts = texts.into_iter().map(|text| {
            let settings = exact_settings(objective, text.sampling);
            if !settings.text_matches_rule() {
                session.console().warn(&format!(
                    "validation at temperature {} reads text of which nobody says how it was drawn: its tau \
                     compares checkpoints but is not that of decoding; set `data.text_temperature`",
                    settings.sampling.temperature
                ));
            }
            MeasuredText {
                rows: text.rows,
                settings,
            }
        });
        Ok(Some(Self {
            texts: texts.collect(),
            source: super::capture::source(session, &card.aux_layer_ids)?,
            ends: session.target()?.ends(),
            vocab: card.vocab.clone(),
        }))
    }
}

/// Temperature and truncation are those of the text, because the evaluator is exact on text drawn as it decodes; of
/// text drawn nobody knows how, the temperature of the objective. Checkpoints
/// are compared under `sampling`, whatever rule a report measures.
fn exact_settings(objective: &ObjectiveConfig, text: Option<Sampling>) -> ExactSettings {
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
    /// The texts, that of training first.
    pub(crate) fn texts(&self) -> &[MeasuredText] {
        &self.texts
    }

    /// The first text that was drawn, because drafts of greedy text are not; else the first one.
    pub(crate) fn drawn_text(&self) -> &MeasuredText {
        let mut texts = self.texts.iter();
        let drawn = texts.find(|text| !text.settings.sampling.is_greedy());
        drawn.unwrap_or(&self.texts[0])
    }

    /// The whole report on a text under the rule of that name, with an interval from `resamples` resamples. A rule that
    /// does not fit the text, or does not judge each draft by itself, gives way to `sampling`, which bounds the latter from below.
    pub(crate) fn report_of(
        &self,
        text: &MeasuredText,
        rule: &str,
        drafter: &AnyDrafter,
        calibration: Option<&Calibration>,
        resamples: usize,
    ) -> Result<ExactReport, EvalError> {
        let rule = verify::for_sampling(rule, &text.settings.sampling).ok();
        let rule = rule.filter(|rule| rule.realised().is_some());
        let settings = ExactSettings {
            rule: rule.unwrap_or(&SpeculativeSampling),
            resamples,
            ..text.settings
        };
        let candidate = Candidate {
            calibration,
            ..self.candidate(drafter)
        };
        exact(candidate, self.source.as_ref(), &text.rows, &settings)
    }

    /// How drafts are drawn best, for the text's own temperature and truncation; `goes_on` is asked between batches.
    pub(crate) fn calibrate(
        &self,
        text: &MeasuredText,
        drafter: &AnyDrafter,
        goes_on: impl Fn() -> bool,
    ) -> Result<Calibration, EvalError> {
        let candidate = self.candidate(drafter);
        calibrate(candidate, &text.rows, &text.settings, |tokens| {
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
    /// Figures of the first text under their own names, those of others behind the label of their sampling; the score
    /// is the mean tau of all texts, each as it was drawn.
    fn validate(&mut self, drafter: &AnyDrafter) -> Result<Validation, PartError> {
        let mut figures = Vec::new();
        let mut sum = 0.0;
        for (place, text) in self.texts.iter().enumerate() {
            let settings = ExactSettings {
                resamples: 0,
                ..text.settings
            };
            let candidate = self.candidate(drafter);
            let report = exact(candidate, self.source.as_ref(), &text.rows, &settings);
            let report = report.map_err(PartError::new)?;
            sum += report.tau();
            let label = settings.sampling.label();
            figures.extend(named_figures(&report).map(|(name, figure)| match place {
                0 => (name, figure),
                _ => (format!("{label}/{name}"), figure),
            }));
        }
        Ok(Validation {
            figures,
            score: sum / self.texts.len() as f64,
        })
    }
}

fn named_figures(report: &ExactReport) -> impl Iterator<Item = (String, f64)> {
    let taus = report
        .by_gamma
        .iter()
        .map(|entry| (format!("tau_gamma_{}", entry.gamma), entry.tau));
    let accepted = report.acceptance_by_depth.iter().enumerate();
    let accepted = accepted
        .filter_map(|(depth, share)| Some((format!("acceptance/depth_{depth}"), (*share)?)));
    taus.chain(accepted)
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
