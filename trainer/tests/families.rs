//! What holds in training for every family, and for every loss where a loss matters.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_pack::Reader;
use common::{World, losses, objective_of, objectives, records};
use draftsmith_models::batch::TokenRow;
use draftsmith_models::drafter::{AnchorDraw, AnyDrafter};
use draftsmith_models::error::ModelError;
use draftsmith_models::objective::SlotWeight;
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::target::TargetEnds;
use draftsmith_models::weights::{NamedTensor, host_values};
use draftsmith_trainer::checkpoint::{self, Identity, RunState};
use draftsmith_trainer::config::OptimizerKind;
use draftsmith_trainer::optimizer::optimizer;
use draftsmith_trainer::order::Position;
use draftsmith_trainer::step::{Learner, StepReport, Update};
use draftsmith_trainer::{Resume, TrainerError};

/// All rows have fewer anchors than are drawn.
const DRAW: AnchorDraw = AnchorDraw { seed: 0, step: 0 };

fn step(learner: &mut Learner<'_>, world: &World, batches: &[Vec<usize>]) -> StepReport {
    let source = world.source();
    learner
        .step(batches, &world.rows, &source, 1e-3, DRAW)
        .unwrap()
}

/// Values of all parameters by name.
fn values(drafter: &AnyDrafter) -> Vec<(String, Vec<f32>)> {
    let floats = |tensor: &NamedTensor| {
        let (words, _) = tensor.bytes.as_chunks::<4>();
        words.iter().map(|word| f32::from_le_bytes(*word)).collect()
    };
    let tensors = drafter.to_tensors();
    tensors
        .iter()
        .map(|t| (t.name.clone(), floats(t)))
        .collect()
}

fn all_finite(drafter: &AnyDrafter) -> bool {
    let values = values(drafter);
    values
        .iter()
        .all(|(_, values)| values.iter().all(|value| value.is_finite()))
}

/// Each term of a mixture is reported as what a run with this loss alone reports, and the loss is their sum.
/// Red under: `self.own_factor(index) * value` replaced by `self.factor(index) * value` in `SlotTerm::value`.
#[test]
fn the_terms_of_a_mixture_add_up_to_its_loss() {
    for (family, mut world) in World::of_every_family(3) {
        for loss in losses() {
            let slot_weight = match loss.as_str() {
                "round_count" => SlotWeight::Uniform, // it takes no other
                _ => SlotWeight::StepDecay(0.8),
            };
            let mut report = |losses: &[(&str, f64)]| {
                let named = losses.iter().map(|&(name, c)| (name.to_owned(), c));
                world.objective.losses = named.collect();
                world.objective.slot_weight = slot_weight;
                step(
                    &mut world.learner(FloatDType::F32),
                    &world,
                    &[vec![0, 1], vec![2]],
                )
            };
            let other = if loss == "jsd" { "ce" } else { "jsd" };
            let absent = if loss == "l1" { "tv" } else { "l1" };
            let [alone, beside] = [&loss, other].map(|name| report(&[(name, 1.0)]).loss.unwrap());
            let mixed = report(&[(&loss, 0.25), (other, 0.7), (absent, 0.0)]);
            let what = format!("{} {loss}", family.name);
            // The same numbers, summed in f64; coefficients are rounded to f32.
            let close = |found: f64, expected: f64| {
                assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{what}");
            };
            close(mixed.terms[loss.as_str()], alone);
            close(mixed.terms[other], beside);
            close(mixed.loss.unwrap(), 0.25 * alone + 0.7 * beside);
            let names = mixed.terms.keys().filter(|name| **name != "confidence");
            assert_eq!(names.count(), 2, "{what}");
        }
    }
}

