//! Bad target folders: each one sentence that names the file and what is wrong with it.

use std::path::Path;

use burn::tensor::{Device, FloatDType};
use draftsmith_models::error::{Diagnose, ModelError};
use draftsmith_models::target::{TargetModel, TargetSpec};
use draftsmith_models::weights::{NamedTensor, write_safetensors};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Golden, golden_path};

/// A copy of the base target whose tensors and configuration were changed.
fn folder(
    change_tensors: impl FnOnce(&mut Vec<NamedTensor>),
    change_config: impl FnOnce(&mut Value),
) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = golden_path("tiny_llama/base");
    let mut tensors = Golden::open(&source.join("model.safetensors")).named("");
    change_tensors(&mut tensors);
    write_safetensors(&folder.path().join("model.safetensors"), &tensors, &[]).unwrap();
    let text = fs_err::read_to_string(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    change_config(&mut config);
    fs_err::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn load(folder: &Path) -> Result<TargetModel, ModelError> {
    TargetModel::load(folder, FloatDType::F32, &Device::flex())
}

/// The message of a folder that must be refused, its path written `DIR`; always a user's mistake.
fn message(folder: &TempDir) -> String {
    let error = load(folder.path()).unwrap_err();
    assert!(error.is_user_error() && error.hint().is_some(), "{error}");
    error
        .to_string()
        .replace(&folder.path().display().to_string(), "DIR")
}

fn unchanged<T>(_: &mut T) {}

fn tensor_named<'a>(tensors: &'a mut [NamedTensor], name: &str) -> &'a mut NamedTensor {
    tensors.iter_mut().find(|t| t.name == name).unwrap()
}

#[test]
fn a_missing_tensor_is_named() {
    let folder = folder(
        |tensors| tensors.retain(|t| t.name != "model.layers.3.mlp.up_proj.weight"),
        unchanged,
    );
    assert_eq!(
        message(&folder),
        "tensor `model.layers.3.mlp.up_proj.weight` is missing in `DIR`"
    );
}

#[test]
fn a_misshapen_tensor_is_named_with_both_shapes() {
    let folder = folder(
        |tensors| {
            tensor_named(tensors, "model.layers.0.self_attn.k_proj.weight").shape = vec![16, 8];
        },
        unchanged,
    );
    assert_eq!(
        message(&folder),
        "tensor `model.layers.0.self_attn.k_proj.weight` in `DIR/model.safetensors` has shape \
         [16, 8], expected [8, 16]"
    );
}

#[test]
fn a_value_that_is_not_finite_is_refused() {
    let folder = folder(
        |tensors| {
            let bytes = &mut tensor_named(tensors, "model.norm.weight").bytes;
            bytes[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
        },
        unchanged,
    );
    assert_eq!(
        message(&folder),
        "tensor `model.norm.weight` in `DIR/model.safetensors` holds a value that is not finite"
    );
}

#[test]
fn a_truncated_file_is_refused() {
    let folder = folder(unchanged, unchanged);
    let path = folder.path().join("model.safetensors");
    let bytes = fs_err::read(&path).unwrap();
    for len in [0, 5, 300, bytes.len() - 1] {
        fs_err::write(&path, &bytes[..len]).unwrap();
        let found = message(&folder);
        assert!(
            found.starts_with("`DIR/model.safetensors` is not a valid safetensors file: "),
            "{found}"
        );
    }
}

#[test]
fn a_tensor_of_another_type_is_refused() {
    let folder = folder(
        |tensors| {
            let tensor = tensor_named(tensors, "model.norm.weight");
            tensor.bytes = vec![0; 16];
            tensor.dtype = Dtype::I8;
        },
        unchanged,
    );
    assert_eq!(
        message(&folder),
        "`DIR/model.safetensors` is not a valid safetensors file: tensor `model.norm.weight` has \
         type I8, not a float"
    );
}

#[test]
fn an_empty_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(message(&folder), "cannot access `DIR/config.json`");
    let source = golden_path("tiny_llama/base/config.json");
    fs_err::copy(source, folder.path().join("config.json")).unwrap();
    assert_eq!(message(&folder), "cannot access `DIR/model.safetensors`");
}

/// Pitfall 35, contradictions. Red under: `refuse_differing_head` answering `Ok(())` at once, or an
/// untied target without a head falling back to the embedding.
#[test]
fn pitfall_35_contradicting_heads_are_refused() {
    let without_head =
        |tensors: &mut Vec<NamedTensor>| tensors.retain(|t| t.name != "lm_head.weight");
    let tied = |config: &mut Value| config["tie_word_embeddings"] = json!(true);
    assert_eq!(
        message(&folder(without_head, unchanged)),
        "tensor `lm_head.weight` is missing in `DIR`"
    );
    assert_eq!(
        message(&folder(unchanged, tied)),
        "`tie_word_embeddings` is true in `DIR`, but `lm_head.weight` differs from \
         `model.embed_tokens.weight`"
    );
    let equal_head = |tensors: &mut Vec<NamedTensor>| {
        let embedding = tensor_named(tensors, "model.embed_tokens.weight")
            .bytes
            .clone();
        tensor_named(tensors, "lm_head.weight").bytes = embedding;
    };
    load(folder(equal_head, tied).path()).unwrap();
    load(folder(without_head, tied).path()).unwrap();
}

