//! Softmax over the attention scores that a query sees, in place.
#![expect(
    clippy::inline_always,
    reason = "the vector width of a caller reaches only what is inlined into it"
)]

use std::ops::Range;

use rayon::prelude::*;

use super::exp::exp;
use super::row::{self, vectorised};

/// What the rows of attention scores, flat `[B, heads, S, T + E]`, see: row `i` of sequence `b` the keys
/// `visible[b * S + i]` of T, and all of the E columns behind them.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Keys seen by each query, `[B, S]` flat.
    pub visible: &'a [Range<usize>],
    /// Sequences, B.
    pub num_rows: usize,
    /// Keys, T.
    pub num_keys: usize,
    /// Columns, T + E.
    pub num_columns: usize,
}

/// Softmax of each row of `scores` over the columns it sees; zero elsewhere.
pub fn softmax(scores: &mut [f32], seen: Seen<'_>) {
    let Seen {
        visible,
        num_rows,
        num_keys,
        num_columns,
    } = seen;
    let rows_per_sequence = scores.len() / num_columns / num_rows.max(1);
    let len = visible.len() / num_rows.max(1);
    let rows_per_task = (super::TASK_LEN / num_columns).max(1);
    scores
        .par_chunks_mut(rows_per_task * num_columns)
        .enumerate()
        .for_each(|(task, rows)| {
            for (index, row) in rows.chunks_exact_mut(num_columns).enumerate() {
                let row_index = task * rows_per_task + index;
                let query = row_index / rows_per_sequence * len + row_index % len;
                let (keys, own) = row.split_at_mut(num_keys);
                let Range { start, end } = visible[query];
                vectorised(|| softmax_row(&mut keys[start..end], own));
                keys[..start].fill(0.0);
                keys[end..].fill(0.0);
            }
        });
}

/// Softmax over both parts of a row together, in place.
#[inline(always)]
fn softmax_row(keys: &mut [f32], own: &mut [f32]) {
    let (a, b) = (row::max(keys), row::max(own));
    let max = if b > a { b } else { a };
    let mut total = 0.0;
    for part in [&mut *keys, &mut *own] {
        for x in &mut *part {
            *x = exp(*x - max);
        }
        total += row::sum([part], |[x]| x);
    }
    let scale = 1.0 / total;
    for part in [keys, own] {
        for x in part {
            *x *= scale;
        }
    }
}

/// Replaces the gradient of softmax rows `p` by that of the scores: `p * (gradient - sum(gradient * p))`.
pub fn softmax_gradient(gradient: &mut [f32], p: &[f32], num_columns: usize) {
    let rows_per_task = (super::TASK_LEN / num_columns).max(1);
    gradient
        .par_chunks_mut(rows_per_task * num_columns)
        .zip(p.par_chunks(rows_per_task * num_columns))
        .for_each(|(gradients, rows)| {
            let rows = rows.chunks_exact(num_columns);
            for (gradient, p) in gradients.chunks_exact_mut(num_columns).zip(rows) {
                vectorised(|| {
                    let mean = row::sum([&*gradient, p], |[g, p]| g * p);
                    for (g, p) in gradient.iter_mut().zip(p) {
                        *g = p * (*g - mean);
                    }
                });
            }
        });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sequences, two heads, four queries; seven keys and two columns that everyone sees.
    const SEEN: Seen<'_> = Seen {
        visible: &[0..4, 0..5, 2..6, 6..7, 0..0, 0..2, 1..3, 4..4],
        num_rows: 2,
        num_keys: 7,
        num_columns: 9,
    };

    fn scores() -> Vec<f32> {
        (0..2 * 2 * 4 * 9)
            .map(|i| ((i * 37) % 11) as f32 - 5.0)
            .collect()
    }

    /// Columns that row `index` sees.
    fn columns(index: usize) -> impl Iterator<Item = usize> + Clone {
        SEEN.visible[index / 8 * 4 + index % 4].clone().chain(7..9)
    }

    #[test]
    fn each_row_sums_to_one_over_the_columns_it_sees_only() {
        let before = scores();
        let mut p = before.clone();
        softmax(&mut p, SEEN);
        for (index, (row, old)) in p.chunks(9).zip(before.chunks(9)).enumerate() {
            let total: f64 = columns(index).map(|i| f64::from(old[i]).exp()).sum();
            for i in 0..9 {
                let exact = if columns(index).any(|seen| seen == i) {
                    f64::from(old[i]).exp() / total
                } else {
                    0.0
                };
                // Relative error of exp, of the sum of at most 9 terms, and two roundings.
                assert!((f64::from(row[i]) - exact).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn the_gradient_is_that_of_finite_differences() {
        let before = scores();
        let mut p = before.clone();
        softmax(&mut p, SEEN);
        let weight: Vec<f32> = (0..p.len()).map(|i| ((i * 29) % 13) as f32 * 0.1).collect();
        let mut gradient = weight.clone();
        softmax_gradient(&mut gradient, &p, 9);
        for index in 0..p.len() / 9 {
            let range = index * 9..(index + 1) * 9;
            let value = |moved: usize, by: f64| {
                let term = |i: usize| {
                    let x = f64::from(before[range.start + i]) + if i == moved { by } else { 0.0 };
                    (x.exp(), x.exp() * f64::from(weight[range.start + i]))
                };
                let terms = columns(index).map(term);
                let (z, sum) = terms.fold((0.0, 0.0), |(z, sum), (e, w)| (z + e, sum + w));
                sum / z
            };
            for i in 0..9 {
                let exact = (value(i, 1e-5) - value(i, -1e-5)) / 2e-5;
                assert!((f64::from(gradient[range.start + i]) - exact).abs() < 1e-6);
            }
        }
    }
}
