//! [`run`]: every suite at every temperature with every proposer.

use draftsmith_models::drafter::AnyDrafter;
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;

use crate::acceptance::{Acceptance, mean_tau_of_sequences};
use crate::bootstrap::ratio_interval;
use crate::config::EvalConfig;
use crate::decode::{
    DecodeOutput, DecodeProgress, DecodeSettings, Decoder, Sequence, SequenceRecord,
    check_sequences, decode,
};
use crate::error::EvalError;
use crate::exact::{Candidate, ExactTau};
use crate::lossless::compare_text;
use crate::produced::Decoded;
use crate::propose::{
    DrafterProposer, MODEL, ModelProposer, NoProposer, PromptLookup, Proposer, SuffixLookup,
};
use crate::report::{Entry, PromptFigures};
use crate::verify::{self, VerifyRule};

/// Bootstrap resamples of the intervals in a report.
const RESAMPLES: usize = 1000;

/// Prompts that are reported together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suite {
    /// Name in the report.
    pub name: String,
    /// Rendered and tokenised prompts.
    pub prompts: Vec<Sequence>,
}

/// A trained drafter with its name in the report.
#[derive(Clone, Debug)]
pub struct NamedDrafter<'a> {
    /// Name in the report.
    pub name: String,
    /// The drafter, on a device without gradient tracking.
    pub drafter: &'a AnyDrafter,
    /// Its draft vocabulary.
    pub vocab: &'a VocabMap,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct SuiteRun<'a> {
    /// The frozen target.
    pub target: &'a TargetModel,
    /// Tokens that end a continuation.
    pub stop_ids: &'a [u32],
    /// The suites.
    pub suites: &'a [Suite],
    /// Trained drafters, beside the baselines of the settings.
    pub drafters: &'a [NamedDrafter<'a>],
    /// The model of the baseline `model`.
    pub draft_model: Option<&'a TargetModel>,
    /// `[eval]`.
    pub config: &'a EvalConfig,
}

/// How far a run is.
#[derive(Clone, Debug)]
pub struct RunProgress<'a> {
    /// Suite being decoded.
    pub suite: &'a str,
    /// Its temperature.
    pub temperature: f64,
    /// Its proposer.
    pub proposer: &'a str,
    /// Decodes finished before this one.
    pub decodes_done: usize,
    /// Decodes in all.
    pub decodes: usize,
    /// Sequences of the decodes before this one.
    pub sequences_done: usize,
    /// Progress of this one.
    pub decode: DecodeProgress,
}

