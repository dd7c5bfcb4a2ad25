//! The terminal table of a report, as text.

use crate::compare::Comparison;
use crate::lossless::LosslessCheck;
use crate::report::{Entry, ExactEntry, Report};
use crate::surprise::z_bound;

/// What the columns mean.
const LEGEND: &str = "\
tau: tokens a target step; 95 %: its bootstrap interval over conversations; exact: tau without the noise of coins; accept d: share of
the verified drafts at depth d that became text; tok/s: in rounds, without prefill; speed-up: of rounds, against plain decoding";
/// Headers of the columns that hold words.
const WORDS: [&str; 3] = ["suite", "proposer", "rule"];
/// Depths whose acceptance is shown.
const SHOWN_DEPTHS: usize = 3;

/// The entries as an aligned table, one line each, followed by exact figures and what the comparison with plain decoding says.
pub fn render(report: &Report) -> String {
    let mut rows = vec![header()];
    rows.extend(report.entries.iter().map(cells));
    let mut lines = align(&rows);
    lines.push(LEGEND.to_owned());
    lines.extend(report.exact.iter().map(exact_line));
    let verdicts = text_verdicts(&report.entries, &report.target.dtype).into_iter();
    let verdicts = verdicts.chain(chance_verdicts(&report.entries));
    lines.extend(verdicts.map(|(words, _)| words));
    lines.push(String::new());
    lines.join("\n")
}

fn exact_line(exact: &ExactEntry) -> String {
    format!(
        "exact tau of `{}` on {} text, {} at temperature {}: {:.3}",
        exact.drafter,
        exact.text,
        exact.report.rule,
        exact.report.sampling.temperature,
        exact.report.tau()
    )
}

fn header() -> Vec<String> {
    let mut names = vec![
        "suite", "T", "batch", "proposer", "rule", "drafts", "tau", "95 %", "exact",
    ];
    let depths: Vec<String> = (0..SHOWN_DEPTHS).map(|d| format!("accept {d}")).collect();
    names.extend(depths.iter().map(String::as_str));
    names.extend(["tok/s", "speed-up"]);
    names.into_iter().map(str::to_owned).collect()
}

fn cells(entry: &Entry) -> Vec<String> {
    let interval = entry
        .tau_interval
        .map_or("-".to_owned(), |i| format!("{:.2}-{:.2}", i.low, i.high));
    let mut cells = vec![
        entry.suite.clone(),
        entry.temperature.to_string(),
        entry.batch_rows.to_string(),
        entry.proposer.clone(),
        entry.rule.clone(),
        entry.gamma.to_string(),
        format!("{:.2}", entry.tau),
        interval,
        optional(entry.exact.map(|exact| exact.tau), 2),
    ];
    let depth = |d: usize| entry.acceptance_by_depth.get(d).copied().flatten();
    cells.extend((0..SHOWN_DEPTHS).map(|d| optional(depth(d), 2)));
    cells.push(format!("{:.1}", entry.tokens_per_second));
    cells.push(
        entry
            .speed_up
            .map_or("-".to_owned(), |x| format!("{x:.2}x")),
    );
    cells
}

fn optional(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |x| format!("{x:.digits$}"))
}

/// Two reports side by side: tau of both, and the paired interval of the difference where it is clear marked by a star.
pub fn render_comparisons(comparisons: &[Comparison]) -> String {
    let names = [
        "suite",
        "T",
        "proposer",
        "rule",
        "drafts",
        "tau",
        "tau",
        "difference",
        "95 %",
    ];
    let mut rows = vec![names.map(str::to_owned).to_vec()];
    rows.extend(comparisons.iter().map(comparison_cells));
    let mut lines = align(&rows);
    lines.push(
        "* the interval of the difference, prompts taken in pairs, leaves zero out".to_owned(),
    );
    lines.join("\n")
}

fn comparison_cells(comparison: &Comparison) -> Vec<String> {
    let [first, second] = comparison.tau;
    let [one, other] = &comparison.proposers;
    let proposer = if one == other {
        one.clone()
    } else {
        format!("{one} / {other}")
    };
    let star = if comparison.is_clear() { "*" } else { "" };
    let interval = comparison.difference.map_or("-".to_owned(), |interval| {
        format!("{:+.3} to {:+.3}{star}", interval.low, interval.high)
    });
    vec![
        comparison.suite.clone(),
        comparison.temperature.to_string(),
        proposer,
        comparison.rule.clone(),
        comparison.gamma.to_string(),
        format!("{first:.3}"),
        format!("{second:.3}"),
        format!("{:+.3}", second - first),
        interval,
    ]
}

