//! A tiny random Llama, a tiny data set and one call that trains on them.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    reason = "every test binary uses its own part of the harness"
)]

#[path = "../../../models/tests/shared/families.rs"]
pub(crate) mod families;

use std::path::Path;
use std::sync::Mutex;

use burn::tensor::{Device, FloatDType};
use draftsmith_data::error::DataError;
use draftsmith_data::hidden::HiddenStateSource;
use draftsmith_models::batch::{StateSpec, TargetStates, TokenBatch, TokenRow};
use draftsmith_models::checkpoint::{DrafterCard, FORMAT_VERSION, TemplateRecord};
use draftsmith_models::drafter::eagle3::Eagle3Config;
use draftsmith_models::drafter::{AnyDrafter, DrafterConfig, DrafterContext};
use draftsmith_models::error::Diagnose;
use draftsmith_models::layers::rope::{RopeScaling, RopeSpec};
use draftsmith_models::objective::{Objective, ObjectiveConfig, SlotWeight, Teacher};
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::target::{TargetEnds, TargetModel, TargetSpec};
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::{NamedTensor, WeightFolder, write_safetensors};
use draftsmith_trainer::config::{LogConfig, OptimizerConfig, TrainConfig};
use draftsmith_trainer::error::PartError;
use draftsmith_trainer::log::jsonl::{self, StepRecord};
use draftsmith_trainer::observe::{Observer, Progress};
use draftsmith_trainer::optimizer::optimizer;
use draftsmith_trainer::parts::{Validation, Validator};
use draftsmith_trainer::step::Learner;
use draftsmith_trainer::{
    Interrupter, Outcome, Parts, Resume, RunSettings, TrainerError, run::train,
};
use safetensors::tensor::Dtype;
use serde_json::json;

use families::Family;

pub const VOCAB: usize = 32;
const HIDDEN: usize = 16;
const INTERMEDIATE: usize = 24;
const LAYERS: usize = 3;

/// Everything a test run needs, built from constants.
pub struct World {
    pub target: TargetModel,
    pub rows: Vec<TokenRow>,
    pub card: DrafterCard,
    pub optimizer: OptimizerConfig,
    pub train: TrainConfig,
    pub objective: ObjectiveConfig,
    pub log: LogConfig,
    pub device: Device,
}

impl World {
    /// `num_rows` rows of 10 tokens, 7 of them generated; two rows a micro-batch.
    pub fn new(num_rows: usize) -> Self {
        let target = tiny_llama();
        Self {
            rows: (0..num_rows).map(|index| row(index, 10)).collect(),
            card: card(target.spec()),
            target,
            optimizer: OptimizerConfig {
                learning_rate: 3e-3,
                weight_decay: 0.01,
                warmup_steps: Some(4),
                ..OptimizerConfig::default()
            },
            train: TrainConfig {
                batch_tokens: 20,
                checkpoint_every: 5,
                keep_checkpoints: 100,
                validate_every: 0,
                log_every: 1,
                seed: 7,
                ..TrainConfig::default()
            },
            objective: ObjectiveConfig::default(),
            log: LogConfig::default(),
            device: Device::flex().autodiff(),
        }
    }

    /// The same world with a drafter of `family` and three depths.
    pub fn of(mut self, family: &Family) -> Self {
        self.card.drafter = family.config(3);
        let spec = self.card.drafter.check(self.target.spec()).unwrap();
        self.card.aux_layer_ids = spec.aux_layer_ids;
        self
    }

    /// One world for each family.
    pub fn of_every_family(num_rows: usize) -> Vec<(Family, Self)> {
        let families = Family::all().into_iter();
        families
            .map(|family| {
                let world = Self::new(num_rows).of(&family);
                (family, world)
            })
            .collect()
    }

    /// The same world with a block drafter and its settings.
    pub fn with_family(mut self, family: &str, mut settings: serde_json::Value) -> Self {
        settings["mask_token"] = json!(31);
        settings["aux_layer_ids"] = json!([0, 1]);
        settings["num_layers"] = json!(2);
        self.card.drafter = DrafterConfig::deserialize_family(family, settings).unwrap();
        let spec = self.card.drafter.check(self.target.spec()).unwrap();
        self.card.aux_layer_ids = spec.aux_layer_ids;
        self
    }

