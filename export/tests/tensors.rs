//! Which tensor goes where: every exported tensor of every family and layout is one of the training state or of the
//! target, and every optional norm travels with its switch.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::allow_attributes,
    reason = "tests"
)]

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::families::Family;
use common::{Case, Wanted, raw, scattered_ids};
use draftsmith_export::{EXPORTERS, ExportConfig, ExportDtype, ExportError, Exporter, export};
use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::weights::{NamedTensor, WeightFolder, write_safetensors};
use half::bf16;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

/// A case of a family with settings beside its usual ones, on a target with other keys.
fn case(
    family: &Family,
    settings: toml::Table,
    target: Value,
    draft_ids: Option<Vec<u32>>,
) -> Case {
    Case::new(Wanted {
        config: target,
        other: Some(family.config_with(3, settings)),
        draft_ids,
        ..Wanted::default()
    })
}

/// Parts of a Llama or Qwen3 block under our names and those of engines; one with `?` exists on some targets only.
const BLOCK: [[&str; 2]; 11] = [
    ["input_norm", "input_layernorm.weight"],
    ["mlp_norm", "post_attention_layernorm.weight"],
    ["q_proj", "self_attn.q_proj.weight"],
    ["k_proj", "self_attn.k_proj.weight"],
    ["v_proj", "self_attn.v_proj.weight"],
    ["o_proj", "self_attn.o_proj.weight"],
    ["gate_proj", "mlp.gate_proj.weight"],
    ["up_proj", "mlp.up_proj.weight"],
    ["down_proj", "mlp.down_proj.weight"],
    ["q_norm?", "self_attn.q_norm.weight"],
    ["k_norm?", "self_attn.k_norm.weight"],
];

/// EAGLE-3's own parts; the block's follow in its layer.
const EAGLE3: [[&str; 2]; 7] = [
    ["aux_norm?", "input_norm.weight"],
    ["aux_norms.0?", "fc_norm.0.weight"],
    ["aux_norms.1?", "fc_norm.1.weight"],
    ["aux_norms.2?", "fc_norm.2.weight"],
    ["fc", "fc.weight"],
    ["norm", "norm.weight"],
    ["head", "lm_head.weight"],
];
/// MTP's own parts.
const MTP: [[&str; 2]; 4] = [
    ["embed_norm", "token_layernorm.weight"],
    ["hidden_norm", "hidden_layernorm.weight"],
    ["input_proj", "input_proj.weight"],
    ["norm", "final_layernorm.weight"],
];
/// DFlash's own parts; engines may draft with the target's head.
const DFLASH: [[&str; 2]; 4] = [
    ["fc", "fc.weight"],
    ["context_norm", "hidden_norm.weight"],
    ["norm", "norm.weight"],
    ["head?", "lm_head.weight"],
];
/// What DSpark has beside the DFlash drafter inside.
const DSPARK: [[&str; 2]; 4] = [
    ["markov_in", "markov_head.markov_w1.weight"],
    ["markov_out", "markov_head.markov_w2.weight"],
    ["confidence_proj", "confidence_head.proj.weight"],
    ["confidence_bias", "confidence_head.proj.bias"],
];

/// Foreign name of every tensor of a drafter, by ours; written down here a second time from what engines read.
fn foreign_names(family: &str, format: &str) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    let mut add = |[ours, foreign]: [&str; 2], parts: &[[&str; 2]]| {
        for [our_part, foreign_part] in parts {
            names.insert(
                format!("{ours}{our_part}"),
                format!("{foreign}{foreign_part}"),
            );
        }
    };
    match family {
        "eagle3" => {
            let is_native = format == "native";
            let layer = if is_native { "midlayer." } else { "layers.0." };
            add(["", ""], &EAGLE3);
            add(["", layer], &BLOCK[1..9]);
            add(["", layer], &[["hidden_norm", "hidden_norm.weight"]]);
            add(["", layer], &[["embed_norm", "input_layernorm.weight"]]);
        }
        "mtp" => {
            add(["", "model.mtp_layers.0."], &MTP);
            add(["layer.", "model.mtp_layers.0."], &BLOCK);
        }
        "dflash" => {
            add(["", ""], &DFLASH);
            add(["layers.0.", "layers.0."], &BLOCK);
            add(["layers.1.", "layers.1."], &BLOCK);
        }
        "dspark" => {
            add(["core.", ""], &DFLASH);
            add(["core.layers.0.", "layers.0."], &BLOCK);
            add(["core.layers.1.", "layers.1."], &BLOCK);
            add(["", ""], &DSPARK);
        }
        other => panic!("a layout holds `{other}`, but this test does not know its names"),
    }
    names
}

