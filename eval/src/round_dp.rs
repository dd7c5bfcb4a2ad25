//! Figures by depth over the rounds that decoding visits on a given text.

pub use draftsmith_models::objective::rounds::{Ratios, expected_rounds, visit_probabilities};

/// Variance of the number of rounds from each anchor on, given the text; `expected` is [`expected_rounds`] of the same
/// ratios and gamma.
///
/// A round leads from anchor `t` to `t + k + 1` with the probability that exactly `k` drafts are accepted, and
/// `Var N(t) = E[Var N(next) + (1 + E N(next))^2] - (E N(t))^2`.
pub fn variance_of_rounds(ratios: &[Vec<f64>], expected: &[f64], gamma: usize) -> Vec<f64> {
    let end = ratios.len();
    let mut variance = vec![0.0; end + 1];
    for anchor in (0..end).rev() {
        let mut square = 0.0;
        let mut survival = 1.0;
        for depth in 0..=gamma {
            let ratio = match ratios[anchor].get(depth) {
                Some(ratio) if depth < gamma => *ratio,
                _ => 0.0,
            };
            let next = (anchor + depth + 1).min(end);
            let from_next = variance[next] + (1.0 + expected[next]).powi(2);
            square += survival * (1.0 - ratio) * from_next;
            survival *= ratio;
        }
        variance[anchor] = (square - expected[anchor].powi(2)).max(0.0); // rounding
    }
    variance
}

/// Expected rounds of a turn that verify `0, 1, .., gamma` drafts. With it any cost of a round can take the place of the
/// "1" that [`expected_rounds`] counts: the cost of a text is the sum of `rounds * cost(drafts)`.
pub fn rounds_by_drafts(ratios: &[Vec<f64>], gamma: usize) -> Vec<f64> {
    let mut rounds = vec![0.0; gamma + 1];
    for (visit, ratios) in visit_probabilities(ratios, gamma).iter().zip(ratios) {
        rounds[ratios.len().min(gamma)] += visit;
    }
    rounds
}

/// The mean of a cost over the rounds that [`rounds_by_drafts`] counts; 0 without a round.
pub fn mean_cost(rounds_by_drafts: &[f64], cost: impl Fn(f64) -> f64) -> f64 {
    let rounds: f64 = rounds_by_drafts.iter().sum();
    let costs = rounds_by_drafts.iter().enumerate();
    let total: f64 = costs
        .map(|(drafts, rounds)| rounds * cost(drafts as f64))
        .sum();
    if rounds > 0.0 { total / rounds } else { 0.0 }
}

/// Expected sum of `count`, a function of the anchor, over all rounds of a turn.
pub fn summed_over_rounds(
    ratios: &[Vec<f64>],
    gamma: usize,
    count: impl Fn(usize) -> usize,
) -> f64 {
    let visits = visit_probabilities(ratios, gamma).into_iter().enumerate();
    visits
        .map(|(anchor, visit)| visit * count(anchor) as f64)
        .sum()
}

/// Probability that a round starts at each anchor and accepts all drafts before each depth, `[anchor][depth]`.
pub fn reach_probabilities(ratios: &[Vec<f64>], gamma: usize) -> Ratios {
    let of_anchor = |(mut survival, ratios): (f64, &Vec<f64>)| {
        let reach = |ratio: &f64| {
            let here = survival;
            survival *= ratio;
            here
        };
        ratios.iter().take(gamma).map(reach).collect()
    };
    let visits = visit_probabilities(ratios, gamma).into_iter();
    visits.zip(ratios).map(of_anchor).collect()
}

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
        for (reach, ratios) in reach_probabilities(ratios, gamma).iter().zip(ratios) {
            for (depth, reached) in reach.iter().enumerate() {
                self.proposed[depth] += reach[0];
                self.reached[depth] += reached;
                self.accepted[depth] += reached * ratios[depth];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_models::rng::{Purpose, Stream};

    use super::*;

    /// Mean and variance by simulation. Red under: `variance[next]` left out.
    #[test]
    fn mean_and_variance_of_rounds_are_those_of_decoding() {
        let mut stream = Stream::new(1, Purpose::Check, 9);
        let len = 12;
        let ratios: Ratios = (0..len)
            .map(|anchor| {
                (0..3.min(len - anchor - 1))
                    .map(|_| stream.uniform())
                    .collect()
            })
            .collect();
        let expected = expected_rounds(&ratios, 3);
        let variance = variance_of_rounds(&ratios, &expected, 3)[0];
        let runs = 40_000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for _ in 0..runs {
            let (mut at, mut rounds) = (0, 0.0);
            while at < len {
                let accepts = |ratio: &&f64| stream.uniform() < **ratio;
                at += 1 + ratios[at].iter().take_while(accepts).count();
                rounds += 1.0;
            }
            sum += rounds;
            squares += rounds * rounds;
        }
        let mean = sum / f64::from(runs);
        let found = squares / f64::from(runs) - mean * mean;
        // Five standard errors of the mean; the variance of a variance is about twice its square.
        let error = (variance / f64::from(runs)).sqrt();
        assert!(
            (mean - expected[0]).abs() < 5.0 * error,
            "{mean} {}",
            expected[0]
        );
        let error = variance * (2.0 / f64::from(runs)).sqrt();
        assert!((found - variance).abs() < 5.0 * error, "{found} {variance}");
    }

    /// Red under: `visit` replaced by `1.0` in `rounds_by_drafts`.
    #[test]
    fn the_cost_of_a_text_is_that_of_its_rounds() {
        let ratios: Ratios = vec![vec![0.5, 0.25], vec![0.5], vec![]];
        // Anchors are visited with probability 1, 0.5 and 0.625; they verify two drafts, one and none.
        let rounds = rounds_by_drafts(&ratios, 2);
        assert_eq!(rounds, [0.625, 0.5, 1.0]);
        assert!((rounds.iter().sum::<f64>() - expected_rounds(&ratios, 2)[0]).abs() < 1e-12);
        let cost = mean_cost(&rounds, |drafts| 3.0 + drafts * drafts);
        assert!((cost - (0.625 * 3.0 + 0.5 * 4.0 + 1.0 * 7.0) / 2.125).abs() < 1e-12);
        assert!(mean_cost(&[0.0, 0.0], |_| 1.0).abs() < 1e-12);
        // With one draft at most, the first anchor verifies one.
        assert_eq!(rounds_by_drafts(&ratios, 1), [0.75, 1.5]);
    }

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

    /// Red under: `survival *= ratio` left out.
    #[test]
    fn a_slot_is_reached_by_rounds_that_start_before_it_and_accept_all_between() {
        let ratios: Ratios = vec![vec![0.5, 0.25], vec![0.5], vec![]];
        // Anchor 1 is visited when the first draft fails, anchor 2 when it alone is accepted or by anchor 1's failure.
        let visits = [1.0, 0.5, 0.5 * 0.75 + 0.5 * 0.5];
        assert_eq!(visit_probabilities(&ratios, 2), visits);
        let reach = reach_probabilities(&ratios, 2);
        assert_eq!(reach, [vec![1.0, 0.5], vec![0.5], vec![]]);
    }
}
