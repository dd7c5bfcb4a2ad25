//! Coefficients that couple the slots of an anchor, or of a turn: detached, from the figures of a first pass.
//!
//! A draft matters only where all drafts before it are accepted, and only as far as those after it are. So the
//! gradient of a slot is a closed form of its own loss times what its neighbours say:
//!
//! - D-PACE: any loss, weighted by how many accepted drafts hang on the slot;
//! - `expected_length`: the gradient of TV, which makes it that of the expected accepted length of the round;
//! - `round_count`: the gradient of the cross entropy, which makes it that of the number of rounds that decoding
//!   takes for the text.

use std::collections::BTreeMap;

use super::SlotScores;
use super::rounds::{expected_rounds, visit_probabilities};
use crate::slot::Slot;

/// What a coupled term asks for, slot by slot.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Coupled {
    /// Its share of the value of the loss.
    pub(super) value: Vec<f32>,
    /// Factor of the gradient of the loss it is made of.
    pub(super) factor: Vec<f32>,
}

/// Indices of the slots of every (row, anchor), by depth.
fn by_anchor(slots: &[Slot]) -> BTreeMap<(usize, usize), Vec<usize>> {
    let mut anchors: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for (index, slot) in slots.iter().enumerate() {
        anchors
            .entry((slot.row, slot.anchor))
            .or_default()
            .push(index);
    }
    for indices in anchors.values_mut() {
        indices.sort_by_key(|&index| slots[index].depth);
    }
    anchors
}

/// D-PACE (speculators pull request 757): weight `sum_{m >= d} prod_{i <= m} s_i` with the smoothed probability
/// `s = (1 - a) q(x) + a` of the data token.
pub(super) fn dpace(slots: &[Slot], scores: &SlotScores, smoothing: f64) -> Vec<f32> {
    let mut weights = vec![0.0; slots.len()];
    for indices in by_anchor(slots).values() {
        let smoothed = |&index: &usize| {
            let q = f64::from(scores.log_q_token[index]).exp();
            (1.0 - smoothing) * q + smoothing
        };
        let reach = products(indices.iter().map(smoothed));
        let mut tail = 0.0;
        for (&index, reach) in indices.iter().zip(reach).rev() {
            tail += reach;
            weights[index] = tail as f32;
        }
    }
    weights
}

/// One minus the expected accepted length over the number of drafts (2606.12370), written as the sum over the
/// drafts of an anchor of `1 - prod_{i <= d} alpha_i`, each weighted by `weight(d)`.
///
/// The factor of slot `d` is `prod_{i < d} alpha_i sum_{k >= d} weight(k) prod_{d < m <= k} alpha_m`.
pub(super) fn expected_length(
    slots: &[Slot],
    scores: &SlotScores,
    weight: impl Fn(usize) -> f64,
) -> Coupled {
    let mut coupled = Coupled::zeros(slots.len());
    for indices in by_anchor(slots).values() {
        let alphas: Vec<f64> = indices
            .iter()
            .map(|&i| f64::from(scores.alpha[i]))
            .collect();
        let reach = products(alphas.iter().copied());
        let mut tail = 0.0;
        for (place, &index) in indices.iter().enumerate().rev() {
            // What the drafts from here on are worth, given that this one is accepted.
            tail =
                weight(slots[index].depth) + alphas.get(place + 1).map_or(0.0, |next| next * tail);
            let before = if place == 0 { 1.0 } else { reach[place - 1] };
            coupled.factor[index] = (before * tail) as f32;
            coupled.value[index] = (1.0 - reach[place]) as f32;
        }
    }
    coupled
}

/// Expected rounds of decoding each turn (theory of the round DP, `rounds.rs`), spread evenly over its slots.
///
/// With `V` the expected rounds from an anchor on, `u` the probability that a round starts at it and `s` the
/// survival of its drafts, `dV / d log r_{a,d} = -u(a) sum_{k > d} s_{a,k} (V(a+k) - V(a+k+1))`; and
/// `d log r = d log q(x)` where `q(x) < p(x)`, else 0. The gradient of the cross entropy is that of `-log q(x)`.
pub(super) fn round_count(slots: &[Slot], scores: &SlotScores) -> Coupled {
    let log_ratio =
        |index: usize| f64::from(scores.log_q_token[index]) - f64::from(scores.log_p_token[index]);
    let mut coupled = Coupled::zeros(slots.len());
    for turn in turns(slots) {
        let num_slots: usize = turn.iter().map(Vec::len).sum();
        let (rounds, factors) = rounds_of_turn(&turn, log_ratio);
        for (&index, factor) in turn.iter().flatten().zip(factors) {
            coupled.factor[index] = factor as f32;
            coupled.value[index] = (rounds / num_slots as f64) as f32;
        }
    }
    coupled
}