/// f32 bytes as the export's type holds them.
fn in_type(bytes: &[u8], dtype: ExportDtype) -> Vec<u8> {
    match dtype {
        ExportDtype::F32 => bytes.to_vec(),
        ExportDtype::Bf16 => {
            let (words, _) = bytes.as_chunks::<4>();
            let round = |word: &[u8; 4]| bf16::from_f32(f32::from_le_bytes(*word)).to_le_bytes();
            words.iter().flat_map(round).collect()
        }
    }
}

/// Compares one export with training state and target; returns the foreign names that were accounted for.
fn check_export(case: &Case, family: &Family, format: &str, dtype: ExportDtype) {
    let config = ExportConfig {
        dtype,
        ..ExportConfig::default()
    };
    let out = case.out(format);
    export(format, &case.checkpoint(), &case.target(), &out, &config).unwrap();
    let weights = WeightFolder::open(&out).unwrap();
    let what = |name: &str| format!("{} {format} {dtype:?}: {name}", family.name);
    let state = case.drafter.to_tensors();
    let mut left: Vec<String> = weights.names().map(str::to_owned).collect();
    let names = foreign_names(family.name, format);
    for (ours, foreign) in &names {
        let (name, is_optional) = (ours.trim_end_matches('?'), ours.ends_with('?'));
        let exported = raw(&weights, foreign);
        let Some(trained) = state.iter().find(|tensor| tensor.name == name) else {
            assert!(is_optional && exported.is_none(), "{}", what(ours));
            continue;
        };
        let is_target_row = family
            .parameters()
            .frozen
            .iter()
            .any(|frozen| frozen == name);
        if is_optional && is_target_row && exported.is_none() {
            continue; // engines draft with the target's own head
        }
        let (found, bytes) = exported.unwrap_or_else(|| panic!("{} is missing", what(foreign)));
        assert_eq!(found, dtype.element(), "{}", what(foreign));
        assert!(bytes == in_type(&trained.bytes, dtype), "{}", what(foreign));
        assert_eq!(
            weights.shape(foreign).unwrap(),
            trained.shape,
            "{}",
            what(foreign)
        );
        left.retain(|name| name != foreign);
    }
    let unnamed = state.iter().find(|tensor| {
        let is_known = |known: &String| known.trim_end_matches('?') == tensor.name;
        let is_kept = family.parameters().frozen.contains(&tensor.name);
        !names.keys().any(is_known) && !is_kept
    });
    assert!(unnamed.is_none(), "{unnamed:?} is in no export");
    check_others(case, &weights, &left, dtype);
}

/// What is no parameter of the drafter: the target's embedding, the vocabulary tables, biases of zero.
fn check_others(case: &Case, weights: &WeightFolder, left: &[String], dtype: ExportDtype) {
    for name in left {
        let (_, bytes) = raw(weights, name).unwrap();
        match name.as_str() {
            "d2t" | "t2d" => (), // held to the vocabulary by tests of their own
            "embed_tokens.weight" => {
                let target = WeightFolder::open(&case.target()).unwrap();
                let (_, theirs) = raw(&target, "model.embed_tokens.weight").unwrap();
                assert!(bytes == in_type(&theirs, dtype), "{name}");
            }
            bias if bias.ends_with("_proj.bias") => assert!(bytes.iter().all(|byte| *byte == 0)),
            other => panic!("`{other}` is neither of the drafter nor of the target"),
        }
    }
}

/// The layouts that can hold a drafter, but for that of a target's own head: `stitch` tests it on targets that have one.
fn layouts(drafter: &DrafterConfig) -> impl Iterator<Item = &'static &'static dyn Exporter> {
    let all = EXPORTERS.iter();
    all.filter(move |layout| layout.name() != "target" && layout.can_hold(drafter))
}