    pub fn drafter(&self) -> AnyDrafter {
        self.drafter_for(self.target.ends())
    }

    /// The drafter for other ends of the target.
    pub fn drafter_for(&self, ends: &TargetEnds) -> AnyDrafter {
        let context = DrafterContext {
            target: self.target.spec(),
            ends,
            vocab: &self.card.vocab,
        };
        AnyDrafter::init(&self.card.drafter, context, 5, &self.device).unwrap()
    }

    pub fn learner(&self, compute: FloatDType) -> Learner<'_> {
        self.learner_for(self.target.ends(), compute)
    }

    /// The learner for other ends of the target.
    pub fn learner_for<'a>(&'a self, ends: &'a TargetEnds, compute: FloatDType) -> Learner<'a> {
        let drafter = self.drafter_for(ends);
        Learner {
            optimizer: optimizer(&self.optimizer, &drafter),
            drafter,
            objective: Objective::new(&self.objective).unwrap(),
            teacher: Teacher::new(ends, &self.card.vocab),
            compute,
            clip_norm: 1.0,
        }
    }

    pub fn source(&self) -> Online<'_> {
        Online {
            target: &self.target,
            spec: StateSpec {
                aux_layer_ids: self.card.aux_layer_ids.clone(),
            },
            scale: 1.0,
            poison: Vec::new(),
            fails_after: usize::MAX,
            taken: Mutex::new(Vec::new()),
        }
    }

    pub fn resolved(&self) -> serde_json::Value {
        json!({
            "optimizer": self.optimizer,
            "train": self.train,
            "objective": self.objective,
            "log": self.log,
        })
    }

    /// Trains in `folder`; stops after step `stop_after` if given.
    pub fn train(
        &self,
        folder: &Path,
        resume: Resume,
        stop_after: Option<u64>,
    ) -> (Result<Outcome, TrainerError>, Spy) {
        self.train_with(folder, resume, stop_after, &self.source(), None)
    }

    pub fn train_with(
        &self,
        folder: &Path,
        resume: Resume,
        stop_after: Option<u64>,
        source: &dyn HiddenStateSource,
        validator: Option<&mut dyn Validator>,
    ) -> (Result<Outcome, TrainerError>, Spy) {
        let mut spy = Spy {
            stop_after,
            interrupter: Interrupter::new(),
            ..Spy::default()
        };
        let interrupter = spy.interrupter.clone();
        let result = train(
            RunSettings {
                optimizer: &self.optimizer,
                train: &self.train,
                objective: &self.objective,
                log: &self.log,
                resolved: self.resolved(),
                folder,
                resume,
            },
            Parts {
                drafter: self.drafter(),
                card: &self.card,
                ends: self.target.ends(),
                device: &self.device,
                rows: &self.rows,
                source,
                validator: validator.map(|validator| validator as &mut dyn Validator),
                observer: &mut spy,
                interrupter,
            },
        );
        (result, spy)
    }
}

/// Names of all losses, as a mistyped one is told.
pub fn losses() -> Vec<String> {
    let hint = Objective::new(&objective_of("none")).unwrap_err().hint();
    let hint = hint.unwrap();
    let names = hint.strip_prefix("the losses are: ").unwrap().split(", ");
    let names: Vec<String> = names.map(str::to_owned).collect();
    assert!(names.len() >= 12, "{names:?}");
    names
}

/// Every loss alone, with even slot weights and with those that hang on the other slots of a round; one loss takes no
/// such weights.
pub fn objectives() -> Vec<ObjectiveConfig> {
    let weighted = |slot_weight| {
        losses().into_iter().map(move |loss| ObjectiveConfig {
            slot_weight,
            ..objective_of(&loss)
        })
    };
    let all = weighted(SlotWeight::Uniform).chain(weighted(SlotWeight::Dpace(0.5)));
    let taken: Vec<ObjectiveConfig> = all.filter(|one| Objective::new(one).is_ok()).collect();
    assert_eq!(taken.len(), 2 * losses().len() - 1, "{taken:?}");
    taken
}

/// One loss alone.
pub fn objective_of(loss: &str) -> ObjectiveConfig {
    ObjectiveConfig {
        losses: [(loss.to_owned(), 1.0)].into(),
        ..ObjectiveConfig::default()
    }
}

