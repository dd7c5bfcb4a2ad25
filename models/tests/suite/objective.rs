//! Losses and their fused head gradient against f64 finite differences of the plain formulas.

use std::collections::BTreeMap;

use burn::tensor::{Device, Tensor};
use draftsmith_models::batch::{DraftBatch, TargetStates, TokenBatch};
use draftsmith_models::loss::{self, LossRows};
use draftsmith_models::objective::{
    Normalize, Objective, ObjectiveConfig, ObjectiveInput, ObjectiveOutput, SlotWeight, Teacher,
};
use draftsmith_models::slot::{Slot, valid_slots};
use draftsmith_models::target::TargetEnds;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::host_values;

use crate::coupled::{self, Draft};
use crate::support::{assert_close, largest, normal, row, tensor};

const VOCAB: usize = 14;
const HIDDEN: usize = 5;
const EPS: f64 = 1e-5;

/// A batch of two rows with random states, and random drafter outputs for its slots.
///
/// The second row has two turns that touch. Of its generated tokens a reduced vocabulary lacks some.
pub(crate) struct Toy {
    ends: TargetEnds,
    vocab: VocabMap,
    batch: DraftBatch,
    pub(crate) slots: Vec<Slot>,
    hidden: Vec<f32>,
    head: Vec<f32>,
}

/// What the objective computes from the drafter and does not differentiate, slot by slot.
struct Detached {
    /// Overlaps, as `lk_hybrid` reads them.
    alphas: Vec<f64>,
    /// Slot weights.
    weights: Vec<f64>,
}

impl Toy {
    pub(crate) fn new(kept: Option<Vec<u32>>) -> Self {
        let vocab = kept.map_or(VocabMap::full(VOCAB), |ids| {
            VocabMap::new(ids, VOCAB).unwrap()
        });
        let tokens = TokenBatch {
            rows: vec![
                row(&[3, 9, 0, 4, 13, 6, 7, 1], &[0, 0, 1, 1, 1, 1, 0, 0]),
                row(&[5, 11, 2, 8, 12, 0, 3], &[0, 1, 1, 1, 1, 2, 2]),
            ],
        };
        let slots: Vec<Slot> = (0..2)
            .flat_map(|index| valid_slots(&tokens.rows[index].turns, index, 3))
            .collect();
        let states = |stream, width| tensor(&normal(stream, 16 * width, 1.0), [2, 8, width]);
        Self {
            ends: TargetEnds {
                embedding: tensor(&normal(1, VOCAB * HIDDEN, 1.0), [VOCAB, HIDDEN]),
                final_norm: tensor(&[0.5, 1.0, 3.0, 2.0, 1.5], [HIDDEN]),
                head: tensor(&normal(2, VOCAB * HIDDEN, 0.5), [VOCAB, HIDDEN]),
                rms_norm_eps: EPS,
            },
            batch: DraftBatch {
                tokens,
                states: TargetStates {
                    aux: states(3, 1),
                    final_hidden: states(4, HIDDEN),
                    teacher: None,
                },
            },
            hidden: normal(5, slots.len() * HIDDEN, 1.0),
            head: normal(6, vocab.len() * HIDDEN, 0.8),
            slots,
            vocab,
        }
    }

    pub(crate) fn reduced() -> Self {
        Self::new(Some(vec![0, 2, 3, 4, 7, 8, 12]))
    }

    fn evaluate(&self, config: &ObjectiveConfig) -> ObjectiveOutput {
        let objective = Objective::new(config).unwrap();
        let input = self.input(&self.hidden, &self.head);
        objective.evaluate(input, objective.denominator(&self.slots))
    }

