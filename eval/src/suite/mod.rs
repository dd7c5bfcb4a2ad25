//! [`run`]: every suite at every temperature, by every rule, with every number of drafts and every proposer.

mod plan;

use draftsmith_models::drafter::AnyDrafter;
use draftsmith_models::rng::stable_hash;
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;

use self::plan::{Cell, Source};
use crate::acceptance::{Acceptance, mean_tau_of_sequences};
use crate::bootstrap::ratio_interval;
use crate::calibration::Calibration;
use crate::category::{by_category, by_conversation};
use crate::config::EvalConfig;
use crate::decode::{
    DecodeOutput, DecodeProgress, Decoder, Sequence, SequenceRecord, TimeSplit, check_sequences,
    decode,
};
use crate::error::EvalError;
use crate::lossless::compare_text;
use crate::parts::{Part, Parts};
use crate::produced::Decoded;
use crate::propose::{NoProposer, Proposer};
use crate::report::{Entry, PromptFigures};

/// Bootstrap resamples of the intervals in a report.
const RESAMPLES: usize = 1000;

/// Prompts that are reported together.
#[derive(Clone, Debug, PartialEq)]
pub struct Suite {
    /// Name in the report.
    pub name: String,
    /// Rendered and tokenised prompts.
    pub prompts: Vec<Sequence>,
    /// Where each of them comes from, in the same order.
    pub origins: Vec<Origin>,
    /// The one temperature that it is decoded at, where prompts hold answers drawn at it; unset means all.
    pub temperature: Option<f64>,
}

/// Where a prompt comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Its conversation; prompts of one conversation hang together.
    pub conversation: String,
    /// What kind of prompt it is.
    pub category: Option<String>,
}

impl Suite {
    /// Prompts that each stand for themselves, at every temperature.
    pub fn of_prompts(name: impl Into<String>, prompts: Vec<Sequence>) -> Self {
        let origins = prompts.iter().map(|prompt| Origin {
            conversation: prompt.id.clone(),
            category: None,
        });
        Self {
            name: name.into(),
            origins: origins.collect(),
            prompts,
            temperature: None,
        }
    }
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
    /// How its drafts are drawn, if it was calibrated.
    pub calibration: Option<&'a Calibration>,
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

/// Runs everything and returns one entry for each suite, temperature, batch, rule, gamma and proposer, in that order.
///
/// Plain decoding is always run where the text does not depend on the drafts, to be compared with it; it is
/// reported when `none` is among the baselines. Decodes found in `parts` are not repeated, finished ones are kept there.
/// `progress` may end the run by returning false.
///
/// # Errors
/// [`EvalError`] before any decoding when a setting or prompt does not fit; [`EvalError::Interrupted`].
pub fn run(
    input: &SuiteRun<'_>,
    parts: &Parts,
    progress: &mut dyn FnMut(&RunProgress<'_>) -> bool,
) -> Result<Vec<Entry>, EvalError> {
    input.config.validate()?;
    let cells = input.cells()?;
    for cell in &cells {
        let settings = input.settings(cell);
        check_sequences(input.target, &settings, &cell.suite.prompts)?;
        if let (Source::Model, Some(model)) = (cell.source, input.draft_model) {
            check_sequences(model, &settings, &cell.suite.prompts)?;
        }
    }
    let mut runner = Runner {
        input,
        parts,
        progress,
        decodes: cells.len(),
        decodes_done: 0,
        sequences_done: 0,
        plain: Vec::new(),
        entries: Vec::new(),
    };
    for cell in &cells {
        runner.measure(cell)?;
    }
    Ok(runner.entries)
}

impl SuiteRun<'_> {
    /// Sequences that [`run`] decodes, over all suites, temperatures, rules, gammas and proposers.
    ///
    /// # Errors
    /// [`EvalError::Setting`] when a rule does not fit a temperature.
    pub fn num_sequences(&self) -> Result<usize, EvalError> {
        let cells = self.cells()?;
        Ok(cells.iter().map(|cell| cell.suite.prompts.len()).sum())
    }
}

impl SuiteRun<'_> {
    fn decode(
        &self,
        cell: &Cell<'_>,
        proposer: &mut dyn Proposer,
        progress: &mut dyn FnMut(DecodeProgress) -> bool,
    ) -> Result<DecodeOutput, EvalError> {
        let settings = self.settings(cell);
        let decoder = Decoder {
            target: self.target,
            rule: cell.rule,
            settings: &settings,
        };
        decode(&decoder, proposer, &cell.suite.prompts, progress)
    }

