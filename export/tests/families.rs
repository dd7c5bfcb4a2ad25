//! What the exported configuration and tensors of block drafters and MTP heads say.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::allow_attributes,
    reason = "tests"
)]

mod common;
mod stitch;

use common::{Case, Wanted};
use draftsmith_export::temper::logit_tensors;
use draftsmith_export::{ExportConfig, ExportError, check, export, export_all, formats_for, read};
use draftsmith_models::checkpoint::load_card;
use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::weights::{NamedTensor, WeightFolder, write_safetensors};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

const FORMATS: [&str; 2] = ["native", "speculators"];

fn config(family: &str, settings: Value) -> DrafterConfig {
    DrafterConfig::deserialize_family(family, settings).unwrap()
}

fn case(family: &str, settings: Value, draft_ids: Option<Vec<u32>>) -> Case {
    Case::new(Wanted {
        other: Some(config(family, settings)),
        draft_ids,
        ..Wanted::default()
    })
}

fn dflash(layout: &str) -> Value {
    json!({
        "mask_token": 7, "num_layers": 2, "block_size": 4, "layout": layout, "aux_layer_ids": [1, 3, 6],
    })
}

/// Draft temperatures reach the logits that an engine computes, and nothing else that it reads.
/// Red under: `"markov_out"` left out of `logit_tensors`; `"norm"` of MTP replaced by `"hidden_norm"`; `/ temperature` in
/// `Source::values` replaced by `* temperature`.
#[test]
fn a_draft_temperature_divides_the_logits_of_every_family() {
    let mut tempered = 0;
    for family in common::families::Family::variants() {
        for draft_ids in [None, Some(common::scattered_ids())] {
            let case = Case::new(Wanted {
                other: Some(family.config(3)),
                draft_ids,
                ..Wanted::default()
            });
            let card = load_card(&case.checkpoint()).unwrap();
            let Some(linear) = logit_tensors(&card) else {
                continue;
            };
            assert_logits_double(&case, linear);
            for format in FORMATS {
                tempered += usize::from(halve_temperature(&case, &card.drafter, format, linear));
            }
        }
    }
    assert!(tempered >= 2 * FORMATS.len(), "{tempered}");
}

/// Twice the values of `linear` give twice the logits, at every depth.
fn assert_logits_double(case: &Case, linear: &[&str]) {
    let doubled = case.drafter.to_tensors().into_iter().map(|tensor| {
        let values = tensor.bytes.chunks_exact(4);
        let values = values.map(|value| f32::from_le_bytes(value.try_into().unwrap()));
        let is_linear = linear.contains(&tensor.name.as_str());
        let factor = if is_linear { 2.0 } else { 1.0 };
        let values: Vec<f32> = values.map(|value| factor * value).collect();
        NamedTensor::float(tensor.name, &tensor.shape, &values, Dtype::F32)
    });
    let file = case.checkpoint().join("doubled.safetensors");
    write_safetensors(&file, &doubled.collect::<Vec<_>>(), &[]).unwrap();
    let weights = WeightFolder::open_file(&file).unwrap();
    let doubled = case.drafter.clone().load_tensors(&weights).unwrap();
    let (aux, ids) = case.context(9);
    let run = |drafter| common::chain(drafter, &case.ends, (aux.clone(), &ids), 3).concat();
    for (plain, doubled) in run(&case.drafter).iter().zip(run(&doubled)) {
        // A recurrent state goes through a norm, whose epsilon is felt in the sixth digit.
        let off = (2.0 * plain - doubled).abs();
        let family = case.drafter.family();
        assert!(
            off < 1e-4 * plain.abs().max(1.0),
            "{family}: {plain} {doubled}"
        );
    }
}

/// Exports at half the temperature and compares with the plain export: doubled are as many tensors as `linear` names. False
/// where the layout has no place for the drafter.
fn halve_temperature(case: &Case, drafter: &DrafterConfig, format: &str, linear: &[&str]) -> bool {
    let settings = ExportConfig {
        formats: vec![format.to_owned()],
        ..common::f32_config()
    };
    if check(&settings, drafter, &case.spec, &case.target()).is_err() {
        return false;
    }
    let (_, _, plain) = case.export(format);
    let out = case.out("tempered");
    let reports = export_all(
        &case.checkpoint(),
        &case.target(),
        &out,
        &settings,
        Some(0.5),
    )
    .unwrap();
    assert_eq!(reports[0].draft_temperature, Some(0.5));
    let tempered = WeightFolder::open(&out.join(format)).unwrap();
    let floats = reports[0]
        .tensors
        .iter()
        .filter(|tensor| tensor.dtype == "F32");
    let changed = floats.filter(|tensor| {
        let read = |weights: &WeightFolder| {
            let data = weights.float_data(&tensor.name, &tensor.shape).unwrap();
            data.try_into_vec::<f32>().unwrap()
        };
        let (plain, tempered) = (read(&plain), read(&tempered));
        let doubled: Vec<f32> = plain.iter().map(|value| 2.0 * value).collect();
        assert!(tempered == plain || tempered == doubled, "{}", tensor.name);
        tempered != plain
    });
    assert_eq!(changed.count(), linear.len(), "{format}");
    true
}