/// Expected rounds of a turn, and minus their derivative by the log-probability of each slot's token.
///
/// Neither is a number when a ratio is not: the smaller of it and 1 would be 1.
fn rounds_of_turn(turn: &[Vec<usize>], log_ratio: impl Fn(usize) -> f64) -> (f64, Vec<f64>) {
    let num_slots = turn.iter().map(Vec::len).sum();
    if turn
        .iter()
        .flatten()
        .any(|&index| log_ratio(index).is_nan())
    {
        return (f64::NAN, vec![f64::NAN; num_slots]);
    }
    let ratio = |&index: &usize| log_ratio(index).exp().min(1.0);
    let ratios: Vec<Vec<f64>> = turn
        .iter()
        .map(|anchor| anchor.iter().map(ratio).collect())
        .collect();
    let gamma = ratios.iter().map(Vec::len).max().unwrap_or(0);
    let rounds = expected_rounds(&ratios, gamma);
    let visits = visit_probabilities(&ratios, gamma);
    let mut factors = Vec::with_capacity(num_slots);
    for (place, anchor) in turn.iter().enumerate() {
        let saved = rounds_saved(&ratios[place], &rounds[place..]);
        let moves = |index: usize| {
            if log_ratio(index) < 0.0 {
                visits[place]
            } else {
                0.0
            }
        };
        factors.extend(
            anchor
                .iter()
                .zip(saved)
                .map(|(&index, saved)| moves(index) * saved),
        );
    }
    (rounds[0], factors)
}

/// `sum_{k > d} s_k (V(k) - V(k+1))` for each depth `d` of one anchor, where `rounds[0]` is its own `V`.
fn rounds_saved(ratios: &[f64], rounds: &[f64]) -> Vec<f64> {
    let reach = products(ratios.iter().copied());
    let mut saved = vec![0.0; ratios.len()];
    let mut tail = 0.0;
    for depth in (0..ratios.len()).rev() {
        let here = depth + 1;
        if here + 1 < rounds.len() {
            tail += reach[depth] * (rounds[here] - rounds[here + 1]);
        }
        saved[depth] = tail;
    }
    saved
}

impl Coupled {
    fn zeros(len: usize) -> Self {
        Self {
            value: vec![0.0; len],
            factor: vec![0.0; len],
        }
    }
}

/// Running products.
fn products(values: impl Iterator<Item = f64>) -> Vec<f64> {
    values
        .scan(1.0, |product, value| {
            *product *= value;
            Some(*product)
        })
        .collect()
}