/// Watches a run and stops it where the test says.
#[derive(Default)]
pub struct Spy {
    pub stop_after: Option<u64>,
    pub interrupter: Interrupter,
    pub planned: Option<u64>,
    pub steps: Vec<u64>,
    pub notices: Vec<String>,
    pub pause: std::time::Duration,
}

impl Observer for Spy {
    fn plan(&mut self, plan: &draftsmith_trainer::order::Plan) {
        self.planned = Some(plan.steps);
    }

    fn step(&mut self, progress: &Progress) {
        self.steps.push(progress.step);
        std::thread::sleep(self.pause);
        if self.stop_after == Some(progress.step) {
            self.interrupter.stop(Some("the test says so"));
        }
    }

    fn notice(&mut self, message: &str) {
        self.notices.push(message.to_owned());
    }
}

/// The target runs in the test process; remembers which rows were asked for.
#[derive(Debug)]
pub struct Online<'a> {
    pub target: &'a TargetModel,
    pub spec: StateSpec,
    /// Factor on all states.
    pub scale: f64,
    /// Calls, from 0, whose states become NaN.
    pub poison: Vec<usize>,
    /// Calls that succeed.
    pub fails_after: usize,
    /// Keys of the rows of every call.
    pub taken: Mutex<Vec<Vec<String>>>,
}

impl Online<'_> {
    pub fn taken(&self) -> Vec<Vec<String>> {
        self.taken.lock().unwrap().clone()
    }
}

impl HiddenStateSource for Online<'_> {
    fn spec(&self) -> &StateSpec {
        &self.spec
    }

    fn states(&self, tokens: &TokenBatch) -> Result<TargetStates, DataError> {
        let mut taken = self.taken.lock().unwrap();
        if taken.len() == self.fails_after {
            return Err(DataError::setting("no states", "none"));
        }
        let states = self.target.forward(&tokens.ids(), &self.spec);
        let poisoned = self.poison.contains(&taken.len());
        let poison = if poisoned { f64::NAN } else { 1.0 };
        taken.push(tokens.rows.iter().map(|row| row.key.clone()).collect());
        Ok(TargetStates {
            aux: states.aux.mul_scalar(self.scale * poison),
            final_hidden: states.final_hidden.mul_scalar(self.scale),
            teacher: None,
        })
    }
}

/// A validator that returns the given scores one after another.
pub struct Scores(pub Vec<f64>);

impl Validator for Scores {
    fn validate(&mut self, _drafter: &AnyDrafter) -> Result<Validation, PartError> {
        let score = self.0.remove(0);
        Ok(Validation {
            figures: vec![("tau_gamma_5".to_owned(), score)],
            score,
        })
    }
}

pub fn records(folder: &Path) -> Vec<StepRecord> {
    jsonl::read(&folder.join("metrics.jsonl")).unwrap()
}

/// What must be equal between a straight and a resumed run: everything but the clock.
pub fn timeless(mut records: Vec<StepRecord>) -> Vec<StepRecord> {
    for record in &mut records {
        record.seconds.clear();
        record.tokens_per_second = 0.0;
    }
    records
}

