//! `draftsmith doctor --lossless`: is the text the target's own under every verification rule?

use draftsmith_eval::OneOrMore;
use draftsmith_eval::config::EvalConfig;
use draftsmith_eval::enumeration::check_rules;
use draftsmith_eval::report::Entry;
use draftsmith_eval::table::{chance_verdicts, text_verdicts};
use draftsmith_eval::verify::RULES;

use super::doctor::Check;
use crate::session::Session;
use crate::stages::eval;

/// The law of every rule in worlds small enough to know it, and what it makes of the suites.
pub(super) fn checks(session: &Session) -> anyhow::Result<Vec<Check>> {
    let mut checks: Vec<Check> = check_rules().into_iter().map(Check::of_rule).collect();
    let entries = decode(session)?;
    checks.push(Check::new("decoded with", true, drafters(&entries)));
    let texts = text_verdicts(&entries, session.run_file().target.dtype.name());
    let all = texts.into_iter().chain(chance_verdicts(&entries));
    checks.extend(all.map(|(words, passed)| {
        let (name, detail) = words.split_once(": ").unwrap_or(("lossless", &words));
        Check::new(name, passed, detail)
    }));
    Ok(checks)
}

/// Decodes the suites with the trained drafters where there are any, else with fresh ones, under every rule.
fn decode(session: &Session) -> anyhow::Result<Vec<Entry>> {
    let sampled = RULES.iter().map(|rule| rule.name());
    let sampled = sampled.filter(|name| *name != "greedy").map(str::to_owned);
    let config = EvalConfig {
        rule: OneOrMore::new(sampled.collect())
            .unwrap_or_else(|| session.run_file().eval.rule.clone()),
        temperatures: vec![0.0, 1.0],
        baselines: ["none", "prompt_lookup", "suffix"]
            .map(str::to_owned)
            .into(),
        draft_model: None,
        timing_repeats: 0,
        ..session.run_file().eval.clone()
    };
    eval::decode_unreported(session, &config)
}

/// Who drafted, in words.
fn drafters(entries: &[Entry]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for entry in entries.iter().filter(|entry| entry.gamma > 0) {
        if !names.contains(&entry.proposer.as_str()) {
            names.push(&entry.proposer);
        }
    }
    names.join(", ")
}