/// Pitfall 36, the index. Red under: `add_file` skipping files that do not exist.
#[test]
fn pitfall_36_an_index_that_names_a_missing_shard_is_refused() {
    let folder = folder(unchanged, unchanged);
    let path = folder.path().join("model.safetensors");
    let tensors = Golden::open(&path).named("");
    fs_err::remove_file(&path).unwrap();
    crate::target_golden::write_shards(folder.path(), &tensors);
    load(folder.path()).unwrap();
    let shard = folder.path().join("model-1.safetensors");
    let bytes = fs_err::read(&shard).unwrap();
    fs_err::remove_file(&shard).unwrap();
    assert_eq!(message(&folder), "cannot access `DIR/model-1.safetensors`");
    // A shard that exists but lacks what the index promises.
    let first = fs_err::read(folder.path().join("model-0.safetensors")).unwrap();
    fs_err::write(&shard, first).unwrap();
    let found = message(&folder);
    assert!(
        found.ends_with("is missing in `DIR/model-1.safetensors`"),
        "{found}"
    );
    fs_err::write(&shard, bytes).unwrap();
    load(folder.path()).unwrap();
}

fn config_message(change: impl FnOnce(&mut Value)) -> String {
    let folder = folder(unchanged, change);
    message(&folder)
}

fn is_refused(key: &str, value: Value, expected: &str) {
    let found = config_message(|config| config[key] = value);
    assert_eq!(found, expected);
}

#[test]
fn a_key_that_is_not_understood_is_named() {
    is_refused(
        "logit_scale",
        json!(0.5),
        "`logit_scale` in `DIR/config.json` is `0.5`, expected a key that this build understands",
    );
    is_refused(
        "attention_bias",
        json!(true),
        "`attention_bias` in `DIR/config.json` is true, expected false",
    );
    is_refused(
        "rope_interleaved",
        json!(true),
        "`rope_interleaved` in `DIR/config.json` is true, expected false",
    );
    is_refused(
        "sliding_window",
        json!(4096),
        "`sliding_window` in `DIR/config.json` is `4096`, expected null",
    );
    is_refused(
        "hidden_act",
        json!("gelu"),
        "`hidden_act` in `DIR/config.json` is `gelu`, expected one of [\"silu\"]",
    );
    is_refused(
        "num_key_value_heads",
        json!(3),
        "`num_key_value_heads` in `DIR/config.json` is 3, expected a divisor of \
         num_attention_heads",
    );
    is_refused(
        "model_type",
        json!("gemma"),
        "`model_type` in `DIR/config.json` is gemma, expected `llama`, `qwen2`, `qwen3` or `mimo`",
    );
    is_refused(
        "rope_parameters",
        json!({ "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0 }),
        "`rope_scaling.rope_type` in `DIR/config.json` is `yarn`, expected `default`, `linear` or \
         `llama3`",
    );
    is_refused(
        "rope_parameters",
        json!({ "rope_type": "default", "rope_theta": 1e4, "factor": 4.0 }),
        "`rope_scaling.factor` in `DIR/config.json` is present, expected no such key for this \
         rope type",
    );
}

/// Pitfall 37: nested text settings, another name of the activation, several rope schedules.
/// Red under: a missing `hidden_act` taken as `silu`.
#[test]
fn pitfall_37_a_nested_configuration_is_refused_by_key() {
    let nested = config_message(|config| {
        *config = json!({ "model_type": "llama", "text_config": config.clone() });
    });
    assert_eq!(
        nested,
        "`hidden_act` in `DIR/config.json` is missing, expected a text"
    );
    let renamed = config_message(|config| {
        let keys = config.as_object_mut().unwrap();
        let activation = keys.remove("hidden_act").unwrap();
        keys.insert("hidden_activation".to_owned(), activation);
    });
    assert_eq!(
        renamed,
        "`hidden_act` in `DIR/config.json` is missing, expected a text"
    );
    let schedules = config_message(|config| {
        let one = config["rope_parameters"].clone();
        config["rope_parameters"] = json!({ "full_attention": one, "sliding_attention": one });
    });
    assert_eq!(
        schedules,
        "`rope_theta` in `DIR/config.json` is missing, expected a number"
    );
}

fn spec(change: impl FnOnce(&mut Value)) -> Result<TargetSpec, ModelError> {
    let folder = folder(unchanged, change);
    TargetSpec::from_folder(folder.path())
}

#[test]
fn old_and_new_spellings_of_rope_give_one_specification() {
    let scaled = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64
    });
    let old = spec(|config| {
        config.as_object_mut().unwrap().remove("rope_parameters");
        config["rope_theta"] = json!(5e5);
        config["rope_scaling"] = scaled.clone();
    })
    .unwrap();
    let new = spec(|config| {
        config["rope_parameters"] = scaled.clone();
        config["rope_parameters"]["rope_theta"] = json!(5e5);
    })
    .unwrap();
    let both = spec(|config| {
        config["rope_parameters"] = scaled.clone();
        config["rope_parameters"]["rope_theta"] = json!(5e5);
        config["rope_theta"] = json!(5e5);
        config["rope_scaling"] = scaled.clone();
    })
    .unwrap();
    assert_eq!(old.rope, new.rope);
    assert_eq!(old.rope, both.rope);
}