/// Runs everything and returns one entry for each suite, temperature and proposer, in that order.
///
/// Plain decoding is always run where the text does not depend on the drafts, to be compared with it; it is
/// reported when `none` is among the baselines. `progress` may end the run by returning false.
///
/// # Errors
/// [`EvalError`] before any decoding when a setting or prompt does not fit; [`EvalError::Interrupted`].
pub fn run(
    input: &SuiteRun<'_>,
    progress: &mut dyn FnMut(&RunProgress<'_>) -> bool,
) -> Result<Vec<Entry>, EvalError> {
    input.config.validate()?;
    for suite in input.suites {
        let settings = input.settings(0.0, input.config.gamma);
        check_sequences(input.target, &settings, &suite.prompts)?;
    }
    for &temperature in &input.config.temperatures {
        input.rule(temperature)?;
    }
    let mut runner = Runner {
        input,
        progress,
        decodes_done: 0,
        sequences_done: 0,
        entries: Vec::new(),
    };
    for suite in input.suites {
        for &temperature in &input.config.temperatures {
            runner.measure(suite, temperature)?;
        }
    }
    Ok(runner.entries)
}

impl<'a> SuiteRun<'a> {
    fn rule(&self, temperature: f64) -> Result<&'static dyn VerifyRule, EvalError> {
        verify::for_sampling(&self.config.rule, &self.config.sampling(temperature))
    }

    fn settings(&self, temperature: f64, gamma: usize) -> DecodeSettings {
        DecodeSettings {
            sampling: self.config.sampling(temperature),
            gamma,
            max_new_tokens: self.config.max_new_tokens,
            stop_ids: self.stop_ids.to_vec(),
            batch_rows: self.config.batch_rows,
            seed: self.config.seed,
        }
    }

    fn needs_plain(&self, temperature: f64) -> bool {
        let rule = self.rule(temperature);
        self.config.has_baseline("none") || rule.is_ok_and(VerifyRule::is_drafter_invariant)
    }

    /// Everything that drafts: the baselines asked for, then the trained drafters.
    fn proposers(&self) -> Result<Vec<MeasuredProposer<'a>>, EvalError> {
        let mut proposers: Vec<MeasuredProposer<'a>> = Vec::new();
        if self.config.has_baseline("prompt_lookup") {
            let lookup = PromptLookup::new(self.config.lookup());
            proposers.push((Box::new(lookup), None));
        }
        if self.config.has_baseline("suffix") {
            let lookup = SuffixLookup::new(self.config.suffix_min);
            proposers.push((Box::new(lookup), None));
        }
        if let Some(model) = self.draft_model {
            let proposer = ModelProposer::new(model, self.target.spec().vocab_size)?;
            proposers.push((Box::new(proposer), None));
        }
        for named in self.drafters {
            let candidate = Candidate {
                drafter: named.drafter,
                ends: self.target.ends(),
                vocab: named.vocab,
            };
            let name = named.name.clone();
            let proposer = DrafterProposer::new(name, named.drafter, candidate.ends, named.vocab);
            proposers.push((Box::new(proposer), Some(candidate)));
        }
        Ok(proposers)
    }

    /// Sequences that [`run`] decodes, over all suites, temperatures and proposers.
    pub fn num_sequences(&self) -> usize {
        let prompts: usize = self.suites.iter().map(|suite| suite.prompts.len()).sum();
        self.decodes_per_suite() * prompts
    }

    fn decodes_per_suite(&self) -> usize {
        let is_asked = |name: &&str| self.config.has_baseline(name);
        let baselines = ["prompt_lookup", "suffix", MODEL]
            .iter()
            .filter(|name| is_asked(name));
        let drafting = self.drafters.len() + baselines.count();
        let plain = |t: &&f64| self.needs_plain(**t);
        let plain = self.config.temperatures.iter().filter(plain).count();
        plain + drafting * self.config.temperatures.len()
    }
}

/// What drafts, and the drafter behind it where it is a trained one.
type MeasuredProposer<'a> = (Box<dyn Proposer + 'a>, Option<Candidate<'a>>);

struct Runner<'a, 'p> {
    input: &'a SuiteRun<'a>,
    progress: &'p mut dyn FnMut(&RunProgress<'_>) -> bool,
    decodes_done: usize,
    sequences_done: usize,
    entries: Vec<Entry>,
}

impl Runner<'_, '_> {
    fn measure(&mut self, suite: &Suite, temperature: f64) -> Result<(), EvalError> {
        let input = self.input;
        let mut plain = None;
        if input.needs_plain(temperature) {
            let settings = input.settings(temperature, 0);
            let output = self.decode(suite, &settings, &mut NoProposer)?;
            if input.config.has_baseline("none") {
                let entry = self.entry(suite, &settings, "none", &output)?;
                self.entries.push(Entry {
                    speed_up: Some(1.0),
                    ..entry
                });
            }
            plain = Some(output);
        }
        for (mut proposer, candidate) in input.proposers()? {
            let settings = input.settings(temperature, input.config.gamma);
            let output = self.decode(suite, &settings, proposer.as_mut())?;
            let mut entry = self.entry(suite, &settings, proposer.name(), &output)?;
            if let Some(candidate) = candidate {
                let exact = self.exact(suite, &settings, candidate, &output)?;
                let rounds = entry.counts.rounds as f64;
                entry.rounds_z = exact.and_then(|exact| exact.z(rounds));
                entry.exact = exact;
            }
            if let Some(plain) = &plain {
                let plain_speed = speed(plain);
                entry.speed_up = (plain_speed > 0.0).then(|| entry.tokens_per_second / plain_speed);
                entry.lossless = input.rule(temperature)?.is_drafter_invariant().then(|| {
                    let tolerance = input.config.near_tie_tolerance;
                    compare_text(&plain.records, &output.records, tolerance)
                });
            }
            self.entries.push(entry);
        }
        Ok(())
    }