    fn input(&self, hidden: &[f32], head: &[f32]) -> ObjectiveInput<'_> {
        ObjectiveInput {
            slots: &self.slots,
            hidden: tensor(hidden, [self.slots.len(), HIDDEN]),
            head: tensor(head, [self.vocab.len(), HIDDEN]),
            batch: &self.batch,
            teacher: Teacher::new(&self.ends, &self.vocab),
            head_gradient: Some(0..HIDDEN),
        }
    }

    /// Teacher probabilities of a slot over the whole vocabulary, in f64.
    fn teacher(&self, slot: &Slot, temperature: f64) -> Vec<f64> {
        let position = slot.row * 8 + slot.teacher_position();
        let states = host_values(&self.batch.states.final_hidden);
        let state: Vec<f64> = states[position * HIDDEN..][..HIDDEN]
            .iter()
            .map(|&x| f64::from(x))
            .collect();
        let mean = state.iter().map(|x| x * x).sum::<f64>() / HIDDEN as f64;
        let gain = host_values(&self.ends.final_norm);
        let normed: Vec<f64> = state
            .iter()
            .zip(&gain)
            .map(|(x, &g)| x / (mean + EPS).sqrt() * f64::from(g))
            .collect();
        let head: Vec<f64> = host_values(&self.ends.head)
            .iter()
            .map(|&x| f64::from(x))
            .collect();
        softmax(&head, &normed, temperature)
    }

    /// The whole objective, written plainly.
    fn plain(
        &self,
        config: &ObjectiveConfig,
        hidden: &[f64],
        head: &[f64],
        detached: &Detached,
    ) -> f64 {
        let drafts = self.drafts(config.temperature, hidden, head);
        let at = |depth| config.slot_weight.at(depth);
        let single = |name: &str| -> f64 {
            let value = |(index, draft): (usize, &Draft)| {
                let alpha = detached.alphas[index];
                let loss = plain_loss(name, &draft.p, &draft.q, draft.label, alpha);
                detached.weights[index] * loss
            };
            drafts.iter().enumerate().map(value).sum()
        };
        let term = |(name, coefficient): (&String, &f64)| {
            coefficient
                * match name.as_str() {
                    "expected_length" => coupled::expected_length(&drafts, at),
                    "round_count" => coupled::round_count(&drafts),
                    name => single(name),
                }
        };
        let denominator: f64 = match config.normalize {
            Normalize::Slots => self.slots.len() as f64,
            Normalize::Weights => self.slots.iter().map(|slot| at(slot.depth)).sum(),
        };
        config.losses.iter().map(term).sum::<f64>() / denominator
    }

    fn detached(&self, config: &ObjectiveConfig, hidden: &[f64], head: &[f64]) -> Detached {
        let drafts = self.drafts(config.temperature, hidden, head);
        Detached {
            alphas: drafts.iter().map(Draft::alpha).collect(),
            weights: match config.slot_weight {
                SlotWeight::Dpace(smoothing) => coupled::dpace(&drafts, smoothing),
                weight => self.slots.iter().map(|s| weight.at(s.depth)).collect(),
            },
        }
    }

    /// The distributions of both sides at every slot, in f64.
    pub(crate) fn drafts(&self, temperature: f64, hidden: &[f64], head: &[f64]) -> Vec<Draft> {
        let draft = |(index, slot): (usize, &Slot)| {
            let tokens = &self.batch.tokens.rows[slot.row];
            let token = tokens.ids[slot.label_position()];
            Draft {
                slot: *slot,
                turn: tokens.turns[slot.anchor],
                q: softmax(head, &hidden[index * HIDDEN..][..HIDDEN], temperature),
                p: self.kept(slot, temperature),
                p_token: self.teacher(slot, temperature)[token as usize],
                label: self.vocab.to_draft(token),
            }
        };
        self.slots.iter().enumerate().map(draft).collect()
    }

    /// Drafter outputs and head weight.
    pub(crate) fn wide(&self) -> [Vec<f64>; 2] {
        [&self.hidden, &self.head].map(|values| values.iter().map(|&x| f64::from(x)).collect())
    }

    /// Teacher probabilities of the draft vocabulary, not renormalised.
    fn kept(&self, slot: &Slot, temperature: f64) -> Vec<f64> {
        let p = self.teacher(slot, temperature);
        self.vocab
            .target_ids()
            .iter()
            .map(|&id| p[id as usize])
            .collect()
    }
}

