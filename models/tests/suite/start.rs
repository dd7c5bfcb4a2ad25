//! Starting a drafter from the parameters of another one.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::Device;
use draftsmith_models::checkpoint::{self, DrafterCard, TemplateRecord};
use draftsmith_models::drafter::{
    AnyDrafter, DrafterConfig, DrafterContext, FAMILIES, Origin, Started,
};
use draftsmith_models::error::{Diagnose, ModelError};
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;
use serde_json::{Value, json};

use crate::families::Family;
use crate::support::tiny_target;

const FINGERPRINT: &str = "abc";

/// Settings of a family for the tiny target.
fn config(family: &str) -> DrafterConfig {
    Family::named(family).config(3)
}

fn settings(family: &str, changes: &Value) -> DrafterConfig {
    let tagged = serde_json::to_value(config(family)).unwrap();
    let mut table = tagged[family].clone();
    for (key, value) in changes.as_object().unwrap() {
        table[key] = value.clone();
    }
    DrafterConfig::deserialize_family(family, table).unwrap()
}

fn every_third() -> VocabMap {
    VocabMap::new((0..320).step_by(3).collect(), 320).unwrap()
}

/// A drafter with other parameters for each seed, on a device that tracks gradients.
fn drafter(
    target: &TargetModel,
    config: &DrafterConfig,
    vocab: &VocabMap,
    seed: u64,
) -> AnyDrafter {
    let context = DrafterContext {
        target: target.spec(),
        ends: target.ends(),
        vocab,
    };
    AnyDrafter::init(config, context, seed, &Device::flex().autodiff()).unwrap()
}

/// A drafter of seed 5 in a checkpoint, opened as `there`.
fn origin(target: &TargetModel, config: &DrafterConfig, folder: &Path) -> Origin {
    let drafter = drafter(target, config, &every_third(), 5);
    let card = DrafterCard {
        format_version: checkpoint::FORMAT_VERSION,
        drafter: config.clone(),
        aux_layer_ids: drafter.state_spec().aux_layer_ids,
        vocab: every_third(),
        target: target.spec().clone(),
        target_fingerprint: FINGERPRINT.to_owned(),
        template: TemplateRecord::default(),
        weights_blake3: String::new(),
        step: 400,
    };
    checkpoint::save(folder, &drafter, card).unwrap();
    Origin::open(folder, "there".to_owned()).unwrap()
}

/// Bytes of parameters by name.
type Values = BTreeMap<String, Vec<u8>>;

fn values(drafter: &AnyDrafter) -> Values {
    let tensors = drafter.to_tensors().into_iter();
    tensors.map(|tensor| (tensor.name, tensor.bytes)).collect()
}

/// Checks and starts a drafter of seed 9 from one of seed 5: before, after, and what was said.
fn start(
    from: &DrafterConfig,
    to: &DrafterConfig,
    vocab: &VocabMap,
) -> Result<([Values; 3], Started), ModelError> {
    let target = tiny_target("base");
    let folder = tempfile::tempdir().unwrap();
    let origin = origin(&target, from, folder.path());
    origin.check(to, target.spec(), FINGERPRINT)?;
    let fresh = drafter(&target, to, vocab, 9);
    let before = values(&fresh);
    let (started, said) = fresh.start_from(&origin, to, vocab)?;
    let there = values(&drafter(&target, from, &every_third(), 5));
    Ok(([there, before, values(&started)], said))
}

#[test]
fn a_drafter_of_the_same_family_has_the_same_bits_before_its_first_step() {
    for family in FAMILIES {
        let config = config(family);
        let ([there, before, after], said) = start(&config, &config, &every_third()).unwrap();
        assert_ne!(there, before, "{family}");
        assert_eq!(there, after, "{family}");
        assert!(said.fresh.is_empty(), "{family}: {said:?}");
        assert!(!said.taken.is_empty(), "{family}");
    }
}

#[test]
fn settings_of_the_training_alone_may_differ() {
    for (family, changes) in [
        ("eagle3", json!({ "ttt_steps": 7 })),
        ("mtp", json!({ "depths": 1 })),
        ("dflash", json!({ "anchors_per_row": 3, "block_size": 8 })),
        ("dspark", json!({ "confidence_weight": 0.0 })),
    ] {
        let ([there, _, after], _) =
            start(&config(family), &settings(family, &changes), &every_third()).unwrap();
        assert_eq!(there, after, "{family}");
    }
}

