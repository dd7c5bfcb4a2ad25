//! The plots of one suite at one temperature.

use std::collections::{BTreeMap, BTreeSet};

use super::Palette;
use super::svg::{Anchor, Drawing};
use crate::report::{Entry, ExactEntry};

const WIDTH: f64 = 420.0;
/// Left end of horizontal scales: names stand before it.
const LEFT: f64 = 120.0;
/// Right end of horizontal scales: figures stand behind it.
const RIGHT: f64 = WIDTH - 60.0;
/// Height of one row of a plot with names.
const ROW: f64 = 26.0;

/// A linear scale from values to coordinates.
struct Scale {
    values: (f64, f64),
    coordinates: (f64, f64),
}

impl Scale {
    fn at(&self, value: f64) -> f64 {
        let (low, high) = self.values;
        let (from, to) = self.coordinates;
        let share = if high > low {
            (value - low) / (high - low)
        } else {
            0.0
        };
        from + (to - from) * share.clamp(0.0, 1.0)
    }

    /// Round values inside the scale, about `count` of them.
    fn ticks(&self, count: f64) -> Vec<f64> {
        let (low, high) = self.values;
        let rough = (high - low) / count;
        if rough <= 0.0 || !rough.is_finite() {
            return vec![low];
        }
        let power = 10.0_f64.powf(rough.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
        let step = steps
            .into_iter()
            .find(|step| *step >= rough)
            .unwrap_or(power);
        let first = (low / step).ceil() as i64;
        let last = (high / step + 1e-9).floor() as i64;
        (first..=last).map(|index| index as f64 * step).collect()
    }
}

fn drafting<'a>(entries: &[&'a Entry]) -> Vec<&'a Entry> {
    entries
        .iter()
        .copied()
        .filter(|entry| entry.gamma > 0)
        .collect()
}

/// Names on the left, a scale below.
fn named_rows(names: &[&str], scale: &Scale, digits: usize) -> Drawing {
    let bottom = ROW * names.len() as f64 + 6.0;
    let mut drawing = Drawing::new(WIDTH, bottom + 22.0);
    for tick in scale.ticks(4.0) {
        drawing.axis((scale.at(tick), 0.0), (scale.at(tick), bottom));
        drawing.soft(
            (scale.at(tick), bottom + 15.0),
            Anchor::Middle,
            &format!("{tick:.digits$}"),
        );
    }
    for (row, name) in names.iter().enumerate() {
        drawing.text(
            (LEFT - 10.0, middle(row) + 4.0),
            Anchor::End,
            &shortened(name),
        );
    }
    drawing
}

fn middle(row: usize) -> f64 {
    ROW * (row as f64 + 0.5) + 3.0
}

fn shortened(name: &str) -> String {
    if name.chars().count() <= 18 {
        return name.to_owned();
    }
    name.chars().take(17).chain(['.']).collect()
}

/// tau of every proposer with its interval.
pub(super) fn taus(entries: &[&Entry], palette: &Palette) -> String {
    let high = |entry: &&Entry| {
        entry
            .tau_interval
            .map_or(entry.tau, |interval| interval.high)
    };
    let most = entries.iter().map(high).fold(1.5, f64::max);
    let scale = Scale {
        values: (1.0, most),
        coordinates: (LEFT, RIGHT),
    };
    let names: Vec<&str> = entries
        .iter()
        .map(|entry| entry.proposer.as_str())
        .collect();
    let mut drawing = named_rows(&names, &scale, 1);
    for (row, entry) in entries.iter().enumerate() {
        let (y, colour) = (middle(row), palette.colour(&entry.proposer));
        let title = format!("{}: {:.3}", entry.proposer, entry.tau);
        if let Some(interval) = entry.tau_interval {
            let ends = [interval.low, interval.high].map(|value| (scale.at(value), y));
            drawing.line(&ends, colour, 2.0);
        }
        if let Some(exact) = entry.exact {
            let title = format!("exact {:.3}", exact.tau);
            drawing.ring((scale.at(exact.tau), y), colour, &title);
        }
        drawing.dot((scale.at(entry.tau), y), colour, &title);
        drawing.text(
            (RIGHT + 12.0, y + 4.0),
            Anchor::Start,
            &format!("{:.2}", entry.tau),
        );
    }
    drawing.finish()
}

