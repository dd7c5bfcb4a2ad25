//! One optimizer step: gradients, denominators, tails, numbers that are not finite.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

mod common;

use burn::optim::GradientsParams;
use burn::tensor::{FloatDType, Tensor, activation};
use common::{World, events, records, weights};
use draftsmith_data::hidden::HiddenStateSource;
use draftsmith_models::batch::{DraftBatch, TokenBatch, index_tensor};
use draftsmith_models::drafter::{AnchorDraw, AnyDrafter};
use draftsmith_models::error::Diagnose;
use draftsmith_models::slot::{Slot, batch_slots};
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::host_values;
use draftsmith_trainer::clip::gradient_norm;
use draftsmith_trainer::config::{OptimizerKind, Schedule};
use draftsmith_trainer::device_check::differences;
use draftsmith_trainer::order::MicroBatch;
use draftsmith_trainer::step::{Learner, StepReport, Update};
use draftsmith_trainer::{Resume, TrainerError};
use serde_json::json;

/// Irrelevant for a family that trains every anchor.
const DRAW: AnchorDraw = AnchorDraw { seed: 0, step: 0 };

fn one_step(world: &World, batches: &[MicroBatch]) -> StepReport {
    let mut learner = world.learner(FloatDType::F32);
    learner
        .step(batches, &world.rows, &world.source(), 1e-3, DRAW)
        .unwrap()
}

fn assert_close(left: Option<f64>, right: Option<f64>, tolerance: f64) {
    let (left, right) = (left.unwrap(), right.unwrap());
    assert!(
        (left - right).abs() <= tolerance * right.abs(),
        "{left} {right}"
    );
}

/// KL of one batch by plain automatic differentiation through all logits.
fn plain_gradient_norm(world: &World, rows: &[usize]) -> (f64, f64) {
    let drafter = world.drafter();
    let tokens = TokenBatch {
        rows: rows.iter().map(|&row| world.rows[row].clone()).collect(),
    };
    let states = world.source().states(&tokens).unwrap();
    let [batch, len, width] = states.final_hidden.dims();
    let flat = states.final_hidden.clone().reshape([batch * len, width]);
    let draft = DraftBatch { tokens, states };
    let slots = batch_slots(&draft.tokens, drafter.num_depths());
    let hidden = drafter.draft_slots(&draft, &slots, world.target.ends(), FloatDType::F32);
    let at = slots.iter().map(|s| s.row * len + s.teacher_position());
    let at = index_tensor(at, &flat.device());
    let log_p = activation::log_softmax(world.target.ends().logits(flat.select(0, at)), 1);
    let count = slots.len() as f64;
    let AnyDrafter::Eagle3(eagle3) = &drafter else {
        panic!("the drafter of these tests is of this family");
    };
    let log_q = activation::log_softmax(hidden.matmul(eagle3.head.val().transpose()), 1);
    let p: Tensor<2> = log_p.clone().exp().autodiff();
    let loss = (p * (log_p.autodiff() - log_q)).sum().div_scalar(count);
    let value = f64::from(host_values(&loss.clone().inner())[0]);
    let gradients = GradientsParams::from_grads(loss.backward(), &drafter);
    (value, gradient_norm(&drafter, &gradients).norm)
}

// The closed form and the tape differ by the rounding of f32 sums only: 1e-5 relative.
#[test]
fn the_closed_form_step_equals_plain_automatic_differentiation() {
    let mut world = World::new(2);
    world.card.vocab = VocabMap::full(common::VOCAB);
    let report = one_step(&world, &[vec![0, 1]]);
    let (loss, norm) = plain_gradient_norm(&world, &[0, 1]);
    assert_close(report.loss, Some(loss), 1e-5);
    assert_close(report.gradient_norm, Some(norm), 1e-5);
    assert_eq!(report.update, Update::Applied);
}

// Red under: dividing by `denominator * 4 / micro-batches` (the full window) in `Learner::step`.
#[test]
fn pitfall_22_the_accumulation_tail_is_a_mean_over_its_own_rows() {
    let mut world = World::new(10);
    world.train.batch_tokens = 10;
    world.train.accumulate = 4;
    world.train.epochs = 2;
    world.optimizer.schedule = Schedule::Cosine;
    let folder = tempfile::tempdir().unwrap();
    let (outcome, spy) = world.train(folder.path(), Resume::Fresh, None);
    outcome.unwrap();
    assert_eq!((spy.planned, spy.steps.len()), (Some(6), 6));
    let slots: Vec<u64> = records(folder.path()).iter().map(|r| r.slots).collect();
    assert_eq!(slots, [60, 60, 30, 60, 60, 30]);
    let rates: Vec<f64> = records(folder.path())
        .iter()
        .map(|r| r.learning_rate)
        .collect();
    assert!(
        rates[5] < 1e-12 && rates[..5].iter().all(|&rate| rate > 1e-4),
        "{rates:?}"
    );

    // The gradient is the mean over the rows, however they are cut; f32 sums in another order.
    let tail = one_step(&world, &[vec![8], vec![9]]);
    let whole = one_step(&world, &[vec![8, 9]]);
    assert_close(tail.gradient_norm, whole.gradient_norm, 1e-5);
    assert_close(tail.loss, whole.loss, 1e-5);
}

