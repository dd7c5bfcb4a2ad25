//! The report as one HTML page: plots and tables, no script, nothing loaded from anywhere.

mod categories;
mod charts;
mod svg;

use std::fmt::Write as _;

use crate::bootstrap::Interval;
use crate::exact::THRESHOLDS;
use crate::report::{Entry, ExactEntry, Report};
use crate::roofline::{PredictedSpeed, Prediction};
use crate::table::{chance_verdicts, text_verdicts};

use self::svg::escape;

/// Colours of proposers in their order; the first ones (Okabe and Ito 2008) are told apart by nearly everyone, on light and
/// dark.
const COLOURS: [&str; 12] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#b5a800",
    "#7a4fa3", "#9c5b2e", "#3fb8af", "#d04a6a",
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
    page.push_str(&overview(report, &palette));
    page.push_str(&palette.legend());
    for setting in Setting::all(&report.entries) {
        page.push_str(&section(report, &palette, setting));
    }
    page.push_str(&exact_section(&report.exact, &palette));
    page.push_str(&predicted_section(&report.predictions));
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

/// What belongs together on the page.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Setting<'a> {
    suite: &'a str,
    temperature: f64,
    batch_rows: usize,
    rule: &'a str,
}

impl<'a> Setting<'a> {
    fn of(entry: &'a Entry) -> Self {
        Self {
            suite: &entry.suite,
            temperature: entry.temperature,
            batch_rows: entry.batch_rows,
            rule: &entry.rule,
        }
    }

    /// All of a report, in its order.
    fn all(entries: &'a [Entry]) -> Vec<Self> {
        let mut settings = Vec::new();
        for entry in entries.iter().filter(|entry| entry.gamma > 0) {
            if !settings.contains(&Self::of(entry)) {
                settings.push(Self::of(entry));
            }
        }
        settings
    }

