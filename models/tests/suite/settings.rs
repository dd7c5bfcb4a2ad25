//! Settings that are not understood are refused by name, with the valid names.

use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::drafter::eagle3::Eagle3Config;
use draftsmith_models::error::Diagnose;
use draftsmith_models::objective::{Objective, ObjectiveConfig, SlotWeight};
use serde_json::{Value, json};

use crate::families::Family;
use crate::support::tiny_target;

fn refused<T: serde::de::DeserializeOwned + std::fmt::Debug>(value: Value) -> String {
    serde_json::from_value::<T>(value).unwrap_err().to_string()
}

/// Pitfall 61. Red under: `deny_unknown_fields` removed from either struct.
#[test]
fn pitfall_61_unknown_keys_and_wrong_types_are_refused() {
    assert_eq!(
        refused::<ObjectiveConfig>(json!({ "temprature": 0.5 })),
        "unknown field `temprature`, expected one of `losses`, `slot_weight`, `stages`, `normalize`, \
         `temperature`, `chunk_positions`"
    );
    assert_eq!(
        refused::<Eagle3Config>(json!({ "ttt_step": 3 })),
        "unknown field `ttt_step`, expected one of `aux_layer_ids`, `ttt_steps`, `aux_norm`, \
         `norm_before_residual`, `norm_output`, `head`, `intermediate_size`"
    );
    assert_eq!(
        refused::<Eagle3Config>(json!({ "ttt_steps": "three" })),
        "invalid type: string \"three\", expected usize"
    );
    // A right key in the wrong table.
    assert!(refused::<Eagle3Config>(json!({ "temperature": 1.0 })).contains("`temperature`"));
    assert!(refused::<ObjectiveConfig>(json!({ "ttt_steps": 3 })).contains("`ttt_steps`"));
    // A key of a later version.
    assert!(refused::<ObjectiveConfig>(json!({ "anneal": [] })).contains("`anneal`"));
}

/// Pitfall 47: no id stands in for a mask token that is missing or means something else. Red under:
/// `check_mask_token` always `Ok`.
#[test]
fn pitfall_47_a_mask_token_is_named_and_has_no_other_meaning() {
    let masked = Family::all().into_iter();
    for family in masked.filter(|family| family.has_setting("mask_token")) {
        let family = family.name;
        let read = |settings| DrafterConfig::deserialize_family(family, settings);
        let message = read(json!({})).unwrap_err().to_string();
        assert_eq!(message, "missing field `mask_token`");
        let message = read(json!({ "mask_token": 1.5 })).unwrap_err().to_string();
        assert!(
            message.contains("expected a token id or the text of a special token"),
            "{message}"
        );
        let mut target = tiny_target("base").spec().clone();
        target.pad_token_id = Some(11);
        target.bos_token_id = Some(12);
        target.eos_token_ids = vec![13, 14];
        let check = |id: u32| {
            let settings = json!({ "mask_token": id, "aux_layer_ids": [1, 3, 4] });
            read(settings).unwrap().check(&target)
        };
        check(10).unwrap();
        for (id, reason) in [
            (11, "the token that pads"),
            (12, "the token that begins a text"),
            (14, "the token that ends a text"),
            (320, "but the target has 320 tokens"),
        ] {
            let message = check(id).unwrap_err().to_string();
            assert_eq!(
                message,
                format!("`drafter.{family}.mask_token` is {id}, {reason}")
            );
        }
    }
}

/// Pitfall 62. Red under: `find(name).unwrap_or(&Kl)`, or a fallback arm in `deserialize_family`.
#[test]
fn pitfall_62_unknown_names_are_refused_with_the_valid_ones() {
    for name in ["eagle-3", "Dflash", "", "EAGLE3"] {
        let message = DrafterConfig::deserialize_family(name, json!({}))
            .unwrap_err()
            .to_string();
        assert!(
            message.starts_with(&format!("unknown variant `{name}`, expected ")),
            "{message}"
        );
        assert!(message.contains("`eagle3`"), "{message}");
    }
    let config: ObjectiveConfig =
        serde_json::from_value(json!({ "losses": { "kll": 1.0 } })).unwrap();
    let error = Objective::new(&config).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`objective.losses` names an unknown loss `kll`"
    );
    assert_eq!(
        error.hint().unwrap(),
        "the losses are: kl, reverse_kl, jsd, renyi_half, tv, l1, neg_log_acceptance, lk_hybrid, ce, \
         ce_argmax, expected_length, round_count"
    );
    assert_eq!(
        refused::<ObjectiveConfig>(json!({ "normalize": "mean" })),
        "unknown variant `mean`, expected `weights` or `slots`"
    );
    assert_eq!(
        refused::<ObjectiveConfig>(json!({ "slot_weight": { "decay": 0.8 } })),
        "unknown variant `decay`, expected one of `uniform`, `step_decay`, `exp_decay`, `dpace`"
    );
    assert_eq!(
        refused::<Eagle3Config>(json!({ "head": "shared" })),
        "unknown variant `shared`, expected `trained` or `frozen`"
    );
}

#[test]
fn values_out_of_range_are_refused() {
    let message = |change: fn(&mut ObjectiveConfig)| {
        let mut config = ObjectiveConfig::default();
        change(&mut config);
        let error = Objective::new(&config).unwrap_err();
        assert!(error.is_user_error() && error.hint().is_some());
        error.to_string()
    };
    assert_eq!(
        message(|config| config.losses.clear()),
        "`objective.losses` is empty or all zero, expected at least one loss"
    );
    assert_eq!(
        message(|config| config.losses = [("kl".to_owned(), -1.0)].into()),
        "`objective.losses` is -1, expected coefficients of at least 0"
    );
    assert_eq!(
        message(|config| config.temperature = 0.0),
        "`objective.temperature` is 0, expected a positive number"
    );
    assert_eq!(
        message(|config| config.temperature = f64::NAN),
        "`objective.temperature` is NaN, expected a positive number"
    );
    assert_eq!(
        message(|config| config.chunk_positions = 0),
        "`objective.chunk_positions` is 0, expected a positive number"
    );
    assert_eq!(
        message(|config| config.slot_weight = SlotWeight::ExpDecay(0.0)),
        "`objective.slot_weight` is 0, expected a positive decay"
    );
}

#[test]
fn settings_survive_a_round_trip() {
    let config: ObjectiveConfig = serde_json::from_value(json!({
        "losses": { "ce": 0.1, "tv": 0.9 },
        "slot_weight": { "step_decay": 0.8 },
        "normalize": "slots"
    }))
    .unwrap();
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(
        serde_json::from_str::<ObjectiveConfig>(&text).unwrap(),
        config
    );
    assert_eq!(
        serde_json::from_value::<ObjectiveConfig>(json!({})).unwrap(),
        ObjectiveConfig::default()
    );
}

/// Red under: `json!(AuxNorm::Concatenated)` in `check_final_state`.
#[test]
fn a_norm_of_states_that_are_not_captured_is_refused() {
    let target = tiny_target("base");
    for norm in ["concatenated", "each"] {
        let settings = json!({ "aux_layer_ids": [], "aux_norm": norm });
        let config = DrafterConfig::deserialize_family("eagle3", settings).unwrap();
        let error = config.check(target.spec()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "`drafter.eagle3.aux_norm` is \"{norm}\", but `aux_layer_ids` is empty: there is nothing to norm"
            )
        );
    }
    let plain =
        DrafterConfig::deserialize_family("eagle3", json!({ "aux_layer_ids": [] })).unwrap();
    let read = plain.check(target.spec()).unwrap();
    assert!(read.aux_layer_ids.is_empty());
}