/// Speed against plain decoding.
pub(super) fn speeds(entries: &[&Entry], palette: &Palette) -> String {
    let known: Vec<(&Entry, f64)> = entries
        .iter()
        .filter_map(|entry| Some((*entry, entry.speed_up?)))
        .collect();
    if known.is_empty() {
        return String::new();
    }
    let most = known.iter().map(|(_, speed)| *speed).fold(1.2, f64::max);
    let scale = Scale {
        values: (0.0, most),
        coordinates: (LEFT, RIGHT),
    };
    let names: Vec<&str> = known
        .iter()
        .map(|(entry, _)| entry.proposer.as_str())
        .collect();
    let mut drawing = named_rows(&names, &scale, 1);
    for (row, (entry, speed)) in known.iter().enumerate() {
        let (from, size) = ((LEFT, middle(row) - 7.0), (scale.at(*speed) - LEFT, 14.0));
        let title = format!(
            "{}: {:.1} tokens/s",
            entry.proposer, entry.tokens_per_second
        );
        drawing.bar(from, size, palette.colour(&entry.proposer), &title);
        let place = (RIGHT + 12.0, middle(row) + 4.0);
        drawing.text(place, Anchor::Start, &format!("{speed:.2}x"));
    }
    drawing.finish()
}

/// tau of every proposer by the number of drafts; nothing where only one was measured.
pub(super) fn taus_by_gamma(entries: &[&Entry], palette: &Palette) -> String {
    by_gamma(entries, palette, 1.0, |entry| Some(entry.tau))
}

/// Speed against plain decoding by the number of drafts; nothing where only one was measured.
pub(super) fn speeds_by_gamma(entries: &[&Entry], palette: &Palette) -> String {
    by_gamma(entries, palette, 0.0, |entry| entry.speed_up)
}

fn by_gamma(
    entries: &[&Entry],
    palette: &Palette,
    least: f64,
    figure: impl Fn(&Entry) -> Option<f64>,
) -> String {
    let gammas: BTreeSet<usize> = entries.iter().map(|entry| entry.gamma).collect();
    let gammas: Vec<usize> = gammas.into_iter().collect();
    if gammas.len() < 2 || entries.iter().all(|entry| figure(entry).is_none()) {
        return String::new();
    }
    let most = entries.iter().filter_map(|entry| figure(entry));
    let (top, bottom) = (8.0, 170.0);
    let y = Scale {
        values: (least, most.fold(least + 0.5, f64::max)),
        coordinates: (bottom, top),
    };
    let x = Scale {
        values: (0.0, gammas.len() as f64),
        coordinates: (36.0, WIDTH - 8.0),
    };
    let mut drawing = Drawing::new(WIDTH, bottom + 26.0);
    for tick in y.ticks(4.0) {
        drawing.axis((36.0, y.at(tick)), (WIDTH - 8.0, y.at(tick)));
        drawing.soft((30.0, y.at(tick) + 4.0), Anchor::End, &format!("{tick:.1}"));
    }
    for (place, gamma) in gammas.iter().enumerate() {
        let at = (x.at(place as f64 + 0.5), bottom + 17.0);
        drawing.soft(at, Anchor::Middle, &gamma.to_string());
    }
    let mut by_name: BTreeMap<&str, Vec<(f64, f64, f64)>> = BTreeMap::new();
    for entry in entries {
        let place = gammas.iter().position(|gamma| *gamma == entry.gamma);
        if let (Some(place), Some(value)) = (place, figure(entry)) {
            let point = (x.at(place as f64 + 0.5), y.at(value), value);
            by_name.entry(&entry.proposer).or_default().push(point);
        }
    }
    for (name, points) in by_name {
        let colour = palette.colour(name);
        let path: Vec<(f64, f64)> = points.iter().map(|(x, y, _)| (*x, *y)).collect();
        drawing.line(&path, colour, 2.0);
        for (x, y, value) in points {
            drawing.dot((x, y), colour, &format!("{name}: {value:.3}"));
        }
    }
    drawing.finish()
}