#[test]
fn rows_of_different_length_weigh_by_their_slots() {
    let mut world = World::new(3);
    world.rows[1] = common::row(1, 6);
    world.rows[2] = common::row(2, 17);
    let cut = one_step(&world, &[vec![0], vec![1], vec![2]]);
    let whole = one_step(&world, &[vec![1, 0, 2]]);
    assert_close(cut.gradient_norm, whole.gradient_norm, 1e-5);
    assert_close(cut.loss, whole.loss, 1e-5);
}

#[test]
fn batches_without_slots_add_nothing_and_are_counted() {
    let mut world = World::new(3);
    world.rows[1].turns.fill(0);
    let alone = one_step(&world, &[vec![0], vec![2]]);
    let beside = one_step(&world, &[vec![0], vec![1], vec![2]]);
    assert_eq!(beside.gradient_norm, alone.gradient_norm);
    assert_eq!((alone.empty_batches, beside.empty_batches), (0, 1));

    let mut learner = world.learner(FloatDType::F32);
    let source = world.source();
    let report = learner
        .step(&[vec![1]], &world.rows, &source, 1e-3, DRAW)
        .unwrap();
    assert_eq!((report.update, report.loss), (Update::Empty, None));
    assert!(
        source.taken().is_empty(),
        "no states are computed for nothing"
    );
}

#[test]
fn norm_gains_are_not_decayed_and_a_frozen_head_stays() {
    let mut world = World::new(2);
    world.optimizer.weight_decay = 0.5;
    let mut learner = world.learner(FloatDType::F32);
    learner
        .step(&[vec![0]], &world.rows, &world.source(), 1e-2, DRAW)
        .unwrap();
    let value = |name: &str| {
        let tensors = learner.drafter.to_tensors();
        let tensor = tensors.iter().find(|t| t.name.ends_with(name)).unwrap();
        f32::from_le_bytes(tensor.bytes[..4].try_into().unwrap())
    };
    // AdamW's first step moves a parameter by the rate; decay would take another 0.005.
    assert!(
        (value("mlp_norm") - 1.0).abs() < 0.0101,
        "{}",
        value("mlp_norm")
    );
}

/// Largest singular value of a row-major matrix, by power iteration.
fn largest_singular_value(matrix: &[f64], width: usize) -> f64 {
    let mut x: Vec<f64> = (0..width).map(|i| 1.0 + (i % 3) as f64).collect();
    let mut norm = 0.0;
    for _ in 0..200 {
        let rows = matrix.chunks_exact(width);
        let y: Vec<f64> = rows
            .map(|row| row.iter().zip(&x).map(|(a, b)| a * b).sum())
            .collect();
        let back = |i: usize| (0..y.len()).map(|r| matrix[r * width + i] * y[r]).sum();
        x = (0..width).map(back).collect();
        norm = x.iter().map(|v| v * v).sum::<f64>().sqrt();
        for v in &mut x {
            *v /= norm;
        }
    }
    norm.sqrt()
}

/// Seen red with Muon's group left out of `optimizer`, and with the head among its matrices.
#[test]
fn muon_orthogonalises_matrices_and_leaves_head_and_gains_to_adamw() {
    const RATE: f64 = 1e-2;
    let mut world = World::new(2);
    world.optimizer.kind = OptimizerKind::Muon;
    world.optimizer.weight_decay = 0.0;
    let mut learner = world.learner(FloatDType::F32);
    let values = |learner: &Learner<'_>| -> Vec<(String, Vec<usize>, Vec<f64>)> {
        let tensors = learner.drafter.to_tensors();
        let floats = |bytes: &[u8]| {
            let each = bytes.chunks_exact(4);
            each.map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
                .collect()
        };
        tensors
            .iter()
            .map(|t| (t.name.clone(), t.shape.clone(), floats(&t.bytes)))
            .collect()
    };
    let before = values(&learner);
    learner
        .step(&[vec![0]], &world.rows, &world.source(), RATE, DRAW)
        .unwrap();
    for ((name, shape, old), (_, _, new)) in before.iter().zip(values(&learner)) {
        let moved: Vec<f64> = old.iter().zip(&new).map(|(a, b)| (a - b) / RATE).collect();
        let furthest = moved.iter().fold(0.0_f64, |sum, x| sum.max(x.abs()));
        if shape.len() == 1 || name == "head" {
            // The first step of AdamW moves every parameter by the rate, up to eps.
            assert!((0.98..1.01).contains(&furthest), "{name}: {furthest}");
        } else {
            let size = 0.2 * (*shape.iter().max().unwrap() as f64).sqrt();
            let unit: Vec<f64> = moved.iter().map(|x| x / size).collect();
            let largest = largest_singular_value(&unit, shape[1]);
            // Five steps of 3.4445 x - 4.7750 x^3 + 2.0315 x^5 leave singular values between 0.68 and its
            // local maximum, 1.2025.
            assert!((0.68..1.203).contains(&largest), "{name}: {largest}");
        }
    }
}