fn softmax(head: &[f64], hidden: &[f64], temperature: f64) -> Vec<f64> {
    let logits: Vec<f64> = head
        .chunks_exact(hidden.len())
        .map(|row| row.iter().zip(hidden).map(|(x, y)| x * y).sum::<f64>() / temperature)
        .collect();
    let sum: f64 = logits.iter().map(|x| x.exp()).sum();
    logits.iter().map(|x| x.exp() / sum).collect()
}

pub(crate) fn overlap(p: &[f64], q: &[f64]) -> f64 {
    p.iter().zip(q).map(|(p, q)| p.min(*q)).sum()
}

fn plain_loss(name: &str, p: &[f64], q: &[f64], label: Option<u32>, detached_alpha: f64) -> f64 {
    let mass: f64 = p.iter().sum();
    let kl: f64 = p
        .iter()
        .zip(q)
        .map(|(p, q)| p / mass * (p / mass / q).ln())
        .sum();
    let tv = 1.0 - overlap(p, q);
    let lambda = (-3.0 * detached_alpha).exp();
    let pairs = || p.iter().map(|p| p / mass).zip(q.iter().copied());
    let best = (0..p.len()).max_by(|&x, &y| p[x].total_cmp(&p[y])).unwrap();
    match name {
        "kl" => kl,
        "tv" => tv,
        "lk_hybrid" => lambda * kl + (1.0 - lambda) * tv,
        "ce" => label.map_or(0.0, |label| -q[label as usize].ln()),
        "ce_argmax" => -q[best].ln(),
        "reverse_kl" => pairs().map(|(p, q)| q * (q / p).ln()).sum(),
        "jsd" => {
            let middle = |p: f64, q: f64| f64::midpoint(p, q);
            let half =
                |(p, q): (f64, f64)| p * (p / middle(p, q)).ln() + q * (q / middle(p, q)).ln();
            pairs().map(half).sum::<f64>() / 2.0
        }
        "renyi_half" => -2.0 * pairs().map(|(p, q)| (p * q).sqrt()).sum::<f64>().ln(),
        "l1" => 2.0 * tv,
        "neg_log_acceptance" => -(1.0 - tv).ln(),
        other => panic!("no plain formula for {other}"),
    }
}

pub(crate) fn config(losses: &[(&str, f64)]) -> ObjectiveConfig {
    ObjectiveConfig {
        losses: losses
            .iter()
            .map(|(name, c)| ((*name).to_owned(), *c))
            .collect(),
        ..ObjectiveConfig::default()
    }
}

/// Central differences of the plain objective with respect to every entry of `values`.
fn differences(values: &[f64], mut objective: impl FnMut(&[f64]) -> f64) -> Vec<f32> {
    // Truncation error about step^2, rounding error about 1e-16 / step: both below 1e-9.
    let step = 1e-5;
    let mut moved = values.to_vec();
    (0..values.len())
        .map(|index| {
            moved[index] = values[index] + step;
            let above = objective(&moved);
            moved[index] = values[index] - step;
            let below = objective(&moved);
            moved[index] = values[index];
            ((above - below) / (2.0 * step)) as f32
        })
        .collect()
}