/// tau of each drafter by its first rule against verified drafts: with 1, 2, .. drafts a round (dots) and where rounds stop at doubts (rings).
pub(super) fn schedules(entries: &[ExactEntry], palette: &Palette) -> String {
    let is_first = |(index, entry): &(usize, &ExactEntry)| {
        let mut earlier = entries[..*index].iter();
        earlier.all(|earlier| earlier.drafter != entry.drafter)
    };
    let firsts = entries.iter().enumerate().filter(is_first);
    let entries: Vec<&ExactEntry> = firsts.map(|(_, entry)| entry).collect();
    let all = |entry: &&ExactEntry| {
        let fixed = entry.report.by_gamma.iter().map(|at| (at.drafts, at.tau));
        let scheduled = entry.report.by_confidence.iter();
        let scheduled = scheduled.map(|at| (at.drafts, at.tau));
        fixed.chain(scheduled).collect::<Vec<_>>()
    };
    let points: Vec<(f64, f64)> = entries.iter().flat_map(all).collect();
    let (top, bottom) = (8.0, 210.0);
    let x = Scale {
        values: (0.0, points.iter().map(|at| at.0).fold(1.0, f64::max)),
        coordinates: (36.0, WIDTH - 12.0),
    };
    let y = Scale {
        values: (1.0, points.iter().map(|at| at.1).fold(1.2, f64::max)),
        coordinates: (bottom, top),
    };
    let mut drawing = Drawing::new(WIDTH, bottom + 26.0);
    for tick in y.ticks(4.0) {
        drawing.axis((36.0, y.at(tick)), (WIDTH - 12.0, y.at(tick)));
        drawing.soft((30.0, y.at(tick) + 4.0), Anchor::End, &format!("{tick:.1}"));
    }
    for tick in x.ticks(5.0) {
        let at = (x.at(tick), bottom + 17.0);
        drawing.soft(at, Anchor::Middle, &format!("{tick:.1}"));
    }
    for entry in entries {
        let (name, colour) = (&entry.drafter, palette.colour(&entry.drafter));
        let place = |drafts: f64, tau: f64| (x.at(drafts), y.at(tau));
        let mut path = vec![place(0.0, 1.0)];
        for at in &entry.report.by_gamma {
            path.push(place(at.drafts, at.tau));
            let title = format!("{name}, {} drafts: {:.3}", at.gamma, at.tau);
            drawing.dot(place(at.drafts, at.tau), colour, &title);
        }
        drawing.line(&path, colour, 1.0);
        for at in &entry.report.by_confidence {
            let title = format!("{name}, confidence {}: {:.3}", at.threshold, at.tau);
            drawing.ring(place(at.drafts, at.tau), colour, &title);
        }
    }
    drawing.finish()
}

/// Where the time of a token goes.
pub(super) fn times(entries: &[&Entry]) -> String {
    let parts = |entry: &Entry| {
        let time = entry.time;
        let tokens = (entry.counts.tokens as f64).max(1.0);
        [time.draft, time.verify, time.sample, time.other].map(|seconds| 1e3 * seconds / tokens)
    };
    let totals = entries.iter().map(|entry| parts(entry).iter().sum::<f64>());
    let most = totals.fold(0.0, f64::max);
    if most <= 0.0 {
        return String::new();
    }
    let scale = Scale {
        values: (0.0, most),
        coordinates: (LEFT, RIGHT),
    };
    let names: Vec<&str> = entries
        .iter()
        .map(|entry| entry.proposer.as_str())
        .collect();
    let mut drawing = named_rows(&names, &scale, usize::from(most < 4.0));
    for (row, entry) in entries.iter().enumerate() {
        let mut before = 0.0;
        let names = ["draft", "verify", "sample", "other"];
        for ((part, name), colour) in parts(entry)
            .into_iter()
            .zip(names)
            .zip(["#e69f00", "#0072b2", "#009e73", "#8a8a8a"])
        {
            let from = scale.at(before);
            before += part;
            let size = (scale.at(before) - from, 14.0);
            let title = format!("{}, {name}: {part:.2} ms a token", entry.proposer);
            drawing.bar((from, middle(row) - 7.0), size, colour, &title);
        }
        drawing.text(
            (RIGHT + 12.0, middle(row) + 4.0),
            Anchor::Start,
            &format!("{before:.1}"),
        );
    }
    drawing.finish()
}