#[test]
fn the_terms_of_a_mixture_are_logged() {
    for (family, mut world) in World::of_every_family(2) {
        world.objective.losses = [("ce".to_owned(), 0.1), ("tv".to_owned(), 0.9)].into();
        let folder = tempfile::tempdir().unwrap();
        let (outcome, _) = world.train(folder.path(), Resume::Fresh, None);
        outcome.unwrap();
        let records = records(folder.path());
        let steps: Vec<u64> = records.iter().map(|record| record.step).collect();
        for name in ["ce", "tv"] {
            assert!(
                records.iter().all(|r| r.terms[name].is_some()),
                "{}",
                family.name
            );
            let tag = format!("train/term/{name}");
            assert_eq!(
                common::events(folder.path(), &tag),
                steps,
                "{}",
                family.name
            );
        }
    }
}

/// Pitfall 20: the middle one of three batches of one row has no slot. Nothing moves, not even by weight decay, the
/// batch is counted, and beside others it adds exactly nothing. So it is under every loss, and under weights that a
/// first pass over the slots computes.
/// Red under: `if report.slots() > 0` in `Learner::step` replaced by `if true`; `filter(|p| !p.is_empty())` there
/// replaced by `filter(|_| true)`.
#[test]
fn pitfall_20_a_batch_without_slots_changes_nothing_under_any_loss() {
    for (family, mut world) in World::of_every_family(3) {
        world.optimizer.weight_decay = 0.1;
        world.rows[1].turns.fill(0);
        for objective in objectives() {
            let what = format!("{} {objective:?}", family.name);
            world.objective = objective;
            let mut learner = world.learner(FloatDType::F32);
            let mut empty = 0;
            for row in 0..3 {
                let before = values(&learner.drafter);
                let report = step(&mut learner, &world, &[vec![row]]);
                empty += report.empty_batches;
                assert_eq!(report.update == Update::Empty, row == 1, "{what}");
                assert_eq!(report.gradient_norm.is_none(), row == 1, "{what}");
                assert_eq!(report.loss.is_none(), row == 1, "{what}");
                assert_eq!(values(&learner.drafter) == before, row == 1, "{what}");
                assert!(all_finite(&learner.drafter), "{what}");
            }
            assert_eq!(empty, 1, "{what}");
            let [alone, beside, together] =
                [vec![vec![0]], vec![vec![0], vec![1]], vec![vec![0, 1]]].map(|batches| {
                    let mut learner = world.learner(FloatDType::F32);
                    let report = step(&mut learner, &world, &batches);
                    (values(&learner.drafter), report.gradient_norm.unwrap())
                });
            assert!(alone == beside, "{what}");
            // The same sums cut in another way; `round_count` multiplies their rounding along a turn.
            let difference = (alone.1 - together.1).abs();
            assert!(difference <= 1e-4 * alone.1, "{what}: {difference}");
        }
    }
}

/// Pitfall 20, in a whole run: the counter rises.
#[test]
fn pitfall_20_a_run_counts_its_empty_batches() {
    for (family, mut world) in World::of_every_family(4) {
        world.rows[1].turns.fill(0);
        world.train.batch_tokens = 10;
        let folder = tempfile::tempdir().unwrap();
        let (outcome, _) = world.train(folder.path(), Resume::Fresh, None);
        outcome.unwrap();
        let records = records(folder.path());
        assert_eq!(records.len(), 4, "{}", family.name);
        assert_eq!(records[3].empty_batches, 1, "{}", family.name);
        let empty = records
            .iter()
            .filter(|record| record.loss.is_none())
            .count();
        assert_eq!(empty, 1, "{}", family.name);
    }
}

/// Sets every value of all parameters.
struct Fill(f64);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = self.0;
        param.map(|tensor| {
            let is_trained = tensor.is_require_grad();
            let filled = tensor.detach().zeros_like().add_scalar(value);
            filled.set_require_grad(is_trained)
        })
    }
}

/// The same gradient for every trained value.
struct Constant(f64, GradientsParams);

impl ModuleVisitor for Constant {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        if value.is_require_grad() {
            let gradient = value.inner().zeros_like().add_scalar(self.0);
            self.1.register(param.id, gradient);
        }
    }
}

fn constant(drafter: &AnyDrafter, value: f64) -> GradientsParams {
    let mut constant = Constant(value, GradientsParams::new());
    drafter.visit(&mut constant);
    constant.1
}

