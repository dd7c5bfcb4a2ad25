//! The round DP: expected number of rounds on a given text, by one backward sweep.
//!
//! A turn is `x_s .. x_e`; anchors are `s .. e-1`. Let `r[a][d]` be the probability that the draft at
//! depth `d` of a round anchored at `a` is accepted and equals the text, given that all drafts before it
//! were. With `s[a][k] = prod(r[a][0 .. k])` and `V(e) = 0`,
//!
//! `V(a) = 1 + V(a+1) - sum_{k=1..gamma} s[a][k] (V(a+k) - V(a+k+1))`,
//!
//! positions clipped at `e`. The prefill wrote `x_s`, so the turn has `e - s` tokens in `V(s)` expected
//! rounds. For speculative sampling `r = min(1, q(x)/p(x))`, for greedy `r = 1[argmax q = x]`.

/// Acceptance probabilities of the anchors of one turn.
///
/// Entry `i` belongs to anchor `s + i`; its list holds depths `0, 1, ..` as far as the turn goes.
pub type Ratios = Vec<Vec<f64>>;

/// Expected rounds from every anchor on, `V(s) ..= V(e)`, with at most `gamma` drafts a round.
pub fn expected_rounds(ratios: &[Vec<f64>], gamma: usize) -> Vec<f64> {
    let end = ratios.len();
    let mut rounds = vec![0.0; end + 1];
    for anchor in (0..end).rev() {
        let mut value = 1.0 + rounds[anchor + 1];
        let mut survival = 1.0;
        for (depth, ratio) in ratios[anchor].iter().enumerate().take(gamma) {
            let (here, next) = (anchor + depth + 1, anchor + depth + 2);
            // At `here = end` both values are 0: the draft of the last token saves no round.
            if here >= end {
                break;
            }
            survival *= ratio;
            value -= survival * (rounds[here] - rounds[next]);
        }
        rounds[anchor] = value;
    }
    rounds
}

/// Probability that decoding starts a round at each anchor, with at most `gamma` drafts a round.
pub fn visit_probabilities(ratios: &[Vec<f64>], gamma: usize) -> Vec<f64> {
    let end = ratios.len();
    let mut visits = vec![0.0; end + 1];
    if end == 0 {
        return Vec::new();
    }
    visits[0] = 1.0;
    for anchor in 0..end {
        let mut survival = visits[anchor];
        for depth in 0..=gamma {
            let ratio = match ratios[anchor].get(depth) {
                Some(ratio) if depth < gamma => *ratio,
                _ => 0.0,
            };
            // `depth` accepted drafts and one token of the target's own.
            let next = (anchor + depth + 1).min(end);
            visits[next] += survival * (1.0 - ratio);
            survival *= ratio;
        }
    }
    visits.truncate(end);
    visits
}

#[cfg(test)]
mod tests {
    use crate::rng::{Purpose, Stream};

    use super::*;

    /// Random probabilities for a turn of `len` anchors and 5 depths.
    fn turn(seed: u64, len: usize) -> Ratios {
        let mut stream = Stream::new(seed, Purpose::Check, 0);
        (0..len)
            .map(|anchor| (0..5.min(len - anchor)).map(|_| stream.uniform()).collect())
            .collect()
    }

    /// `V(s)` straight from the transition probabilities between anchors.
    fn rounds_by_transitions(ratios: &[Vec<f64>], gamma: usize) -> f64 {
        let end = ratios.len();
        let mut rounds = vec![0.0; end + 1];
        for anchor in (0..end).rev() {
            let mut survival = 1.0;
            rounds[anchor] = 1.0;
            for k in 0..=gamma {
                let ratio = if k < gamma {
                    ratios[anchor].get(k).copied().unwrap_or(0.0)
                } else {
                    0.0
                };
                let next = (anchor + k + 1).min(end);
                rounds[anchor] += survival * (1.0 - ratio) * rounds[next];
                survival *= ratio;
            }
        }
        rounds[0]
    }

    /// Rounds of one simulated decode of the turn.
    fn simulated_rounds(ratios: &[Vec<f64>], gamma: usize, coins: &mut Stream) -> f64 {
        let (mut anchor, mut rounds) = (0, 0.0);
        while anchor < ratios.len() {
            rounds += 1.0;
            let drafts = ratios[anchor].iter().take(gamma);
            let accepted = drafts.take_while(|ratio| coins.uniform() < **ratio).count();
            anchor += accepted + 1;
        }
        rounds
    }

    #[test]
    fn the_sweep_equals_the_transition_sums() {
        for seed in 0..20 {
            let ratios = turn(seed, 1 + seed as usize);
            for gamma in 0..=6 {
                let sweep = expected_rounds(&ratios, gamma)[0];
                let direct = rounds_by_transitions(&ratios, gamma);
                // Two orders of adding at most a few hundred terms in f64.
                assert!((sweep - direct).abs() < 1e-12, "{sweep} {direct}");
            }
        }
    }

    #[test]
    fn the_sweep_equals_simulated_decoding() {
        let ratios = turn(3, 40);
        let mut coins = Stream::new(9, Purpose::Accept, 0);
        let n = 20_000;
        let samples: Vec<f64> = (0..n)
            .map(|_| simulated_rounds(&ratios, 4, &mut coins))
            .collect();
        let mean = samples.iter().sum::<f64>() / f64::from(n);
        let variance = samples.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / f64::from(n);
        let expected = expected_rounds(&ratios, 4)[0];
        // Four standard errors.
        let tolerance = 4.0 * (variance / f64::from(n)).sqrt();
        assert!((mean - expected).abs() < tolerance, "{mean} {expected}");
    }

    #[test]
    fn visits_sum_to_the_expected_rounds() {
        for gamma in 0..=6 {
            let ratios = turn(5, 30);
            let visits: f64 = visit_probabilities(&ratios, gamma).iter().sum();
            let rounds = expected_rounds(&ratios, gamma)[0];
            assert!((visits - rounds).abs() < 1e-12, "{visits} {rounds}");
        }
        assert!(visit_probabilities(&[], 3).is_empty());
    }

    #[test]
    fn certain_drafts_give_the_shortest_and_impossible_ones_the_longest_decode() {
        let all = |ratio: f64| -> Ratios {
            (0..10)
                .map(|anchor| vec![ratio; 3.min(10 - anchor)])
                .collect()
        };
        // 10 tokens in rounds of 4: 4 + 4 + 2.
        assert!((expected_rounds(&all(1.0), 3)[0] - 3.0).abs() < 1e-12);
        assert!((expected_rounds(&all(0.0), 3)[0] - 10.0).abs() < 1e-12);
        assert!((expected_rounds(&all(1.0), 0)[0] - 10.0).abs() < 1e-12);
    }
}
