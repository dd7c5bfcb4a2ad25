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

/// Replaces the gradient of the output rows of [`rms_norm`] by that of its input rows `x`; returns the
/// gradient of the gain.
///
/// With `r = 1 / sqrt(mean(x^2) + eps)` and `h = gradient * gain`: `r h - x r^3 mean(h x)` and
/// `sum over rows(gradient * x * r)`. The sum runs in one fixed order.
pub fn rms_norm_gradient(gradient: &mut [f32], x: &[f32], gain: &[f32], eps: f32) -> Vec<f32> {
    let width = gain.len();
    let rows_per_task = (super::TASK_LEN / width).max(1);
    let parts: Vec<Vec<f32>> = gradient
        .par_chunks_mut(rows_per_task * width)
        .zip(x.par_chunks(rows_per_task * width))
        .map(|(gradients, rows)| {
            let mut of_gain = vec![0.0; width];
            let rows = rows.chunks_exact(width);
            for (gradient, x) in gradients.chunks_exact_mut(width).zip(rows) {
                vectorised(|| rms_norm_row_gradient(gradient, x, gain, eps, &mut of_gain));
            }
            of_gain
        })
        .collect();
    let mut of_gain = vec![0.0; width];
    for part in parts {
        for (sum, part) in of_gain.iter_mut().zip(part) {
            *sum += part;
        }
    }
    of_gain
}

#[inline(always)]
fn rms_norm_row_gradient(
    gradient: &mut [f32],
    x: &[f32],
    gain: &[f32],
    eps: f32,
    of_gain: &mut [f32],
) {
    let width = x.len() as f32;
    let mean_square = row::sum([x], |[x]| x * x) / width;
    let scale = 1.0 / (mean_square + eps).sqrt();
    let along = row::sum([&*gradient, gain, x], |[g, gain, x]| g * gain * x) / width;
    let along = along * scale * scale;
    for (((g, gain), x), sum) in gradient.iter_mut().zip(gain).zip(x).zip(of_gain) {
        *sum += *g * x * scale;
        *g = (*g * gain - x * along) * scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_is_that_of_finite_differences() {
        let (width, rows) = (5, 700); // more than one task
        let value = |i: usize| ((i * 37) % 23) as f64 * 0.2 - 2.1;
        let x: Vec<f64> = (0..width * rows).map(value).collect();
        let gain: Vec<f64> = (0..width).map(|i| 0.6 + i as f64 * 0.3).collect();
        let weight: Vec<f64> = (0..width * rows).map(|i| value(i * 7 + 3)).collect();
        let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let row_value = |x: &[f64], gain: &[f64], weight: &[f64]| {
            let square: f64 = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
            let scale = 1.0 / (square + 1e-5).sqrt();
            let terms = x.iter().zip(gain).zip(weight);
            terms.map(|((x, g), w)| x * scale * g * w).sum::<f64>()
        };
        let mut gradient = narrow(&weight);
        let of_gain = rms_norm_gradient(&mut gradient, &narrow(&x), &narrow(&gain), 1e-5);
        let step = 1e-5;
        let mut exact_gain = vec![0.0; width];
        for row in 0..rows {
            let range = row * width..(row + 1) * width;
            let (x, weight) = (&x[range.clone()], &weight[range.clone()]);
            for i in 0..width {
                let moved = |sign: f64| {
                    let (mut x, mut gain) = (x.to_vec(), gain.clone());
                    x[i] += sign * step;
                    let of_x = row_value(&x, &gain, weight);
                    x[i] -= sign * step;
                    gain[i] += sign * step;
                    (of_x, row_value(&x, &gain, weight))
                };
                let ((x_up, gain_up), (x_down, gain_down)) = (moved(1.0), moved(-1.0));
                let exact = (x_up - x_down) / (2.0 * step);
                // Differences of second order are exact to 1e-9 here; f32 leaves some 1e-6 of values near 2.
                assert!((f64::from(gradient[range.start + i]) - exact).abs() < 2e-5);
                exact_gain[i] += (gain_up - gain_down) / (2.0 * step);
            }
        }
        for (found, exact) in of_gain.iter().zip(&exact_gain) {
            assert!((f64::from(*found) - exact).abs() < 2e-5 * rows as f64);
        }
    }

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