/// Red under: `PARTS` of `Dspark` naming the field "".
#[test]
fn a_dspark_starts_from_a_dflash_of_its_layout_with_fresh_heads() {
    let from = settings(
        "dflash",
        &json!({ "layout": "anchor_predicts", "block_size": 3 }),
    );
    let to = config("dspark");
    let ([there, before, after], said) = start(&from, &to, &every_third()).unwrap();
    for (name, bytes) in &after {
        match name.strip_prefix("core.") {
            Some(own) => assert_eq!(bytes, &there[own], "{name}"),
            None => assert_eq!(bytes, &before[name], "{name}"),
        }
    }
    let heads = [
        "markov_in",
        "markov_out",
        "confidence_proj",
        "confidence_bias",
    ];
    assert_eq!(said.fresh, heads);
    assert_eq!(said.from_target, ["core.head"]);
}

#[test]
fn layers_that_the_other_lacks_are_fresh() {
    let from = settings("dflash", &json!({ "num_layers": 1 }));
    let (_, said) = start(&from, &config("dflash"), &every_third()).unwrap();
    assert!(said.fresh.iter().all(|name| name.starts_with("layers.1.")));
    assert_eq!(said.fresh.len(), 11);
}

/// A frozen head is the target's, whatever the file holds. Red under: the first arm of `map_float` removed.
#[test]
fn a_frozen_head_never_comes_from_the_file() {
    let target = tiny_target("base");
    let folder = tempfile::tempdir().unwrap();
    let trained = config("eagle3");
    let mut origin = origin(&target, &trained, folder.path());
    // The head that was trained: that of another vocabulary of the same size.
    let other = VocabMap::new((1..320).step_by(3).collect(), 320).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let moved = drafter(&target, &trained, &other, 5);
    let card = checkpoint::load_card(folder.path()).unwrap();
    checkpoint::save(elsewhere.path(), &moved, card).unwrap();
    origin.weights = Origin::open(elsewhere.path(), "there".to_owned())
        .unwrap()
        .weights;
    for (mode, is_taken) in [("frozen", false), ("trained", true)] {
        let to = settings("eagle3", &json!({ "head": mode }));
        let fresh = drafter(&target, &to, &every_third(), 9);
        let before = values(&fresh);
        let (started, said) = fresh.start_from(&origin, &to, &every_third()).unwrap();
        assert_eq!(
            values(&started)["head"] != before["head"],
            is_taken,
            "{mode}"
        );
        assert_eq!(said.from_target.is_empty(), is_taken, "{mode}");
    }
}

fn refused(from: &DrafterConfig, to: &DrafterConfig, vocab: &VocabMap) -> String {
    let error = start(from, to, vocab).unwrap_err();
    assert!(error.is_user_error());
    format!("{error}; {}", error.hint().unwrap())
}

/// Pitfall 48 where parameters change hands: a drafter of the other layout is shifted by one.
/// Red under: `layout` left out of `Dflash::meaning`.
#[test]
fn pitfall_48_a_drafter_of_the_other_block_layout_is_refused() {
    let of = |layout: &str| settings("dflash", &json!({ "layout": layout }));
    let why = "`layout` must be the same in both: it says which token a block position predicts (a `dspark` always \
               has `anchor_predicts`), and every draft of the other layout would be shifted by one";
    assert_eq!(
        refused(&of("anchor_as_bonus"), &config("dspark"), &every_third()),
        format!(
            "`drafter.dspark` cannot start from `there`: its `layout` is \"anchor_as_bonus\", expected \
             \"anchor_predicts\"; {why}"
        )
    );
    assert_eq!(
        refused(
            &of("anchor_predicts"),
            &of("anchor_as_bonus"),
            &every_third()
        ),
        format!(
            "`drafter.dflash` cannot start from `there`: its `layout` is \"anchor_predicts\", expected \
             \"anchor_as_bonus\"; {why}"
        )
    );
}

