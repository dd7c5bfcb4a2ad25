//! Every drafter family against an independent PyTorch script: logits, losses, every gradient.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, FloatDType, Gradients, Tensor};
use draftsmith_models::batch::{DraftBatch, TargetStates, TokenBatch};
use draftsmith_models::drafter::eagle3::{Eagle3, Eagle3Config};
use draftsmith_models::drafter::{AnyDrafter, Drafter, DrafterConfig, DrafterContext, HeadMode};
use draftsmith_models::layers::rope::{RopeScaling, RopeSpec};
use draftsmith_models::objective::{
    Objective, ObjectiveConfig, ObjectiveInput, ObjectiveOutput, SlotWeight, Teacher,
};
use draftsmith_models::slot::{Slot, batch_slots};
use draftsmith_models::target::{TargetEnds, TargetSpec};
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::{WeightFolder, host_values, write_safetensors};

use crate::families::{CaseTarget, Family};
use crate::support::{Golden, assert_close, golden_path, largest, normal, row};

const HIDDEN: usize = 16;
const VOCAB: usize = 48;

/// The golden is computed in f64; a unit of f32 rounding is 6e-8, a slot is a chain of some 20 sums of
/// up to 48 terms per step over 4 steps, and gradients run through it twice.
const TOLERANCE: f32 = 2e-5;

/// Draft vocabulary of the reduced cases, as in the generator.
const KEEP: [u32; 24] = [
    0, 1, 2, 5, 7, 8, 11, 13, 17, 19, 20, 21, 26, 29, 30, 33, 34, 38, 40, 41, 44, 45, 46, 47,
];

/// A golden case with everything a drafter is built from.
pub(crate) struct Case {
    pub(crate) golden: Golden,
    pub(crate) spec: TargetSpec,
    pub(crate) ends: TargetEnds,
    pub(crate) vocab: VocabMap,
    pub(crate) batch: DraftBatch,
    /// Family and name, for messages.
    pub(crate) what: String,
    family: Family,
    config: DrafterConfig,
}

impl Case {
    /// The cases of all families, which are the files of their folders.
    pub(crate) fn all() -> Vec<Self> {
        let families = Family::all().into_iter();
        let cases = families.flat_map(|family| {
            let cases = family.cases();
            assert!(!cases.is_empty(), "`{}` has no golden case", family.name);
            cases
                .into_iter()
                .map(move |name| Self::open(&family, &name))
        });
        cases.collect()
    }

    fn open(family: &Family, name: &str) -> Self {
        let path = golden_path(family.name).join(format!("{name}.safetensors"));
        let golden = Golden::open(&path);
        let device = Device::flex();
        let ends = TargetEnds {
            embedding: golden.tensor("embedding", &device),
            final_norm: golden.tensor("final_norm", &device),
            head: golden.tensor("target_head", &device),
            rms_norm_eps: 1e-5,
        };
        let vocab = if golden.shape("logits")[1] == VOCAB {
            VocabMap::full(VOCAB)
        } else {
            VocabMap::new(KEEP.to_vec(), VOCAB).unwrap()
        };
        Self {
            spec: spec(family.case(name).target),
            batch: batch(&golden),
            what: format!("{} {name}", family.name),
            config: family.case_config(name),
            family: family.clone(),
            golden,
            ends,
            vocab,
        }
    }

    fn context(&self) -> DrafterContext<'_> {
        DrafterContext {
            target: &self.spec,
            ends: &self.ends,
            vocab: &self.vocab,
        }
    }

    /// The drafter with the golden's weights, read from a file by name.
    pub(crate) fn drafter(&self, device: &Device) -> AnyDrafter {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drafter.safetensors");
        write_safetensors(&path, &self.golden.named("weight."), &[]).unwrap();
        AnyDrafter::init(&self.config, self.context(), 99, device)
            .unwrap()
            .load_tensors(&WeightFolder::open_file(&path).unwrap())
            .unwrap()
    }

    /// The gradient of the head by parameter: the parameters of the head stand side by side.
    fn head_gradients(&self, head: &Tensor<2>) -> BTreeMap<String, Vec<f32>> {
        let mut start = 0;
        let names = self.family.parameters().head.iter();
        let parts = names.map(|name| {
            let width = self.golden.shape(&format!("weight.{name}"))[1];
            let part = head.clone().narrow(1, start, width);
            start += width;
            (name.clone(), host_values(&part))
        });
        let parts = parts.collect();
        assert_eq!(start, head.dims()[1], "{}: columns of the head", self.what);
        parts
    }

    fn slots(&self, drafter: &AnyDrafter) -> Vec<Slot> {
        batch_slots(&self.batch.tokens, drafter.num_depths())
    }

    fn evaluate(
        &self,
        hidden: Tensor<2>,
        head: Tensor<2>,
        slots: &[Slot],
        loss: &str,
    ) -> ObjectiveOutput {
        let objective = Objective::new(&objective(loss)).unwrap();
        let [_, width] = head.dims();
        let input = ObjectiveInput {
            slots,
            hidden,
            head,
            batch: &self.batch,
            teacher: Teacher::new(&self.ends, &self.vocab),
            head_gradient: Some(0..width),
        };
        objective.evaluate(input, objective.denominator(slots))
    }
}

