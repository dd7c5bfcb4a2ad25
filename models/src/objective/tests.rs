//! The fused chunk against the composed one, and the teacher's figures against its whole head.

use std::collections::BTreeMap;

use burn::tensor::{Device, TensorData};

use super::*;
use crate::batch::{
    TargetStates, TeacherFigures, TokenBatch, TokenRow, index_tensor, teaching_positions,
};
use crate::host;
use crate::rng::{Purpose, Stream};
use crate::slot::valid_slots;
use crate::target::TargetEnds;
use crate::vocab::VocabMap;

const VOCAB: usize = 37;
const HIDDEN: usize = 6;

fn random<const D: usize>(shape: [usize; D], stream: u64) -> Tensor<D> {
    let mut stream = Stream::new(7, Purpose::Check, stream);
    let len = shape.iter().product();
    let values: Vec<f32> = (0..len)
        .map(|_| stream.uniform() as f32 * 2.0 - 1.0)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

fn assert_close(fused: &[f32], composed: &[f32], what: &str) {
    assert_eq!(fused.len(), composed.len(), "{what}");
    let largest = composed.iter().filter(|x| x.is_finite());
    let largest = largest.fold(0.0_f32, |sum, x| sum.max(x.abs()));
    for (a, b) in fused.iter().zip(composed) {
        // Both are f32; exponentials within 3e-7, sums of 37 terms in another order.
        let is_close = (a - b).abs() <= 3e-6 * largest.max(1e-3);
        assert!(is_close || a.to_bits() == b.to_bits(), "{what}: {a} {b}");
    }
}

/// One row of twelve tokens with random states, and its slots.
struct Toy {
    ends: TargetEnds,
    batch: DraftBatch,
    slots: Vec<Slot>,
}

impl Toy {
    fn new() -> Self {
        let tokens = TokenBatch {
            rows: vec![TokenRow {
                key: "row".to_owned(),
                ids: (0..12).map(|i| (i * 5 + 3) % VOCAB as u32).collect(),
                turns: (0..12).map(|i| u32::from(i > 2)).collect(),
            }],
        };
        Self {
            ends: TargetEnds {
                embedding: random([VOCAB, HIDDEN], 0),
                final_norm: random([HIDDEN], 1),
                head: random([VOCAB, HIDDEN], 2) * 4.0,
                rms_norm_eps: 1e-5,
            },
            slots: valid_slots(&tokens.rows[0].turns, 0, 3),
            batch: DraftBatch {
                states: TargetStates {
                    aux: random([1, 12, 1], 3),
                    final_hidden: random([1, 12, HIDDEN], 4),
                    teacher: None,
                },
                tokens,
            },
        }
    }

    /// The same batch with the figures of every position that has a slot.
    fn with_figures(&self) -> DraftBatch {
        let row = &self.batch.tokens.rows[0];
        let positions: Vec<usize> = teaching_positions(&row.turns).collect();
        let next: Vec<u32> = positions.iter().map(|t| row.ids[t + 1]).collect();
        let at = index_tensor(positions.iter().copied(), &Device::flex());
        let states = self.batch.states.final_hidden.clone();
        let found = teacher_figures(&self.ends, states.flatten::<2>(0, 1).select(0, at), &next);
        let mut figures = vec![TeacherFigures::ABSENT; row.len()];
        for (position, found) in positions.into_iter().zip(found) {
            figures[position] = found;
        }
        self.batch_with(figures)
    }

    fn batch_with(&self, figures: Vec<TeacherFigures>) -> DraftBatch {
        let mut batch = self.batch.clone();
        batch.states.teacher = Some(vec![figures]);
        batch
    }

    fn input<'a>(&'a self, batch: &'a DraftBatch, vocab: &'a VocabMap) -> ObjectiveInput<'a> {
        ObjectiveInput {
            slots: &self.slots,
            hidden: random([self.slots.len(), HIDDEN], 5) * 3.0,
            head: random([vocab.len(), HIDDEN], 6) * 2.0,
            batch,
            teacher: Teacher::new(&self.ends, vocab),
            head_gradient: None,
        }
    }
}

fn reduced() -> VocabMap {
    let ids = (0..VOCAB as u32).filter(|id| id % 3 != 1).collect();
    VocabMap::new(ids, VOCAB).expect("distinct ids")
}

