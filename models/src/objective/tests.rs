//! The fused chunk against the composed one.

use std::collections::BTreeMap;

use burn::tensor::{Device, TensorData};

use super::*;
use crate::batch::{TargetStates, TokenBatch, TokenRow};
use crate::host;
use crate::rng::{Purpose, Stream};
use crate::slot::valid_slots;

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

/// Seen red with `q <= p` turned into `q < p - 0.01` in the row form of TV, with the scale of CE's
/// label doubled, and with `p` not divided by the kept mass in the row form of KL.
#[test]
fn the_fused_chunk_equals_the_composed_one_for_every_loss_and_vocabulary() {
    let ends = TargetEnds {
        embedding: random([VOCAB, HIDDEN], 0),
        final_norm: random([HIDDEN], 1),
        head: random([VOCAB, HIDDEN], 2) * 4.0,
        rms_norm_eps: 1e-5,
    };
    let tokens = TokenBatch {
        rows: vec![TokenRow {
            key: "row".to_owned(),
            ids: (0..12).map(|i| (i * 5 + 3) % VOCAB as u32).collect(),
            turns: (0..12).map(|i| u32::from(i > 2)).collect(),
        }],
    };
    let slots = valid_slots(&tokens.rows[0].turns, 0, 3);
    let batch = DraftBatch {
        states: TargetStates {
            aux: random([1, 12, 1], 3),
            final_hidden: random([1, 12, HIDDEN], 4),
        },
        tokens,
    };
    let reduced = (0..VOCAB as u32).filter(|id| id % 3 != 1).collect();
    for vocab in [
        VocabMap::full(VOCAB),
        VocabMap::new(reduced, VOCAB).expect("distinct ids"),
    ] {
        let input = ObjectiveInput {
            slots: &slots,
            hidden: random([slots.len(), HIDDEN], 5) * 3.0,
            head: random([vocab.len(), HIDDEN], 6) * 2.0,
            batch: &batch,
            teacher: Teacher {
                ends: &ends,
                vocab: &vocab,
            },
            head_gradient: None,
        };
        assert!(fused::applies(&input));
        for loss in Term::names() {
            let config = ObjectiveConfig {
                losses: BTreeMap::from([(loss.to_owned(), 0.7), ("kl".to_owned(), 0.3)]),
                temperature: 0.8,
                ..ObjectiveConfig::default()
            };
            let objective = Objective::new(&config).expect("known losses");
            let scale = objective.row_scale(&slots, 9.0);
            let terms = objective.slot_terms(&input);
            let chunk = Chunk {
                input: &input,
                range: 1..slots.len() - 2,
                temperature: 0.8,
                terms: &terms,
                scale: &scale,
            };
            compare(fused::evaluate(&chunk), composed::evaluate(&chunk), loss);
        }
    }
}

fn compare(fused: ChunkOutput, composed: ChunkOutput, loss: &str) {
    let grad = |output: &ChunkOutput| host::take(output.grad_logits.clone().expect("terms"));
    assert_close(&grad(&fused), &grad(&composed), &format!("{loss} gradient"));
    assert_close(&fused.loss, &composed.loss, &format!("{loss} value"));
    let (fused, composed) = (fused.scores, composed.scores);
    assert_close(&fused.alpha, &composed.alpha, "alpha");
    assert_close(&fused.log_p_token, &composed.log_p_token, "log p");
    assert_close(&fused.log_q_token, &composed.log_q_token, "log q");
    assert_eq!(fused.argmax_agrees, composed.argmax_agrees);
    assert_eq!(fused.argmax_is_token, composed.argmax_is_token);
}