/// Red under: `"num_nextn_predict_layers"` left out of `refuse_other_families`.
#[test]
fn an_export_of_another_family_is_not_read_as_eagle3() {
    for (family, settings) in [
        ("dflash", dflash("anchor_as_bonus")),
        (
            "dspark",
            json!({ "mask_token": 7, "num_layers": 1, "block_size": 3, "aux_layer_ids": [1, 3, 6] }),
        ),
        (
            "mtp",
            json!({ "half_order": "hidden_first", "zero_first_embedding": true }),
        ),
    ] {
        let case = case(family, settings, None);
        let wanted = FORMATS.map(str::to_owned);
        for format in formats_for(&wanted, &load_card(&case.checkpoint()).unwrap().drafter) {
            case.export(format);
            let error = read(&case.out(format), &case.target()).unwrap_err();
            assert!(
                matches!(error, ExportError::OtherFamily { .. }),
                "{family} {format}: {error}"
            );
        }
    }
}

/// Pitfall 48: the layout of the block is always written. Red under: `samples_from_anchor` returning false.
#[test]
fn pitfall_48_both_layouts_say_which_position_predicts() {
    for (layout, from_anchor, tokens) in
        [("anchor_as_bonus", false, 3), ("anchor_predicts", true, 4)]
    {
        let case = case("dflash", dflash(layout), None);
        let (_, native, _) = case.export("native");
        assert_eq!(
            native["dflash_config"]["sample_from_anchor"],
            json!(from_anchor)
        );
        let (_, speculators, _) = case.export("speculators");
        assert_eq!(speculators["sample_from_anchor"], json!(from_anchor));
        let method = &speculators["speculators_config"]["proposal_methods"][0];
        assert_eq!(method["speculative_tokens"], json!(tokens));
        for config in [native, speculators] {
            assert_eq!(config["block_size"], json!(4));
        }
    }
}

/// Pitfall 47, the exported half. Red under: `mask_id + 1` in either layout.
#[test]
fn pitfall_47_the_mask_token_of_training_is_written() {
    let case = case("dflash", dflash("anchor_as_bonus"), None);
    let (_, native, _) = case.export("native");
    assert_eq!(native["dflash_config"]["mask_token_id"], json!(7));
    let (_, speculators, _) = case.export("speculators");
    assert_eq!(speculators["mask_token_id"], json!(7));
    let markov =
        json!({ "mask_token": 9, "block_size": 4, "markov_rank": 2, "aux_layer_ids": [1, 3, 6] });
    let (_, native, _) = self::case("dspark", markov, None).export("native");
    assert_eq!(native["mask_token_id"], json!(9));
    assert_eq!(native["dflash_config"]["mask_token_id"], json!(9));
}

/// The same blocks under both conventions. Red under: `layer_ids::input_ids` left out of `speculators`.
#[test]
fn layer_ids_are_outputs_in_one_layout_and_inputs_in_the_other() {
    let case = case("dflash", dflash("anchor_as_bonus"), None);
    let (_, native, _) = case.export("native");
    assert_eq!(
        native["dflash_config"]["target_layer_ids"],
        json!([1, 3, 6])
    );
    let (_, speculators, _) = case.export("speculators");
    assert_eq!(speculators["aux_hidden_state_layer_ids"], json!([2, 4, 7]));
    // False would make vLLM mask the block causally.
    assert_eq!(speculators["sliding_window_non_causal"], json!(true));
}

/// An engine that takes a window of causal layers, or none at all, accepts less and says nothing. Red under: `is_causal`
/// left out of `dflash::native`.
#[test]
fn pitfall_76_a_sliding_window_travels_and_stays_without_causality() {
    let mut settings = dflash("anchor_as_bonus");
    for window in [None, Some(16)] {
        settings["sliding_window"] = json!(window);
        let kind = window.map_or("full_attention", |_| "sliding_attention");
        let expect = |decoder: &Value| {
            assert_eq!(decoder["layer_types"], json!([kind, kind]));
            assert_eq!(decoder["sliding_window"], json!(window));
            assert_eq!(decoder["use_sliding_window"], json!(window.is_some()));
        };
        let case = case("dflash", settings.clone(), None);
        let (_, native, _) = case.export("native");
        expect(&native);
        assert_eq!(
            native["is_causal"],
            if window.is_some() {
                json!(false)
            } else {
                json!(null)
            }
        );
        let (_, speculators, _) = case.export("speculators");
        expect(&speculators["transformer_layer_config"]);
        assert_eq!(speculators["sliding_window_non_causal"], json!(true));
    }
}

