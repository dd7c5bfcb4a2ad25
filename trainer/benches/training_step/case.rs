//! What is timed: a learner with random states.

use burn::tensor::{Device, Tensor, TensorData};
use draftsmith_data::error::DataError;
use draftsmith_data::hidden::HiddenStateSource;
use draftsmith_models::batch::{StateSpec, TargetStates, TeacherFigures, TokenBatch, TokenRow};
use draftsmith_models::drafter::{AnchorDraw, AnyDrafter, DrafterConfig, DrafterContext};
use draftsmith_models::layers::rope::{RopeScaling, RopeSpec};
use draftsmith_models::objective::{Objective, ObjectiveConfig, Teacher, teacher_figures};
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::target::{TargetEnds, TargetSpec};
use draftsmith_models::vocab::VocabMap;
use draftsmith_trainer::config::{Compute, OptimizerConfig};
use draftsmith_trainer::optimizer::optimizer;
use draftsmith_trainer::step::{Learner, Phases};
use serde_json::{Value, json};

const VOCAB: usize = 49_152;
const DRAFT_VOCAB: usize = 8192;
const HIDDEN: usize = 576;
const ROWS: usize = 4;
const ROW_LEN: usize = 225;
const PROMPT_LEN: usize = 45;
/// Captured blocks.
const AUX_LAYERS: [usize; 3] = [1, 14, 26];

/// Real tokens of a step.
pub(crate) const fn tokens() -> usize {
    ROWS * ROW_LEN
}

/// The drafters whose step `eager.py` computes too.
fn drafter_settings(family: &str, trained_head: bool) -> Value {
    match family {
        "dflash" => json!({
            "mask_token": 5, "aux_layer_ids": AUX_LAYERS, "num_layers": 2, "block_size": 8, "anchors_per_row": 60,
        }),
        _ => json!({
            "ttt_steps": 3, "aux_layer_ids": AUX_LAYERS, "head": if trained_head { "trained" } else { "frozen" },
        }),
    }
}

/// A drafter to train and the frozen target's share of it.
pub(crate) struct Case {
    config: DrafterConfig,
    spec: TargetSpec,
    ends: TargetEnds,
    vocab: VocabMap,
    has_figures: bool,
}

impl Case {
    /// The case of a family; `is_asked` tells which of `trained` and `whole-teacher` were named.
    pub(crate) fn new(family: &str, is_asked: impl Fn(&str) -> bool) -> Self {
        let device = Device::flex();
        let spec = smollm2();
        let settings = json!({ family: drafter_settings(family, is_asked("trained")) });
        let ids = (0..DRAFT_VOCAB as u32).map(|index| index * 6).collect();
        Self {
            config: serde_json::from_value(settings).expect("valid settings"),
            ends: TargetEnds {
                embedding: random([VOCAB, HIDDEN], 0.1, 1, &device),
                final_norm: Tensor::ones([HIDDEN], &device),
                head: random([VOCAB, HIDDEN], 0.1, 1, &device),
                rms_norm_eps: spec.rms_norm_eps,
            },
            spec,
            vocab: VocabMap::new(ids, VOCAB).expect("distinct ids"),
            has_figures: !is_asked("whole-teacher"),
        }
    }

    /// Times of `steps` steps, after one that is not counted.
    pub(crate) fn time(&self, steps: usize) -> Vec<Phases> {
        let mut learner = self.learner();
        let rows = rows();
        let source = self.source(&learner, &rows);
        let batch: Vec<usize> = (0..ROWS).collect();
        let mut phases = Vec::new();
        for step in 0..=steps as u64 {
            let draw = AnchorDraw { seed: 0, step };
            let report = learner
                .step(std::slice::from_ref(&batch), &rows, &source, 1e-4, draw)
                .expect("the source never fails");
            if step == 0 {
                let slots = report.slots();
                println!("{} tokens, {slots} slots a step", report.tokens);
            } else {
                phases.push(report.phases);
            }
        }
        phases
    }

