//! [`ChiSquare`]: counts of drawn texts beside the law that they should have.

/// Statistic and bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChiSquare {
    /// Sum over cells of the squared difference to the expected count, over that count; infinite where an impossible
    /// text was drawn.
    pub statistic: f64,
    /// What chance exceeds once in a hundred.
    pub bound: f64,
}

impl ChiSquare {
    /// Over cells of at least five expected counts, the rest pooled.
    pub fn new(counts: &[f64], law: &[f64]) -> Self {
        let total: f64 = counts.iter().sum();
        let (mut statistic, mut cells) = (0.0, 0.0);
        let (mut pooled_count, mut pooled_expected) = (0.0, 0.0);
        for (&count, &share) in counts.iter().zip(law) {
            let expected = share * total;
            if share <= 0.0 && count > 0.5 {
                statistic = f64::INFINITY;
            }
            if expected < 5.0 {
                pooled_count += count;
                pooled_expected += expected;
            } else {
                statistic += (count - expected).powi(2) / expected;
                cells += 1.0;
            }
        }
        if pooled_expected > 1.0 {
            statistic += (pooled_count - pooled_expected).powi(2) / pooled_expected;
            cells += 1.0;
        }
        Self {
            statistic,
            bound: upper_point(cells - 1.0),
        }
    }

    /// Whether the counts may be of the law.
    pub fn holds(&self) -> bool {
        self.statistic < self.bound
    }
}

/// Upper 1 % point of chi-square (Wilson and Hilferty 1931).
fn upper_point(freedom: f64) -> f64 {
    let spread = 2.0 / (9.0 * freedom);
    freedom * (1.0 - spread + 2.326 * spread.sqrt()).powi(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Red under: `share <= 0.0` replaced by `share < 0.0`.
    #[test]
    fn counts_are_judged_by_tabled_points() {
        let of = |counts: [f64; 3], law: [f64; 3]| ChiSquare::new(&counts, &law);
        let even = of([100.0, 100.0, 100.0], [1.0 / 3.0; 3]);
        // The 1 % point of two degrees of freedom is 9.210; the approximation is good to 1 % there.
        assert!((even.bound - 9.21).abs() < 0.1 && even.holds(), "{even:?}");
        assert!(!of([140.0, 80.0, 80.0], [1.0 / 3.0; 3]).holds());
        assert!(!of([149.0, 150.0, 1.0], [0.5, 0.5, 0.0]).holds());
    }
}
