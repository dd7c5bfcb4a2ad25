//! Reductions over one row of f32 values.
//!
//! Sums run in [`LANES`] independent partial sums over blocks whose totals are added in f64: one fixed
//! order, whatever the width of the machine's vectors, and no loss of digits over a large vocabulary.
#![expect(
    clippy::inline_always,
    reason = "the vector width of a caller reaches only what is inlined into it"
)]

use super::exp::exp;

/// Independent partial sums; the widest vector in use holds as many f32 values.
pub const LANES: usize = 16;

/// Values whose partial sums stay in f32.
const BLOCK: usize = 128 * LANES;

/// Runs `body` compiled for the widest vectors of this machine.
///
/// Functions called by `body` take part only when they are inlined into it. Results do not depend on the
/// vector width: nothing here fuses or reorders operations.
#[inline(always)]
pub fn vectorised<R>(body: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(body)
}

/// `sum(f(a[i], b[i], ..))` over rows of equal length.
#[inline(always)]
pub fn sum<const N: usize>(rows: [&[f32]; N], f: impl Fn([f32; N]) -> f32) -> f32 {
    let len = rows[0].len();
    let mut total = 0.0_f64;
    for start in (0..len).step_by(BLOCK) {
        let end = (start + BLOCK).min(len);
        total += f64::from(block_sum(rows.map(|row| &row[start..end]), &f));
    }
    total as f32
}

#[inline(always)]
fn block_sum<const N: usize>(rows: [&[f32]; N], f: &impl Fn([f32; N]) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let parts = rows.map(<[f32]>::as_chunks::<LANES>);
    for chunk in 0..parts[0].0.len() {
        let values = parts.map(|(chunks, _)| &chunks[chunk]);
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(values.map(|value| value[lane]));
        }
    }
    for (lane, sum) in lanes.iter_mut().enumerate().take(parts[0].1.len()) {
        *sum += f(parts.map(|(_, rest)| rest[lane]));
    }
    lanes.iter().sum()
}

/// Largest value of a row, minus infinity for an empty one; values that are not numbers are passed over.
#[inline(always)]
pub fn max(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    let largest = lanes.into_iter().chain(rest.iter().copied());
    largest.fold(f32::NEG_INFINITY, larger)
}

/// Index of the first largest value, 0 for an empty row.
#[inline(always)]
pub fn argmax(row: &[f32]) -> usize {
    let largest = max(row);
    row.iter().position(|&x| x >= largest).unwrap_or(0)
}

/// `log(sum(exp(x)))`; not a number when any value is not.
#[inline(always)]
pub fn log_sum_exp(row: &[f32]) -> f32 {
    let max = max(row);
    sum([row], |[x]| exp(x - max)).ln() + max
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(len: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 37) % 101) as f32 * 0.11 - 4.0)
            .collect()
    }

    #[test]
    fn reductions_equal_their_definitions_for_every_length() {
        for len in (1..70).chain([BLOCK - 1, BLOCK, BLOCK + 1, 50_000]) {
            let row = values(len);
            let wide: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
            let exact: f64 = wide.iter().map(|x| x.exp()).sum::<f64>().ln();
            let found = f64::from(vectorised(|| log_sum_exp(&row)));
            // exp within 3e-7 relative, at most 128 additions a lane, logarithm and addition rounded.
            assert!((found - exact).abs() < 3e-6, "{len}: {found} {exact}");
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&row).to_bits(), largest.to_bits());
            let first = row.iter().position(|x| x.to_bits() == largest.to_bits());
            assert_eq!(Some(argmax(&row)), first);
            let product: f64 = wide.iter().map(|x| x * 2.0 * x).sum();
            let doubled: Vec<f32> = row.iter().map(|x| x * 2.0).collect();
            let found = f64::from(sum([&row, &doubled], |[x, y]| x * y));
            assert!((found - product).abs() <= 1e-5 * product, "{len}");
        }
    }

    #[test]
    fn the_vector_width_changes_no_bit() {
        let row = values(5_003);
        assert_eq!(
            vectorised(|| log_sum_exp(&row)).to_bits(),
            log_sum_exp(&row).to_bits()
        );
    }

    /// Seen red with `max` in place of the comparison in [`exp`]: `f32::max` drops what is not a number.
    #[test]
    fn what_is_not_a_number_stays_visible() {
        for at in [0, 17, 99] {
            let mut row = values(100);
            row[at] = f32::NAN;
            assert!(log_sum_exp(&row).is_nan(), "{at}");
        }
    }
}