#[test]
fn head_and_tables_are_written_for_a_reduced_vocabulary_only() {
    for format in FORMATS {
        let full = case("dflash", dflash("anchor_as_bonus"), None);
        let (_, _, weights) = full.export(format);
        assert!(
            ["lm_head.weight", "d2t", "t2d", "embed_tokens.weight"]
                .iter()
                .all(|name| !weights.contains(name))
        );
        let ids: Vec<u32> = (0..100).map(|i| i * 3).collect();
        let reduced = case("dflash", dflash("anchor_as_bonus"), Some(ids));
        let (_, config, weights) = reduced.export(format);
        assert_eq!(config["draft_vocab_size"], json!(100));
        assert!(
            ["lm_head.weight", "d2t", "t2d"]
                .iter()
                .all(|name| weights.contains(name))
        );
        let names: Vec<&str> = weights
            .names()
            .filter(|name| name.starts_with("layers.1."))
            .collect();
        assert_eq!(names.len(), 11, "{names:?}");
    }
}

#[test]
fn a_confidence_that_was_not_trained_is_not_written() {
    for (weight, is_trained) in [(1.0, true), (0.0, false)] {
        let settings = json!({
            "mask_token": 7, "block_size": 4, "markov_rank": 2, "aux_layer_ids": [1, 3, 6],
            "num_layers": 1, "confidence_weight": weight,
        });
        let case = case("dspark", settings, None);
        for format in FORMATS {
            let (_, config, weights) = case.export(format);
            assert_eq!(config["enable_confidence_head"], json!(is_trained));
            assert_eq!(weights.contains("confidence_head.proj.weight"), is_trained);
            assert!(weights.contains("markov_head.markov_w1.weight"));
        }
    }
}

/// Other blocks than those trained are refused, or warned of. Red under: `is_block: false` in `dflash.rs`.
#[test]
fn more_drafts_than_a_block_yields_are_refused() {
    let case = case("dflash", dflash("anchor_as_bonus"), None);
    let with = |tokens| {
        let config = ExportConfig {
            speculative_tokens: Some(tokens),
            ..ExportConfig::default()
        };
        export(
            "speculators",
            &case.checkpoint(),
            &case.target(),
            &case.out("speculators"),
            &config,
        )
    };
    assert!(matches!(with(4), Err(ExportError::NotExpressible { .. })));
    assert!(
        with(2)
            .unwrap()
            .warnings
            .iter()
            .any(|text| text.contains("blocks for 2 drafts"))
    );
    assert!(
        with(3)
            .unwrap()
            .warnings
            .iter()
            .all(|text| !text.contains("blocks for"))
    );
}

/// What an engine would compute otherwise is refused before training. Red under: `check` always `Ok`.
#[test]
fn an_mtp_head_that_engines_read_otherwise_is_refused() {
    let case = case("mtp", json!({}), None);
    let formats = ExportConfig::default();
    let refused = |settings: Value| {
        let config = config("mtp", settings);
        check(&formats, &config, &case.spec, &case.target())
            .unwrap_err()
            .to_string()
    };
    assert!(refused(json!({ "half_order": "embedding_first" })).contains("half_order"));
    assert!(refused(json!({ "zero_first_embedding": false })).contains("zero_first_embedding"));
    let plain = config("mtp", json!({}));
    check(&formats, &plain, &case.spec, &case.target()).unwrap();
    assert_eq!(formats_for(&formats.formats, &plain), ["native"]);
    let only = ExportConfig {
        formats: vec!["speculators".to_owned()],
        ..ExportConfig::default()
    };
    assert!(matches!(
        check(&only, &plain, &case.spec, &case.target()),
        Err(ExportError::NoLayout { .. })
    ));
}

/// The biases that the layout asks for are there, and zero.
#[test]
fn an_mtp_head_has_the_names_of_mimo() {
    let case = case("mtp", json!({}), None);
    let (_, config, weights) = case.export("native");
    assert_eq!(config["architectures"], json!(["MiMoForCausalLM"]));
    assert_eq!(config["num_nextn_predict_layers"], json!(1));
    let prefix = "model.mtp_layers.0.";
    assert!(weights.names().all(|name| name.starts_with(prefix)));
    for part in ["q", "k", "v"] {
        assert!(weights.contains(&format!("{prefix}self_attn.{part}_proj.bias")));
    }
    assert!(weights.contains(&format!("{prefix}input_proj.weight")));
}