/// Compares value, gradients and overlaps with those of the plain formulas.
pub(crate) fn check_against_plain(toy: &Toy, config: &ObjectiveConfig) {
    let [hidden, head] = toy.wide();
    let detached = toy.detached(config, &hidden, &head);
    let (losses, weight) = (&config.losses, config.slot_weight);
    let what = format!("{losses:?}, {weight:?} on {} draft tokens", toy.vocab.len());
    let output = toy.evaluate(config);

    let by_hidden = differences(&hidden, |x| toy.plain(config, x, &head, &detached));
    let by_head = differences(&head, |x| toy.plain(config, &hidden, x, &detached));
    // f32 sums of 14 terms of order one: 1e-6; relative to the largest entry.
    let close = |found: &Tensor<2>, expected: &[f32], part: &str| {
        let tolerance = 5e-6 * largest(expected).max(0.1);
        assert_close(
            &format!("{what}: {part}"),
            &host_values(found),
            expected,
            tolerance,
        );
    };
    close(&output.grad_hidden, &by_hidden, "gradient of hidden");
    close(
        output.grad_head.as_ref().unwrap(),
        &by_head,
        "gradient of head",
    );

    let total = Objective::new(config).unwrap().denominator(&toy.slots);
    let sum: f64 = toy
        .slots
        .iter()
        .zip(&output.loss)
        .map(|(slot, value)| config.slot_weight.at(slot.depth) * f64::from(*value))
        .sum();
    let expected = toy.plain(config, &hidden, &head, &detached);
    assert!(
        (sum / total - expected).abs() < 5e-6,
        "{what}: {} {expected}",
        sum / total
    );
    for (found, expected) in output.scores.alpha.iter().zip(&detached.alphas) {
        assert!((f64::from(*found) - expected).abs() < 2e-6, "{what}: alpha");
    }
}

#[test]
fn every_loss_has_the_value_and_gradient_of_its_plain_formula() {
    for toy in [Toy::new(None), Toy::reduced()] {
        for name in loss::names() {
            check_against_plain(&toy, &config(&[(name, 1.0)]));
        }
    }
}

#[test]
fn mixtures_weights_and_temperatures_too() {
    for toy in [Toy::new(None), Toy::reduced()] {
        for slot_weight in [SlotWeight::StepDecay(0.8), SlotWeight::ExpDecay(2.0)] {
            for normalize in [Normalize::Weights, Normalize::Slots] {
                let config = ObjectiveConfig {
                    slot_weight,
                    normalize,
                    temperature: 0.6,
                    chunk_positions: 2,
                    ..config(&[("ce", 0.1), ("tv", 0.9), ("lk_hybrid", 0.5)])
                };
                check_against_plain(&toy, &config);
            }
        }
    }
}

/// Red under: `range.start` replaced by 0 in `ChunkRows::new`.
#[test]
fn chunks_change_nothing() {
    for toy in [Toy::new(None), Toy::reduced()] {
        let whole = ObjectiveConfig {
            chunk_positions: 1000,
            ..config(&[("kl", 0.5), ("tv", 0.5), ("ce", 0.2)])
        };
        let expected = toy.evaluate(&whole);
        for chunk_positions in [1, 3] {
            let chunked = ObjectiveConfig {
                chunk_positions,
                ..whole.clone()
            };
            let found = toy.evaluate(&chunked);
            // Other matrix shapes, other order of the sums: a few units of 6e-8.
            let same = |x: &[f32], y: &[f32]| assert_close("chunked", x, y, 1e-6);
            same(&found.loss, &expected.loss);
            same(
                &host_values(&found.grad_hidden),
                &host_values(&expected.grad_hidden),
            );
            same(
                &host_values(&found.grad_head.unwrap()),
                &host_values(expected.grad_head.as_ref().unwrap()),
            );
            same(&found.scores.alpha, &expected.scores.alpha);
            same(&found.scores.log_p_token, &expected.scores.log_p_token);
            assert_eq!(found.scores.argmax_agrees, expected.scores.argmax_agrees);
            assert_eq!(
                found.scores.argmax_is_token,
                expected.scores.argmax_is_token
            );
        }
    }
}

#[test]
fn total_variation_is_one_minus_alpha() {
    for toy in [Toy::new(None), Toy::reduced()] {
        let output = toy.evaluate(&config(&[("tv", 1.0)]));
        for (value, alpha) in output.loss.iter().zip(&output.scores.alpha) {
            assert!((value - (1.0 - alpha)).abs() < 1e-6);
        }
    }
}

