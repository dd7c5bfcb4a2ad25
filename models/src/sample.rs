//! The sampler: temperature, top-k, top-p and min-p on one row of logits, on the host.
//!
//! The probabilities a token was drawn from and those used in an acceptance ratio are the same numbers:
//! both come from [`Sampling::probabilities`].

use serde::{Deserialize, Serialize};

use crate::error::ModelError;

/// How tokens are drawn from logits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sampling {
    /// 0 means greedy: all mass on the first most probable token.
    pub temperature: f64,
    /// Keep the k most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most probable tokens with at least this mass; 1 keeps all.
    pub top_p: f64,
    /// Drop tokens below this share of the most probable one; 0 keeps all.
    pub min_p: f64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
        }
    }
}

impl Sampling {
    /// Greedy decoding.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            ..Self::default()
        }
    }

    /// Plain sampling at a temperature.
    pub fn at(temperature: f64) -> Self {
        Self {
            temperature,
            ..Self::default()
        }
    }

    /// Whether all mass is on one token.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// A short name that differs wherever the setting does, for files and tags: `t0`, `t0.8-k20-p0.95-m0.05`.
    pub fn label(&self) -> String {
        let Self {
            temperature,
            top_k,
            top_p,
            min_p,
        } = self;
        let mut parts = vec![format!("t{temperature}")];
        if *top_k > 0 {
            parts.push(format!("k{top_k}"));
        }
        if *top_p < 1.0 {
            parts.push(format!("p{top_p}"));
        }
        if *min_p > 0.0 {
            parts.push(format!("m{min_p}"));
        }
        parts.join("-")
    }

    /// Checks the ranges; `key` names the table in messages.
    ///
    /// # Errors
    /// [`ModelError::Setting`] naming the key and its range.
    pub fn validate(&self, key: &str) -> Result<(), ModelError> {
        let check = |name: &str, value: f64, valid: bool, expected: &str| {
            if valid && value.is_finite() {
                return Ok(());
            }
            Err(ModelError::setting(
                format!("`{key}.{name}` is {value}, expected {expected}"),
                "0 as temperature means greedy",
            ))
        };
        check(
            "temperature",
            self.temperature,
            self.temperature >= 0.0,
            "at least 0",
        )?;
        check(
            "top_p",
            self.top_p,
            self.top_p > 0.0 && self.top_p <= 1.0,
            "above 0 and at most 1",
        )?;
        check(
            "min_p",
            self.min_p,
            (0.0..1.0).contains(&self.min_p),
            "at least 0 and below 1",
        )
    }

    /// The distribution a token is drawn from: a vector of `logits.len()` probabilities summing to 1.
    pub fn probabilities(&self, logits: &[f32]) -> Vec<f64> {
        if self.is_greedy() {
            let mut one_hot = vec![0.0; logits.len()];
            if let Some(best) = argmax(logits) {
                one_hot[best] = 1.0;
            }
            return one_hot;
        }
        let mut probabilities = softmax(logits, self.temperature);
        self.truncate(&mut probabilities);
        probabilities
    }

    fn truncate(&self, probabilities: &mut [f64]) {
        let keeps_all = self.top_k == 0 && self.top_p >= 1.0 && self.min_p == 0.0;
        if keeps_all {
            return;
        }
        if self.top_k == 0 && self.top_p >= 1.0 {
            let best = probabilities.iter().copied().fold(0.0, f64::max);
            for p in probabilities.iter_mut().filter(|p| **p < self.min_p * best) {
                *p = 0.0;
            }
            return normalise(probabilities);
        }
        let mut order: Vec<usize> = (0..probabilities.len()).collect();
        order.sort_by(|&a, &b| {
            probabilities[b]
                .total_cmp(&probabilities[a])
                .then(a.cmp(&b))
        });
        let mut kept = order.len();
        if self.top_k > 0 {
            kept = kept.min(self.top_k);
        }
        let mut mass = 0.0;
        for (rank, &id) in order.iter().enumerate().take(kept) {
            let share = probabilities[id];
            let too_small = share < self.min_p * probabilities[order[0]];
            if rank > 0 && (too_small || mass >= self.top_p) {
                kept = rank;
                break;
            }
            mass += share;
        }
        for &id in &order[kept..] {
            probabilities[id] = 0.0;
        }
        normalise(probabilities);
    }
}

fn normalise(probabilities: &mut [f64]) {
    let total: f64 = probabilities.iter().sum();
    for p in probabilities {
        *p /= total;
    }
}

/// Index of the first largest value; `None` for an empty row.
pub fn argmax<T: PartialOrd>(values: &[T]) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (index, value) in values.iter().enumerate() {
        if best.is_none_or(|b| *value > values[b]) {
            best = Some(index);
        }
    }
    best
}

/// Softmax at a positive temperature, in f64.
fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scaled = |x: f32| (f64::from(x - max) / temperature).exp();
    let mut weights: Vec<f64> = logits.iter().map(|&x| scaled(x)).collect();
    let total: f64 = weights.iter().sum();
    for weight in &mut weights {
        *weight /= total;
    }
    weights
}

/// The token at cumulative mass `uniform` in `[0, 1)` of weights that need not sum to 1; never one of weight zero.
pub fn draw(weights: &[f64], uniform: f64) -> u32 {
    let total: f64 = weights.iter().sum();
    let mut left = uniform * total;
    let mut last_possible = 0;
    for (id, &weight) in weights.iter().enumerate() {
        if weight > 0.0 {
            last_possible = id;
            left -= weight;
            if left < 0.0 {
                return id as u32;
            }
        }
    }
    last_possible as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncations_keep_what_they_say() {
        let logits = [0.0_f32, 1.0, 2.0, 3.0].map(|x| x * 1.0);
        let top_k = Sampling {
            top_k: 2,
            ..Sampling::default()
        }
        .probabilities(&logits);
        assert_eq!(top_k.iter().filter(|&&p| p > 0.0).count(), 2);
        let full = Sampling::default().probabilities(&logits);
        // 0.644 alone is below 0.7, so the second token is needed as well.
        let top_p = Sampling {
            top_p: 0.7,
            ..Sampling::default()
        }
        .probabilities(&logits);
        assert_eq!(top_p.iter().filter(|&&p| p > 0.0).count(), 2);
        let min_p = Sampling {
            min_p: 0.2,
            ..Sampling::default()
        }
        .probabilities(&logits);
        assert_eq!(min_p.iter().filter(|&&p| p > 0.0).count(), 2);
        for row in [top_k, full, top_p, min_p] {
            assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn greedy_takes_the_first_of_equal_logits() {
        assert_eq!(
            Sampling::greedy().probabilities(&[1.0, 2.0, 2.0]),
            [0.0, 1.0, 0.0]
        );
    }

    #[test]
    fn a_draw_never_returns_an_impossible_token() {
        let row = [0.0, 0.5, 0.0, 0.5, 0.0];
        for step in 0..=1000 {
            let id = draw(&row, f64::from(step) / 1000.0);
            assert!(id == 1 || id == 3);
        }
    }
}
