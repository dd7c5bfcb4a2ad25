//! [`compare`]: two reports, or two proposers of one, prompt by prompt.

use serde::Serialize;

use crate::bootstrap::{Interval, paired_interval};
use crate::category::by_conversation;
use crate::error::EvalError;
use crate::report::{Entry, PromptFigures, Report};

/// Bootstrap resamples.
const RESAMPLES: usize = 2000;

/// One side of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// The report.
    pub report: &'a Report,
    /// The proposer that is compared; all that both reports have where neither side names one.
    pub proposer: Option<&'a str>,
}

/// Two entries over the same prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Suite.
    pub suite: String,
    /// Temperature.
    pub temperature: f64,
    /// Verification rule.
    pub rule: String,
    /// Drafts a round, at most.
    pub gamma: usize,
    /// Proposer on each side.
    pub proposers: [String; 2],
    /// Prompts that both sides have, with the same tokens.
    pub prompts: usize,
    /// tau on each side over these prompts.
    pub tau: [f64; 2],
    /// 95 % interval of the second tau less the first, conversations resampled in pairs.
    pub difference: Option<Interval>,
}

impl Comparison {
    /// Whether the interval of the difference leaves zero out.
    pub fn is_clear(&self) -> bool {
        self.difference
            .is_some_and(|interval| interval.low > 0.0 || interval.high < 0.0)
    }
}

/// Compares all entries of the same suite, temperature, rule and gamma.
///
/// # Errors
/// [`EvalError::Setting`] when the targets differ, a proposer is unknown, or nothing fits together.
pub fn compare(first: Side<'_>, second: Side<'_>) -> Result<Vec<Comparison>, EvalError> {
    let targets = [first, second].map(|side| &side.report.target.fingerprint);
    if targets[0] != targets[1] {
        return Err(EvalError::setting(
            format!(
                "the reports measure different targets: {} and {}",
                targets[0], targets[1]
            ),
            "tau compares drafters of one target",
        ));
    }
    for side in [first, second] {
        side.check_proposer()?;
    }
    let pairs = first.entries().flat_map(|one| {
        second
            .entries()
            .filter(move |other| is_pair((first, one), (second, other)))
            .map(move |other| (one, other))
    });
    let comparisons: Vec<Comparison> = pairs.filter_map(|(a, b)| comparison(a, b)).collect();
    if comparisons.is_empty() {
        return Err(EvalError::setting(
            "the reports have no suite, temperature, rule, gamma and proposer in common",
            "measure both with the same `[eval] suites`, `temperatures`, `rule` and `gamma`",
        ));
    }
    Ok(comparisons)
}

/// Settings in which two reports differ and which move tau, as words.
pub fn differing_settings(first: &Report, second: &Report) -> Vec<String> {
    let (a, b) = (&first.settings, &second.settings);
    let figures = |name: &str, a: f64, b: f64| {
        (a.to_bits() != b.to_bits()).then(|| format!("`eval.{name}`: {a} and {b}"))
    };
    let numbers = [
        figures(
            "max_new_tokens",
            a.max_new_tokens as f64,
            b.max_new_tokens as f64,
        ),
        figures("top_k", a.top_k as f64, b.top_k as f64),
        figures("top_p", a.top_p, b.top_p),
        figures("min_p", a.min_p, b.min_p),
        figures("seed", a.seed as f64, b.seed as f64),
    ];
    let words = |name: &str, a: String, b: String| (a != b).then(|| format!("{name}: {a} and {b}"));
    let template = (first.template != second.template).then(|| "the chat template".to_owned());
    let target = [
        words(
            "number type of the target",
            first.target.dtype.clone(),
            second.target.dtype.clone(),
        ),
        words(
            "stop tokens",
            format!("{:?}", first.target.stop_ids),
            format!("{:?}", second.target.stop_ids),
        ),
        template,
    ];
    numbers.into_iter().chain(target).flatten().collect()
}

impl<'a> Side<'a> {
    /// The entries of the first batch: tau does not depend on it.
    fn entries(self) -> impl Iterator<Item = &'a Entry> {
        let first = self.report.settings.batch_rows.iter().next();
        let entries = self.report.entries.iter();
        entries.filter(move |entry| Some(&entry.batch_rows) == first)
    }

    fn check_proposer(self) -> Result<(), EvalError> {
        let Some(wanted) = self.proposer else {
            return Ok(());
        };
        let mut names: Vec<&str> = Vec::new();
        for entry in &self.report.entries {
            if !names.contains(&entry.proposer.as_str()) {
                names.push(&entry.proposer);
            }
        }
        if names.contains(&wanted) {
            return Ok(());
        }
        Err(EvalError::setting(
            format!("the report has no proposer `{wanted}`"),
            format!("it has: {}", names.join(", ")),
        ))
    }
}

fn is_pair((first, one): (Side<'_>, &Entry), (second, other): (Side<'_>, &Entry)) -> bool {
    let names = match (first.proposer, second.proposer) {
        (None, None) => one.proposer == other.proposer,
        (a, b) => {
            let a = a.or(b).unwrap_or_default();
            let b = second.proposer.unwrap_or(a);
            one.proposer == a && other.proposer == b
        }
    };
    let same_setting =
        one.suite == other.suite && one.temperature.to_bits() == other.temperature.to_bits();
    names && same_setting && one.rule == other.rule && one.gamma == other.gamma && one.gamma > 0
}

/// `None` when the two have no prompt in common.
fn comparison(one: &Entry, other: &Entry) -> Option<Comparison> {
    let find = |one: &PromptFigures| {
        let is_same = |other: &&PromptFigures| other.id == one.id && other.prompt == one.prompt;
        other.prompts.iter().find(is_same)
    };
    let both: Vec<(&PromptFigures, &PromptFigures)> = one
        .prompts
        .iter()
        .filter_map(|prompt| Some((prompt, find(prompt)?)))
        .collect();
    let (first, second): (Vec<PromptFigures>, Vec<PromptFigures>) = both
        .iter()
        .map(|(one, other)| ((*one).clone(), (*other).clone()))
        .unzip();
    let (first, second) = (by_conversation(&first), by_conversation(&second));
    let tau = |pairs: &[(f64, f64)]| {
        let tokens: f64 = pairs.iter().map(|(tokens, _)| tokens).sum();
        let rounds: f64 = pairs.iter().map(|(_, rounds)| rounds).sum();
        tokens / rounds
    };
    let taus = [tau(&first), tau(&second)];
    taus.iter().all(|tau| tau.is_finite()).then(|| Comparison {
        suite: one.suite.clone(),
        temperature: one.temperature,
        rule: one.rule.clone(),
        gamma: one.gamma,
        proposers: [one.proposer.clone(), other.proposer.clone()],
        prompts: both.len(),
        tau: taus,
        difference: paired_interval(&first, &second, RESAMPLES, 0),
    })
}