/// The drafter's logits are the target's: hidden rows are the normed target states.
fn agreeing(mut toy: Toy) -> Toy {
    let flat = toy.batch.states.final_hidden.clone().flatten::<2>(0, 1);
    let normed = host_values(&toy.ends.normed(flat));
    toy.hidden = toy
        .slots
        .iter()
        .flat_map(|slot| {
            normed[(slot.row * 8 + slot.teacher_position()) * HIDDEN..][..HIDDEN].to_vec()
        })
        .collect();
    let head = host_values(&toy.ends.head);
    toy.head = toy
        .vocab
        .target_ids()
        .iter()
        .flat_map(|&id| head[id as usize * HIDDEN..][..HIDDEN].to_vec())
        .collect();
    toy
}

/// Red under: `rows.q.clone() - p` in `Kl` replaced by `rows.q.clone() - p * 0.9`.
#[test]
fn an_agreeing_drafter_has_no_loss_and_no_gradient() {
    let toy = agreeing(Toy::new(None));
    for name in ["kl", "tv", "lk_hybrid"] {
        let output = toy.evaluate(&config(&[(name, 1.0)]));
        assert!(largest(&output.loss) < 1e-6, "{name}: {:?}", output.loss);
        assert!(largest(&host_values(&output.grad_hidden)) < 1e-6, "{name}");
        assert!(
            largest(&host_values(&output.grad_head.unwrap())) < 1e-6,
            "{name}"
        );
        assert!(
            output
                .scores
                .alpha
                .iter()
                .all(|alpha| (alpha - 1.0).abs() < 1e-6)
        );
        assert!(output.scores.argmax_agrees.iter().all(|&agrees| agrees));
    }
}

#[test]
fn with_a_reduced_vocabulary_an_agreeing_drafter_loses_the_lost_mass() {
    let toy = agreeing(Toy::reduced());
    let kl = toy.evaluate(&config(&[("kl", 1.0)]));
    assert!(largest(&kl.loss) < 1e-6, "{:?}", kl.loss);
    assert!(largest(&host_values(&kl.grad_hidden)) < 1e-6);
    let tv = toy.evaluate(&config(&[("tv", 1.0)]));
    let mut most_lost = 0.0_f64;
    for (slot, value) in toy.slots.iter().zip(&tv.loss) {
        let lost = 1.0 - toy.kept(slot, 1.0).iter().sum::<f64>();
        most_lost = most_lost.max(lost);
        assert!((f64::from(*value) - lost).abs() < 1e-6, "{value} {lost}");
    }
    assert!(most_lost > 0.3, "the case must lose mass");
}

#[test]
fn scores_say_what_greedy_decoding_would_do() {
    let toy = Toy::reduced();
    let scores = Objective::score(&toy.input(&toy.hidden, &toy.head), 1.0, 2);
    let [hidden, head] = toy.wide();
    let argmax = |values: &[f64]| {
        (0..values.len())
            .max_by(|&x, &y| values[x].total_cmp(&values[y]))
            .unwrap()
    };
    for (index, slot) in toy.slots.iter().enumerate() {
        let q = softmax(&head, &hidden[index * HIDDEN..][..HIDDEN], 1.0);
        let p = toy.teacher(slot, 1.0);
        let token = toy.batch.tokens.rows[slot.row].ids[slot.label_position()];
        let drafted = toy.vocab.to_target(argmax(&q) as u32);
        assert_eq!(scores.argmax_agrees[index], drafted as usize == argmax(&p));
        assert_eq!(scores.argmax_is_token[index], drafted == token);
        assert!((f64::from(scores.log_p_token[index]) - p[token as usize].ln()).abs() < 5e-6);
        match toy.vocab.to_draft(token) {
            Some(label) => {
                let expected = q[label as usize].ln();
                assert!((f64::from(scores.log_q_token[index]) - expected).abs() < 5e-6);
            }
            None => assert!(scores.log_q_token[index] == f32::NEG_INFINITY),
        }
    }
}