/// Slot indices by turn, anchor and depth. Anchors that follow each other belong to one turn: the last token of
/// a turn is no anchor.
fn turns(slots: &[Slot]) -> Vec<Vec<Vec<usize>>> {
    let mut turns: Vec<Vec<Vec<usize>>> = Vec::new();
    let mut last: Option<(usize, usize)> = None;
    for ((row, anchor), indices) in by_anchor(slots) {
        let follows = last.is_some_and(|last| last == (row, anchor.wrapping_sub(1)));
        last = Some((row, anchor));
        match turns.last_mut().filter(|_| follows) {
            Some(turn) => turn.push(indices),
            None => turns.push(vec![indices]),
        }
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Purpose, Stream};
    use crate::slot::valid_slots;

    /// Two turns of one row, three depths.
    fn slots() -> Vec<Slot> {
        valid_slots(&[0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0], 0, 3)
    }

    /// Log-probabilities of the token and overlaps, from a list of free numbers.
    fn scores(numbers: &[f64]) -> SlotScores {
        let probability = |x: &f64| (1.0 / (1.0 + (-x).exp())) as f32;
        SlotScores {
            alpha: numbers.iter().map(probability).collect(),
            log_p_token: vec![-0.7; numbers.len()],
            log_q_token: numbers.iter().map(|x| probability(x).ln()).collect(),
            ..SlotScores::default()
        }
    }

    fn numbers(len: usize) -> Vec<f64> {
        let mut stream = Stream::new(4, Purpose::Check, 0);
        (0..len).map(|_| stream.normal()).collect()
    }

    /// Central differences of `objective` in f64.
    fn differences(at: &[f64], objective: impl Fn(&[f64]) -> f64) -> Vec<f64> {
        let step = 1e-5;
        let moved = |index: usize, by: f64| {
            let mut moved = at.to_vec();
            moved[index] += by;
            objective(&moved)
        };
        (0..at.len())
            .map(|index| (moved(index, step) - moved(index, -step)) / (2.0 * step))
            .collect()
    }

    fn weight(depth: usize) -> f64 {
        0.8_f64.powi(depth as i32)
    }

    /// Seen red with `before` left out of the factor, and with `tail` counted from the slot's own overlap.
    #[test]
    fn expected_length_has_the_gradient_of_its_plain_formula() {
        let slots = slots();
        let alphas: Vec<f64> = numbers(slots.len())
            .iter()
            .map(|x| 1.0 / (1.0 + (-x).exp()))
            .collect();
        let plain = |alphas: &[f64]| {
            let mut sum = 0.0;
            for (index, slot) in slots.iter().enumerate() {
                let before = (0..slots.len()).filter(|&other| {
                    slots[other].anchor == slot.anchor && slots[other].depth <= slot.depth
                });
                let reach: f64 = before.map(|other| alphas[other]).product();
                sum += weight(slots[index].depth) * (1.0 - reach);
            }
            sum
        };
        let scores = SlotScores {
            alpha: alphas.iter().map(|&x| x as f32).collect(),
            ..SlotScores::default()
        };
        let found = expected_length(&slots, &scores, weight);
        let sum: f64 = slots
            .iter()
            .zip(&found.value)
            .map(|(slot, &value)| weight(slot.depth) * f64::from(value))
            .sum();
        assert!((sum - plain(&alphas)).abs() < 1e-5);
        // The gradient of TV is that of `-alpha`.
        for (expected, &factor) in differences(&alphas, plain).iter().zip(&found.factor) {
            assert!(
                (expected + f64::from(factor)).abs() < 1e-5,
                "{expected} {factor}"
            );
        }
    }

    /// Seen red with `visits` replaced by 1, and with `rounds[here + 1]` left out.
    #[test]
    fn round_count_has_the_gradient_of_the_expected_rounds() {
        let slots = slots();
        let numbers = numbers(slots.len());
        let rounds = |log_q: &[f64]| -> f64 {
            let ratio = |&index: &usize| (log_q[index] + 0.7).exp().min(1.0);
            turns(&slots)
                .iter()
                .map(|turn| {
                    let ratios: Vec<Vec<f64>> = turn
                        .iter()
                        .map(|anchor| anchor.iter().map(ratio).collect())
                        .collect();
                    expected_rounds(&ratios, 3)[0]
                })
                .sum()
        };
        let scores = scores(&numbers);
        let log_q: Vec<f64> = scores.log_q_token.iter().map(|&x| f64::from(x)).collect();
        let found = round_count(&slots, &scores);
        let sum: f64 = found.value.iter().map(|&value| f64::from(value)).sum();
        assert!((sum - rounds(&log_q)).abs() < 1e-5, "{sum}");
        for (expected, &factor) in differences(&log_q, rounds).iter().zip(&found.factor) {
            // The gradient of the cross entropy is that of `-log q`.
            assert!(
                (expected + f64::from(factor)).abs() < 1e-5,
                "{expected} {factor}"
            );
        }
    }

    #[test]
    fn dpace_weighs_a_slot_by_the_drafts_that_hang_on_it() {
        let slots = valid_slots(&[0, 1, 1, 1, 1], 0, 3);
        let half = SlotScores {
            log_q_token: vec![0.0; slots.len()],
            ..SlotScores::default()
        };
        // Certain drafts: as many as follow, the slot's own included.
        let weights = dpace(&slots, &half, 0.5);
        for (slot, weight) in slots.iter().zip(weights) {
            let deepest = slots
                .iter()
                .filter(|other| other.anchor == slot.anchor)
                .count();
            assert!((weight - (deepest - slot.depth) as f32).abs() < 1e-6);
        }
        // Impossible ones keep a share: 0.5 + 0.25 + 0.125, 0.25 + 0.125, 0.125.
        let never = SlotScores {
            log_q_token: vec![f32::NEG_INFINITY; slots.len()],
            ..SlotScores::default()
        };
        let weights = dpace(&slots, &never, 0.5);
        let first: Vec<f32> = slots
            .iter()
            .zip(&weights)
            .filter(|(slot, _)| slot.anchor == 1)
            .map(|(_, &weight)| weight)
            .collect();
        let mut sorted = first;
        sorted.sort_by(f32::total_cmp);
        assert_eq!(sorted, [0.125, 0.375, 0.875]);
    }

    /// Seen red without the look at the ratios in `rounds_of_turn`.
    #[test]
    fn what_is_not_a_number_stays_visible() {
        let slots = slots();
        let mut broken = scores(&numbers(slots.len()));
        broken.alpha[2] = f32::NAN;
        broken.log_p_token[2] = f32::NAN;
        let has_nan = |values: &[f32]| values.iter().any(|x| x.is_nan());
        let found = round_count(&slots, &broken);
        assert!(has_nan(&found.value) && has_nan(&found.factor));
        let found = expected_length(&slots, &broken, weight);
        assert!(has_nan(&found.value) && has_nan(&found.factor));
        broken.log_q_token[2] = f32::NAN;
        assert!(has_nan(&dpace(&slots, &broken, 0.5)));
    }

    #[test]
    fn turns_that_touch_stay_apart() {
        let lens: Vec<usize> = turns(&slots()).iter().map(Vec::len).collect();
        assert_eq!(lens, [4, 3]);
    }
}
