//! `silu(gate) * up` in one pass.
#![expect(
    clippy::inline_always,
    reason = "the vector width of a caller reaches only what is inlined into it"
)]

use rayon::prelude::*;

use super::exp::exp;
use super::row::vectorised;

/// Replaces `gate` by `silu(gate) * up`, element by element.
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    gate.par_chunks_mut(super::TASK_LEN)
        .zip(up.par_chunks(super::TASK_LEN))
        .for_each(|(gate, up)| vectorised(|| swiglu_part(gate, up)));
}

#[inline(always)]
fn swiglu_part(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        // Beyond 80 the sigmoid differs from its limit by less than f32 can show.
        let e = exp(-g.clamp(-80.0, 80.0));
        *g = *g / (1.0 + e) * u;
    }
}

/// Gradients of `gate` and `up` from that of the output: replaces the latter by the gradient of `gate`, and
/// returns that of `up`.
///
/// With `s = sigmoid(gate)`: `gradient * up * s * (1 + gate * (1 - s))` and `gradient * gate * s`.
pub fn swiglu_gradient(gradient: &mut [f32], gate: &[f32], up: &[f32]) -> Vec<f32> {
    let mut of_up = vec![0.0; up.len()];
    gradient
        .par_chunks_mut(super::TASK_LEN)
        .zip(of_up.par_chunks_mut(super::TASK_LEN))
        .zip(gate.par_chunks(super::TASK_LEN))
        .zip(up.par_chunks(super::TASK_LEN))
        .for_each(|(((gradient, of_up), gate), up)| {
            vectorised(|| swiglu_part_gradient(gradient, of_up, gate, up));
        });
    of_up
}

#[inline(always)]
fn swiglu_part_gradient(gradient: &mut [f32], of_up: &mut [f32], gate: &[f32], up: &[f32]) {
    for (((g, of_up), x), u) in gradient.iter_mut().zip(of_up).zip(gate).zip(up) {
        let sigmoid = 1.0 / (1.0 + exp(-x.clamp(-80.0, 80.0)));
        *of_up = *g * x * sigmoid;
        *g = *g * u * sigmoid * (1.0 + x * (1.0 - sigmoid));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_is_that_of_finite_differences() {
        let gate: Vec<f32> = (-300..300).map(|i| i as f32 * 0.05).collect();
        let up: Vec<f32> = gate.iter().map(|g| (g * 0.7).sin()).collect();
        let weight: Vec<f32> = gate.iter().map(|g| (g * 1.3).cos()).collect();
        let value = |g: f64, u: f64| g / (1.0 + (-g).exp()) * u;
        let mut of_gate = weight.clone();
        let of_up = swiglu_gradient(&mut of_gate, &gate, &up);
        for i in 0..gate.len() {
            let (g, u, w) = (f64::from(gate[i]), f64::from(up[i]), f64::from(weight[i]));
            let step = 1e-5;
            let exact = w * (value(g + step, u) - value(g - step, u)) / (2.0 * step);
            assert!((f64::from(of_gate[i]) - exact).abs() < 2e-6, "{g} {u}");
            let exact = w * value(g, 1.0);
            assert!(
                (f64::from(of_up[i]) - exact).abs() < 1e-6 * (1.0 + g.abs()),
                "{g}"
            );
        }
    }

    #[test]
    fn swiglu_equals_its_definition() {
        let gate: Vec<f32> = (-2000..2000).map(|i| i as f32 * 0.05).collect();
        let up: Vec<f32> = gate.iter().map(|g| (g * 0.7).sin()).collect();
        let mut fused = gate.clone();
        swiglu(&mut fused, &up);
        for ((&g, &u), &y) in gate.iter().zip(&up).zip(&fused) {
            let exact = f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u);
            // Relative error of exp plus three roundings.
            assert!(
                (f64::from(y) - exact).abs() <= 1e-6 * exact.abs() + 1e-30,
                "{g} {u}"
            );
        }
    }
}
