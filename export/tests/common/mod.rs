//! A tiny random target on disk and drafter checkpoints for it.

#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test file compiles this module and uses a part of it"
)]

#[path = "../../../models/tests/shared/families.rs"]
pub(crate) mod families;

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor, TensorData};
use draftsmith_export::{ExportConfig, ExportDtype};
use draftsmith_models::checkpoint::{self, DrafterCard, TemplateRecord};
use draftsmith_models::drafter::eagle3::Eagle3Config;
use draftsmith_models::drafter::{AnyDrafter, Committed, DrafterConfig, DrafterContext};
use draftsmith_models::fingerprint::target_fingerprint;
use draftsmith_models::rng::{Purpose, Stream, stable_hash};
use draftsmith_models::target::{TargetEnds, TargetSpec};
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::{NamedTensor, WeightFolder, host_values, write_safetensors};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

/// A target, a checkpoint of a drafter for it and a place for exports.
pub(crate) struct Case {
    folder: tempfile::TempDir,
    pub(crate) drafter: AnyDrafter,
    pub(crate) ends: TargetEnds,
    pub(crate) spec: TargetSpec,
}

/// What a test wants to differ from the shared tiny target (`T-tiny` of the fixtures).
pub(crate) struct Wanted {
    pub(crate) config: Value,
    pub(crate) drafter: Eagle3Config,
    /// A drafter of another family in place of `drafter`.
    pub(crate) other: Option<DrafterConfig>,
    pub(crate) draft_ids: Option<Vec<u32>>,
}

impl Default for Wanted {
    fn default() -> Self {
        Self {
            config: json!({}),
            drafter: Eagle3Config {
                ttt_steps: 3,
                ..Eagle3Config::default()
            },
            other: None,
            draft_ids: Some((0..100).map(|i| (i * i) % 320).collect()),
        }
    }
}

/// 100 scattered ids of 320, 0 and 319 among them.
pub(crate) fn scattered_ids() -> Vec<u32> {
    let mut ids: Vec<u32> = (0..99).map(|i| i * 3 + u32::from(i % 5 == 4)).collect();
    ids.push(319);
    ids
}

impl Case {
    pub(crate) fn new(mut wanted: Wanted) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        write_target(&target, &wanted.config);
        let spec = TargetSpec::from_folder(&target).unwrap();
        let device = Device::flex();
        let weights = WeightFolder::open(&target).unwrap();
        let ends =
            TargetEnds::load(&weights, &spec, burn::tensor::FloatDType::F32, &device).unwrap();
        let vocab = match wanted.draft_ids.take() {
            None => VocabMap::full(spec.vocab_size),
            Some(mut ids) => {
                ids.sort_unstable();
                ids.dedup();
                VocabMap::new(ids, spec.vocab_size).unwrap()
            }
        };
        let config = wanted
            .other
            .unwrap_or(DrafterConfig::Eagle3(wanted.drafter));
        let context = DrafterContext {
            target: &spec,
            ends: &ends,
            vocab: &vocab,
        };
        let drafter = perturbed(AnyDrafter::init(&config, context, 7, &device).unwrap());
        let card = DrafterCard {
            format_version: checkpoint::FORMAT_VERSION,
            aux_layer_ids: drafter.state_spec().aux_layer_ids,
            drafter: config,
            vocab,
            target: spec.clone(),
            target_fingerprint: target_fingerprint(&target).unwrap(),
            template: TemplateRecord::default(),
            weights_blake3: String::new(),
            step: 400,
        };
        checkpoint::save(&folder.path().join("checkpoint"), &drafter, card).unwrap();
        Self {
            folder,
            drafter,
            ends,
            spec,
        }
    }

    pub(crate) fn target(&self) -> PathBuf {
        self.folder.path().join("target")
    }

    pub(crate) fn checkpoint(&self) -> PathBuf {
        self.folder.path().join("checkpoint")
    }

    pub(crate) fn out(&self, format: &str) -> PathBuf {
        self.folder.path().join("export").join(format)
    }

    pub(crate) fn export(
        &self,
        format: &str,
    ) -> (draftsmith_export::ExportReport, Value, WeightFolder) {
        let out = self.out(format);
        let report = draftsmith_export::export(
            format,
            &self.checkpoint(),
            &self.target(),
            &out,
            &f32_config(),
        )
        .unwrap();
        let config = draftsmith_models::file::read_json(&out.join("config.json")).unwrap();
        (report, config, WeightFolder::open(&out).unwrap())
    }

    /// Random captured states `[1, num_positions, K*H]` and the tokens that follow each position.
    pub(crate) fn context(&self, num_positions: usize) -> (Tensor<3>, Vec<u32>) {
        let num_states = self.drafter.state_spec().aux_layer_ids.len().max(1);
        let width = num_states * self.spec.hidden_size;
        let mut stream = Stream::new(3, Purpose::Check, 0);
        let values: Vec<f32> = (0..num_positions * width)
            .map(|_| stream.normal() as f32 * 2.0)
            .collect();
        let ids = (0..num_positions)
            .map(|_| stream.below(320) as u32)
            .collect();
        let shape = [1, num_positions, width];
        (
            Tensor::from_data(TensorData::new(values, shape), &Device::flex()),
            ids,
        )
    }
}