/// Names and bytes of all parameters. The header of the file is no part of it: its order is free.
pub fn weights(checkpoint: &Path) -> Vec<(String, Vec<u8>)> {
    let bytes = fs_err::read(checkpoint.join("drafter.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors();
    let mut weights: Vec<_> = tensors
        .iter()
        .map(|(name, view)| (name.clone(), view.data().to_vec()))
        .collect();
    weights.sort();
    weights
}

/// Like `assert_eq`, without printing the bytes.
pub fn assert_same_weights(left: &Path, right: &Path) {
    for (left, right) in weights(left).iter().zip(&weights(right)) {
        assert!(left == right, "{} and {} differ", left.0, right.0);
    }
    assert_eq!(weights(left).len(), weights(right).len());
}

/// (step, value) of every event of a tag, over all event files of a run folder.
pub fn events(folder: &Path, tag: &str) -> Vec<u64> {
    let mut steps = Vec::new();
    for start in fs_err::read_dir(folder.join("tensorboard")).unwrap() {
        for file in fs_err::read_dir(start.unwrap().path()).unwrap() {
            let bytes = fs_err::read(file.unwrap().path()).unwrap();
            steps.extend(steps_of(&bytes, tag));
        }
    }
    steps.sort_unstable();
    steps
}

fn steps_of(bytes: &[u8], tag: &str) -> Vec<u64> {
    let mut steps = Vec::new();
    let mut rest = bytes;
    while rest.len() >= 12 {
        let len = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        let Some(event) = rest.get(12..12 + len) else {
            break;
        };
        // Steps below 128 are one byte after the 9 bytes of the time and the tag of field 2.
        // A text follows its length, which tells `train/loss` from `train/loss/depth_0`.
        let text = [&[tag.len() as u8], tag.as_bytes()].concat();
        let named = event.windows(text.len()).any(|part| part == text);
        if named && event[9] == 0x10 {
            assert!(
                event[10] < 128,
                "the reader of this test knows short steps only"
            );
            steps.push(u64::from(event[10]));
        }
        rest = rest.get(16 + len..).unwrap_or_default();
    }
    steps
}

/// Row `index` of the data set: a random prompt of 3 tokens and a random answer.
pub fn row(index: usize, len: usize) -> TokenRow {
    let mut stream = Stream::new(11, Purpose::Check, index as u64);
    TokenRow {
        key: format!("row-{index}"),
        ids: (0..len).map(|_| stream.below(VOCAB) as u32).collect(),
        turns: (0..len).map(|t| u32::from(t >= 3)).collect(),
    }
}

fn card(target: &TargetSpec) -> DrafterCard {
    DrafterCard {
        format_version: FORMAT_VERSION,
        drafter: DrafterConfig::Eagle3(Eagle3Config {
            aux_layer_ids: Some(vec![0, 1]),
            ttt_steps: 3,
            ..Eagle3Config::default()
        }),
        aux_layer_ids: vec![0, 1],
        vocab: VocabMap::new((0..VOCAB as u32 - 4).collect(), VOCAB).unwrap(),
        target: target.clone(),
        target_fingerprint: "tiny".to_owned(),
        template: TemplateRecord::default(),
        weights_blake3: String::new(),
        step: 0,
    }
}

fn tiny_llama() -> TargetModel {
    let spec = TargetSpec {
        model_type: "llama".to_owned(),
        vocab_size: VOCAB,
        hidden_size: HIDDEN,
        intermediate_size: INTERMEDIATE,
        num_layers: LAYERS,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 8,
        rms_norm_eps: 1e-5,
        rope: RopeSpec {
            theta: 1e4,
            scaling: RopeScaling::Default,
        },
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        qk_norm: false,
        qkv_bias: false,
        bos_token_id: None,
        eos_token_ids: vec![1],
        pad_token_id: None,
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_safetensors(&path, &tiny_weights(), &[]).unwrap();
    let weights = WeightFolder::open_file(&path).unwrap();
    TargetModel::from_weights(spec, &weights, FloatDType::F32, &Device::flex()).unwrap()
}

fn tiny_weights() -> Vec<NamedTensor> {
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[usize]| {
        let mut stream = Stream::new(3, Purpose::Check, tensors.len() as u64 + 1000);
        let is_gain = shape.len() == 1;
        let scale = 1.0 / (shape[shape.len() - 1] as f64).sqrt();
        let values: Vec<f32> = (0..shape.iter().product::<usize>())
            .map(|_| {
                if is_gain {
                    1.0
                } else {
                    (stream.normal() * scale) as f32
                }
            })
            .collect();
        tensors.push(NamedTensor::float(name, shape, &values, Dtype::F32));
    };
    add("model.embed_tokens.weight".to_owned(), &[VOCAB, HIDDEN]);
    add("model.norm.weight".to_owned(), &[HIDDEN]);
    for layer in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        for gain in ["input_layernorm", "post_attention_layernorm"] {
            add(name(gain), &[HIDDEN]);
        }
        for (part, shape) in [
            ("self_attn.q_proj", [16, HIDDEN]),
            ("self_attn.k_proj", [8, HIDDEN]),
            ("self_attn.v_proj", [8, HIDDEN]),
            ("self_attn.o_proj", [HIDDEN, 16]),
            ("mlp.gate_proj", [INTERMEDIATE, HIDDEN]),
            ("mlp.up_proj", [INTERMEDIATE, HIDDEN]),
            ("mlp.down_proj", [HIDDEN, INTERMEDIATE]),
        ] {
            add(name(part), &shape);
        }
    }
    tensors
}
