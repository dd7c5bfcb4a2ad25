//! A vectorisable `exp` for f32.

/// `exp(x)` with a relative error below 3e-7; 0 below -87.3, and `x` must not exceed 88. What is not a
/// number stays so.
///
/// Range reduction by `ln 2` in two parts, then the degree-5 polynomial of Cephes `expf` (Moshier, 1989)
/// on `[-ln2/2, ln2/2]`; free of branches, so that a loop over it becomes vector code.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    // `f32::max` would turn what is not a number into the bound.
    let clamped = if x < -87.3 { -87.3 } else { x };
    let rounded = clamped * LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let p = 1.987_569_2e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let value = p * r * r + r + 1.0;
    // `n + 127` in the exponent field: only the low nine bits of the sum survive the shift.
    let scale = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    if x < -87.3 { 0.0 } else { value * scale }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        for step in 0..200_000 {
            let x = -87.2 + step as f32 * (175.0 / 200_000.0);
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 3e-7, "exp({x}): relative error {error}");
        }
        assert_eq!(exp(-1e30).to_bits(), 0);
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
        assert!(exp(f32::NAN).is_nan());
    }
}