fn spec(target: CaseTarget) -> TargetSpec {
    TargetSpec {
        model_type: "llama".to_owned(),
        vocab_size: VOCAB,
        hidden_size: HIDDEN,
        intermediate_size: 24,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 8,
        rms_norm_eps: 1e-5,
        rope: RopeSpec {
            theta: 10_000.0,
            scaling: if target.llama3 {
                RopeScaling::Llama3 {
                    factor: 8.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_max_position_embeddings: 8,
                }
            } else {
                RopeScaling::Default
            },
        },
        max_position_embeddings: 64,
        tie_word_embeddings: false,
        qk_norm: target.qk_norm,
        qkv_bias: target.qkv_bias,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        pad_token_id: None,
    }
}

/// Both rows, padded on the right with noise that must not matter.
fn batch(golden: &Golden) -> DraftBatch {
    let rows: Vec<_> = (0..2)
        .map(|index| {
            let list = |name: &str| -> Vec<u32> {
                let values = golden.integers(&format!("{name}.{index}"));
                values.into_iter().map(|value| value as u32).collect()
            };
            row(&list("ids"), &list("turns"))
        })
        .collect();
    let padded_len = rows.iter().map(|row| row.ids.len()).max().unwrap();
    let states = |name: &str, width: usize| {
        let device = Device::flex();
        let padded = (0..2).map(|index| {
            let mut values = golden.floats(&format!("{name}.{index}"));
            let missing = padded_len * width - values.len();
            values.extend(normal(index, missing, 100.0));
            crate::support::tensor(&values, [1, padded_len, width])
        });
        Tensor::cat(padded.collect(), 0).to_device(&device)
    };
    DraftBatch {
        states: TargetStates {
            aux: states("aux", 3 * HIDDEN),
            final_hidden: states("final_hidden", HIDDEN),
            teacher: None,
        },
        tokens: TokenBatch { rows },
    }
}

fn objective(loss: &str) -> ObjectiveConfig {
    let one = |name: &str| BTreeMap::from([(name.to_owned(), 1.0)]);
    match loss {
        "mixture" => ObjectiveConfig {
            losses: BTreeMap::from([("ce".to_owned(), 0.1), ("tv".to_owned(), 0.9)]),
            temperature: 0.7,
            slot_weight: SlotWeight::StepDecay(0.8),
            chunk_positions: 3,
            ..ObjectiveConfig::default()
        },
        "confidence" => ObjectiveConfig {
            losses: one("kl"),
            slot_weight: SlotWeight::StepDecay(0.8),
            ..ObjectiveConfig::default()
        },
        name => ObjectiveConfig {
            losses: one(name),
            chunk_positions: 5,
            ..ObjectiveConfig::default()
        },
    }
}

const LOSSES: [&str; 11] = [
    "kl",
    "tv",
    "lk_hybrid",
    "ce",
    "ce_argmax",
    "reverse_kl",
    "jsd",
    "renyi_half",
    "l1",
    "neg_log_acceptance",
    "mixture",
];

/// Gradients by parameter name.
struct Collected<'a> {
    gradients: &'a Gradients,
    path: Vec<String>,
    found: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Collected<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.val().grad(self.gradients) {
            self.found
                // The first name is that of the family.
                .insert(self.path[1..].join("."), host_values(&gradient));
        }
    }
}