/// A part of the batch with every loss, through the way that `evaluate` takes.
fn outputs(
    input: &ObjectiveInput<'_>,
    temperature: f64,
    evaluate: fn(&Chunk<'_>) -> ChunkOutput,
) -> Vec<(&'static str, ChunkOutput)> {
    let output = |loss: &'static str| {
        let config = ObjectiveConfig {
            losses: BTreeMap::from([(loss.to_owned(), 0.7), ("kl".to_owned(), 0.3)]),
            temperature,
            ..ObjectiveConfig::default()
        };
        let objective = Objective::new(&config).expect("known losses");
        let chunk = Chunk {
            input,
            range: 1..input.slots.len() - 2,
            temperature,
            terms: &objective.slot_terms(input),
            scale: &objective.row_scale(input.slots, 9.0),
        };
        (loss, evaluate(&chunk))
    };
    Term::names().into_iter().map(output).collect()
}

/// Seen red with `q <= p` turned into `q < p - 0.01` in the row form of TV, with the scale of CE's
/// label doubled, and with `p` not divided by the kept mass in the row form of KL.
#[test]
fn the_fused_chunk_equals_the_composed_one_for_every_loss_and_vocabulary() {
    let toy = Toy::new();
    for vocab in [VocabMap::full(VOCAB), reduced()] {
        let input = toy.input(&toy.batch, &vocab);
        assert!(fused::applies(&input));
        let fused = outputs(&input, 0.8, fused::evaluate);
        for ((loss, fused), (_, composed)) in
            fused
                .into_iter()
                .zip(outputs(&input, 0.8, composed::evaluate))
        {
            compare(fused, composed, loss);
        }
    }
}

#[test]
fn figures_of_the_teacher_give_what_its_whole_head_gives_for_every_loss() {
    let toy = Toy::new();
    let (vocab, known) = (reduced(), toy.with_figures());
    let (whole, kept) = (toy.input(&toy.batch, &vocab), toy.input(&known, &vocab));
    for evaluate in [fused::evaluate, composed::evaluate] {
        let whole = outputs(&whole, 1.0, evaluate);
        for ((loss, kept), (_, whole)) in outputs(&kept, 1.0, evaluate).into_iter().zip(whole) {
            compare(kept, whole, loss);
        }
    }
}

/// Two ways to the same figures: rows on the host, and tensors.
#[test]
fn figures_are_the_same_on_every_device() {
    let logits = random([9, VOCAB], 8) * 20.0;
    let tokens: Vec<u32> = (0..9).map(|i| i * 4).collect();
    let fused = fused::figures(logits.clone(), &tokens);
    for (fused, composed) in fused.iter().zip(composed::figures(&logits, &tokens)) {
        assert_close(&[fused.log_z], &[composed.log_z], "log z");
        assert_close(&[fused.log_p_next], &[composed.log_p_next], "log p");
        assert_eq!(fused.argmax, composed.argmax);
    }
}

/// Figures of temperature 1 say nothing of another one, and a full vocabulary needs every logit anyway: figures that
/// are not numbers show where they are read.
#[test]
fn figures_are_read_at_temperature_1_and_for_a_reduced_vocabulary_only() {
    let toy = Toy::new();
    let unknown = toy.batch_with(vec![TeacherFigures::ABSENT; 12]);
    for evaluate in [fused::evaluate, composed::evaluate] {
        for (vocab, temperature, are_read) in [
            (reduced(), 1.0, true),
            (reduced(), 0.8, false),
            (VocabMap::full(VOCAB), 1.0, false),
        ] {
            let found = outputs(&toy.input(&unknown, &vocab), temperature, evaluate);
            let plain = outputs(&toy.input(&toy.batch, &vocab), temperature, evaluate);
            for ((_, found), (_, plain)) in found.iter().zip(&plain) {
                let bits = |output: &ChunkOutput| -> Vec<u32> {
                    output.scores.alpha.iter().map(|x| x.to_bits()).collect()
                };
                assert_eq!(bits(found) != bits(plain), are_read);
                assert_eq!(found.scores.alpha.iter().any(|x| x.is_nan()), are_read);
            }
        }
    }
}

fn compare(fused: ChunkOutput, composed: ChunkOutput, loss: &str) {
    let grad = |output: &ChunkOutput| host::take(output.grad_logits.clone().expect("terms"));
    assert_close(&grad(&fused), &grad(&composed), &format!("{loss} gradient"));
    assert_close(
        &fused.terms.concat(),
        &composed.terms.concat(),
        &format!("{loss} value"),
    );
    let (fused, composed) = (fused.scores, composed.scores);
    assert_close(&fused.alpha, &composed.alpha, "alpha");
    assert_close(&fused.log_p_token, &composed.log_p_token, "log p");
    assert_close(&fused.log_q_token, &composed.log_q_token, "log q");
    assert_close(&fused.log_q_best, &composed.log_q_best, "log q of the best");
    assert_eq!(fused.argmax_agrees, composed.argmax_agrees);
    assert_eq!(fused.argmax_is_token, composed.argmax_is_token);
}