    fn learner(&self) -> Learner<'_> {
        let context = DrafterContext {
            target: &self.spec,
            ends: &self.ends,
            vocab: &self.vocab,
        };
        let device = Device::flex().autodiff();
        let drafter = AnyDrafter::init(&self.config, context, 0, &device).expect("valid settings");
        Learner {
            optimizer: optimizer(&OptimizerConfig::default(), &drafter),
            drafter,
            objective: Objective::new(&ObjectiveConfig::default()).expect("valid settings"),
            teacher: Teacher::new(&self.ends, &self.vocab),
            compute: Compute::F32.dtype(),
            clip_norm: 1.0,
        }
    }

    fn source(&self, learner: &Learner<'_>, rows: &[TokenRow]) -> Constant {
        let device = Device::flex();
        let final_hidden = random([ROWS, ROW_LEN, HIDDEN], 1.0, 3, &device);
        Constant {
            spec: learner.drafter.state_spec(),
            states: TargetStates {
                aux: random([ROWS, ROW_LEN, AUX_LAYERS.len() * HIDDEN], 1.0, 2, &device),
                teacher: self
                    .has_figures
                    .then(|| figures(&self.ends, &final_hidden, rows)),
                final_hidden,
            },
        }
    }
}

#[derive(Debug)]
struct Constant {
    spec: StateSpec,
    states: TargetStates,
}

impl HiddenStateSource for Constant {
    fn spec(&self) -> &StateSpec {
        &self.spec
    }

    fn states(&self, _batch: &TokenBatch) -> Result<TargetStates, DataError> {
        Ok(self.states.clone())
    }
}

fn rows() -> Vec<TokenRow> {
    let mut stream = Stream::new(0, Purpose::Check, 0);
    let row = |index: usize| TokenRow {
        key: index.to_string(),
        ids: (0..ROW_LEN).map(|_| stream.below(VOCAB) as u32).collect(),
        turns: (0..ROW_LEN).map(|t| u32::from(t >= PROMPT_LEN)).collect(),
    };
    (0..ROWS).map(row).collect()
}

/// Figures of every position, row after row; those before the answer teach nobody and are as good as any.
fn figures(
    ends: &TargetEnds,
    final_hidden: &Tensor<3>,
    rows: &[TokenRow],
) -> Vec<Vec<TeacherFigures>> {
    let flat = final_hidden.clone().flatten::<2>(0, 1);
    let next: Vec<u32> = rows
        .iter()
        .flat_map(|row| row.ids[1..].iter().chain(&row.ids[..1]).copied())
        .collect();
    let figures = teacher_figures(ends, flat, &next);
    figures.chunks(ROW_LEN).map(<[_]>::to_vec).collect()
}

fn random<const D: usize>(
    shape: [usize; D],
    scale: f64,
    stream: u64,
    device: &Device,
) -> Tensor<D> {
    let mut stream = Stream::new(0, Purpose::Check, stream);
    let values: Vec<f32> = (0..shape.iter().product::<usize>())
        .map(|_| ((stream.uniform() - 0.5) * scale) as f32)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn smollm2() -> TargetSpec {
    TargetSpec {
        model_type: "llama".to_owned(),
        vocab_size: VOCAB,
        hidden_size: HIDDEN,
        intermediate_size: 1536,
        num_layers: 30,
        num_heads: 9,
        num_kv_heads: 3,
        head_dim: 64,
        rms_norm_eps: 1e-5,
        rope: RopeSpec {
            theta: 1e5,
            scaling: RopeScaling::Default,
        },
        max_position_embeddings: 8192,
        tie_word_embeddings: true,
        qk_norm: false,
        qkv_bias: false,
        bos_token_id: Some(1),
        eos_token_ids: vec![2],
        pad_token_id: Some(2),
    }
}