    fn decode(
        &mut self,
        suite: &Suite,
        settings: &DecodeSettings,
        proposer: &mut dyn Proposer,
    ) -> Result<DecodeOutput, EvalError> {
        let input = self.input;
        let decoder = Decoder {
            target: input.target,
            rule: input.rule(settings.sampling.temperature)?,
            settings,
        };
        let name = proposer.name().to_owned();
        let decodes = input.suites.len() * input.decodes_per_suite();
        let (decodes_done, sequences_done) = (self.decodes_done, self.sequences_done);
        let mut report = |decode: DecodeProgress| {
            (self.progress)(&RunProgress {
                suite: &suite.name,
                temperature: settings.sampling.temperature,
                proposer: &name,
                decodes_done,
                decodes,
                sequences_done,
                decode,
            })
        };
        let output = decode(&decoder, proposer, &suite.prompts, &mut report)?;
        self.decodes_done += 1;
        self.sequences_done += suite.prompts.len();
        Ok(output)
    }

    /// What the exact evaluator expects on the text that a drafter helped to produce.
    fn exact(
        &mut self,
        suite: &Suite,
        settings: &DecodeSettings,
        candidate: Candidate<'_>,
        output: &DecodeOutput,
    ) -> Result<Option<ExactTau>, EvalError> {
        let input = self.input;
        let decoded = Decoded {
            target: input.target,
            rule: input.rule(settings.sampling.temperature)?,
            sampling: settings.sampling,
            gamma: settings.gamma,
            seed: settings.seed,
            resamples: RESAMPLES,
        };
        let decodes = input.suites.len() * input.decodes_per_suite();
        let total = suite.prompts.len();
        let at = RunProgress {
            suite: &suite.name,
            temperature: settings.sampling.temperature,
            proposer: "exact evaluation",
            decodes_done: self.decodes_done - 1, // it belongs to the decode before
            decodes,
            sequences_done: self.sequences_done,
            decode: DecodeProgress {
                tokens: 0,
                finished: 0,
                total,
            },
        };
        decoded.exact(candidate, &suite.prompts, &output.records, &mut || {
            (self.progress)(&at)
        })
    }

    fn entry(
        &self,
        suite: &Suite,
        settings: &DecodeSettings,
        proposer: &str,
        output: &DecodeOutput,
    ) -> Result<Entry, EvalError> {
        let counts = Acceptance::new(&output.records, settings.gamma);
        let rule = self.input.rule(settings.sampling.temperature)?;
        let prompts: Vec<PromptFigures> = output.records.iter().map(prompt_figures).collect();
        let pairs: Vec<(f64, f64)> = prompts.iter().map(PromptFigures::pair).collect();
        Ok(Entry {
            suite: suite.name.clone(),
            temperature: settings.sampling.temperature,
            proposer: proposer.to_owned(),
            rule: rule.name().to_owned(),
            gamma: settings.gamma,
            batch_rows: settings.batch_rows,
            tau: counts.tau(),
            tau_interval: ratio_interval(&pairs, RESAMPLES, settings.seed),
            exact: None,
            rounds_z: None,
            tau_mean_of_prompts: mean_tau_of_sequences(&output.records),
            engine_length: counts.engine_length(),
            acceptance_by_depth: counts.acceptance_by_depth(),
            survival_by_depth: counts.survival_by_depth(),
            prompts,
            tokens_per_second: speed(output),
            speed_up: None,
            time: output.time,
            lossless: None,
            counts,
        })
    }
}

fn prompt_figures(record: &SequenceRecord) -> PromptFigures {
    let tokens: usize = record.rounds.iter().map(|round| round.committed).sum();
    PromptFigures {
        id: record.id.clone(),
        tokens: tokens as u64,
        rounds: record.rounds.len() as u64,
    }
}

/// Tokens committed in rounds per second of rounds; 0 when there was no round.
fn speed(output: &DecodeOutput) -> f64 {
    let records = output.records.iter();
    let tokens: u64 = records.map(|record| prompt_figures(record).tokens).sum();
    let seconds = output.time.rounds();
    if seconds > 0.0 {
        tokens as f64 / seconds
    } else {
        0.0
    }
}