/// The frame of a plot over whole numbers: shares from 0 to 1 upwards.
fn shares_over(count: usize) -> (Drawing, Scale, Scale) {
    let (top, bottom) = (8.0, 170.0);
    let mut drawing = Drawing::new(WIDTH, bottom + 26.0);
    let x = Scale {
        values: (0.0, count as f64),
        coordinates: (36.0, WIDTH - 8.0),
    };
    let y = Scale {
        values: (0.0, 1.0),
        coordinates: (bottom, top),
    };
    for tick in [0.0, 0.25, 0.5, 0.75, 1.0] {
        drawing.axis((36.0, y.at(tick)), (WIDTH - 8.0, y.at(tick)));
        drawing.soft((30.0, y.at(tick) + 4.0), Anchor::End, &format!("{tick:.2}"));
    }
    for index in 0..count {
        let place = (x.at(index as f64 + 0.5), bottom + 17.0);
        drawing.soft(place, Anchor::Middle, &index.to_string());
    }
    (drawing, x, y)
}

/// Conditional acceptance by depth.
pub(super) fn depths(entries: &[&Entry], palette: &Palette) -> String {
    let entries = drafting(entries);
    let count = entries
        .iter()
        .map(|entry| entry.acceptance_by_depth.len())
        .max();
    let Some(count) = count.filter(|count| *count > 0) else {
        return String::new();
    };
    let (mut drawing, x, y) = shares_over(count);
    for entry in entries {
        let colour = palette.colour(&entry.proposer);
        let known = entry.acceptance_by_depth.iter().enumerate();
        let points: Vec<(f64, f64, f64)> = known
            .filter_map(|(depth, share)| {
                let share = (*share)?;
                Some((x.at(depth as f64 + 0.5), y.at(share), share))
            })
            .collect();
        let path: Vec<(f64, f64)> = points.iter().map(|(x, y, _)| (*x, *y)).collect();
        drawing.line(&path, colour, 2.0);
        for (x, y, share) in points {
            drawing.dot((x, y), colour, &format!("{}: {share:.3}", entry.proposer));
        }
    }
    drawing.finish()
}

/// How many drafts the rounds accept.
pub(super) fn lengths(entries: &[&Entry], palette: &Palette) -> String {
    let entries = drafting(entries);
    let count = entries
        .iter()
        .map(|entry| entry.counts.accepted_length_histogram.len())
        .max();
    let Some(count) = count.filter(|count| *count > 0) else {
        return String::new();
    };
    let (mut drawing, x, y) = shares_over(count);
    let width = (x.at(1.0) - x.at(0.0)) * 0.8 / entries.len() as f64;
    for (place, entry) in entries.iter().enumerate() {
        let colour = palette.colour(&entry.proposer);
        let rounds = (entry.counts.rounds as f64).max(1.0);
        for (accepted, number) in entry.counts.accepted_length_histogram.iter().enumerate() {
            let share = *number as f64 / rounds;
            let from = x.at(accepted as f64 + 0.1) + width * place as f64;
            let size = (width, y.at(0.0) - y.at(share));
            let title = format!(
                "{}: {accepted} accepted in {:.1} %",
                entry.proposer,
                100.0 * share
            );
            drawing.bar((from, y.at(share)), size, colour, &title);
        }
    }
    drawing.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_have_round_ticks_and_keep_inside() {
        let scale = Scale {
            values: (1.0, 2.4),
            coordinates: (100.0, 200.0),
        };
        let ticks = scale.ticks(4.0);
        assert_eq!(ticks.len(), 3, "{ticks:?}");
        assert!((ticks[0] - 1.0).abs() < 1e-9 && (ticks[2] - 2.0).abs() < 1e-9);
        assert!((scale.at(1.7) - 150.0).abs() < 1e-9);
        assert!((scale.at(9.0) - 200.0).abs() < 1e-9);
    }
}
