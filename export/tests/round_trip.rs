//! Exports read back compute the same logits, and what this build cannot compute is refused.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::allow_attributes,
    reason = "tests"
)]

mod common;

use burn::tensor::Device;
use common::{Case, Wanted, chain, scattered_ids};
use draftsmith_export::{ExportConfig, ExportError, export, formats_for, load, read};
use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::drafter::eagle3::{AuxNorm, Eagle3Config};
use serde_json::{Value, json};

const FORMATS: [&str; 2] = ["native", "speculators"];

fn variants() -> Vec<Wanted> {
    let drafter = |config| Wanted {
        drafter: config,
        ..Wanted::default()
    };
    vec![
        Wanted::default(),
        Wanted {
            draft_ids: None,
            ..Wanted::default()
        },
        Wanted {
            config: json!({"head_dim": 8, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64}}),
            draft_ids: Some(scattered_ids()),
            ..Wanted::default()
        },
        drafter(Eagle3Config {
            aux_layer_ids: Some(vec![0, 3, 6, 7]),
            aux_norm: AuxNorm::Concatenated,
            norm_before_residual: true,
            norm_output: true,
            intermediate_size: Some(40),
            ..Eagle3Config::default()
        }),
        drafter(Eagle3Config {
            aux_layer_ids: Some(vec![0, 3, 6, 7]),
            aux_norm: AuxNorm::Each,
            norm_output: true,
            ..Eagle3Config::default()
        }),
        drafter(Eagle3Config {
            aux_layer_ids: Some(Vec::new()),
            norm_output: true,
            ..Eagle3Config::default()
        }),
    ]
}

#[test]
fn reloaded_drafters_give_the_same_logits_bit_for_bit() {
    for (number, wanted) in variants().into_iter().enumerate() {
        let config = DrafterConfig::Eagle3(wanted.drafter.clone());
        let case = Case::new(wanted);
        let (aux, ids) = case.context(9);
        let ours = chain(&case.drafter, &case.ends, (aux.clone(), &ids), 3);
        let all = FORMATS.map(str::to_owned);
        for format in formats_for(&all, &config) {
            case.export(format);
            let out = case.out(format);
            let (drafter, card) = load(&out, &case.target(), &case.ends, &Device::flex()).unwrap();
            assert_eq!(card.target, case.spec);
            assert_eq!(
                card.aux_layer_ids,
                case.drafter.state_spec().aux_layer_ids,
                "variant {number}, {format}"
            );
            let theirs = chain(&drafter, &case.ends, (aux.clone(), &ids), 3);
            assert_eq!(ours, theirs, "variant {number}, {format}");
        }
    }
}

#[test]
fn a_bf16_copy_of_the_embedding_is_recognised() {
    let case = Case::new(Wanted::default());
    let out = case.out("speculators");
    let config = ExportConfig::default();
    export(
        "speculators",
        &case.checkpoint(),
        &case.target(),
        &out,
        &config,
    )
    .unwrap();
    let imported = read(&out, &case.target()).unwrap();
    assert_eq!(imported.tensors.len(), 13);
    assert!(imported.warnings.is_empty(), "{:?}", imported.warnings);
}

#[test]
fn steps_and_vocabulary_come_back() {
    let case = Case::new(Wanted::default());
    case.export("speculators");
    let card = read(&case.out("speculators"), &case.target()).unwrap().card;
    let original = draftsmith_models::checkpoint::load_card(&case.checkpoint()).unwrap();
    assert_eq!(card.vocab, original.vocab);
    assert_eq!(card.target_fingerprint, original.target_fingerprint);
    let DrafterConfig::Eagle3(config) = card.drafter else {
        panic!("an EAGLE-3 export reads back as one");
    };
    assert_eq!(config.ttt_steps, 3);
}

#[test]
fn layers_named_under_one_key_only_are_read_by_that_keys_meaning() {
    let case = Case::new(Wanted::default());
    case.export("native");
    let key = "eagle_aux_hidden_state_layer_ids";
    let ids = |edit: &dyn Fn(&mut Value)| {
        case.export("native");
        edit_config(&case, edit);
        read(&case.out("native"), &case.target()).map(|imported| imported.card.aux_layer_ids)
    };
    assert_eq!(ids(&|c| c["eagle_config"] = json!({})).unwrap(), [1, 3, 4]);
    assert_eq!(ids(&|c| c[key] = Value::Null).unwrap(), [1, 3, 4]);
    let neither = |c: &mut Value| {
        c[key] = Value::Null;
        c["eagle_config"] = Value::Null;
    };
    assert_eq!(ids(&neither).unwrap(), [1, 3, 4]);
    let error = ids(&|c| c[key] = json!([1, 3, 4])).unwrap_err();
    assert!(matches!(error, ExportError::Unsupported { .. }), "{error}");
}

#[test]
fn variants_that_this_build_does_not_compute_are_refused_by_key() {
    let case = Case::new(Wanted::default());
    let edits: &[(&str, Value)] = &[
        ("logit_scale", json!(0.5)),
        ("target_hidden_size", json!(32)),
        ("num_hidden_layers", json!(2)),
        ("rms_norm_eps", json!(1e-6)),
        ("head_dim", json!(8)),
        ("num_aux_hidden_states", json!(4)),
        (
            "rope_parameters",
            json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0}),
        ),
    ];
    for (key, value) in edits {
        case.export("native");
        edit_config(&case, &|config| config[*key] = value.clone());
        let error = read(&case.out("native"), &case.target()).unwrap_err();
        assert!(
            error.to_string().starts_with(&format!("`{key}`")),
            "{key}: {error}"
        );
    }
}

/// A norm that the file asks for and does not hold, two that it asks for, and one that it holds and nobody asked for.
/// Red under: `(_, true) => Ok(AuxNorm::Each)` first in `Reader::aux_norm`; `AuxNorm::None` for `AuxNorm::Each` there.
#[test]
fn a_norm_of_each_state_is_read_only_where_switch_and_weights_agree() {
    let each = || Wanted {
        drafter: Eagle3Config {
            aux_norm: AuxNorm::Each,
            ..Eagle3Config::default()
        },
        ..Wanted::default()
    };
    let message = |wanted: Wanted, key: &str, value: Value| {
        let case = Case::new(wanted);
        case.export("native");
        edit_config(&case, &|config| config[key] = value.clone());
        let error = read(&case.out("native"), &case.target()).unwrap_err();
        error.to_string()
    };
    let missing = message(Wanted::default(), "fc_norm", json!(true));
    assert!(missing.contains("`fc_norm.0.weight`"), "{missing}");
    let both = message(each(), "norm_before_fc", json!(true));
    assert!(both.starts_with("`fc_norm`"), "{both}");
    assert!(both.ends_with("false beside `norm_before_fc`"), "{both}");
    let unasked = message(each(), "fc_norm", json!(false));
    assert!(unasked.contains("`fc_norm.0.weight`"), "{unasked}");
}

#[test]
fn unknown_keys_are_reported() {
    let case = Case::new(Wanted::default());
    case.export("native");
    edit_config(&case, &|config| config["shiny_feature"] = json!(true));
    let imported = read(&case.out("native"), &case.target()).unwrap();
    assert_eq!(imported.warnings.len(), 1);
    assert!(imported.warnings[0].contains("`shiny_feature`"));
}

fn edit_config(case: &Case, edit: &dyn Fn(&mut Value)) {
    let path = case.out("native").join("config.json");
    let mut config: Value = draftsmith_models::file::read_json(&path).unwrap();
    edit(&mut config);
    draftsmith_models::file::write_json(&path, &config).unwrap();
}
