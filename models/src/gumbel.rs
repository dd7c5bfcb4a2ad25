//! Gumbel noise: a draw from any distribution as the largest of its scores under shared noise.
//!
//! The noise is a pure function of (seed, sequence, absolute position, token of the target's vocabulary), so target and
//! drafters of any draft vocabulary see the same, and the text that the target draws is the same whoever drafts
//! (Daliri et al. 2408.07978). The Gumbel variate `-ln(E)` with `E` standard exponential makes `ln p - ln E` the score;
//! `p / E` has the same order and spares a logarithm.

use crate::rng::{Purpose, Stream};

/// Where noise is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoiseAt {
    /// Seed of the run.
    pub seed: u64,
    /// Stream of the sequence.
    pub stream: u64,
    /// Absolute position of the token to be drawn.
    pub position: usize,
}

impl NoiseAt {
    /// `exp(g) = 1 / E` of every token, `[V]`.
    pub fn weights(self, vocab_size: usize) -> Vec<f64> {
        let first = self.position as u64 * vocab_size as u64;
        let mut stream = Stream::at(self.seed, Purpose::Gumbel, self.stream, first);
        // `1 - u` lies in (0, 1]; at 1, with probability 2^-53, the weight is as large as it can be.
        let weight = |_| -1.0 / (1.0 - stream.uniform()).ln().min(-f64::MIN_POSITIVE);
        (0..vocab_size).map(weight).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(position: usize) -> NoiseAt {
        NoiseAt {
            seed: 3,
            stream: 5,
            position,
        }
    }

    #[test]
    fn noise_depends_on_the_token_alone() {
        assert_eq!(at(2).weights(7), at(2).weights(7));
        assert_ne!(at(2).weights(7), at(3).weights(7));
        let other = NoiseAt { stream: 6, ..at(2) };
        assert_ne!(at(2).weights(7), other.weights(7));
    }

    #[test]
    fn the_largest_score_follows_the_distribution() {
        let p = [0.1, 0.2, 0.0, 0.7];
        let mut counts = [0.0_f64; 4];
        let runs = 40_000;
        for position in 0..runs {
            let scores: Vec<f64> = at(position)
                .weights(4)
                .iter()
                .zip(p)
                .map(|(noise, p)| noise * p)
                .collect();
            let best = (0..4).max_by(|&a, &b| scores[a].total_cmp(&scores[b]));
            counts[best.unwrap_or(0)] += 1.0 / runs as f64;
        }
        for (count, p) in counts.iter().zip(p) {
            // Five standard errors of the worst rate.
            assert!((count - p).abs() < 5.0 * 0.5 / 200.0, "{counts:?}");
        }
    }
}