/// A drafter with its optimizer.
type Trained = (AnyDrafter, ModuleOptimizer);

const RATE: f64 = 6e-4;

fn advance((mut drafter, mut optimizer): Trained, steps: usize) -> Trained {
    for _ in 0..steps {
        let gradients = constant(&drafter, 1.0);
        drafter = optimizer.step(RATE, drafter, gradients);
    }
    (drafter, optimizer)
}

fn filled(world: &World, value: f64) -> Trained {
    let mut learner = world.learner(FloatDType::BF16);
    // A real step shows that computing in bf16 leaves the parameters in f32.
    let report = step(&mut learner, world, &[vec![0]]);
    assert_eq!(report.update, Update::Applied);
    let drafter = learner.drafter.map(&mut Fill(value));
    (drafter.clone(), optimizer(&world.optimizer, &drafter))
}

/// Writes a checkpoint and reads it back.
fn saved_and_restored(world: &World, (drafter, moments): Trained) -> Trained {
    let folder = tempfile::tempdir().unwrap();
    let (identity, state) = identity_of(world);
    let path = checkpoint::save(folder.path(), &drafter, &moments, &identity.card, state).unwrap();
    let (ends, config) = (world.target.ends(), &world.optimizer);
    let make = |drafter: &AnyDrafter| optimizer(config, drafter);
    let restored = checkpoint::restore(&path, &identity, ends, &world.device, make).unwrap();
    (restored.drafter, restored.optimizer)
}

fn identity_of(world: &World) -> (Identity, RunState) {
    let identity = Identity {
        config: world.resolved(),
        rows_blake3: String::new(),
        card: world.card.clone(),
    };
    let position = Position {
        epoch: 0,
        step_in_epoch: 50,
    };
    let state = RunState::new(&identity, 7, 50, position);
    (identity, state)
}

/// Pitfall 55: weights of 1 under a constant gradient and a rate far below a unit of bf16 (2^-8 below 1) move as
/// weights of 0 do, where every type holds the change; also through a checkpoint half way.
/// Red under: `.cast(FloatDType::BF16).cast(FloatDType::F32)` on the value in `Loader::map_float` of `params.rs`.
#[test]
fn pitfall_55_small_steps_add_up_in_bf16_and_across_a_resume() {
    for kind in [OptimizerKind::Adamw, OptimizerKind::Muon] {
        for (family, mut world) in World::of_every_family(1) {
            world.optimizer.kind = kind;
            world.optimizer.weight_decay = 0.0;
            let what = format!("{kind:?} {}", family.name);
            let one_step = advance(filled(&world, 0.0), 1);
            let straight = advance(filled(&world, 1.0), 100);
            let half = saved_and_restored(&world, advance(filled(&world, 1.0), 50));
            let resumed = advance(half, 50);
            let is_f32 = |trained: &Trained| {
                let mut types = Types(Vec::new());
                trained.0.visit(&mut types);
                types.0.iter().all(|dtype| *dtype == DType::F32)
            };
            assert!(is_f32(&straight) && is_f32(&resumed), "{what}");
            assert!(values(&straight.0) == values(&resumed.0), "{what}");
            let moved = values(&one_step.0).into_iter().zip(values(&straight.0));
            for ((name, single), (_, hundred)) in moved {
                let is_frozen = family.parameters().frozen.contains(&name);
                for (single, hundred) in single.iter().zip(&hundred) {
                    let (found, expected) = (1.0 - hundred, -100.0 * single);
                    let close = (found - expected).abs() <= 0.05 * expected.abs();
                    assert!(
                        close && (expected > 0.0) != is_frozen,
                        "{what} {name}: {found}, {expected}"
                    );
                }
            }
        }
    }
}

struct Types(Vec<DType>);

impl ModuleVisitor for Types {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().dtype());
    }
}

