//! RMSNorm of rows in place.
#![expect(
    clippy::inline_always,
    reason = "the vector width of a caller reaches only what is inlined into it"
)]

use rayon::prelude::*;

use super::row::{self, vectorised};

/// Replaces each row `x` of `gain.len()` values by `x / sqrt(mean(x^2) + eps) * gain`.
pub fn rms_norm(values: &mut [f32], gain: &[f32], eps: f32) {
    let width = gain.len();
    let rows_per_task = (super::TASK_LEN / width).max(1);
    values
        .par_chunks_mut(rows_per_task * width)
        .for_each(|rows| {
            for row in rows.chunks_exact_mut(width) {
                vectorised(|| rms_norm_row(row, gain, eps));
            }
        });
}

#[inline(always)]
fn rms_norm_row(row: &mut [f32], gain: &[f32], eps: f32) {
    let mean_square = row::sum([&*row], |[x]| x * x) / row.len() as f32;
    let scale = 1.0 / (mean_square + eps).sqrt();
    for (x, gain) in row.iter_mut().zip(gain) {
        *x = *x * scale * gain;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_equals_the_definition() {
        let width = 37;
        let gain: Vec<f32> = (0..width).map(|i| 0.5 + i as f32 * 0.1).collect();
        let before: Vec<f32> = (0..5 * width)
            .map(|i| ((i * 53) % 97) as f32 - 48.0)
            .collect();
        let mut after = before.clone();
        rms_norm(&mut after, &gain, 1e-5);
        for (old, new) in before.chunks(width).zip(after.chunks(width)) {
            let square: f64 = old.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let root = (square / width as f64 + f64::from(1e-5_f32)).sqrt();
            for ((x, gain), y) in old.iter().zip(&gain).zip(new) {
                let exact = f64::from(*x) / root * f64::from(*gain);
                // Mean, root, reciprocal and two products, each rounded once.
                assert!((f64::from(*y) - exact).abs() <= 4e-7 * exact.abs());
            }
        }
    }
}