/// Gradients of `scalar` with respect to every parameter that it depends on.
fn layer_gradients(drafter: &AnyDrafter, scalar: Tensor<1>) -> BTreeMap<String, Vec<f32>> {
    let gradients = scalar.backward();
    let mut collected = Collected {
        gradients: &gradients,
        path: Vec::new(),
        found: BTreeMap::new(),
    };
    drafter.visit(&mut collected);
    collected.found
}

/// Positions in the golden of our slots, in our order; every golden slot exactly once.
fn golden_order(golden: &Golden, slots: &[Slot]) -> Vec<usize> {
    let listed = golden.integers("slots");
    let index: BTreeMap<[usize; 3], usize> = listed
        .chunks_exact(3)
        .enumerate()
        .map(|(place, slot)| ([slot[0], slot[1], slot[2]], place))
        .collect();
    assert_eq!(slots.len(), index.len());
    let order: Vec<usize> = slots
        .iter()
        .map(|slot| index[&[slot.row, slot.anchor, slot.depth]])
        .collect();
    let mut sorted = order.clone();
    sorted.sort_unstable();
    assert!(sorted.into_iter().eq(0..slots.len()));
    order
}

/// Red under (each seen), EAGLE-3: depth-major rotary position left at `t`; `t + 1` in
/// `UnrollPlan::context_ids` replaced by `t`; the embedding half behind the hidden half; `norm_before_residual` ignored;
/// the diagonal keys of earlier steps dropped; `aux_norm` or `norm_output` ignored;
/// the gain of the first state for all of them in `Eagle3::normed`.
#[test]
fn logits_equal_the_golden() {
    for case in Case::all() {
        let drafter = case.drafter(&Device::flex());
        let slots = case.slots(&drafter);
        let hidden = drafter.draft_slots(&case.batch, &slots, &case.ends, FloatDType::F32);
        let logits = host_values(&hidden.matmul(drafter.head().transpose()));
        let expected = case.golden.floats("logits");
        let width = case.vocab.len();
        let scale = largest(&expected);
        for (place, index) in golden_order(&case.golden, &slots).into_iter().enumerate() {
            assert_close(
                &format!("{}, {:?}", case.what, slots[place]),
                &logits[place * width..(place + 1) * width],
                &expected[index * width..(index + 1) * width],
                TOLERANCE * scale,
            );
        }
    }
}

/// Red under: any closed-form gradient of `loss/` scaled by 1.01; `/ temperature` removed from
/// `row_scale`; `hidden` detached between steps of `unroll`.
#[test]
fn losses_and_all_gradients_equal_the_golden() {
    let device = Device::flex().autodiff();
    for case in Case::all() {
        let drafter = case.drafter(&device);
        let slots = case.slots(&drafter);
        for loss in LOSSES {
            let hidden = drafter.draft_slots(&case.batch, &slots, &case.ends, FloatDType::F32);
            let output = case.evaluate(hidden.clone().inner(), drafter.head(), &slots, loss);
            check_values(&case, &slots, &output, loss);
            let surrogate = (hidden * output.grad_hidden.autodiff()).sum();
            let mut found = layer_gradients(&drafter, surrogate);
            found.extend(case.head_gradients(&output.grad_head.unwrap()));
            check_gradients(&case, &found, loss);
        }
    }
}

/// Red under: `sigmoid(logits)` without `- alpha`; the scale left out of `Confidence::surrogate`; `alpha * logit` left
/// out of `Confidence::value`.
#[test]
fn the_confidence_is_taught_the_overlap() {
    let device = Device::flex().autodiff();
    let is_taught = |case: &Case| case.golden.contains("confidence.loss");
    for case in Case::all().into_iter().filter(is_taught) {
        let drafter = case.drafter(&device);
        let slots = case.slots(&drafter);
        let hidden = drafter.draft_slots(&case.batch, &slots, &case.ends, FloatDType::F32);
        let output = case.evaluate(hidden.clone().inner(), drafter.head(), &slots, "confidence");
        let confidence = drafter.confidence(hidden.clone()).unwrap();
        let weights = slots.iter().map(|slot| 0.8_f32.powi(slot.depth as i32));
        let total: f32 = weights.clone().sum();
        let scale: Vec<f32> = weights.map(|weight| weight / total).collect();
        let kl = output.loss.iter().zip(&scale).map(|(kl, scale)| kl * scale);
        let value = confidence.value(&output.scores.alpha, &scale) as f32;
        let found = [kl.sum::<f32>() + value];
        let expected = case.golden.floats("confidence.loss");
        assert_close(&case.what, &found, &expected, TOLERANCE);
        let surrogate = confidence.surrogate(&output.scores.alpha, &scale);
        let product = (hidden * output.grad_hidden.autodiff()).sum();
        let found = layer_gradients(&drafter, product + surrogate);
        check_gradients(&case, &found, "confidence");
    }
}

