//! `draftsmith doctor --lossless`: is the text the target's own under every verification rule?

use draftsmith_eval::OneOrMore;
use draftsmith_eval::config::EvalConfig;
use draftsmith_eval::table::{chance_verdicts, text_verdicts};
use draftsmith_eval::verify::RULES;

use super::doctor::Check;
use crate::session::Session;
use crate::stages::eval;

/// Decodes the suites with the trained drafters where there are any, else with fresh ones, under every rule.
pub(super) fn checks(session: &Session) -> anyhow::Result<Vec<Check>> {
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
    let entries = eval::decode_unreported(session, &config)?;
    let mut drafters: Vec<&str> = Vec::new();
    for entry in entries.iter().filter(|entry| entry.gamma > 0) {
        if !drafters.contains(&entry.proposer.as_str()) {
            drafters.push(&entry.proposer);
        }
    }
    let measured = Check::new("decoded with", true, drafters.join(", "));
    let texts = text_verdicts(&entries, session.run_file().target.dtype.name()).into_iter();
    let all = texts.chain(chance_verdicts(&entries));
    let check = |(words, passed): (String, bool)| {
        let (name, detail) = words.split_once(": ").unwrap_or(("lossless", &words));
        Check::new(name, passed, detail)
    };
    Ok(std::iter::once(measured).chain(all.map(check)).collect())
}