/// KL and confidence of one batch by plain automatic differentiation through all logits: their values, and the norm of
/// the whole gradient.
fn plain_dspark(world: &World, drafter: &AnyDrafter, row: usize) -> ([f64; 2], f64) {
    let AnyDrafter::Dspark(dspark) = drafter else {
        panic!("the drafter of this test is of this family");
    };
    let tokens = TokenBatch {
        rows: vec![world.rows[row].clone()],
    };
    let states = world.source().states(&tokens).unwrap();
    let final_hidden = states.final_hidden.clone().flatten::<2>(0, 1);
    let batch = DraftBatch { tokens, states };
    let slots = drafter.training_slots(&batch.tokens, DRAW);
    let count = slots.len() as f64;
    let hidden = drafter.draft_slots(&batch, &slots, world.target.ends(), FloatDType::F32);
    let head = Tensor::cat(vec![dspark.core.head.val(), dspark.markov_out.val()], 1);
    let log_q = activation::log_softmax(hidden.clone().matmul(head.transpose()), 1);
    let at = slots.iter().map(Slot::teacher_position);
    let at = index_tensor(at, &final_hidden.device());
    let teacher = world.target.ends().logits(final_hidden.select(0, at));
    let log_p: Tensor<2> = activation::log_softmax(teacher, 1);
    let p = log_p.clone().exp();
    let alpha = p.clone().min_pair(log_q.clone().inner().exp()).sum_dim(1);
    let confidence = drafter
        .confidence(hidden)
        .unwrap()
        .logits
        .unsqueeze_dim::<2>(1);
    // softplus(c) - alpha c: the cross entropy of sigmoid(c) to alpha.
    let bce = activation::softplus(confidence.clone(), 1.0) - confidence * alpha.autodiff();
    let kl = p.autodiff() * (log_p.autodiff() - log_q);
    let means = [kl, bce].map(|term| term.sum().div_scalar(count));
    let values = means
        .clone()
        .map(|mean| f64::from(host_values(&mean.inner())[0]));
    let [kl, bce] = means;
    let gradients = GradientsParams::from_grads((kl + bce).backward(), drafter);
    (values, gradient_norm(drafter, &gradients).norm)
}

/// Seen red with the confidence left out of `Learner::backward`, and with the head's gradient not registered.
#[test]
fn a_dspark_step_equals_plain_automatic_differentiation() {
    let settings = json!({ "block_size": 3, "markov_rank": 2, "confidence_weight": 1.0 });
    let mut world = World::new(3).with_family("dspark", settings);
    world.card.vocab = VocabMap::full(common::VOCAB);
    let mut learner = world.learner(FloatDType::F32);
    // A first step moves what starts at zero: Markov bias and confidence.
    for rate in [1e-2, 1e-2] {
        learner
            .step(&[vec![0]], &world.rows, &world.source(), rate, DRAW)
            .unwrap();
    }
    let ([kl, confidence], norm) = plain_dspark(&world, &learner.drafter, 1);
    let report = learner
        .step(&[vec![1]], &world.rows, &world.source(), 1e-3, DRAW)
        .unwrap();
    assert_close(report.loss, Some(kl), 1e-5);
    assert_close(
        report.terms.get("confidence").copied(),
        Some(confidence),
        1e-5,
    );
    assert_close(report.gradient_norm, Some(norm), 1e-5);
}

#[test]
fn passes_change_nothing() {
    for family in ["dflash", "dspark"] {
        let gradients = [512, 2].map(|limit| {
            let mut settings = json!({ "block_size": 4, "blocks_per_pass": limit });
            if family == "dspark" {
                settings["markov_rank"] = json!(2);
            }
            let world = World::new(3).with_family(family, settings);
            let learner = world.learner(FloatDType::F32);
            learner
                .named_gradients(&[0, 1, 2], &world.rows, &world.source())
                .unwrap()
        });
        assert!((gradients[0].loss - gradients[1].loss).abs() < 1e-6);
        for difference in differences(&gradients[0], &gradients[1]) {
            // The same f32 sums cut in another way.
            assert!(difference.max_relative < 1e-4, "{family}: {difference:?}");
        }
    }
}

