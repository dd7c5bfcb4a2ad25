//! [`Progress`]: a bar with rate and remaining time, or plain lines where there is no terminal.

use std::cell::Cell;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::console::Console;

/// Seconds between two plain lines.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Progress of one long piece of work.
#[derive(Debug)]
pub(crate) struct Progress<'a> {
    console: &'a Console,
    label: String,
    unit: &'static str,
    total: Option<u64>,
    started: Instant,
    /// What was done when the first report came: work of an earlier start counts for no rate.
    origin: Cell<Option<(u64, Instant)>>,
    last_line: Cell<Instant>,
    bar: Option<ProgressBar>,
}

impl<'a> Progress<'a> {
    /// Starts counting `total` things called `unit`; without a total there is no remaining time.
    pub(crate) fn new(
        console: &'a Console,
        label: impl Into<String>,
        total: Option<u64>,
        unit: &'static str,
    ) -> Self {
        let label = label.into();
        let bar = console.is_interactive().then(|| bar(&label, total, unit));
        let now = Instant::now();
        Self {
            console,
            label,
            unit,
            total,
            started: now,
            origin: Cell::new(None),
            last_line: Cell::new(now),
            bar,
        }
    }

    /// Says that `done` things are finished.
    pub(crate) fn set(&self, done: u64) {
        self.set_with(done, "");
    }

    /// Says that `done` things were finished before the work begins; the first report does so, if nothing else does.
    pub(crate) fn begin(&self, done: u64) {
        if self.origin.get().is_none() {
            self.origin.set(Some((done, Instant::now())));
            if let Some(bar) = &self.bar {
                bar.set_position(done);
                bar.reset_eta();
            }
        }
    }

    /// Says that `done` things are finished, with a note such as the current loss.
    pub(crate) fn set_with(&self, done: u64, note: &str) {
        self.begin(done);
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            bar.set_message(note.to_owned());
        } else if self.last_line.get().elapsed() >= LINE_INTERVAL {
            self.last_line.set(Instant::now());
            self.console.say(&self.line(done, note));
        }
    }

    /// Ends with a line that says how much was done since the start, and how fast; `done` counts what was finished before, too.
    pub(crate) fn finish(self, done: u64) {
        let unit = self.unit;
        let (before, _) = self.origin.get().unwrap_or((0, self.started));
        self.finish_as(done.saturating_sub(before), unit);
    }

    /// As [`Progress::finish`], for a count of new things, perhaps in another unit than the progress.
    pub(crate) fn finish_as(self, done: u64, unit: &str) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let seconds = self.started.elapsed().as_secs_f64();
        let rate = done as f64 / seconds.max(1e-9);
        self.console.say(&format!(
            "{}: {done} {unit} in {seconds:.1} s ({rate:.1}/s)",
            self.label
        ));
    }

    fn line(&self, done: u64, note: &str) -> String {
        let (before, since) = self.origin.get().unwrap_or((0, self.started));
        let seconds = since.elapsed().as_secs_f64();
        let rate = done.saturating_sub(before) as f64 / seconds.max(1e-9);
        let note = if note.is_empty() {
            String::new()
        } else {
            format!(", {note}")
        };
        match self.total {
            // Nothing done yet says nothing about the time that is left.
            Some(total) if done <= before => {
                format!("{}: {done}/{total} {}{note}", self.label, self.unit)
            }
            Some(total) => format!(
                "{}: {done}/{total} {} ({rate:.1}/s, {:.0} s left){note}",
                self.label,
                self.unit,
                total.saturating_sub(done) as f64 / rate.max(1e-9)
            ),
            None => format!("{}: {done} {} ({rate:.1}/s){note}", self.label, self.unit),
        }
    }
}

fn bar(label: &str, total: Option<u64>, unit: &str) -> ProgressBar {
    let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
    let counts = if total.is_some() {
        "{bar:30} {pos}/{len}"
    } else {
        "{spinner} {pos}"
    };
    let template = format!("{label} {counts} {unit} ({{per_sec}}, {{eta}} left) {{msg}}");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    bar
}
