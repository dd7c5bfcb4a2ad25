//! A random Llama-shaped target written into a temporary folder, and rows for it.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType};
use draftsmith_data::cache::{
    CacheIdentity, CaptureConfig, CaptureFigures, CaptureJob, CaptureReport, capture,
};
use draftsmith_models::batch::{StateSpec, TokenBatch, TokenRow};
use draftsmith_models::checkpoint::TemplateRecord;
use draftsmith_models::file;
use draftsmith_models::fingerprint::target_fingerprint;
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::{NamedTensor, write_safetensors};
use safetensors::Dtype;
use serde_json::json;

pub(crate) const HIDDEN: usize = 16;
pub(crate) const VOCAB: usize = 320;
pub(crate) const LAYERS: usize = 8;
pub(crate) const AUX: [usize; 3] = [1, 3, 4];

/// Writes `config.json` and `model.safetensors`; untied head, norm gains between 0.5 and 3.
pub(crate) fn write_target(folder: &Path, seed: u64) {
    let (mlp, kv) = (32, HIDDEN / 2);
    let config = json!({
        "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": mlp, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "max_position_embeddings": 256, "tie_word_embeddings": false,
        "bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 259,
    });
    file::write_json(&folder.join("config.json"), &config).unwrap();
    let mut tensors = vec![
        matrix("model.embed_tokens.weight", VOCAB, HIDDEN, seed),
        matrix("lm_head.weight", VOCAB, HIDDEN, seed),
        gain("model.norm.weight", seed),
    ];
    for layer in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        for (part, rows, width) in [
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", mlp, HIDDEN),
            ("mlp.up_proj", mlp, HIDDEN),
            ("mlp.down_proj", HIDDEN, mlp),
        ] {
            tensors.push(matrix(&name(part), rows, width, seed));
        }
        tensors.push(gain(&name("input_layernorm"), seed));
        tensors.push(gain(&name("post_attention_layernorm"), seed));
    }
    write_safetensors(&folder.join("model.safetensors"), &tensors, &[]).unwrap();
}

fn stream(name: &str, seed: u64) -> Stream {
    Stream::new(
        seed,
        Purpose::Check,
        draftsmith_models::rng::stable_hash(name),
    )
}

fn matrix(name: &str, rows: usize, width: usize, seed: u64) -> NamedTensor {
    let mut stream = stream(name, seed);
    let scale = 1.0 / (width as f64).sqrt();
    let values: Vec<f32> = (0..rows * width)
        .map(|_| (stream.normal() * scale) as f32)
        .collect();
    NamedTensor::float(name, &[rows, width], &values, Dtype::F32)
}

fn gain(name: &str, seed: u64) -> NamedTensor {
    let mut stream = stream(name, seed);
    let values: Vec<f32> = (0..HIDDEN)
        .map(|_| (0.5 + 2.5 * stream.uniform()) as f32)
        .collect();
    NamedTensor::float(name, &[HIDDEN], &values, Dtype::F32)
}

pub(crate) fn load(folder: &Path) -> Arc<TargetModel> {
    Arc::new(TargetModel::load(folder, FloatDType::F32, &Device::flex()).unwrap())
}

/// A target of its own for one test.
pub(crate) fn target() -> (tempfile::TempDir, Arc<TargetModel>) {
    let folder = tempfile::tempdir().unwrap();
    write_target(folder.path(), 1);
    let target = load(folder.path());
    (folder, target)
}

pub(crate) fn spec() -> StateSpec {
    StateSpec {
        aux_layer_ids: AUX.to_vec(),
    }
}

/// Rows of random ids with the second half marked as generated.
pub(crate) fn rows(lens: &[usize]) -> Vec<TokenRow> {
    let row = |(index, &len): (usize, &usize)| {
        let mut stream = Stream::new(3, Purpose::Check, index as u64);
        TokenRow {
            key: format!("row-{index}"),
            ids: (0..len).map(|_| stream.below(256) as u32).collect(),
            turns: (0..len).map(|t| u32::from(t >= len / 2)).collect(),
        }
    };
    lens.iter().enumerate().map(row).collect()
}

/// `count` rows of 3 to 20 tokens.
pub(crate) fn many_rows(count: usize) -> Vec<TokenRow> {
    let lens: Vec<usize> = (0..count).map(|i| 3 + (i * 7) % 18).collect();
    rows(&lens)
}

pub(crate) fn batch(rows: &[TokenRow]) -> TokenBatch {
    TokenBatch {
        rows: rows.to_vec(),
    }
}

pub(crate) fn identity(target_folder: &Path) -> CacheIdentity {
    CacheIdentity {
        target_fingerprint: target_fingerprint(target_folder).unwrap(),
        aux_layer_ids: AUX.to_vec(),
        hidden_size: HIDDEN,
        tokenizer_blake3: "tokenizer".to_owned(),
        template: TemplateRecord {
            blake3: "template".to_owned(),
            ..TemplateRecord::default()
        },
        dataset_blake3: "dataset".to_owned(),
        max_len: 128,
        compute_dtype: "F32".to_owned(),
    }
}

/// One shard a row, so that tests can count them.
pub(crate) fn one_row_shards() -> CaptureConfig {
    CaptureConfig {
        shard_bytes: 1,
        ..CaptureConfig::default()
    }
}

/// Captures everything with the given settings.
pub(crate) fn capture_all(
    target: &TargetModel,
    rows: &[TokenRow],
    identity: &CacheIdentity,
    config: &CaptureConfig,
    folder: &Path,
) -> CaptureReport {
    let job = CaptureJob {
        identity,
        config,
        folder,
        figures: CaptureFigures::Compute,
    };
    let report = capture(target, rows, job, &mut |_| true).unwrap();
    assert!(report.is_complete);
    report
}

/// Captures the states alone, as before there were figures.
pub(crate) fn capture_states(
    target: &TargetModel,
    rows: &[TokenRow],
    identity: &CacheIdentity,
    config: &CaptureConfig,
    folder: &Path,
) -> CaptureReport {
    let job = CaptureJob {
        identity,
        config,
        folder,
        figures: CaptureFigures::Skip,
    };
    capture(target, rows, job, &mut |_| true).unwrap()
}

/// File names of a folder, sorted.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs_err::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
