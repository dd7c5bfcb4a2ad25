//! Bad input: one clear message with place and hint, exit status 2, nothing written.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use draftsmith_models::drafter::FAMILIES;
use support::{Workplace, tokenizer, weights, write_target};

/// Pitfall 61: a misspelt or misplaced key is refused, not ignored.
/// Red under: `deny_unknown_fields` removed from `OptimizerConfig`.
#[test]
fn pitfall_61_a_mistyped_key_is_refused_with_the_nearest_name() {
    let place = Workplace::new();
    place.edit("learning_rate", "learing_rate");
    place.refused(&["run", "run.toml"], "mistyped_key");
}

#[test]
fn pitfall_61_a_right_key_in_the_wrong_table_is_sent_to_its_table() {
    let place = Workplace::new();
    place.edit("[train]\n", "[train]\nlearning_rate = 1e-3\n");
    place.refused(&["run", "run.toml"], "misplaced_key");
}

#[test]
fn pitfall_61_a_wrong_type_is_refused() {
    let place = Workplace::new();
    place.edit("max_steps = 4", "max_steps = \"four\"");
    place.refused(&["run", "run.toml"], "wrong_type");
}

#[test]
fn pitfall_61_a_dry_run_finds_the_same_and_names_a_key_of_a_later_version() {
    let place = Workplace::new();
    place.edit("[eval]\n", "[eval]\nlook_into_the_future = true\n");
    place.refused(&["plan", "run.toml"], "key_of_a_later_version");
}

#[test]
fn pitfall_61_a_mistake_in_an_override_is_shown_in_the_override() {
    let place = Workplace::new();
    place.refused(
        &["run", "run.toml", "--set", "train.max_step=3"],
        "mistyped_override",
    );
}

/// Pitfall 47: the mask token is one of the tokenizer's own, and the text is free of it.
#[test]
fn pitfall_47_a_mask_token_that_does_not_exist_is_refused() {
    let place = Workplace::new();
    place.edit(
        "[drafter.eagle3]",
        "[drafter.dflash]\nmask_token = \"<|gap|>\"\n\n[drafter.eagle3]",
    );
    place.refused(&["run", "run.toml"], "unknown_mask_token");
}

/// Seen red with the call in `Capture::execute` removed.
#[test]
fn pitfall_47_a_mask_token_that_the_text_holds_is_refused_before_its_states_are_captured() {
    let place = Workplace::new();
    place.edit(
        "[drafter.eagle3]",
        "[drafter.dflash]\nmask_token = 5\naux_layer_ids = [1, 3, 4]\n\n[drafter.eagle3]",
    );
    let cached = ["--set", "capture.mode=\"cached\""];
    let arguments = [&["run", "run.toml"][..], &cached].concat();
    place.refused_later(&arguments, "mask_token_in_the_text");
    assert!(!place.path("out/states").exists());
}

#[test]
fn an_unknown_section_is_refused() {
    let place = Workplace::new();
    place.edit("[optimizer]", "[optimiser]");
    place.refused(&["run", "run.toml"], "unknown_section");
}

#[test]
fn a_mistyped_key_of_a_drafter_names_the_shared_keys_too() {
    let place = Workplace::new();
    place.edit("draft_vocab", "draft_vocabulary");
    place.refused(&["run", "run.toml"], "mistyped_drafter_key");
}

/// Pitfall 62: an unknown name never falls back to a default.
/// The test of unknown losses below is red under `find` in `loss/mod.rs` ending with `.or(Some(&Kl))`.
#[test]
fn pitfall_62_unknown_families_are_refused_with_the_list() {
    for family in ["eagle-3", "Dflash", "\"\""] {
        let place = Workplace::new();
        place.edit("[drafter.eagle3]", &format!("[drafter.{family}]"));
        let outcome = place.run(&["run", "run.toml"]);
        assert_eq!(outcome.code, 2, "{outcome:?}");
        let name = family.trim_matches('"');
        let first = outcome.stderr.lines().next().unwrap();
        assert_eq!(
            first,
            format!("error: run file refused: unknown drafter family `{name}`")
        );
        let last = outcome.stderr.lines().last().unwrap();
        let list = format!("the families are: `{}`", FAMILIES.join("`, `"));
        assert!(last.ends_with(&list), "{last}");
        assert!(!place.path("out").exists());
    }
}