    /// Its entries with drafts.
    fn drafting(self, entries: &'a [Entry]) -> Vec<&'a Entry> {
        let is_own = |entry: &&'a Entry| Self::of(entry) == self && entry.gamma > 0;
        entries.iter().filter(is_own).collect()
    }

    /// Plain decoding, then its entries with the most drafts.
    fn widest(self, entries: &'a [Entry]) -> Vec<&'a Entry> {
        let drafting = self.drafting(entries);
        let gamma = drafting.iter().map(|entry| entry.gamma).max().unwrap_or(0);
        // Rules that draw alike share one plain decoding.
        let plain = |entry: &&'a Entry| {
            entry.gamma == 0
                && entry.suite == self.suite
                && entry.temperature.to_bits() == self.temperature.to_bits()
                && entry.batch_rows == self.batch_rows
        };
        let mut plains: Vec<&Entry> = entries.iter().filter(plain).collect();
        plains.sort_by_key(|entry| entry.rule != self.rule);
        let widest = drafting.into_iter().filter(|entry| entry.gamma == gamma);
        plains.into_iter().take(1).chain(widest).collect()
    }
}

fn head(report: &Report) -> String {
    let target = &report.target;
    let mut verdicts = String::new();
    let texts = text_verdicts(&report.entries, &target.dtype).into_iter();
    for (words, holds) in texts.chain(chance_verdicts(&report.entries)) {
        let class = if holds { "good" } else { "bad" };
        let _ = writeln!(verdicts, "<p class=\"{class}\">{}</p>", escape(&words));
    }
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

/// One row a proposer, one column a suite, temperature and rule.
fn overview(report: &Report, palette: &Palette) -> String {
    let settings = Setting::all(&report.entries);
    let mut batches: Vec<usize> = settings.iter().map(|setting| setting.batch_rows).collect();
    batches.sort_unstable();
    batches.dedup();
    let mut table = String::from(
        "<h2>Tokens per target step (tau)</h2>\n<div class=\"wide\"><table><tr><th>proposer</th>",
    );
    for setting in &settings {
        let (suite, rule) = (escape(setting.suite), escape(setting.rule));
        let batch = match batches.as_slice() {
            [_] => String::new(),
            _ => format!(", {} together", setting.batch_rows),
        };
        let _ = write!(
            table,
            "<th>{suite}<br>T={} <small>{rule}{batch}</small></th>",
            setting.temperature
        );
    }
    table.push_str("</tr>\n");
    for name in &palette.0 {
        let _ = write!(table, "<tr><td>{}</td>", escape(name));
        for setting in &settings {
            let entries = setting.widest(&report.entries);
            let entry = entries.into_iter().find(|entry| entry.proposer == *name);
            let _ = write!(
                table,
                "<td>{}</td>",
                entry.map_or(String::new(), |entry| tau_cell(
                    entry.tau,
                    entry.tau_interval
                ))
            );
        }
        table.push_str("</tr>\n");
    }
    table.push_str("</table></div>\n");
    table
}

/// A tau with its interval, for a cell of a table.
fn tau_cell(tau: f64, interval: Option<Interval>) -> String {
    let interval = interval.map_or(String::new(), |interval| {
        format!("<small>{:.2}-{:.2}</small>", interval.low, interval.high)
    });
    format!("<b>{tau:.2}</b> {interval}")
}

fn section(report: &Report, palette: &Palette, setting: Setting<'_>) -> String {
    let entries = setting.widest(&report.entries);
    let all = setting.drafting(&report.entries);
    let (Some(first), Some(widest)) = (entries.first(), entries.last()) else {
        return String::new();
    };
    let plots = [
        (
            "tau, with its 95 % interval; a ring is the exact evaluator",
            charts::taus(&entries, palette),
        ),
        (
            "tau by the number of drafts a round",
            charts::taus_by_gamma(&all, palette),
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
            "milliseconds a token: draft, verify, sample, other",
            charts::times(&entries),
        ),
        (
            "speed against plain decoding",
            charts::speeds(&entries, palette),
        ),
        (
            "speed against plain decoding by the number of drafts",
            charts::speeds_by_gamma(&all, palette),
        ),
    ];
    let mut figures = String::new();
    for (title, plot) in plots.into_iter().filter(|(_, plot)| !plot.is_empty()) {
        let _ = writeln!(
            figures,
            "<figure><figcaption>{title}</figcaption>{plot}</figure>"
        );
    }
    let categories = categories::table(&entries);
    format!(
        "<section><h2>{}, temperature {}</h2>\n<p>{} prompts, verified by <code>{}</code>, up to {} drafts a round, {} \
         sequences together.</p>\n<div class=\"plots\">{figures}</div>{categories}</section>\n",
        escape(setting.suite),
        setting.temperature,
        first.counts.sequences,
        escape(setting.rule),
        widest.gamma,
        first.batch_rows,
    )
}

/// Tau of every gamma on given text, and what the uniform-anchor average would have said.
fn exact_section(entries: &[ExactEntry], palette: &Palette) -> String {
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
    let _ = writeln!(
        text,
        "</table></div>\n<p>Uniform anchors: the mean over all positions that other trainers log. Decoding starts its \
         rounds where drafts failed, so it is not the tau of decoding.</p>\n<div class=\"plots\"><figure class=\"one\"><figcaption>tau by \
         verified drafts a round: dots verify a fixed number, rings stop where the drafter's estimate that all drafts so far \
         are accepted falls below {} .. {}</figcaption>{}</figure></div></section>",
        THRESHOLDS[THRESHOLDS.len() - 1],
        THRESHOLDS[0],
        charts::schedules(entries, palette),
    );
    text
}

/// Best number of drafts and speed-up of every drafter on every device.
fn predicted_section(predictions: &[Prediction]) -> String {
    let Some(first) = predictions.first() else {
        return String::new();
    };
    let mut text = format!(
        "<section><h2>Predicted speed-up</h2>\n<p>A roofline model, not a measurement: {} sequences of {} tokens.</p>\n\
         <div class=\"wide\"><table><tr><th>drafter</th><th>device</th><th>best drafts</th><th>speed-up there</th>\
         <th>by drafts 1, 2, ..</th><th>assumed of the device</th></tr>\n",
        first.load.batch, first.load.context,
    );
    for prediction in predictions {
        let speed = |speed: &PredictedSpeed| format!("{:.2}", speed.speed_up);
        let all: Vec<String> = prediction.by_gamma.iter().map(speed).collect();
        let mut speeds = prediction.by_gamma.iter();
        let best = speeds.find(|speed| speed.gamma == prediction.best_gamma);
        let best = best.map_or("1.00".to_owned(), speed);
        let device = &prediction.device;
        let _ = writeln!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td><b>{best}x</b></td><td>{}</td><td><small>{:.0} % of {} GB/s, {:.0} % of \
             {} Tflop/s, {} bytes a number, {} us a layer</small></td></tr>",
            escape(&prediction.drafter),
            escape(&device.name),
            prediction.best_gamma,
            all.join(", "),
            100.0 * device.bandwidth_share,
            device.bandwidth,
            100.0 * device.compute_share,
            device.teraflops,
            device.bytes_per_number,
            device.microseconds_per_layer,
        );
    }
    text.push_str("</table></div></section>\n");
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
