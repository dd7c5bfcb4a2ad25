//! The report as one HTML page: plots and tables, no script, nothing loaded from anywhere.

mod charts;
mod svg;

use std::fmt::Write as _;

use crate::report::{Entry, ExactEntry, Report};
use crate::table::text_verdicts;

use self::svg::escape;

/// Colours of proposers in their order (Okabe and Ito 2008: told apart by nearly everyone, on light and dark).
const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#b5a800",
];

/// The page.
pub fn render(report: &Report) -> String {
    let palette = Palette::new(&report.entries);
    let mut page = String::new();
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Draftsmith report</title>\n<style>{}</style></head>\n<body><main>\n",
        include_str!("style.css")
    );
    page.push_str(&head(report));
    page.push_str(&overview(report));
    page.push_str(&palette.legend());
    for (suite, temperature) in settings_of(&report.entries) {
        page.push_str(&section(report, &palette, &suite, temperature));
    }
    page.push_str(&exact_section(&report.exact));
    page.push_str(&notes(report));
    page.push_str("</main></body></html>\n");
    page
}

/// Which colour belongs to which proposer, the same in every plot.
pub(crate) struct Palette(Vec<String>);

impl Palette {
    fn new(entries: &[Entry]) -> Self {
        let mut names: Vec<String> = Vec::new();
        for entry in entries {
            if !names.contains(&entry.proposer) {
                names.push(entry.proposer.clone());
            }
        }
        Self(names)
    }

    /// The colour of a proposer.
    pub(crate) fn colour(&self, proposer: &str) -> &'static str {
        let place = self.0.iter().position(|name| name == proposer);
        COLOURS[place.unwrap_or(0) % COLOURS.len()]
    }

    fn legend(&self) -> String {
        let item = |name: &String| {
            format!(
                "<span class=\"key\"><i style=\"background:{}\"></i>{}</span>",
                self.colour(name),
                escape(name)
            )
        };
        let items: String = self.0.iter().map(item).collect();
        format!("<nav class=\"legend\">{items}</nav>\n")
    }
}

/// Suites and temperatures in the order of the report.
fn settings_of(entries: &[Entry]) -> Vec<(String, f64)> {
    let mut settings: Vec<(String, f64)> = Vec::new();
    for entry in entries {
        let one = (entry.suite.clone(), entry.temperature);
        if !settings.contains(&one) {
            settings.push(one);
        }
    }
    settings
}

fn head(report: &Report) -> String {
    let target = &report.target;
    let verdict = |text: &String| {
        let class = if text.contains("NO (") { "bad" } else { "good" };
        format!("<p class=\"{class}\">{}</p>\n", escape(text))
    };
    let verdicts: String = text_verdicts(&report.entries).iter().map(verdict).collect();
    format!(
        "<header><h1>Acceptance of drafters</h1>\n<p>{} with {} layers, width {}, {} tokens, {} on {}; target \
         <code>{}</code>; {}.</p>\n{verdicts}</header>\n",
        escape(&target.model_type),
        target.num_layers,
        target.hidden_size,
        target.vocab_size,
        escape(&target.dtype),
        escape(&report.device),
        escape(&target.fingerprint[..target.fingerprint.len().min(12)]),
        escape(&report.generator),
    )
}

/// One row a proposer, one column a suite and temperature.
fn overview(report: &Report) -> String {
    let settings = settings_of(&report.entries);
    let mut names: Vec<&str> = Vec::new();
    for entry in &report.entries {
        if !names.contains(&entry.proposer.as_str()) {
            names.push(&entry.proposer);
        }
    }
    let mut table = String::from(
        "<h2>Tokens per target step (tau)</h2>\n<div class=\"wide\"><table><tr><th>proposer</th>",
    );
    for (suite, temperature) in &settings {
        let _ = write!(table, "<th>{}<br>T={temperature}</th>", escape(suite));
    }
    table.push_str("</tr>\n");
    for name in names {
        let _ = write!(table, "<tr><td>{}</td>", escape(name));
        for (suite, temperature) in &settings {
            let entry = find(&report.entries, suite, *temperature).find(|e| e.proposer == name);
            let _ = write!(table, "<td>{}</td>", entry.map_or(String::new(), tau_cell));
        }
        table.push_str("</tr>\n");
    }
    table.push_str("</table></div>\n");
    table
}