#[test]
fn settings_under_which_parameters_mean_something_else_are_refused() {
    refused_alone(
        "eagle3",
        "norm_output",
        json!(true),
        "its `norm_output` is false, expected true",
    );
    let expected = "its `norm_before_residual` is false, expected true";
    refused_alone("eagle3", "norm_before_residual", json!(true), expected);
    for norm in ["concatenated", "each"] {
        let expected = format!("its `aux_norm` is \"none\", expected \"{norm}\"");
        refused_alone("eagle3", "aux_norm", json!(norm), &expected);
    }
    let expected = "it reads the layers [0, 1, 2], expected [1, 3, 5]";
    refused_alone("eagle3", "aux_layer_ids", json!([1, 3, 5]), expected);
    let expected = "its `half_order` is \"hidden_first\", expected \"embedding_first\"";
    refused_alone("mtp", "half_order", json!("embedding_first"), expected);
    let expected = "its `zero_first_embedding` is true, expected false";
    refused_alone("mtp", "zero_first_embedding", json!(false), expected);
    for family in ["dflash", "dspark"] {
        refused_alone(
            family,
            "mask_token",
            json!(9),
            "its `mask_token` is 14, expected 9",
        );
    }
}

#[test]
fn other_sizes_are_refused() {
    let expected = "its tensor `markov_in` has shape [320, 4], expected [320, 5]";
    refused_alone("dspark", "markov_rank", json!(5), expected);
    let expected = "its tensor `layers.1.down_proj` has no place in this drafter";
    refused_alone("dflash", "num_layers", json!(1), expected);
    let expected = "its tensor `gate_proj` has shape ";
    refused_alone("eagle3", "intermediate_size", json!(8), expected);
}

/// A family's own drafter is refused once one setting differs.
fn refused_alone(family: &str, key: &str, value: Value, expected: &str) {
    let other = settings(family, &json!({ key: value }));
    let message = refused(&config(family), &other, &every_third());
    let start = format!("`drafter.{family}` cannot start from `there`: {expected}");
    assert!(message.starts_with(&start), "{message}");
}

#[test]
fn another_family_vocabulary_or_target_is_refused() {
    let (eagle, flash) = (config("eagle3"), config("dflash"));
    assert_eq!(
        refused(&config("dspark"), &flash, &every_third()),
        "`drafter.dflash` cannot start from `there`: it holds a `dspark` drafter, expected `dflash`; \
         leave `drafter.dflash.start_from` out to start from fresh parameters"
    );
    assert!(
        refused(&eagle, &config("dspark"), &every_third())
            .contains("expected `dspark` or `dflash`;")
    );
    let hint = "a reduced vocabulary is chosen from the answers of the rows: use the same rows and `draft_vocab`, \
                or `draft_vocab = \"full\"` in both";
    assert_eq!(
        refused(&eagle, &eagle, &VocabMap::full(320)),
        format!(
            "`drafter.eagle3` cannot start from `there`: its draft vocabulary has 107 tokens, expected 320; {hint}"
        )
    );
    let shifted = VocabMap::new((1..320).step_by(3).collect(), 320).unwrap();
    assert_eq!(
        refused(&eagle, &eagle, &shifted),
        format!(
            "`drafter.eagle3` cannot start from `there`: its draft vocabulary holds other tokens than the 107 of this \
             run; {hint}"
        )
    );
    let target = tiny_target("base");
    let folder = tempfile::tempdir().unwrap();
    let error = origin(&target, &eagle, folder.path())
        .check(&eagle, target.spec(), "def")
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "`drafter.eagle3` cannot start from `there`: its target has the fingerprint abc, expected def"
    );
}

#[test]
fn a_damaged_file_is_refused() {
    let target = tiny_target("base");
    let folder = tempfile::tempdir().unwrap();
    origin(&target, &config("mtp"), folder.path());
    let path = folder.path().join(checkpoint::WEIGHTS);
    let mut bytes = fs_err::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs_err::write(&path, bytes).unwrap();
    let error = Origin::open(folder.path(), "there".to_owned()).unwrap_err();
    assert!(
        error.to_string().contains("its checksum differs"),
        "{error}"
    );
}