    /// Decodes again as often as the settings say, in turn with plain decoding; the mean times of a decode of both.
    fn time_in_turn(
        &self,
        cell: &Cell<'_>,
        proposer: &mut dyn Proposer,
        progress: &mut dyn FnMut(DecodeProgress) -> bool,
    ) -> Result<Option<(TimeSplit, Option<TimeSplit>)>, EvalError> {
        let repeats = self.config.timing_repeats;
        if repeats == 0 {
            return Ok(None);
        }
        let has_plain = !cell.is_plain() && self.is_compared(cell.rule);
        let (mut own, mut plain) = (TimeSplit::default(), TimeSplit::default());
        for _ in 0..repeats {
            if has_plain {
                let without = cell.without_drafts(cell.rule);
                plain.add(&self.decode(&without, &mut NoProposer, progress)?.time);
            }
            own.add(&self.decode(cell, proposer, progress)?.time);
        }
        let plain = has_plain.then(|| plain.of_each(repeats));
        Ok(Some((own.of_each(repeats), plain)))
    }
}

/// Plain decoding that later entries of the same suite and temperature are compared with.
struct Plain {
    suite: String,
    temperature: f64,
    rule: &'static str,
    records: Vec<SequenceRecord>,
    batch_rows: usize,
    tokens: u64,
    speed: f64,
}

struct Runner<'a, 'p> {
    input: &'a SuiteRun<'a>,
    parts: &'a Parts,
    progress: &'p mut dyn FnMut(&RunProgress<'_>) -> bool,
    decodes: usize,
    decodes_done: usize,
    sequences_done: usize,
    plain: Vec<Plain>,
    entries: Vec<Entry>,
}

impl Runner<'_, '_> {
    fn measure(&mut self, cell: &Cell<'_>) -> Result<(), EvalError> {
        let mut proposer = self.input.proposer(cell.source)?;
        let label = cell.label(proposer.name());
        let name = part_name(cell, &label);
        let part = if let Some(part) = self.parts.load(&name) {
            part
        } else {
            let part = self.decode(cell, proposer.as_mut())?;
            self.parts.save(&name, part.clone())?;
            part
        };
        self.decodes_done += 1;
        self.sequences_done += cell.suite.prompts.len();
        let mut entry = self.entry(cell, &label, &part);
        if cell.is_plain() {
            entry.speed_up = Some(1.0);
            self.plain.push(Plain {
                suite: cell.suite.name.clone(),
                temperature: cell.sampling.temperature,
                rule: cell.rule.name(),
                batch_rows: cell.batch_rows,
                tokens: entry.counts.tokens,
                speed: entry.tokens_per_second,
                records: part.records,
            });
        } else if let Some(plain) = self.plain_of(cell) {
            let in_turn = part.plain_time.map(|time| speed(plain.tokens, &time));
            let plain_speed = in_turn.unwrap_or(plain.speed);
            let speed_up = entry.tokens_per_second / plain_speed;
            entry.speed_up = (plain_speed > 0.0).then_some(speed_up);
            let tolerance = self.input.config.near_tie_tolerance;
            let is_comparable = cell.rule.is_drafter_invariant();
            entry.lossless =
                is_comparable.then(|| compare_text(&plain.records, &part.records, tolerance));
        }
        if !cell.is_plain() || self.input.config.has_baseline("none") {
            self.entries.push(entry);
        }
        Ok(())
    }

    fn plain_of(&self, cell: &Cell<'_>) -> Option<&Plain> {
        let rule = plan::plain_rule(cell.rule).name();
        self.plain.iter().find(|plain| {
            plain.suite == cell.suite.name
                && plain.temperature.to_bits() == cell.sampling.temperature.to_bits()
                && plain.rule == rule
                && plain.batch_rows == cell.batch_rows
        })
    }

