//! Figures by depth over the rounds that decoding visits on a given text.

pub use draftsmith_models::objective::rounds::{Ratios, expected_rounds, visit_probabilities};

/// Sums over the visited rounds, by depth.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DepthSums {
    /// Expected rounds that propose depth `d`.
    pub proposed: Vec<f64>,
    /// Expected rounds that propose depth `d` and accept all drafts before it.
    pub reached: Vec<f64>,
    /// Expected rounds that accept the draft at depth `d` too.
    pub accepted: Vec<f64>,
}

impl DepthSums {
    /// Empty sums for `gamma` depths.
    pub fn new(gamma: usize) -> Self {
        Self {
            proposed: vec![0.0; gamma],
            reached: vec![0.0; gamma],
            accepted: vec![0.0; gamma],
        }
    }

    /// Adds the rounds of one turn.
    pub fn add(&mut self, ratios: &[Vec<f64>]) {
        let gamma = self.proposed.len();
        let visits = visit_probabilities(ratios, gamma);
        for (visit, ratios) in visits.iter().zip(ratios) {
            let mut survival = *visit;
            for (depth, ratio) in ratios.iter().enumerate().take(gamma) {
                self.proposed[depth] += visit;
                self.reached[depth] += survival;
                survival *= ratio;
                self.accepted[depth] += survival;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_sums_follow_the_visited_rounds() {
        let ratios: Ratios = vec![vec![1.0, 0.0], vec![0.5, 0.0], vec![1.0]];
        let mut sums = DepthSums::new(2);
        sums.add(&ratios);
        // Anchor 0 always: accepts one draft, continues at anchor 2, which drafts the last token.
        assert_eq!(sums.proposed, [2.0, 1.0]);
        assert_eq!(sums.reached, [2.0, 1.0]);
        assert_eq!(sums.accepted, [2.0, 0.0]);
    }
}
