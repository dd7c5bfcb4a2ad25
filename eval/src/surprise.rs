//! A test of drawn text that needs nothing but the target: is it as surprising as text of the target's own?
//!
//! Each token `x` was drawn from `p`, so `-log p(x)` has the mean `H(p)`, and the sum of the differences over the text is a
//! martingale: `z = sum(-log p(x) - H(p)) / sqrt(sum(Var(-log p)))` is standard normal for text of the target's law. A wrong
//! residual, a wrong temperature or tokens that are chosen where they should be drawn move it with the square root of the
//! text's length.

use burn::tensor::Tensor;
use draftsmith_models::batch::{TokenRow, index_tensor};
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::host_values;

/// Positions whose logits exist at one time.
const POSITIONS: usize = 256;

/// Sums over drawn text.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Surprise {
    /// Of what the text was more surprising than expected.
    excess: f64,
    variance: f64,
    /// Tokens of probability zero: drawn beside the cut of a truncation, which rounding moves from pass to pass.
    outside: u64,
}

impl Surprise {
    /// Adds the marked tokens of rows, which were drawn with `sampling`; `final_hidden` `[B, S, H]` are the target's states.
    pub(crate) fn add_rows(
        &mut self,
        target: &TargetModel,
        sampling: &Sampling,
        rows: &[TokenRow],
        final_hidden: &Tensor<3>,
    ) {
        let [_, len, _] = final_hidden.dims();
        let flat = final_hidden.clone().flatten::<2>(0, 1);
        // Place of the state that predicts each drawn token, and the token.
        let mut drawn: Vec<(usize, u32)> = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            let marked = (1..row.len()).filter(|&t| row.turns[t] != 0);
            drawn.extend(marked.map(|t| (index * len + t - 1, row.ids[t])));
        }
        for part in drawn.chunks(POSITIONS) {
            let places = index_tensor(part.iter().map(|(place, _)| *place), target.device());
            let logits = host_values(&target.ends().logits(flat.clone().select(0, places)));
            let width = logits.len() / part.len();
            for (logits, (_, token)) in logits.chunks_exact(width).zip(part) {
                self.add(&sampling.probabilities(logits), *token);
            }
        }
    }

    /// Tokens to which the truncated law gives nothing; they are no part of the z.
    pub(crate) fn outside(&self) -> u64 {
        self.outside
    }

    /// The z of everything added; `None` where nothing was left to chance.
    pub(crate) fn z(&self) -> Option<f64> {
        let deviation = self.variance.sqrt();
        (deviation > 1e-9).then(|| self.excess / deviation)
    }

    fn add(&mut self, p: &[f64], token: u32) {
        if p[token as usize] <= 0.0 {
            self.outside += 1;
            return;
        }
        let (mut entropy, mut square) = (0.0, 0.0);
        for &p in p.iter().filter(|p| **p > 0.0) {
            entropy -= p * p.ln();
            square += p * p.ln().powi(2);
        }
        self.excess += -p[token as usize].ln() - entropy;
        self.variance += (square - entropy * entropy).max(0.0);
    }
}

/// Largest |z| among `count` independent ones that chance exceeds once in a thousand at most, by
/// `P(|Z| > z) <= 2 exp(-z^2 / 2)` and a bound over all of them.
pub fn z_bound(count: usize) -> f64 {
    (2.0 * (2000.0 * count.max(1) as f64).ln()).sqrt()
}

#[cfg(test)]
mod tests {
    use draftsmith_models::rng::{Purpose, Stream};
    use draftsmith_models::sample::draw;

    use super::*;

    /// z of 3000 tokens drawn from `drawn` and judged as if from `p`.
    fn z(p: &[f64], drawn: &[f64], seed: u64) -> f64 {
        let mut stream = Stream::new(seed, Purpose::Check, 31);
        let mut sums = Surprise::default();
        for _ in 0..3000 {
            sums.add(p, draw(drawn, stream.uniform()));
        }
        sums.z().unwrap()
    }

    #[test]
    fn text_of_the_law_is_normal_and_sharpened_text_is_not() {
        let p = [0.5, 0.3, 0.15, 0.05];
        let squares: Vec<f64> = (0..40).map(|seed| z(&p, &p, seed).powi(2)).collect();
        let mean = squares.iter().sum::<f64>() / 40.0;
        // Five standard errors of the mean of forty chi-squares.
        assert!((mean - 1.0).abs() < 5.0 * (2.0_f64 / 40.0).sqrt(), "{mean}");
        let power: Vec<f64> = p.iter().map(|p: &f64| p.powf(1.2)).collect();
        assert!(z(&p, &power, 1) < -z_bound(1));
    }

    #[test]
    fn bounds_grow_with_the_number_of_tests() {
        assert!((z_bound(1) - 3.899).abs() < 1e-3 && z_bound(100) > z_bound(10));
    }
}