/// Pitfall 74, its siblings: every tensor of every family and layout, in both types, on targets with and without
/// norms of queries and keys, with the whole vocabulary and a part of it.
/// Red under: `norm` for `context_norm` in `names::dflash`; the foreign names of `q_norm` and `k_norm` exchanged in
/// `names::decoder_layer`; `vec![1.0; width]` in `mtp::zero_biases`.
#[test]
fn pitfall_74_every_tensor_of_every_layout_is_the_trained_one_or_the_targets() {
    let mut held = 0;
    for family in Family::all() {
        for model_type in ["llama", "qwen3"] {
            for draft_ids in [None, Some(scattered_ids())] {
                let target = json!({ "model_type": model_type, "head_dim": 4 });
                let case = case(&family, toml::Table::new(), target, draft_ids);
                let config = family.config(3);
                for exporter in layouts(&config) {
                    for dtype in [ExportDtype::F32, ExportDtype::Bf16] {
                        check_export(&case, &family, exporter.name(), dtype);
                        held += 1;
                    }
                }
            }
        }
    }
    assert!(held >= 7 * 8, "{held}");
}

/// Pitfall 74: the head that is exported is the drafter's own where it is trained, the target's rows where it is kept.
/// Red under: `head_rows` multiplied by two.
#[test]
fn pitfall_74_kept_heads_are_the_targets_rows() {
    for family in Family::all() {
        let ids = scattered_ids();
        let case = case(&family, toml::Table::new(), json!({}), Some(ids.clone()));
        let target = WeightFolder::open(&case.target()).unwrap();
        let (_, head) = raw(&target, "lm_head.weight").unwrap();
        let width = 4 * case.spec.hidden_size;
        let rows: Vec<u8> = ids
            .iter()
            .flat_map(|id| head[*id as usize * width..][..width].to_vec())
            .collect();
        let state = case.drafter.to_tensors();
        for name in &family.parameters().frozen {
            let kept = state.iter().find(|tensor| tensor.name == *name).unwrap();
            assert!(kept.bytes == rows, "{} {name}", family.name);
        }
    }
}