/// The target's ends with logits of up to 300 on the rows of a world.
fn loud_ends(world: &World) -> TargetEnds {
    let tokens = draftsmith_models::batch::TokenBatch {
        rows: world.rows.clone(),
    };
    let states = world.target.forward(&tokens.ids(), &world.source().spec);
    let mut ends = world.target.ends().clone();
    let logits = host_values(&ends.logits(states.final_hidden.flatten::<2>(0, 1)));
    let largest = logits
        .iter()
        .fold(0.0_f32, |most, logit| most.max(logit.abs()));
    ends.head = ends.head.mul_scalar(300.0 / largest);
    ends
}

/// Pitfall 57: states a thousand times larger and logits of 300 in bf16 give a finite loss within a percent of f32.
/// Red under: `max(row)` in `host::row::log_sum_exp` replaced by `0.0`.
#[test]
fn pitfall_57_large_states_and_logits_stay_finite_in_bf16() {
    for (family, mut world) in World::of_every_family(2) {
        let ends = loud_ends(&world);
        for objective in objectives() {
            world.objective = objective.clone();
            let [full, half] = [FloatDType::F32, FloatDType::BF16].map(|compute| {
                let learner = world.learner_for(&ends, compute);
                let mut source = world.source();
                source.scale = 1000.0;
                learner
                    .named_gradients(&[0, 1], &world.rows, &source)
                    .unwrap()
            });
            let what = format!(
                "{} {objective:?}: {} in f32, {} in bf16",
                family.name, full.loss, half.loss
            );
            assert!(full.loss.is_finite() && half.loss.is_finite(), "{what}");
            assert!(
                (full.loss - half.loss).abs() <= 0.01 * full.loss.abs(),
                "{what}"
            );
            let gradients = full.tensors.iter().chain(&half.tensors);
            for (name, gradient) in gradients {
                assert!(
                    gradient.iter().all(|value| value.is_finite()),
                    "{what}, {name}"
                );
            }
        }
    }
}

/// Pitfall 57: a checkpoint of parameters that are not finite is not written, and the tensor is named.
/// Red under: `check_finite` left out of `models::checkpoint::save`.
#[test]
fn pitfall_57_no_checkpoint_holds_what_is_not_finite() {
    for (family, world) in World::of_every_family(1) {
        let drafter = world.drafter();
        let mut moments = optimizer(&world.optimizer, &drafter);
        let gradients = constant(&drafter, f64::NAN);
        let drafter = moments.step(RATE, drafter, gradients);
        let folder = tempfile::tempdir().unwrap();
        let (identity, state) = identity_of(&world);
        let saved = checkpoint::save(folder.path(), &drafter, &moments, &identity.card, state);
        let Err(TrainerError::Model(ModelError::NotWritten { name, .. })) = saved else {
            panic!("{}: {saved:?}", family.name);
        };
        let is_broken = |tensor: &(String, Vec<f32>)| tensor.1.iter().any(|x| x.is_nan());
        let first = values(&drafter).into_iter().find(is_broken).unwrap();
        assert_eq!(name, first.0);
        assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 0);
    }
}

/// Values of parameters, trained or all, and of matrices that Muon moves.
#[derive(Default)]
struct Counts {
    vocabulary: Vec<ParamId>,
    trained: usize,
    orthogonal: usize,
}

impl ModuleVisitor for Counts {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        if value.is_require_grad() {
            let size = value.dims().iter().product::<usize>();
            self.trained += size;
            let is_matrix = D == 2 && !self.vocabulary.contains(&param.id);
            self.orthogonal += if is_matrix { size } else { 0 };
        }
    }
}

/// Bytes of all tensors of the optimizer's state.
fn state_bytes(optimizer: &ModuleOptimizer) -> usize {
    let reader = Reader::from_bytes(optimizer.into_bytes().unwrap()).unwrap();
    let names: Vec<String> = reader
        .tensor_names()
        .into_iter()
        .map(str::to_owned)
        .collect();
    let lens = names
        .iter()
        .map(|name| reader.tensor_data(name).unwrap().len());
    lens.sum()
}