/// When both spellings are present and differ, it is unclear which one a server would use.
#[test]
fn contradicting_spellings_of_rope_are_refused() {
    assert!(spec(|config| config["rope_theta"] = json!(1e4)).is_err());
    assert!(
        spec(|config| config["rope_scaling"] = json!({ "rope_type": "linear", "factor": 2.0 }))
            .is_err()
    );
}

#[test]
fn stop_tokens_of_the_generation_configuration_win() {
    let folder = folder(unchanged, unchanged);
    let path = folder.path().join("generation_config.json");
    fs_err::write(path, r#"{ "eos_token_id": [258, 2] }"#).unwrap();
    let spec = TargetSpec::from_folder(folder.path()).unwrap();
    assert_eq!(spec.eos_token_ids, [258, 2]);
    assert_eq!(spec.bos_token_id, Some(256));
}

/// Keys and tensors of heads for further tokens change nothing about the target itself.
#[test]
fn a_target_that_brings_heads_along_is_read_without_them() {
    let plain = folder(unchanged, unchanged);
    let with_heads = folder(
        |tensors| {
            let name = "mtp.fc.weight";
            tensors.push(NamedTensor::float(name, &[2], &[0.5, 0.5], Dtype::F32));
        },
        |config| {
            config["num_nextn_predict_layers"] = json!(1);
            config["mtp_num_hidden_layers"] = json!(1);
            config["mtp_use_dedicated_embeddings"] = json!(false);
            config["attn_output_gate"] = json!(false);
        },
    );
    let [plain, with_heads] = [&plain, &with_heads].map(|folder| load(folder.path()).unwrap());
    assert_eq!(plain.spec(), with_heads.spec());
}

#[test]
fn what_heads_need_beyond_the_blocks_is_refused_by_key() {
    is_refused(
        "num_nextn_predict_layers",
        json!("one"),
        "`num_nextn_predict_layers` in `DIR/config.json` is `\"one\"`, expected a whole number",
    );
    for key in [
        "attn_output_gate",
        "mtp_use_dedicated_embeddings",
        "use_mrope",
    ] {
        let expected = format!("`{key}` in `DIR/config.json` is true, expected false");
        is_refused(key, json!(true), &expected);
    }
    is_refused(
        "model_type",
        json!("qwen3_5_text"),
        "`model_type` in `DIR/config.json` is qwen3_5_text, expected `llama`, `qwen2`, `qwen3` or `mimo` (the \
         linear-attention layers of this type are not computed)",
    );
}

/// MiMo's own blocks are those of Qwen2. Red under: `qkv_bias: model_type == "qwen2"`.
#[test]
fn a_mimo_target_computes_what_a_qwen2_target_of_its_weights_computes() {
    let source = golden_path("tiny_llama/qwen2");
    let qwen = load(&source).unwrap();
    let mimo = tempfile::tempdir().unwrap();
    let weights = "model.safetensors";
    fs_err::copy(source.join(weights), mimo.path().join(weights)).unwrap();
    let text = fs_err::read_to_string(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["model_type"] = json!("mimo");
    config["attention_bias"] = json!(true);
    fs_err::write(mimo.path().join("config.json"), config.to_string()).unwrap();
    let mimo = load(mimo.path()).unwrap();
    let logits = |target: &TargetModel| {
        let none = draftsmith_models::batch::StateSpec {
            aux_layer_ids: Vec::new(),
        };
        let states = target.forward(&[&[3, 1, 4, 1, 5]], &none);
        let logits = target.ends().logits(states.final_hidden.flatten(0, 1));
        draftsmith_models::weights::host_values(&logits)
    };
    assert_eq!(logits(&mimo), logits(&qwen));
}