    /// Decodes a cell, and asks the exact evaluator about the text where a trained drafter helped to produce it.
    fn decode(&mut self, cell: &Cell<'_>, proposer: &mut dyn Proposer) -> Result<Part, EvalError> {
        let input = self.input;
        let name = cell.label(proposer.name());
        let at = |decode, proposer| RunProgress {
            suite: &cell.suite.name,
            temperature: cell.sampling.temperature,
            proposer,
            decodes_done: self.decodes_done,
            decodes: self.decodes,
            sequences_done: self.sequences_done,
            decode,
        };
        let prompts = &cell.suite.prompts;
        let output = input.decode(cell, proposer, &mut |decode| {
            (self.progress)(&at(decode, &name))
        })?;
        let mut shown = |decode| (self.progress)(&at(decode, "timing"));
        let timed = input.time_in_turn(cell, proposer, &mut shown)?;
        let whole = DecodeProgress {
            tokens: 0,
            finished: prompts.len(),
            total: prompts.len(),
        };
        let mut goes_on = || (self.progress)(&at(whole, "exact evaluation"));
        let decoded = Decoded {
            target: input.target,
            rule: cell.rule,
            sampling: cell.sampling,
            gamma: cell.gamma,
            seed: input.config.seed,
            resamples: RESAMPLES,
        };
        // The expectation is that of chains.
        let candidate = input.candidate(cell.source).filter(|_| cell.tree.is_none());
        let judgement = decoded.judge(candidate, prompts, &output.records, &mut goes_on)?;
        Ok(Part {
            records: output.records,
            time: timed.map_or(output.time, |(own, _)| own),
            plain_time: timed.and_then(|(_, plain)| plain),
            exact: judgement.exact,
            text_z: judgement.text_z,
            outside: judgement.outside,
        })
    }

    fn entry(&self, cell: &Cell<'_>, proposer: &str, part: &Part) -> Entry {
        let counts = Acceptance::new(&part.records, cell.gamma);
        let suite = cell.suite;
        let sequences = suite.prompts.iter().zip(&suite.origins);
        let prompts: Vec<PromptFigures> = sequences
            .zip(&part.records)
            .map(|((sequence, origin), record)| prompt_figures(sequence, origin, record))
            .collect();
        let (resamples, seed) = (RESAMPLES, self.input.config.seed);
        let rounds = counts.rounds as f64;
        Entry {
            suite: cell.suite.name.clone(),
            temperature: cell.sampling.temperature,
            proposer: proposer.to_owned(),
            rule: cell.rule.name().to_owned(),
            gamma: cell.gamma,
            batch_rows: cell.batch_rows,
            tau: counts.tau(),
            tau_interval: ratio_interval(&by_conversation(&prompts), resamples, seed),
            by_category: by_category(&prompts, resamples, seed),
            exact: part.exact,
            rounds_z: part.exact.and_then(|exact| exact.z(rounds)),
            text_z: part.text_z,
            outside_truncation: part.outside,
            tau_mean_of_prompts: mean_tau_of_sequences(&part.records),
            engine_length: counts.engine_length(),
            acceptance_by_depth: counts.acceptance_by_depth(),
            // A round with a tree tells which depths it tried, not which it offered.
            survival_by_depth: match cell.tree {
                Some(_) => Vec::new(),
                None => counts.survival_by_depth(),
            },
            tokens_per_second: speed(counts.tokens, &part.time),
            prompts,
            speed_up: None,
            time: part.time,
            lossless: None,
            counts,
        }
    }
}

/// What tells a decode from all others of a run.
fn part_name(cell: &Cell<'_>, proposer: &str) -> String {
    format!(
        "{}, T={}, {}, gamma {}, batch {}, {proposer}",
        cell.suite.name,
        cell.sampling.temperature,
        cell.rule.name(),
        cell.gamma,
        cell.batch_rows
    )
}

fn prompt_figures(sequence: &Sequence, origin: &Origin, record: &SequenceRecord) -> PromptFigures {
    let tokens: usize = record.rounds.iter().map(|round| round.committed).sum();
    let ids: Vec<String> = sequence.prompt.iter().map(ToString::to_string).collect();
    PromptFigures {
        id: record.id.clone(),
        conversation: origin.conversation.clone(),
        category: origin.category.clone(),
        prompt: format!("{:016x}", stable_hash(&ids.join(" "))),
        tokens: tokens as u64,
        rounds: record.rounds.len() as u64,
    }
}

/// Tokens committed in rounds per second of rounds; 0 when there was no round.
fn speed(tokens: u64, time: &TimeSplit) -> f64 {
    let seconds = time.rounds();
    if seconds > 0.0 {
        tokens as f64 / seconds
    } else {
        0.0
    }
}