/// `greedy output identical: ...` over all compared entries, and the same for every other rule whose text does not depend
/// on the drafts; each as (words, whether it holds). `target_dtype` is the type that the target computed in, which decides
/// how near a tie of its scores is.
pub fn text_verdicts(entries: &[Entry], target_dtype: &str) -> Vec<(String, bool)> {
    let mut rules: Vec<&str> = Vec::new();
    for entry in entries.iter().filter(|entry| entry.lossless.is_some()) {
        if !rules.contains(&entry.rule.as_str()) {
            rules.push(&entry.rule);
        }
    }
    let of_rule = |rule: &&str| {
        let entries = entries.iter().filter(|entry| entry.rule == **rule);
        let checks: Vec<&LosslessCheck> = entries.filter_map(|e| e.lossless.as_ref()).collect();
        let holds = checks.iter().all(|check| check.is_lossless());
        let hint = rounding_hint(&checks, target_dtype).unwrap_or_default();
        (
            format!("{rule} output identical: {}{hint}", verdict(&checks)),
            holds,
        )
    };
    rules.iter().map(of_rule).collect()
}

/// Whether the drawn text and the rounds it took are what theory says, over all entries; each as (words, whether it holds).
pub fn chance_verdicts(entries: &[Entry]) -> Vec<(String, bool)> {
    let verdict = |what: &str, figures: Vec<f64>| {
        let most = figures.iter().map(|z| z.abs()).reduce(f64::max)?;
        let bound = z_bound(figures.len());
        let words = format!(
            "{what}: largest |z| {most:.2} of {} (bound {bound:.2})",
            figures.len()
        );
        Some((words, most <= bound))
    };
    let texts = entries.iter().filter_map(|entry| entry.text_z).collect();
    let rounds = entries.iter().filter_map(|entry| entry.rounds_z).collect();
    let tokens: u64 = entries.iter().map(|entry| entry.counts.tokens).sum();
    let outside: u64 = entries.iter().map(|entry| entry.outside_truncation).sum();
    let is_outside = (outside > 0).then(|| {
        let words = format!("tokens outside the truncation: {outside} of {tokens}");
        (words, 1000 * outside <= tokens)
    });
    [
        is_outside,
        verdict("drawn text against the target's law", texts),
        verdict("rounds against their expectation", rounds),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn verdict(checks: &[&LosslessCheck]) -> String {
    let compared: usize = checks.iter().map(|check| check.compared).sum();
    let identical: usize = checks.iter().map(|check| check.identical).sum();
    let near_ties: usize = checks.iter().map(|check| check.near_ties).sum();
    let tolerance = checks.first().map_or(0.0, |check| check.near_tie_tolerance);
    if identical == compared {
        format!("yes ({compared} of {compared} outputs)")
    } else if checks.iter().all(|check| check.is_lossless()) {
        format!(
            "yes, but for {near_ties} near ties of the target's scores (gap at most {tolerance}) in {compared} \
             outputs"
        )
    } else {
        format!(
            "NO ({} of {compared} outputs differ, {near_ties} of them at near ties)",
            compared - identical
        )
    }
}

/// What to set where texts of a target in bf16 part at gaps beyond the tolerance. Within it the token was no runner-up, which
/// a wider one would not excuse.
fn rounding_hint(checks: &[&LosslessCheck], target_dtype: &str) -> Option<String> {
    let gaps = checks.iter().flat_map(|check| {
        let gaps = check.divergences.iter().filter_map(|parted| parted.gap);
        gaps.filter(|gap| *gap > check.near_tie_tolerance)
    });
    let widest = gaps.reduce(f64::max)?;
    (target_dtype == "bf16").then(|| {
        format!(
            "; the two best scores are up to {widest:.1e} apart there, and bf16 moves each by up to 2^-8 of it: set \
             `eval.near_tie_tolerance` to 2^-7 of the largest logits before this counts as a fault"
        )
    })
}

/// Columns padded to their widest cell, words on the left and numbers on the right; the first row is the header.
fn align(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let lens = rows
            .iter()
            .filter_map(|row| row.get(column))
            .map(String::len);
        lens.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let header = rows.first();
    let is_word = |column: usize| {
        let name = header.and_then(|names| names.get(column));
        name.is_some_and(|name| WORDS.contains(&name.as_str()))
    };
    let line = |row: &Vec<String>| {
        let padded = row.iter().enumerate().map(|(column, cell)| {
            let width = widths[column];
            if is_word(column) {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            }
        });
        let line = padded.collect::<Vec<_>>().join("  ");
        line.trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_words_stand_left() {
        let line = |cells: [&str; 6]| cells.map(str::to_owned).to_vec();
        let text = align(&[
            line(["suite", "T", "batch", "proposer", "rule", "tau"]),
            line(["gsm8k", "0", "16", "none", "greedy", "1.00"]),
            line(["x", "0.7", "1", "prompt_lookup", "block", "11.25"]),
        ]);
        let expected = [
            "suite    T  batch  proposer       rule      tau",
            "gsm8k    0     16  none           greedy   1.00",
            "x      0.7      1  prompt_lookup  block   11.25",
        ];
        assert_eq!(text, expected);
    }
}