/// Pitfall 73, its siblings: an optional norm travels as a switch and as a weight, and neither without the other.
/// Red under: `config.aux_norm == AuxNorm::Concatenated` in `speculators::eagle3` always true; the optional
/// norms left out of `names::decoder_layer`; `fc_norm` always false in `native::eagle3_config`; `fc_norm.0.weight` for
/// every state in `names::aux_norms`.
#[test]
fn pitfall_73_optional_norms_travel_as_switch_and_weight() {
    let eagle3 = Family::named("eagle3");
    for aux_norm in ["none", "concatenated", "each"] {
        let settings = toml::Table::from_iter([("aux_norm".to_owned(), aux_norm.into())]);
        let case = case(&eagle3, settings, json!({}), None);
        for format in ["native", "speculators"] {
            let (_, config, weights) = case.export(format);
            for (value, switch, tensor) in [
                ("concatenated", "norm_before_fc", "input_norm.weight"),
                ("each", "fc_norm", "fc_norm.0.weight"),
            ] {
                let is_on = aux_norm == value;
                assert_eq!(config[switch], json!(is_on), "{format} {aux_norm}");
                assert_eq!(weights.contains(tensor), is_on, "{format} {aux_norm}");
            }
            check_export(&case, &eagle3, format, ExportDtype::F32);
        }
    }
    let mtp = Family::named("mtp");
    for (model_type, is_on) in [("qwen3", true), ("llama", false)] {
        let target = json!({ "model_type": model_type, "head_dim": 4 });
        let case = case(&mtp, toml::Table::new(), target, None);
        let (report, _, weights) = case.export("native");
        for norm in ["q_norm", "k_norm"] {
            let name = format!("model.mtp_layers.0.self_attn.{norm}.weight");
            assert_eq!(weights.contains(&name), is_on, "{model_type}");
        }
        // The switch is one of the target's, which the file cannot set.
        let says_so = report.warnings[0].contains(r#""qk_norm": true"#);
        assert_eq!(says_so, is_on, "{model_type}");
    }
    for name in ["dflash", "dspark"] {
        let case = case(&Family::named(name), toml::Table::new(), json!({}), None);
        for format in ["native", "speculators"] {
            let (_, config, weights) = case.export(format);
            let layer = config.get("transformer_layer_config").unwrap_or(&config);
            assert_eq!(
                layer["model_type"],
                json!("qwen3"),
                "blocks with such norms"
            );
            for norm in ["q_norm", "k_norm"] {
                assert!(weights.contains(&format!("layers.1.self_attn.{norm}.weight")));
            }
        }
    }
}

/// Writes other tensors into the checkpoint, with the checksum that goes with them.
fn rewrite(case: &Case, tensors: &[NamedTensor]) {
    let path = case.checkpoint().join("drafter.safetensors");
    write_safetensors(&path, tensors, &[]).unwrap();
    let hash = blake3::hash(&file::read(&path).unwrap())
        .to_hex()
        .to_string();
    edit(&case.checkpoint().join("drafter.json"), |card| {
        card["weights_blake3"] = json!(hash);
    });
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = file::read_json(path).unwrap();
    change(&mut value);
    file::write_json(path, &value).unwrap();
}

fn exported(case: &Case, format: &str, config: &ExportConfig) -> Result<(), ExportError> {
    let out = case.out(format);
    let result = export(format, &case.checkpoint(), &case.target(), &out, config);
    assert_eq!(
        result.is_ok(),
        out.exists(),
        "nothing is written by a refusal"
    );
    result.map(drop)
}

/// Pitfall 73: any tensor of any family that is missing, or one too many, fails every export by name: a switch
/// without its weight, or a weight without its switch.
/// Red under: `refuse_unknown_tensors` always `Ok`.
#[test]
fn pitfall_73_a_switch_without_its_weight_or_the_reverse_is_refused() {
    let config = ExportConfig::default();
    for family in Family::all() {
        let case = case(
            &family,
            toml::Table::new(),
            json!({}),
            Some(scattered_ids()),
        );
        let settings = family.config(3);
        for exporter in layouts(&settings) {
            let all = case.drafter.to_tensors();
            let is_norm = |tensor: &&NamedTensor| tensor.shape.len() == 1;
            for norm in all.iter().filter(is_norm) {
                let others = all.iter().filter(|tensor| tensor.name != norm.name);
                rewrite(&case, &others.cloned().collect::<Vec<_>>());
                let error = exported(&case, exporter.name(), &config).unwrap_err();
                let is_missing = matches!(
                    &error,
                    ExportError::Model(ModelError::MissingTensor { name, .. }) if *name == norm.name
                );
                assert!(is_missing, "{} {}: {error}", family.name, norm.name);
            }
            let extra = NamedTensor::float("extra_norm", &[16], &[2.0; 16], Dtype::F32);
            rewrite(&case, &[all.clone(), vec![extra]].concat());
            let error = exported(&case, exporter.name(), &config).unwrap_err();
            assert!(
                matches!(&error, ExportError::UnexpectedTensor { name, .. } if name == "extra_norm")
            );
            rewrite(&case, &all);
            exported(&case, exporter.name(), &config).unwrap();
            fs_err::remove_dir_all(case.out(exporter.name())).unwrap();
        }
    }
}

/// Pitfall 57: no export holds a value that is not finite: not one of the checkpoint, and not one that f32 holds and
/// bf16 does not.
/// Red under: `check_finite` left out of `folder::write`.
#[test]
fn pitfall_57_no_export_holds_what_is_not_finite() {
    for family in Family::all() {
        let case = case(
            &family,
            toml::Table::new(),
            json!({}),
            Some(scattered_ids()),
        );
        let settings = family.config(3);
        for exporter in layouts(&settings) {
            let name = exporter.name();
            let [f32, bf16] = [ExportDtype::F32, ExportDtype::Bf16].map(|dtype| ExportConfig {
                dtype,
                ..ExportConfig::default()
            });
            let with = |value: f32| {
                let mut tensors = case.drafter.to_tensors();
                let norm = tensors
                    .iter_mut()
                    .find(|tensor| tensor.name.ends_with("norm"));
                let norm = norm.unwrap();
                norm.bytes[..4].copy_from_slice(&value.to_le_bytes());
                rewrite(&case, &tensors);
            };
            let refused = |config: &ExportConfig| {
                let error = exported(&case, name, config).unwrap_err();
                let ExportError::Model(
                    ModelError::NotFinite { name: tensor, .. }
                    | ModelError::NotWritten { name: tensor, .. },
                ) = &error
                else {
                    panic!("{} {name}: {error}", family.name);
                };
                assert!(tensor.contains("norm"), "{tensor}");
            };
            for value in [f32::NAN, f32::INFINITY] {
                with(value);
                refused(&f32);
                refused(&bf16);
            }
            with(f32::MAX);
            refused(&bf16);
            exported(&case, name, &f32).unwrap();
        }
    }
}
