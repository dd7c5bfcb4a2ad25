//! What the exported configuration and tensors say, by the rules of the engines that read them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::allow_attributes,
    reason = "tests"
)]

mod common;

use common::{Case, Wanted, offsets, raw, scattered_ids, values};
use draftsmith_export::{ExportConfig, ExportError, export, export_all};
use draftsmith_models::drafter::HeadMode;
use draftsmith_models::drafter::eagle3::{AuxNorm, Eagle3Config};
use draftsmith_models::error::ModelError;
use draftsmith_models::weights::WeightFolder;
use half::bf16;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

const FORMATS: [&str; 2] = ["native", "speculators"];

fn with_layers(ids: Option<Vec<usize>>) -> Wanted {
    Wanted {
        drafter: Eagle3Config {
            aux_layer_ids: ids,
            ttt_steps: 3,
            ..Eagle3Config::default()
        },
        ..Wanted::default()
    }
}

fn id_list(value: &Value) -> Option<Vec<usize>> {
    let list = value.as_array()?;
    Some(
        list.iter()
            .map(|id| id.as_u64().unwrap() as usize)
            .collect(),
    )
}

/// Number of blocks whose output an engine captures (`res[L]`), by the rule of vLLM: the top-level list
/// names block inputs and wins; the nested one is read the same way only without it.
fn captured_by_vllm(config: &Value, num_layers: usize) -> Vec<usize> {
    let key = "eagle_aux_hidden_state_layer_ids";
    id_list(&config[key])
        .or_else(|| id_list(&config["eagle_config"][key]))
        .unwrap_or_else(|| vec![2, num_layers / 2, num_layers - 3])
}

/// The same by the rule of SGLang: only the nested list, which names block outputs.
fn captured_by_sglang(config: &Value, num_layers: usize) -> Vec<usize> {
    match id_list(&config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) {
        Some(ids) => ids.iter().map(|id| id + 1).collect(),
        None => vec![2, num_layers / 2, num_layers - 3],
    }
}

/// Pitfall 31: block `i` adds `i + 1` to channel 0, so `res[L]` holds `L (L + 1) / 2` there; our id `k`
/// is `res[k + 1]`. Red under: `id + 1` replaced by `*id` in `layer_ids::input_ids`.
#[test]
fn pitfall_31_engines_select_the_layers_we_captured() {
    let channel = |num_blocks: usize| num_blocks * (num_blocks + 1) / 2;
    for ids in [
        vec![2, 4, 5],
        vec![1, 3, 4],
        vec![0, 3, 7],
        vec![1, 3, 5, 6],
    ] {
        let ours: Vec<usize> = ids.iter().map(|id| channel(id + 1)).collect();
        let case = Case::new(with_layers(Some(ids.clone())));
        for format in FORMATS {
            let (_, config, _) = case.export(format);
            let vllm = captured_by_vllm(&config, 8).into_iter().map(channel);
            assert_eq!(vllm.collect::<Vec<_>>(), ours, "vLLM, {format}, {ids:?}");
        }
        let (_, config, _) = case.export("native");
        let sglang = captured_by_sglang(&config, 8).into_iter().map(channel);
        assert_eq!(sglang.collect::<Vec<_>>(), ours, "SGLang, {ids:?}");
    }
}

/// Pitfall 32: a server that finds no layer ids guesses. Red under: removing the top-level key from
/// `native::eagle3_config`.
#[test]
fn pitfall_32_layer_ids_are_always_written() {
    let key = "eagle_aux_hidden_state_layer_ids";
    for (ids, inputs) in [(None, [2, 4, 5]), (Some(vec![1, 3, 6]), [2, 4, 7])] {
        let case = Case::new(with_layers(ids));
        for format in FORMATS {
            let (_, config, _) = case.export(format);
            assert_eq!(config[key], json!(inputs), "{format}");
        }
        let (_, config, _) = case.export("native");
        let outputs: Vec<usize> = inputs.iter().map(|id| id - 1).collect();
        assert_eq!(config["eagle_config"][key], json!(outputs));
        assert_eq!(config["num_aux_hidden_states"], json!(3));
    }
}