#[test]
fn pitfall_62_an_unknown_loss_is_refused_with_the_list() {
    let place = Workplace::new();
    place.edit(
        "[optimizer]",
        "[objective]\nlosses = { kll = 1.0 }\n\n[optimizer]",
    );
    place.refused(&["run", "run.toml"], "unknown_loss");
}

#[test]
fn pitfall_62_an_unknown_schedule_is_refused_with_the_list() {
    let place = Workplace::new();
    place.edit("[optimizer]\n", "[optimizer]\nschedule = \"cosin\"\n");
    place.refused(&["run", "run.toml"], "unknown_schedule");
}

/// Red under: `devices(session)?` in `refuse_unusable` left out.
#[test]
fn what_would_stop_the_evaluation_is_refused_before_any_work() {
    let place = Workplace::new();
    let run = ["run", "run.toml", "--set"];
    let device = [&run[..], &["eval.devices=[\"h10\"]"]].concat();
    place.refused(&device, "unknown_device");
    let file = [&run[..], &["eval.device_file=cards.toml"]].concat();
    place.refused(&file, "missing_device_file");
}

/// A key of a table whose other keys the file gives: alone it would lack them.
/// Red under: `Self::parse(&change.source)?` in front of `change.apply`.
#[test]
fn one_key_of_a_table_with_required_keys_can_be_replaced() {
    let place = Workplace::new();
    place.edit(
        "[drafter.eagle3]",
        "[drafter.dflash]\nmask_token = 5\n\n[drafter.eagle3]",
    );
    let set = ["--set", "drafter.dflash.aux_layer_ids=[1, 3]"];
    let outcome = place.run(&[&["plan", "run.toml"][..], &set].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
}

/// Red under: the call of `refuse_what_regenerate_replaces` left out.
#[test]
fn keys_that_regenerated_answers_replace_are_refused() {
    let place = Workplace::new();
    let set = ["run", "run.toml", "--set"];
    let ids = [&set[..], &["data.ids_files=[\"ids.jsonl\"]"]].concat();
    place.refused(&ids, "ids_beside_regenerate");
    let temperature = [&set[..], &["data.text_temperature=0.7"]].concat();
    place.refused(&temperature, "text_temperature_beside_regenerate");
}

/// Red under: the call of `refuse_texts_of_no_prompt` left out; `is_known` in `RegenerateConfig::validate` always false.
#[test]
fn validation_texts_that_measure_nothing_new_are_refused() {
    let place = Workplace::new();
    let texts = |texts: &str| format!("regenerate.validation_sampling={texts}");
    let twice = texts("[{ temperature = 0.0 }, { temperature = 1.0 }]");
    place.refused(
        &["run", "run.toml", "--set", &twice],
        "validation_text_twice",
    );
    let one = texts("[{ temperature = 0.0 }]");
    let set = ["--set", &one, "--set", "data.validation_fraction=0.0"];
    place.refused(
        &[&["run", "run.toml"], &set[..]].concat(),
        "validation_text_of_no_prompt",
    );
}

/// Red under: either call of `nothing_to_decode` left out.
#[test]
fn an_evaluation_without_prompts_is_refused() {
    let place = Workplace::new();
    let none = ["run", "run.toml", "--set", "data.validation_fraction=0.0"];
    place.refused(&none, "no_validation_row_and_no_suite");
    let run = place.run(&["run", "run.toml"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    place.write("empty.jsonl", "");
    let suite = "eval.suites=[{ name = \"empty\", file = \"empty.jsonl\" }]";
    place.refused_later(
        &["eval", "run.toml", "--set", suite],
        "suite_without_prompts",
    );
}

/// Red under: `for_sampling` in `EvalConfig::validate` replaced by `find(rule)`.
#[test]
fn a_rule_that_a_temperature_does_not_allow_is_refused_before_any_work() {
    let place = Workplace::new();
    let set = [
        "--set",
        "eval.rule=greedy",
        "--set",
        "eval.temperatures=[0.0, 1.0]",
    ];
    place.refused(
        &[&["run", "run.toml"][..], &set].concat(),
        "greedy_above_zero",
    );
}

/// Red under: `args.typed()` in `Session::open` replaced by the name of the file.
#[test]
fn hints_name_commands_with_everything_that_was_typed() {
    let place = Workplace::new();
    let typed = [
        "eval",
        "run.toml",
        "--out",
        "out",
        "--set",
        "eval.temperatures=[0.0, 1.0]",
    ];
    place.refused(&typed, "hint_as_typed");
}

#[test]
fn a_value_out_of_range_is_shown_in_its_place() {
    let place = Workplace::new();
    place.edit("gamma = 2", "gamma = 0");
    place.refused(&["run", "run.toml"], "out_of_range");
}

#[test]
fn a_run_file_that_does_not_exist_is_named() {
    Workplace::new().refused(&["run", "other.toml"], "missing_run_file");
}

#[test]
fn a_target_without_one_of_its_tensors_is_refused() {
    let place = Workplace::new();
    let mut shapes = weights();
    shapes.remove("model.layers.3.mlp.up_proj.weight");
    write_target(&place.path("target"), &shapes);
    place.refused(&["run", "run.toml"], "missing_tensor");
}

#[test]
fn a_target_file_that_was_cut_off_is_refused() {
    let place = Workplace::new();
    let path = place.path("target/model.safetensors");
    let bytes = fs_err::read(&path).unwrap();
    fs_err::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    place.refused(&["run", "run.toml"], "truncated_weights");
}

#[test]
fn a_tokenizer_with_more_ids_than_the_target_is_refused() {
    let place = Workplace::new();
    let mut tokenizer = tokenizer();
    tokenizer["added_tokens"][3]["id"] = 500.into();
    tokenizer["model"]["vocab"]["<pad>"] = 500.into();
    place.write("target/tokenizer.json", &tokenizer.to_string());
    place.refused(&["run", "run.toml"], "vocabulary_mismatch");
}

#[test]
fn an_empty_data_file_is_refused() {
    let place = Workplace::new();
    place.write("prompts.jsonl", "");
    place.refused(&["run", "run.toml"], "empty_data");
}

#[test]
fn a_line_that_was_cut_in_the_middle_is_refused_with_its_number() {
    let place = Workplace::new();
    let text = place.read("prompts.jsonl");
    place.write("prompts.jsonl", &text[..text.len() - 10]);
    place.refused(&["run", "run.toml"], "cut_line");
}

#[test]
fn a_device_that_this_build_does_not_have_is_refused() {
    let place = Workplace::new();
    place.refused(&["run", "run.toml", "--device", "cuda:0"], "missing_device");
}

/// A workplace with cached states, trained on by nobody yet, and the path of their manifest.
fn with_cached_states() -> (Workplace, std::path::PathBuf) {
    let place = Workplace::new();
    place.edit("[optimizer]", "[capture]\nmode = \"cached\"\n\n[optimizer]");
    for stage in ["prepare", "regenerate", "capture"] {
        let outcome = place.run(&[stage, "run.toml"]);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    }
    let folders = fs_err::read_dir(place.path("out/states")).unwrap();
    let folder = folders.map(|entry| entry.unwrap().path()).next().unwrap();
    (place, folder.join("manifest.json"))
}

#[test]
fn states_of_another_target_are_refused() {
    let (place, manifest) = with_cached_states();
    let mut content: serde_json::Value =
        serde_json::from_str(&fs_err::read_to_string(&manifest).unwrap()).unwrap();
    content["identity"]["target_fingerprint"] = "0".repeat(64).into();
    fs_err::write(&manifest, content.to_string()).unwrap();
    place.refused_later(&["train", "run.toml"], "states_of_another_target");
    assert!(!place.path("out/eagle3").exists());
}

/// The first stage that would run is an earlier one; it must not replace what the states belong to.
#[test]
fn a_run_refuses_states_of_another_target_before_its_first_stage() {
    let (place, manifest) = with_cached_states();
    let mut content: serde_json::Value =
        serde_json::from_str(&fs_err::read_to_string(&manifest).unwrap()).unwrap();
    content["identity"]["target_fingerprint"] = "0".repeat(64).into();
    fs_err::write(&manifest, content.to_string()).unwrap();
    fs_err::remove_file(place.path("out/prepare.stamp.json")).unwrap();
    place.refused_later(&["run", "run.toml"], "run_with_states_of_another_target");
    assert!(!place.path("out/prepare.stamp.json").exists());
}

#[test]
fn a_state_that_is_not_a_number_is_refused_with_its_row() {
    let (place, manifest) = with_cached_states();
    let mut content: serde_json::Value =
        serde_json::from_str(&fs_err::read_to_string(&manifest).unwrap()).unwrap();
    let shard = manifest.with_file_name(content["shards"][0]["file"].as_str().unwrap());
    let mut bytes = fs_err::read(&shard).unwrap();
    // Half of the file is far inside the states of some row, past all headers.
    let middle = bytes.len() / 2 / 64 * 64;
    for pair in bytes[middle..middle + 64].chunks_exact_mut(2) {
        pair.copy_from_slice(&0x7FC0_u16.to_le_bytes());
    }
    content["shards"][0]["blake3"] = blake3::hash(&bytes).to_hex().to_string().into();
    fs_err::write(&shard, bytes).unwrap();
    fs_err::write(&manifest, content.to_string()).unwrap();
    place.refused_later(&["train", "run.toml"], "state_not_a_number");
    assert!(!place.path("out/eagle3/checkpoints").exists());
}

#[test]
fn what_a_later_stage_would_refuse_is_refused_before_the_first_one() {
    let place = Workplace::new();
    place.edit("draft_vocab = 128", "draft_vocab = 321");
    place.refused(&["run", "run.toml"], "draft_vocabulary_too_large");
    place.edit("draft_vocab = 321", "aux_layer_ids = [1, 8]");
    place.refused(&["run", "run.toml"], "captured_layer_outside_the_target");
    place.edit("aux_layer_ids = [1, 8]", "draft_vocab = 128");
    let suites = "eval.suites=[{ name = \"math\", file = \"gone.jsonl\" }]";
    place.refused(&["run", "run.toml", "--set", suites], "missing_suite");
}

#[test]
fn a_start_that_holds_no_drafter_is_refused_before_the_first_stage() {
    let place = Workplace::new();
    place.edit("ttt_steps", "start_from = \"nowhere\"\nttt_steps");
    place.refused(&["run", "run.toml"], "start_without_drafter");
}

#[test]
fn a_start_from_another_drafter_is_refused_before_the_first_stage() {
    let place = Workplace::new();
    assert_eq!(place.run(&["run", "run.toml", "--out", "done"]).code, 0);
    place.edit("ttt_steps", "start_from = \"done/eagle3\"\nttt_steps");
    place.edit("draft_vocab = 128", "draft_vocab = 64");
    place.refused(&["run", "run.toml"], "start_with_another_vocabulary");
    place.edit("draft_vocab = 64", "aux_layer_ids = [1, 3, 5]");
    place.refused(&["run", "run.toml"], "start_with_other_layers");
    place.edit("aux_layer_ids = [1, 3, 5]", "draft_vocab = 128");
    place.edit(
        "draft_vocab = 128",
        "draft_vocab = 128\nintermediate_size = 8",
    );
    place.refused(&["run", "run.toml"], "start_with_other_sizes");
    place.refused_later(&["run", "run.toml", "--out", "done"], "start_from_itself");
}

#[test]
fn a_head_that_the_target_does_not_bring_along_is_refused_before_the_first_stage() {
    let place = Workplace::new();
    place.edit(
        "[drafter.eagle3]\nttt_steps = 2\ndraft_vocab = 128\n",
        "[drafter.mtp]\nstart_from = \"target\"\n",
    );
    place.refused(&["run", "run.toml"], "start_without_target_head");
    place.edit(
        "start_from = \"target\"\n",
        "\n[export]\nformats = [\"target\"]\n",
    );
    place.refused(&["run", "run.toml"], "export_without_target_head");
}

#[test]
fn resuming_where_nothing_was_begun_is_refused() {
    let place = Workplace::new();
    assert_eq!(place.run(&["prepare", "run.toml"]).code, 0);
    assert_eq!(place.run(&["regenerate", "run.toml"]).code, 0);
    place.refused_later(&["train", "run.toml", "--resume"], "nothing_to_resume");
    assert!(!place.path("out/eagle3").exists());
}