/// Pitfall 59: what is trained is the drafter without the target's rows it keeps, and the optimizer holds two moments
/// in f32 for each value (AdamW), or one for each value that Muon moves. Nothing of the target is among them.
/// Red under: `.set_require_grad(false)` left out of `Mtp::init`.
#[test]
fn pitfall_59_only_the_drafter_is_trained_and_has_optimizer_state() {
    for kind in [OptimizerKind::Adamw, OptimizerKind::Muon] {
        for (family, mut world) in World::of_every_family(1) {
            world.optimizer.kind = kind;
            let mut learner = world.learner(FloatDType::F32);
            let before = values(&learner.drafter);
            // The second step reaches what starts behind a zero.
            step(&mut learner, &world, &[vec![0]]);
            step(&mut learner, &world, &[vec![0]]);
            let frozen = &family.parameters().frozen;
            let after = values(&learner.drafter);
            for (old, new) in before.iter().zip(&after) {
                assert_eq!(
                    old == new,
                    frozen.contains(&new.0),
                    "{} {}",
                    family.name,
                    new.0
                );
            }
            let sizes = after.iter().filter(|(name, _)| !frozen.contains(name));
            let expected: usize = sizes.map(|(_, values)| values.len()).sum();
            let mut counts = Counts {
                vocabulary: learner.drafter.vocabulary_params(),
                ..Counts::default()
            };
            learner.drafter.visit(&mut counts);
            assert_eq!(counts.trained, expected, "{}", family.name);
            let single = match kind {
                OptimizerKind::Adamw => 0,
                OptimizerKind::Muon => counts.orthogonal,
            };
            let bytes = 2 * 4 * (expected - single) + 4 * single;
            assert_eq!(
                state_bytes(&learner.optimizer),
                bytes,
                "{kind:?} {}",
                family.name
            );
        }
    }
}

/// A row of ten tokens, seven of them generated, each drawn alike from `IDS` ids.
fn drawn_row(index: usize) -> TokenRow {
    let mut stream = Stream::new(29, Purpose::Check, index as u64);
    TokenRow {
        key: format!("drawn-{index}"),
        ids: (0..10).map(|_| stream.below(IDS) as u32).collect(),
        turns: (0..10).map(|t| u32::from(t >= 3)).collect(),
    }
}

/// Ids of the rows of [`drawn_row`], all in the draft vocabulary.
const IDS: usize = 4;

/// Nothing that a slot may see tells anything about such labels. Each row is met once, so that nothing is learned by heart: the
/// loss comes down to the entropy of the labels, and not below it, or some slot sees what it is to predict.
/// Red under: `a + step` in `UnrollPlan::query_ids` replaced by `a + step + 1` (EAGLE-3, MTP); `..anchor` in
/// `context_of_blocks` replaced by `..anchor + 2` (DFlash, DSpark).
#[test]
fn random_labels_stay_at_chance() {
    const STEPS: usize = 500;
    const ROWS_A_STEP: usize = 8;
    for (family, mut world) in World::of_every_family(0) {
        world.rows = (0..STEPS * ROWS_A_STEP).map(drawn_row).collect();
        world.objective = objective_of("ce");
        let mut learner = world.learner(FloatDType::F32);
        let source = world.source();
        let losses: Vec<f64> = (0..STEPS)
            .map(|step| {
                let first = step * ROWS_A_STEP;
                let batch = [(first..first + ROWS_A_STEP).collect()];
                // Small in the end, so that the last steps do not wander about the optimum.
                let rate = if step < STEPS / 2 { 1e-2 } else { 2e-3 };
                let report = learner.step(&batch, &world.rows, &source, rate, DRAW);
                report.unwrap().loss.unwrap()
            })
            .collect();
        let last = &losses[STEPS - 80..];
        let mean = last.iter().sum::<f64>() / last.len() as f64;
        let entropy = (IDS as f64).ln();
        // About 10,000 slots, whose losses differ by a few tenths of a nat: their mean is known to 0.005.
        let what = format!("{}: {mean:.3} nats, first {:.3}", family.name, losses[0]);
        assert!(mean > entropy - 0.02, "{what}, entropy {entropy:.3}");
        // Trained it was. The output of an MTP head has a norm of its own, which keeps its logits apart.
        assert!(mean < entropy + 0.3, "{what}, entropy {entropy:.3}");
    }
}