/// Pitfall 32, other half: no export without ids. Red under: dropping the comparison of `aux_layer_ids` from
/// `source::check_card`.
#[test]
fn pitfall_32_a_checkpoint_without_layer_ids_is_refused() {
    let case = Case::new(Wanted::default());
    edit_card(&case, |card| card["aux_layer_ids"] = json!([]));
    assert!(matches!(
        refused(&case),
        ExportError::Model(ModelError::Malformed { .. })
    ));
}

/// Pitfall 33: ids out of range or repeated never leave. Red as the test above.
#[test]
fn pitfall_33_invalid_layer_ids_are_refused() {
    for ids in [json!([1, 1, 4]), json!([1, 3, 8]), json!([4, 3, 1])] {
        let case = Case::new(Wanted::default());
        edit_card(&case, |card| card["aux_layer_ids"] = ids.clone());
        assert!(matches!(
            refused(&case),
            ExportError::Model(ModelError::Malformed { .. })
        ));
    }
}

/// Pitfall 40: the tables are in the weights file, as offsets and flags. Red under: dropping the
/// subtraction in `d2t::offsets`.
#[test]
fn pitfall_40_the_vocabulary_travels_as_offsets_and_flags() {
    let ids = scattered_ids();
    let case = Case::new(Wanted {
        draft_ids: Some(ids.clone()),
        ..Wanted::default()
    });
    for format in FORMATS {
        let (_, config, weights) = case.export(format);
        assert_eq!(config["draft_vocab_size"], json!(100));
        let offsets = offsets(&weights).unwrap();
        let targets: Vec<u32> = offsets
            .iter()
            .enumerate()
            .map(|(draft, offset)| u32::try_from(draft as i64 + offset).unwrap())
            .collect();
        assert!(targets.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(targets, ids);
        let (dtype, flags) = raw(&weights, "t2d").unwrap();
        assert_eq!((dtype, flags.len()), (Dtype::BOOL, 320));
        let set: Vec<u32> = (0..320).filter(|&id| flags[id as usize] == 1).collect();
        assert_eq!(set, ids);
        assert_eq!(weights.shape("lm_head.weight").unwrap(), [100, 16]);
    }
}

#[test]
fn a_full_vocabulary_has_no_tables() {
    let case = Case::new(Wanted {
        draft_ids: None,
        ..Wanted::default()
    });
    for format in FORMATS {
        let (_, config, weights) = case.export(format);
        assert_eq!(config["draft_vocab_size"], json!(320));
        assert!(!weights.contains("d2t") && !weights.contains("t2d"));
        assert_eq!(weights.shape("lm_head.weight").unwrap(), [320, 16]);
    }
}

/// Pitfall 70: the base travels with type and all parameters of the scaling, in both spellings. Red
/// under: `scaling_parameters` replaced by `{"rope_type": "default"}` in `decoder::rope_parameters`.
#[test]
fn pitfall_70_rope_scaling_travels_whole() {
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    let case = Case::new(Wanted {
        config: json!({"rope_scaling": scaling}),
        ..Wanted::default()
    });
    let mut parameters = scaling.clone();
    parameters["rope_theta"] = json!(500_000.0);
    let (_, native, _) = case.export("native");
    assert_eq!(native["rope_theta"], json!(500_000.0));
    assert_eq!(native["rope_scaling"], scaling);
    assert_eq!(native["rope_parameters"], parameters);
    assert_eq!(native["max_position_embeddings"], json!(256));
    let (_, speculators, _) = case.export("speculators");
    assert_eq!(
        speculators["transformer_layer_config"]["rope_parameters"],
        parameters
    );
}

#[test]
fn default_rope_is_spelled_out_too() {
    let (_, native, _) = Case::new(Wanted::default()).export("native");
    assert_eq!(native["rope_scaling"], Value::Null);
    assert_eq!(
        native["rope_parameters"],
        json!({"rope_type": "default", "rope_theta": 500_000.0})
    );
}

/// Pitfall 71: hidden 16, 4 heads of size 8, 2 key-value heads. Red under: `head_dim` replaced by
/// `hidden_size / num_heads` in `decoder::keys`.
#[test]
fn pitfall_71_an_explicit_head_size_is_kept() {
    let case = Case::new(Wanted {
        config: json!({"head_dim": 8}),
        ..Wanted::default()
    });
    let (_, native, weights) = case.export("native");
    assert_eq!(native["head_dim"], json!(8));
    let rows = |part: &str| {
        weights
            .shape(&format!("midlayer.self_attn.{part}"))
            .unwrap()
    };
    assert_eq!(rows("q_proj.weight"), [32, 32]);
    assert_eq!(rows("k_proj.weight"), [16, 32]);
    assert_eq!(rows("v_proj.weight"), [16, 32]);
    assert_eq!(rows("o_proj.weight"), [16, 32]);
    let (_, speculators, _) = case.export("speculators");
    assert_eq!(
        speculators["transformer_layer_config"]["head_dim"],
        json!(8)
    );
}

/// Pitfall 73: every norm switch travels in both layouts, with a warning where an engine ignores it.
/// Red under: writing `false` for it in `native::eagle3_config`; the warning about `fc_norm` left out of
/// `native::eagle3_warnings`.
#[test]
fn pitfall_73_the_norm_switch_travels() {
    let wanted = |aux_norm| Wanted {
        drafter: Eagle3Config {
            aux_norm,
            norm_before_residual: true,
            norm_output: true,
            ttt_steps: 3,
            ..Eagle3Config::default()
        },
        ..Wanted::default()
    };
    for (aux_norm, switch) in [
        (AuxNorm::Concatenated, "norm_before_fc"),
        (AuxNorm::Each, "fc_norm"),
    ] {
        let case = Case::new(wanted(aux_norm));
        for format in FORMATS {
            let (report, config, _) = case.export(format);
            for key in ["norm_before_residual", switch, "norm_output"] {
                assert_eq!(config[key], json!(true), "{format} {key}");
            }
            let warns = |start: &str| report.warnings.iter().any(|text| text.starts_with(start));
            let is_native = format == "native";
            assert_eq!(warns("`norm_before_residual` is true"), is_native);
            assert_eq!(warns("`fc_norm` is true"), is_native && switch == "fc_norm");
        }
    }
    let (report, config, _) = Case::new(Wanted::default()).export("native");
    for key in [
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
    ] {
        assert_eq!(config[key], json!(false), "{key}");
    }
    assert!(report.warnings.is_empty());
}

/// Pitfall 74: every tensor is the training state's or the target's, bit for bit; the head is the
/// drafter's own and not tied. Red under: `Source::embedding` returning zeros.
#[test]
fn pitfall_74_no_exported_tensor_is_new() {
    let renamed = [
        ("fc", "fc"),
        ("hidden_norm", "L.hidden_norm"),
        ("embed_norm", "L.input_layernorm"),
        ("mlp_norm", "L.post_attention_layernorm"),
        ("q_proj", "L.self_attn.q_proj"),
        ("k_proj", "L.self_attn.k_proj"),
        ("v_proj", "L.self_attn.v_proj"),
        ("o_proj", "L.self_attn.o_proj"),
        ("gate_proj", "L.mlp.gate_proj"),
        ("up_proj", "L.mlp.up_proj"),
        ("down_proj", "L.mlp.down_proj"),
        ("norm", "norm"),
        ("head", "lm_head"),
    ];
    for head in [HeadMode::Trained, HeadMode::Frozen] {
        let case = Case::new(Wanted {
            drafter: Eagle3Config {
                head,
                ..Eagle3Config::default()
            },
            ..Wanted::default()
        });
        for (format, layer) in [("native", "midlayer"), ("speculators", "layers.0")] {
            let (report, config, weights) = case.export(format);
            assert_eq!(config["tie_word_embeddings"], json!(false));
            let mut expected: Vec<String> = vec!["d2t".into(), "t2d".into()];
            for (ours, foreign) in renamed {
                let name = format!("{}.weight", foreign.replace('L', layer));
                let state = case.drafter.to_tensors();
                let trained = state.iter().find(|tensor| tensor.name == ours).unwrap();
                let (dtype, bytes) = raw(&weights, &name).unwrap();
                assert_eq!((dtype, &bytes), (Dtype::F32, &trained.bytes), "{name}");
                assert_eq!(weights.shape(&name).unwrap(), trained.shape, "{name}");
                expected.push(name);
            }
            if format == "speculators" {
                let target = WeightFolder::open(&case.target()).unwrap();
                let (_, theirs) = raw(&target, "model.embed_tokens.weight").unwrap();
                let (_, exported) = raw(&weights, "embed_tokens.weight").unwrap();
                assert_eq!(exported, theirs);
                expected.push("embed_tokens.weight".into());
            }
            expected.sort();
            assert_eq!(weights.names().collect::<Vec<_>>(), expected);
            assert_eq!(report.tensors.len(), expected.len());
        }
    }
}

#[test]
fn the_default_type_is_bf16_rounded_once() {
    let case = Case::new(Wanted::default());
    let out = case.out("native");
    let config = ExportConfig::default();
    export("native", &case.checkpoint(), &case.target(), &out, &config).unwrap();
    let weights = WeightFolder::open(&out).unwrap();
    let state = case.drafter.to_tensors();
    let trained = state.iter().find(|tensor| tensor.name == "fc").unwrap();
    let (dtype, bytes) = raw(&weights, "fc.weight").unwrap();
    let rounded: Vec<u8> = trained
        .bytes
        .as_chunks::<4>()
        .0
        .iter()
        .flat_map(|word| bf16::from_f32(f32::from_le_bytes(*word)).to_le_bytes())
        .collect();
    assert_eq!((dtype, bytes), (Dtype::BF16, rounded));
    assert!(offsets(&weights).is_some());
    let written: Value = draftsmith_models::file::read_json(&out.join("config.json")).unwrap();
    assert_eq!(written["torch_dtype"], json!("bfloat16"));
}

/// Pitfall 29: states of one weight variant, embedding of another. Red under: dropping the comparison
/// of fingerprints from `source::check_target`.
#[test]
fn pitfall_29_another_variant_of_the_target_is_refused() {
    let case = Case::new(Wanted::default());
    let path = case.target().join("model.safetensors");
    let mut bytes = draftsmith_models::file::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    draftsmith_models::file::write_atomic(&path, &bytes).unwrap();
    let error = refused(&case);
    assert!(
        matches!(
            &error,
            ExportError::OtherTarget {
                what: "fingerprint",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn another_target_shape_is_refused_by_field() {
    let case = Case::new(Wanted::default());
    common::write_target(&case.target(), &json!({"rope_theta": 10000.0}));
    let message = refused(&case).to_string();
    assert!(message.contains("configuration `rope`"), "{message}");
}

#[test]
fn an_incomplete_checkpoint_is_refused_and_nothing_is_written() {
    let case = Case::new(Wanted::default());
    rewrite_weights(&case, |names| names != "o_proj");
    let error = refused(&case);
    assert!(
        matches!(&error, ExportError::Model(ModelError::MissingTensor { name, .. }) if name == "o_proj"),
        "{error}"
    );
    let case = Case::new(Wanted::default());
    let path = case.checkpoint().join("drafter.safetensors");
    let bytes = draftsmith_models::file::read(&path).unwrap();
    draftsmith_models::file::write_atomic(&path, &bytes[..bytes.len() - 5]).unwrap();
    assert!(refused(&case).to_string().contains("checksum"));
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(
        refused(&case),
        ExportError::Model(ModelError::Io { .. })
    ));
}

#[test]
fn an_unknown_format_lists_the_known_ones() {
    let case = Case::new(Wanted::default());
    let config = ExportConfig::default();
    let out = case.out("x");
    let error = export("onnx", &case.checkpoint(), &case.target(), &out, &config).unwrap_err();
    assert_eq!(
        error.to_string(),
        "export format `onnx` is unknown, expected one of [\"native\", \"speculators\", \"target\"]"
    );
}

#[test]
fn an_earlier_export_is_replaced_and_other_folders_are_left_alone() {
    let case = Case::new(Wanted::default());
    case.export("native");
    case.export("native");
    let out = case.out("native");
    let siblings = std::fs::read_dir(out.parent().unwrap()).unwrap().count();
    assert_eq!(siblings, 1, "no temporary folder stays behind");
    draftsmith_models::file::write_atomic(&out.join("notes.txt"), b"mine").unwrap();
    let error = export(
        "native",
        &case.checkpoint(),
        &case.target(),
        &out,
        &common::f32_config(),
    )
    .unwrap_err();
    assert!(matches!(error, ExportError::OutTaken { .. }), "{error}");
    assert!(out.join("notes.txt").exists());
}

#[test]
fn every_format_of_the_settings_gets_its_folder() {
    let case = Case::new(Wanted::default());
    let root = case.out("all");
    let reports = export_all(
        &case.checkpoint(),
        &case.target(),
        &root,
        &ExportConfig::default(),
        None,
    )
    .unwrap();
    let names: Vec<&str> = reports
        .iter()
        .map(|report| report.format.as_str())
        .collect();
    assert_eq!(names, FORMATS);
    assert!(root.join("speculators").join("model.safetensors").exists());
}

#[test]
fn the_verifier_is_named_by_setting_and_a_local_path_is_reported() {
    let case = Case::new(Wanted::default());
    let (report, config, _) = case.export("speculators");
    let verifier = &config["speculators_config"]["verifier"];
    assert_eq!(verifier["name_or_path"], json!(case.target()));
    assert_eq!(verifier["architectures"], json!(["LlamaForCausalLM"]));
    assert_eq!(report.warnings.len(), 1);
    let settings = ExportConfig {
        target_name: Some("org/model".into()),
        speculative_tokens: Some(5),
        ..ExportConfig::default()
    };
    let out = case.out("named");
    let report = export(
        "speculators",
        &case.checkpoint(),
        &case.target(),
        &out,
        &settings,
    );
    assert!(report.unwrap().warnings.is_empty());
    let config: Value = draftsmith_models::file::read_json(&out.join("config.json")).unwrap();
    let settings = &config["speculators_config"];
    assert_eq!(settings["verifier"]["name_or_path"], json!("org/model"));
    assert_eq!(
        settings["proposal_methods"][0]["speculative_tokens"],
        json!(5)
    );
}

#[test]
fn head_rows_follow_the_vocabulary() {
    let case = Case::new(Wanted {
        draft_ids: Some(scattered_ids()),
        drafter: Eagle3Config {
            head: HeadMode::Frozen,
            ..Eagle3Config::default()
        },
        ..Wanted::default()
    });
    let (_, _, weights) = case.export("native");
    let target = WeightFolder::open(&case.target()).unwrap();
    let (head, theirs) = (
        values(&weights, "lm_head.weight"),
        values(&target, "lm_head.weight"),
    );
    for (draft, id) in scattered_ids().into_iter().enumerate() {
        let row = |values: &[f32], index: usize| values[index * 16..(index + 1) * 16].to_vec();
        assert_eq!(row(&head, draft), row(&theirs, id as usize));
    }
}

fn refused(case: &Case) -> ExportError {
    let out = case.out("native");
    let error = export(
        "native",
        &case.checkpoint(),
        &case.target(),
        &out,
        &common::f32_config(),
    )
    .unwrap_err();
    assert!(!out.exists());
    error
}

fn edit_card(case: &Case, edit: impl FnOnce(&mut Value)) {
    let path = case.checkpoint().join("drafter.json");
    let mut card: Value = draftsmith_models::file::read_json(&path).unwrap();
    edit(&mut card);
    draftsmith_models::file::write_json(&path, &card).unwrap();
}

/// Keeps some tensors of a checkpoint, with the checksum made right again.
fn rewrite_weights(case: &Case, keep: impl Fn(&str) -> bool) {
    let mut tensors = case.drafter.to_tensors();
    tensors.retain(|tensor| keep(&tensor.name));
    let path = case.checkpoint().join("drafter.safetensors");
    draftsmith_models::weights::write_safetensors(&path, &tensors, &[]).unwrap();
    let hash = blake3::hash(&draftsmith_models::file::read(&path).unwrap()).to_hex();
    edit_card(case, |card| card["weights_blake3"] = json!(hash.as_str()));
}

/// The keys under which engines give the final state, and nothing they would capture or fuse.
/// Red under: `state_keys` without its first branch.
#[test]
fn a_drafter_of_the_final_state_names_no_layers_and_has_no_fusion() {
    let case = Case::new(Wanted {
        drafter: Eagle3Config {
            aux_layer_ids: Some(Vec::new()),
            ..Eagle3Config::default()
        },
        ..Wanted::default()
    });
    let (_, config, weights) = case.export("native");
    assert_eq!(
        config["eagle_config"],
        json!({ "use_aux_hidden_state": false })
    );
    assert!(config.get("eagle_aux_hidden_state_layer_ids").is_none());
    assert!(config.get("num_aux_hidden_states").is_none());
    assert!(!weights.contains("fc.weight"));
    let settings = common::f32_config();
    let out = case.out("speculators");
    let error = export(
        "speculators",
        &case.checkpoint(),
        &case.target(),
        &out,
        &settings,
    );
    assert!(matches!(error, Err(ExportError::NoLayout { .. })));
}