pub(crate) fn f32_config() -> ExportConfig {
    ExportConfig {
        dtype: ExportDtype::F32,
        ..ExportConfig::default()
    }
}

/// Logits of `num_steps` chained depths after observing `ids.len()` positions; every depth is fed the
/// given token, so that both sides of a comparison walk the same path.
pub(crate) fn chain(
    drafter: &AnyDrafter,
    ends: &TargetEnds,
    (aux, ids): (Tensor<3>, &[u32]),
    num_steps: usize,
) -> Vec<Vec<f32>> {
    let device = Device::flex();
    let mut state = drafter.open(1, ids.len() + num_steps);
    let hidden = ends.embedding.dims()[1];
    // Without captured states the given ones are the final state.
    let reads_final = drafter.state_spec().aux_layer_ids.is_empty();
    let (aux, final_hidden) = if reads_final {
        (Tensor::zeros([1, ids.len(), 0], &device), aux)
    } else {
        (aux, Tensor::zeros([1, ids.len(), hidden], &device))
    };
    let committed = Committed {
        final_hidden,
        next_ids: draftsmith_models::batch::padded_ids(&[ids], &device),
        lens: vec![ids.len()],
        aux,
    };
    drafter.observe(&mut state, committed, ends);
    (0..num_steps)
        .map(|step| {
            let fed = [fed_token(step)];
            let previous = (step > 0).then_some(&fed[..]);
            host_values(&drafter.next_logits(&mut state, previous, ends))
        })
        .collect()
}

/// The token fed at depth `step` of [`chain`].
pub(crate) fn fed_token(step: usize) -> u32 {
    (step as u32 * 77 + 5) % 320
}

/// Moves every norm gain away from one and fills what starts at zero, so that a tensor that is skipped or swapped
/// shows.
fn perturbed(drafter: AnyDrafter) -> AnyDrafter {
    let tensors: Vec<NamedTensor> = drafter
        .to_tensors()
        .into_iter()
        .map(|tensor| match tensor.shape.as_slice() {
            [width] => random(&tensor.name, &[*width], 0.5, 1.5, Dtype::F32),
            shape if tensor.bytes.iter().all(|byte| *byte == 0) => {
                random(&tensor.name, shape, -0.5, 1.0, Dtype::F32)
            }
            _ => tensor,
        })
        .collect();
    let views = tensors.iter().map(|t| {
        let view = TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap();
        (t.name.as_str(), view)
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    let weights = WeightFolder::from_bytes(Path::new("memory"), bytes).unwrap();
    drafter.load_tensors(&weights).unwrap()
}

/// Values uniform in `[low, low + width)`, a pure function of the name.
pub(crate) fn random(
    name: &str,
    shape: &[usize],
    low: f64,
    width: f64,
    dtype: Dtype,
) -> NamedTensor {
    let mut stream = Stream::new(11, Purpose::Check, stable_hash(name));
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| (low + width * stream.uniform()) as f32)
        .collect();
    NamedTensor::float(name, shape, &values, dtype)
}

/// `T-tiny`: 8 blocks, hidden 16, 4 query heads and 2 key-value heads, vocabulary 320, untied; `config`
/// replaces keys.
pub(crate) fn write_target(folder: &Path, config: &Value) {
    let mut full = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320,
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "max_position_embeddings": 256,
        "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": [2, 3],
    });
    for (key, value) in config.as_object().unwrap() {
        full[key] = value.clone();
    }
    draftsmith_models::file::write_json(&folder.join("config.json"), &full).unwrap();
    let number = |key: &str| full[key].as_u64().unwrap() as usize;
    let (hidden, vocab) = (number("hidden_size"), number("vocab_size"));
    // An export reads the ends only; the blocks matter to the fingerprint alone.
    let matrix = |name: &str| random(name, &[vocab, hidden], -1.0, 2.0, Dtype::F32);
    let tensors = [
        matrix("model.embed_tokens.weight"),
        matrix("lm_head.weight"),
        random("model.norm.weight", &[hidden], 0.5, 2.5, Dtype::F32),
    ];
    write_safetensors(&folder.join("model.safetensors"), &tensors, &[]).unwrap();
}

/// Float values of a tensor of an exported file.
pub(crate) fn values(weights: &WeightFolder, name: &str) -> Vec<f32> {
    let shape = weights.shape(name).unwrap();
    weights
        .float_data(name, &shape)
        .unwrap()
        .try_into_vec::<f32>()
        .unwrap()
}

/// Raw bytes of a tensor of an exported file, with its element type.
pub(crate) fn raw(weights: &WeightFolder, name: &str) -> Option<(Dtype, Vec<u8>)> {
    weights.file_bytes().find_map(|bytes| {
        let file = safetensors::SafeTensors::deserialize(bytes).unwrap();
        let view = file.tensor(name).ok()?;
        Some((view.dtype(), view.data().to_vec()))
    })
}

/// The offsets of `d2t`.
pub(crate) fn offsets(weights: &WeightFolder) -> Option<Vec<i64>> {
    let (dtype, bytes) = raw(weights, "d2t")?;
    assert_eq!(dtype, Dtype::I64);
    let (words, rest) = bytes.as_chunks::<8>();
    assert!(rest.is_empty());
    Some(words.iter().map(|word| i64::from_le_bytes(*word)).collect())
}