// Seen red: `norm.not_finite.filter(|_| false)` in `Learner::update`.
#[test]
fn pitfall_57_a_gradient_that_is_not_finite_is_skipped_and_counted() {
    let world = World::new(40);
    let folder = tempfile::tempdir().unwrap();
    let mut source = world.source();
    source.poison = vec![4];
    let (outcome, spy) = world.train_with(folder.path(), Resume::Fresh, None, &source, None);
    outcome.unwrap();
    let records = records(folder.path());
    let skipped: Vec<u64> = records.iter().map(|r| r.skipped_steps).collect();
    assert_eq!(skipped[3..6], [0, 1, 1]);
    assert_eq!((records[4].loss, records[4].grad_norm), (None, None));
    assert!(records[19].loss.is_some_and(f64::is_finite));
    assert!(
        spy.notices
            .join("\n")
            .contains("step 5 left the parameters unchanged")
    );
}

// Red under: `count < MAX_CONSECUTIVE_SKIPS` replaced by `true`.
#[test]
fn pitfall_57_ten_skips_in_a_row_end_the_run_naming_the_tensor() {
    let world = World::new(40);
    let folder = tempfile::tempdir().unwrap();
    let mut source = world.source();
    source.poison = (7..40).collect();
    let (outcome, _) = world.train_with(folder.path(), Resume::Fresh, None, &source, None);
    let error = outcome.unwrap_err();
    assert!(!error.is_user_error());
    let TrainerError::NonFiniteGradient {
        tensor,
        count,
        step,
    } = error
    else {
        panic!("{error:?}");
    };
    assert_eq!(
        (tensor.rsplit('.').next(), count, step),
        (Some("fc"), 10, 17)
    );
    // Steps without an update leave finite weights, so the checkpoints written meanwhile are whole.
    let at = |step: u64| folder.path().join(format!("checkpoints/step-{step:06}"));
    assert_eq!(weights(&at(10)), weights(&at(15)));
    assert_eq!(
        events(folder.path(), "train/lr"),
        (1..=17).collect::<Vec<_>>()
    );
}

// bf16 keeps 8 bits, and the norms undo the scale: 1 percent of the f32 loss.
#[test]
fn large_hidden_states_in_bf16_give_the_loss_of_f32() {
    let world = World::new(4);
    let loss = |compute| {
        let mut source = world.source();
        source.scale = 1000.0;
        let mut learner = world.learner(compute);
        let report = learner
            .step(&[vec![0, 1], vec![2, 3]], &world.rows, &source, 1e-3, DRAW)
            .unwrap();
        assert_eq!(report.update, Update::Applied);
        report.loss
    };
    assert_close(loss(FloatDType::BF16), loss(FloatDType::F32), 0.01);
}

// Red under: recording only at the end of an interval in `Run::log`.
#[test]
fn pitfall_64_short_runs_and_failing_runs_keep_their_events() {
    let mut world = World::new(6);
    world.train.log_every = 100;
    let folder = tempfile::tempdir().unwrap();
    world
        .train(&folder.path().join("a"), Resume::Fresh, None)
        .0
        .unwrap();
    assert_eq!(events(&folder.path().join("a"), "train/loss"), [1, 2, 3]);

    let world = World::new(20);
    let mut source = world.source();
    source.fails_after = 3;
    let path = folder.path().join("b");
    let (outcome, _) = world.train_with(&path, Resume::Fresh, None, &source, None);
    let error = outcome.unwrap_err();
    assert_eq!(
        (error.to_string(), error.hint()),
        ("no states".into(), Some("none".into()))
    );
    assert_eq!(events(&path, "train/loss"), [1, 2, 3]);
    assert_eq!(records(&path).len(), 3);
}

#[test]
fn event_files_that_cannot_be_written_never_end_a_run() {
    let world = World::new(6);
    let folder = tempfile::tempdir().unwrap();
    fs_err::write(folder.path().join("tensorboard"), "a file, not a folder").unwrap();
    let (outcome, spy) = world.train(folder.path(), Resume::Fresh, None);
    outcome.unwrap();
    let warnings = spy.notices.iter().filter(|n| n.contains("no event file"));
    assert_eq!(warnings.count(), 1, "{:?}", spy.notices);
}

#[test]
fn rows_that_cannot_be_trained_on_are_refused_before_anything_is_written() {
    let mut world = World::new(4);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    world.train.batch_tokens = 9;
    let error = world
        .train(&path, Resume::Fresh, None)
        .0
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("row `row-0` has 10 tokens"), "{error}");
    world.train.batch_tokens = 20;
    for row in &mut world.rows {
        row.turns.fill(0);
    }
    let error = world
        .train(&path, Resume::Fresh, None)
        .0
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("none of the 4 training rows has a valid slot"),
        "{error}"
    );
    assert!(!path.exists());
}