fn tau_cell(entry: &Entry) -> String {
    let interval = entry.tau_interval.map_or(String::new(), |interval| {
        format!("<small>{:.2}-{:.2}</small>", interval.low, interval.high)
    });
    format!("<b>{:.2}</b> {interval}", entry.tau)
}

fn find<'a>(
    entries: &'a [Entry],
    suite: &'a str,
    temperature: f64,
) -> impl Iterator<Item = &'a Entry> {
    let is_wanted = move |entry: &&Entry| {
        entry.suite == suite && entry.temperature.to_bits() == temperature.to_bits()
    };
    entries.iter().filter(is_wanted)
}

fn section(report: &Report, palette: &Palette, suite: &str, temperature: f64) -> String {
    let entries: Vec<&Entry> = find(&report.entries, suite, temperature).collect();
    let Some(first) = entries.first() else {
        return String::new();
    };
    let plots = [
        (
            "tau, with its 95 % interval; a ring is the exact evaluator",
            charts::taus(&entries, palette),
        ),
        (
            "acceptance by depth, given that all drafts before were accepted",
            charts::depths(&entries, palette),
        ),
        (
            "drafts accepted in a round, share of rounds",
            charts::lengths(&entries, palette),
        ),
        (
            "milliseconds a token: draft, verify, other",
            charts::times(&entries),
        ),
        (
            "speed against plain decoding",
            charts::speeds(&entries, palette),
        ),
    ];
    let mut figures = String::new();
    for (title, plot) in plots.into_iter().filter(|(_, plot)| !plot.is_empty()) {
        let _ = writeln!(
            figures,
            "<figure><figcaption>{title}</figcaption>{plot}</figure>"
        );
    }
    format!(
        "<section><h2>{}, temperature {temperature}</h2>\n<p>{} prompts, verified by <code>{}</code>, up to {} drafts a \
         round, {} sequences together.</p>\n<div class=\"plots\">{figures}</div></section>\n",
        escape(suite),
        first.counts.sequences,
        escape(&first.rule),
        entries.iter().map(|entry| entry.gamma).max().unwrap_or(0),
        first.batch_rows,
    )
}

/// Tau of every gamma on given text, and what the uniform-anchor average would have said.
fn exact_section(entries: &[ExactEntry]) -> String {
    if entries.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "<section><h2>Exact evaluation of given text</h2>\n<div class=\"wide\"><table><tr><th>drafter</th><th>text</th>\
         <th>rule</th><th>drafts a round</th><th>tau</th><th>uniform anchors</th></tr>\n",
    );
    for entry in entries {
        let report = &entry.report;
        for tau in &report.by_gamma {
            let _ = writeln!(
                text,
                "<tr><td>{}</td><td>{}</td><td>{} T={}</td><td>{}</td><td><b>{:.3}</b></td><td>{:.3} ({:+.1} %)</td></tr>",
                escape(&entry.drafter),
                escape(&entry.text),
                escape(&report.rule),
                report.sampling.temperature,
                tau.gamma,
                tau.tau,
                tau.uniform_anchor_tau,
                100.0 * (tau.uniform_anchor_tau / tau.tau - 1.0),
            );
        }
    }
    text.push_str(
        "</table></div>\n<p>Uniform anchors: the mean over all positions that other trainers log. Decoding starts its \
         rounds where drafts failed, so it is not the tau of decoding.</p></section>\n",
    );
    text
}

fn notes(report: &Report) -> String {
    let settings = serde_json::to_string_pretty(&report.settings).unwrap_or_default();
    format!(
        "<details><summary>Settings</summary><pre>{}</pre></details>\n<p class=\"small\">tau counts the tokens committed \
         per target forward, the target's own included, pooled over all rounds of all prompts; the prompt's own pass and \
         its token are no round.</p>\n",
        escape(&settings)
    )
}