/// A distribution so sharp that probabilities underflow must not give NaN.
#[test]
fn extreme_logits_stay_finite() {
    let mut toy = Toy::reduced();
    toy.hidden.iter_mut().for_each(|x| *x *= 300.0);
    toy.ends.final_norm = toy.ends.final_norm.mul_scalar(100.0);
    for name in loss::names() {
        assert_finite(&toy.evaluate(&config(&[(name, 1.0)])), name);
    }
}

fn assert_finite(output: &ObjectiveOutput, name: &str) {
    let finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
    assert!(finite(&output.loss), "{name}: {:?}", output.loss);
    assert!(finite(&host_values(&output.grad_hidden)), "{name}");
    let head = output.grad_head.as_ref().unwrap();
    assert!(finite(&host_values(head)), "{name}");
}

/// A token outside the draft vocabulary may take all the mass that f32 can show; the teacher on the
/// draft vocabulary is still what its logits say.
///
/// Seen red with `log_mass` taken as `log(sum(p))` in `fused.rs`.
#[test]
fn a_teacher_whose_kept_mass_underflows_still_teaches() {
    let mut toy = Toy::new(Some(vec![2, 3]));
    toy.ends.final_norm = toy.ends.final_norm.mul_scalar(100.0);
    let alpha = toy.evaluate(&config(&[("kl", 1.0)])).scores.alpha;
    assert!(alpha.contains(&0.0), "no mass underflows: {alpha:?}");
    for name in loss::names() {
        let output = toy.evaluate(&config(&[(name, 1.0)]));
        assert_finite(&output, name);
        if ["kl", "lk_hybrid", "ce_argmax"].contains(&name) {
            assert!(output.loss.iter().all(|&loss| loss > 0.0), "{name}");
        }
    }
}

/// Seen red with the check for what is not a number removed from the row form of TV, and from that of
/// the cross entropy.
#[test]
fn a_teacher_that_is_not_a_number_never_looks_healthy() {
    for name in loss::names().into_iter().filter(|name| *name != "ce") {
        let mut toy = Toy::reduced();
        toy.ends.final_norm = toy.ends.final_norm.mul_scalar(f32::NAN);
        let output = toy.evaluate(&config(&[(name, 1.0)]));
        assert!(output.loss.iter().all(|loss| loss.is_nan()), "{name}");
        assert!(output.scores.alpha.iter().all(|x| x.is_nan()), "{name}");
        let grad = host_values(&output.grad_hidden);
        assert!(grad.iter().all(|x| x.is_nan()), "{name}");
    }
}

/// A loss sees rows only: equal rows give equal values whatever stands beside them.
#[test]
fn losses_treat_rows_independently() {
    let logits = |stream| tensor::<2>(&normal(stream, 3 * 6, 1.0), [3, 6]);
    let log_softmax = |x| burn::tensor::activation::log_softmax(x, 1);
    let rows = |range: std::ops::Range<usize>| {
        let cut = |x: Tensor<2>| x.narrow(0, range.start, range.len());
        let (log_q, log_p) = (cut(log_softmax(logits(1))), cut(log_softmax(logits(2))));
        let device = Device::flex();
        LossRows {
            q: log_q.clone().exp(),
            p: log_p.clone().exp(),
            log_mass: log_p.clone().exp().sum_dim(1).log(),
            label: Tensor::zeros([range.len(), 1], &device),
            label_known: Tensor::ones([range.len(), 1], &device),
            log_q,
            log_p,
        }
    };
    let alone: BTreeMap<&str, f32> = loss::names()
        .into_iter()
        .map(|name| {
            let terms = loss::find(name).unwrap().evaluate(&rows(1..2));
            (name, host_values(&terms.value)[0])
        })
        .collect();
    for (name, value) in alone {
        let together = loss::find(name).unwrap().evaluate(&rows(0..3));
        assert_eq!(host_values(&together.value)[1..2], [value], "{name}");
    }
}
