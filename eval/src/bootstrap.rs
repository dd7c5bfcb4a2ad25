//! Confidence intervals for pooled ratios by resampling rows (Efron 1979, percentile method).

use draftsmith_models::rng::{Purpose, Stream};
use serde::{Deserialize, Serialize};

/// A 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interval {
    /// 2.5 % quantile.
    pub low: f64,
    /// 97.5 % quantile.
    pub high: f64,
}

/// Interval of `sum(numerator) / sum(denominator)` over `rows` of (numerator, denominator).
///
/// Rows are drawn with replacement; resample `i` is a pure function of (seed, i), so that two drafters
/// measured on the same rows are resampled alike. `None` without a row or a resample, or when a
/// resample has no denominator.
pub fn ratio_interval(rows: &[(f64, f64)], resamples: usize, seed: u64) -> Option<Interval> {
    interval(rows.len(), resamples, seed, |drawn| ratio(rows, drawn))
}

/// Interval of the difference of two pooled ratios over the same rows, `second - first`, each resample drawing the same
/// rows for both: what the rows have in common cancels.
pub fn paired_interval(
    first: &[(f64, f64)],
    second: &[(f64, f64)],
    resamples: usize,
    seed: u64,
) -> Option<Interval> {
    let rows = first.len().min(second.len());
    interval(rows, resamples, seed, |drawn| {
        ratio(second, drawn) - ratio(first, drawn)
    })
}

fn ratio(rows: &[(f64, f64)], drawn: &[usize]) -> f64 {
    let (mut numerator, mut denominator) = (0.0, 0.0);
    for &row in drawn {
        numerator += rows[row].0;
        denominator += rows[row].1;
    }
    numerator / denominator
}

fn interval(
    num_rows: usize,
    resamples: usize,
    seed: u64,
    figure: impl Fn(&[usize]) -> f64,
) -> Option<Interval> {
    if num_rows == 0 || resamples == 0 {
        return None;
    }
    let resample = |index: usize| {
        let mut stream = Stream::new(seed, Purpose::Bootstrap, index as u64);
        let drawn: Vec<usize> = (0..num_rows).map(|_| stream.below(num_rows)).collect();
        figure(&drawn)
    };
    let mut figures: Vec<f64> = (0..resamples).map(resample).collect();
    if figures.iter().any(|figure| !figure.is_finite()) {
        return None;
    }
    figures.sort_by(f64::total_cmp);
    let quantile = |share: f64| figures[(share * (resamples - 1) as f64).round() as usize];
    Some(Interval {
        low: quantile(0.025),
        high: quantile(0.975),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_rows_have_no_spread_and_no_rows_no_interval() {
        let interval = ratio_interval(&[(3.0, 2.0); 5], 200, 1).unwrap();
        assert!((interval.low - 1.5).abs() < 1e-12 && (interval.high - 1.5).abs() < 1e-12);
        assert!(ratio_interval(&[], 200, 1).is_none());
        assert!(ratio_interval(&[(1.0, 0.0)], 200, 1).is_none());
    }

    #[test]
    fn the_interval_has_the_width_of_the_normal_approximation() {
        // 400 rows, half 1 and half 2 tokens per round: standard error 0.5 / sqrt(400) = 0.025.
        let rows: Vec<(f64, f64)> = (0..400).map(|i| (f64::from(1 + i % 2), 1.0)).collect();
        let interval = ratio_interval(&rows, 2000, 7).unwrap();
        let width = interval.high - interval.low;
        // 2 * 1.96 * 0.025 = 0.098; the quantiles of 2000 resamples are known to about 4 %.
        assert!((width - 0.098).abs() < 0.012, "{width}");
        assert!(interval.low < 1.5 && 1.5 < interval.high);
    }

    #[test]
    fn what_rows_have_in_common_cancels_in_pairs() {
        // Rows differ a lot, the second is better by exactly 0.1 tokens a round in each.
        let first: Vec<(f64, f64)> = (0..50).map(|i| (f64::from(i % 5 + 1), 1.0)).collect();
        let second: Vec<(f64, f64)> = first.iter().map(|(n, d)| (n + 0.1, *d)).collect();
        let paired = paired_interval(&first, &second, 500, 3).unwrap();
        assert!((paired.low - 0.1).abs() < 1e-9 && (paired.high - 0.1).abs() < 1e-9);
        let alone = ratio_interval(&first, 500, 3).unwrap();
        assert!(alone.high - alone.low > 0.3);
    }
}
