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

#[cfg(test)]
mod tests {
    use super::*;

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