/// Compares the gradients of all trained parameters; one that is not there must be zero.
fn check_gradients(case: &Case, found: &BTreeMap<String, Vec<f32>>, loss: &str) {
    for tensor in case.golden.named("weight.") {
        let name = &tensor.name;
        let expected = case.golden.floats(&format!("{loss}.grad.{name}"));
        let is_head = case.family.parameters().head.contains(name);
        if loss == "confidence" && is_head {
            continue; // the closed form of the head is checked with the losses
        }
        let gradient = found
            .get(name)
            .cloned()
            .unwrap_or(vec![0.0; expected.len()]);
        let tolerance = TOLERANCE * largest(&expected);
        let what = format!("{}, {loss}, gradient of {name}", case.what);
        assert_close(&what, &gradient, &expected, tolerance);
    }
}

fn check_values(case: &Case, slots: &[Slot], output: &ObjectiveOutput, loss: &str) {
    let order = golden_order(&case.golden, slots);
    let expected = case.golden.floats(&format!("{loss}.alpha"));
    let expected: Vec<f32> = order.iter().map(|&index| expected[index]).collect();
    assert_close("alpha", &output.scores.alpha, &expected, TOLERANCE);
    let weight = |slot: &Slot| objective(loss).slot_weight.at(slot.depth);
    let total: f64 = slots.iter().map(weight).sum();
    let sum: f64 = slots
        .iter()
        .zip(&output.loss)
        .map(|(slot, value)| weight(slot) * f64::from(*value))
        .sum();
    let want = case.golden.floats(&format!("{loss}.loss"));
    let found = [(sum / total) as f32];
    assert_close(loss, &found, &want, TOLERANCE * largest(&want).max(1.0));
}

#[test]
fn a_frozen_head_stays_the_targets_rows_and_changes_nothing_else() {
    let case = Case::open(&Family::named("eagle3"), "plain");
    let device = Device::flex().autodiff();
    let trained = Eagle3Config {
        aux_layer_ids: Some(vec![0, 1, 2]),
        ttt_steps: 4,
        ..Eagle3Config::default()
    };
    let frozen = Eagle3Config {
        head: HeadMode::Frozen,
        ..trained.clone()
    };
    let [frozen, trained] =
        [frozen, trained].map(|config| Eagle3::init(&config, case.context(), 1, &device).unwrap());
    assert!(frozen.trained_head().is_none());
    assert_eq!(trained.trained_head().unwrap().columns, 0..HIDDEN);
    assert!(!frozen.head.is_require_grad() && trained.head.is_require_grad());
    let target_head = case.golden.floats("target_head");
    let rows: Vec<f32> = KEEP
        .iter()
        .flat_map(|&id| target_head[id as usize * HIDDEN..][..HIDDEN].to_vec())
        .collect();
    assert_eq!(host_values(&frozen.head().inner()), rows);
    assert_eq!(host_values(&trained.head().inner()), rows);
    let outputs = |drafter: &Eagle3| {
        let slots = batch_slots(&case.batch.tokens, drafter.num_depths());
        let drafter = drafter.valid();
        host_values(&drafter.draft_slots(&case.batch, &slots, &case.ends, FloatDType::F32))
    };
    assert_eq!(outputs(&frozen), outputs(&trained));
}

#[test]
fn reading_back_what_was_written_gives_equal_logits() {
    for case in Case::all() {
        let drafter = case.drafter(&Device::flex());
        for tensor in drafter.to_tensors() {
            let name = format!("weight.{}", tensor.name);
            assert_eq!(tensor.shape, case.golden.shape(&name));
            let bytes: Vec<u8> = case
                .golden
                .floats(&name)
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            assert!(tensor.bytes == bytes, "{} {name}", case.what);
        }
    }
}
