//! Causal softmax over attention scores in place.
#![expect(
    clippy::inline_always,
    reason = "the vector width of a caller reaches only what is inlined into it"
)]

use rayon::prelude::*;

use super::exp::exp;
use super::row::{self, vectorised};

/// Softmax of each row of `scores`, flat `[B, heads, S, T]`, over the keys it may see; zero elsewhere.
///
/// Row `i` of sequence `b` sees the first `visible[b * S + i]` keys; `num_rows` is B.
pub fn causal_softmax(scores: &mut [f32], visible: &[usize], num_rows: usize, num_keys: usize) {
    let rows_per_sequence = scores.len() / num_keys / num_rows.max(1);
    let len = visible.len() / num_rows.max(1);
    let rows_per_task = (super::TASK_LEN / num_keys).max(1);
    scores
        .par_chunks_mut(rows_per_task * num_keys)
        .enumerate()
        .for_each(|(task, rows)| {
            for (index, row) in rows.chunks_exact_mut(num_keys).enumerate() {
                let row_index = task * rows_per_task + index;
                let query = row_index / rows_per_sequence * len + row_index % len;
                let (seen, unseen) = row.split_at_mut(visible[query]);
                vectorised(|| softmax_row(seen));
                unseen.fill(0.0);
            }
        });
}

/// Softmax of one row in place.
#[inline(always)]
fn softmax_row(row: &mut [f32]) {
    let max = row::max(row);
    for x in &mut *row {
        *x = exp(*x - max);
    }
    let scale = 1.0 / row::sum([row], |[x]| x);
    for x in row {
        *x *= scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_sums_to_one_over_visible_keys_only() {
        let (visible, heads, len, keys) = ([4, 5, 6, 7, 1, 2, 3, 4], 2, 4, 7);
        let mut scores: Vec<f32> = (0..2 * heads * len * keys)
            .map(|i| ((i * 37) % 11) as f32 - 5.0)
            .collect();
        let before = scores.clone();
        causal_softmax(&mut scores, &visible, 2, keys);
        for (index, row) in scores.chunks(keys).enumerate() {
            let visible = visible[index / (heads * len) * len + index % len];
            assert!(row[visible..].iter().all(|&p| p.to_bits() == 0));
            let old = &before[index * keys..index * keys + visible];
            let total: f64 = old.iter().map(|&x| f64::from(x).exp()).sum();
            for (p, x) in row.iter().zip(old) {
                // Relative error of exp, of the sum of at most 7 terms, and two roundings.
                assert!((f64::from(*p) - f64::from(*x).exp() / total).abs() < 1e-6);
            }
        }
    }
}
