//! The whole program on a tiny random target: every stage, skipping, resuming, exporting.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::path::Path;

use serde_json::Value;
use support::{Workplace, weights, write_target};

fn json(place: &Workplace, name: &str) -> Value {
    serde_json::from_str(&place.read(name)).unwrap()
}

fn stamps() -> [&'static str; 6] {
    [
        "prepare",
        "regenerate",
        "capture",
        "train",
        "eval",
        "export",
    ]
}

#[test]
fn a_run_trains_measures_and_exports_and_a_second_run_does_nothing() {
    let place = Workplace::new();
    let first = place.run(&["run", "run.toml"]);
    assert_eq!(first.code, 0, "{}", first.stderr);
    assert!(
        first.stdout.contains("greedy output identical: yes"),
        "{}",
        first.stdout
    );
    assert!(
        first.stdout.contains("export: out/eagle3/export/native"),
        "{}",
        first.stdout
    );
    assert!(first.stdout.contains("wall time: "), "{}", first.stdout);
    for name in stamps() {
        assert!(
            place.path(&format!("out/{name}.stamp.json")).exists(),
            "{name}"
        );
    }
    let report = json(&place, "out/eval/report.json");
    let proposers: Vec<&str> = report["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["proposer"].as_str().unwrap())
        .collect();
    let all = ["none", "prompt_lookup", "eagle3", "eagle3 untrained"];
    assert_eq!(proposers, [all, all].concat());
    let page = fs_err::read_to_string(place.path("out/eval/report.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("eagle3 untrained"));
    assert!(!place.path("out/eval/parts").exists());
    let starts = fs_err::read_dir(place.path("out/eagle3/tensorboard")).unwrap();
    let events = starts.flat_map(|start| fs_err::read_dir(start.unwrap().path()).unwrap());
    let holds_tau = |bytes: Vec<u8>| bytes.windows(9).any(|part| part == b"eval/tau/");
    let with_tau =
        events.filter(|file| holds_tau(fs_err::read(file.as_ref().unwrap().path()).unwrap()));
    assert_eq!(with_tau.count(), 1);

    let second = place.run(&["run", "run.toml"]);
    assert_eq!(second.code, 0, "{}", second.stderr);
    for name in stamps() {
        assert!(
            second.stderr.contains(&format!("{name}: up to date")),
            "{}",
            second.stderr
        );
    }
}

/// Each validation text is measured as it was drawn, and the best checkpoint is the best in the mean.
///
/// Seen red: `Some(Sampling::default())` for `text.sampling` in `ExactValidator::new`; `score: sum`.
#[test]
fn validations_look_at_every_text_as_it_was_drawn() {
    let place = Workplace::new();
    let further =
        "regenerate.validation_sampling=[{ temperature = 0.0 }, { temperature = 1.5, top_k = 20 }]";
    let set = ["--set", further, "--set", "capture.mode=cached"];
    let outcome = place.run(&[&["run", "run.toml"], &set[..]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let manifest = json(&place, "out/data/rows/manifest.json");
    let texts = manifest["texts"].as_array().unwrap();
    let temperatures = texts.iter().map(|text| &text["sampling"]["temperature"]);
    assert_eq!(temperatures.collect::<Vec<_>>(), [1.0, 0.0, 1.5]);
    assert_eq!(texts[1]["rows"], texts[2]["rows"]);
    let answers = json(&place, "out/data/answers-t1.5-k20.manifest.json");
    assert_eq!(answers["identity"]["settings"]["sampling"]["top_k"], 20);

    let report = json(&place, "out/eval/report.json");
    let exact = report["exact"].as_array().unwrap();
    let rules: Vec<&str> = exact
        .iter()
        .map(|entry| entry["report"]["rule"].as_str().unwrap())
        .collect();
    assert_eq!(rules, ["sampling", "greedy", "sampling"]);
    for (entry, text) in exact.iter().zip(texts) {
        assert_eq!(entry["report"]["text_matches_rule"], true);
        assert_eq!(entry["report"]["sampling"], text["sampling"]);
    }
    let tau = |entry: &Value| entry["report"]["by_gamma"][1]["tau"].as_f64().unwrap();
    let mean = exact.iter().map(tau).sum::<f64>() / 3.0;
    let lines = place.read("out/eagle3/metrics.jsonl");
    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    for (name, entry) in ["", "t0/", "t1.5-k20/"].iter().zip(exact) {
        let figure = &last["validation"][format!("{name}tau_gamma_2")];
        assert_eq!(figure.as_f64(), Some(tau(entry)));
    }
    let latest = place.read("out/eagle3/checkpoints/latest");
    let state = format!("out/eagle3/checkpoints/{}/state.json", latest.trim());
    let state = json(&place, &state);
    let score = state["best"]["score"].as_f64().unwrap();
    assert!((score - mean).abs() < 1e-12, "{score} {mean}");
}

#[test]
fn a_changed_section_reruns_only_what_depends_on_it() {
    let place = Workplace::new();
    assert_eq!(place.run(&["run", "run.toml"]).code, 0);
    let outcome = place.run(&["run", "run.toml", "--set", "eval.gamma=1"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("train: up to date"),
        "{}",
        outcome.stderr
    );
    assert!(
        outcome.stderr.contains("eval: [eval] changed"),
        "{}",
        outcome.stderr
    );
    assert!(
        outcome.stderr.contains("export: up to date"),
        "{}",
        outcome.stderr
    );
}

/// Seen red with `Restart::Resume` in place of `Restart::Continue` for `run`.
#[test]
fn a_changed_training_setting_trains_again_and_keeps_the_earlier_training() {
    let place = Workplace::new();
    assert_eq!(place.run(&["run", "run.toml"]).code, 0);
    let weights = |folder: &str| {
        let checkpoints = place.path(&format!("out/{folder}/checkpoints"));
        let latest = fs_err::read_to_string(checkpoints.join("latest")).unwrap();
        fs_err::read(checkpoints.join(latest.trim()).join("drafter.safetensors")).unwrap()
    };
    let before = weights("eagle3");
    let outcome = place.run(&["run", "run.toml", "--set", "optimizer.learning_rate=2e-3"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("regenerate: up to date"));
    assert_eq!(weights("superseded/eagle3-1"), before);
    assert_ne!(weights("eagle3"), before);
}

/// Seen red with the exit status of `CliError::Interrupted` set to 1.
#[cfg(unix)]
#[test]
fn ctrl_c_saves_the_step_and_a_resume_ends_the_run() {
    let place = Workplace::new();
    for stage in ["prepare", "regenerate"] {
        assert_eq!(place.run(&[stage, "run.toml"]).code, 0);
    }
    let long = [
        "train",
        "run.toml",
        "--set",
        "train.max_steps=100000",
        "--set",
        "train.epochs=100000",
    ];
    let mut child = place.start(&long);
    let metrics = place.path("out/eagle3/metrics.jsonl");
    // The first line of the metrics says that steps are being taken.
    for _ in 0..600 {
        if fs_err::metadata(&metrics).is_ok_and(|found| found.len() > 0) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let id = child.id().to_string();
    let sent = std::process::Command::new("kill")
        .args(["-INT", &id])
        .status();
    assert!(sent.unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let latest = place.read("out/eagle3/checkpoints/latest");
    let folder = place.path(&format!("out/eagle3/checkpoints/{}", latest.trim()));
    assert!(folder.join("state.json").exists());
}

#[test]
fn the_resolved_run_file_repeats_the_run() {
    let place = Workplace::new();
    assert_eq!(place.run(&["run", "run.toml"]).code, 0);
    let resolved = place.read("out/resolved.toml");
    place.write("again.toml", &resolved);
    let outcome = place.run(&["run", "again.toml"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("export: up to date"),
        "{}",
        outcome.stderr
    );
    let provenance = json(&place, "out/provenance.json");
    assert_eq!(provenance["target_fingerprint"].as_str().unwrap().len(), 64);
    assert!(
        provenance["data"]["`prompts.jsonl`"].is_string(),
        "{provenance}"
    );
}

#[test]
fn a_stage_whose_input_is_missing_says_which_command_makes_it() {
    let place = Workplace::new();
    place.refused(&["eval", "run.toml"], "missing_stage");
}

#[test]
fn a_stage_with_nothing_to_do_is_not_asked_for() {
    let place = Workplace::new();
    place.answer();
    place.prepare_and_train();
}

#[test]
fn training_again_over_a_finished_run_is_refused_without_resume() {
    let place = Workplace::new();
    assert_eq!(place.run(&["run", "run.toml"]).code, 0);
    fs_err::remove_file(place.path("out/train.stamp.json")).unwrap();
    let outcome = place.run(&["train", "run.toml"]);
    assert_eq!(outcome.code, 2, "{}", outcome.stderr);
    let error = outcome
        .stderr
        .lines()
        .find(|line| line.starts_with("error:"));
    assert_eq!(
        error,
        Some("error: `out/eagle3/checkpoints` already holds checkpoints")
    );
    let outcome = place.run(&["train", "run.toml", "--resume"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
}

#[test]
fn states_from_shards_train_the_same_drafter_as_states_from_the_target() {
    let online = Workplace::new();
    assert_eq!(online.run(&["run", "run.toml"]).code, 0);
    let cached = Workplace::new();
    let set = ["--set", "capture.mode=cached"];
    let outcome = cached.run(&[&["run", "run.toml"], set.as_slice()].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let loss = |place: &Workplace| -> f64 {
        let metrics = place.read("out/eagle3/metrics.jsonl");
        let first: Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
        first["loss"].as_f64().unwrap()
    };
    let (online, cached) = (loss(&online), loss(&cached));
    // Shards hold bf16: 8 bits of mantissa, so the loss moves by about a part in 256 at most.
    assert!((online - cached).abs() < 0.01 * online, "{online} {cached}");
}

/// The states of three blocks hold those of the last one: a drafter that reads only that one trains on them.
/// Red under: `larger.next().unwrap_or(set)` in `layer_sets` replaced by `set`.
#[test]
fn a_capture_for_one_drafter_serves_another_that_reads_less() {
    let place = Workplace::new();
    place.edit("[optimizer]", "[capture]\nmode = \"cached\"\n\n[optimizer]");
    for stage in ["prepare", "regenerate", "capture"] {
        assert_eq!(place.run(&[stage, "run.toml"]).code, 0);
    }
    let mut run_file = place.read("run.toml").parse::<toml::Table>().unwrap();
    let mtp = "depths = 2\ndraft_vocab = 100"
        .parse::<toml::Table>()
        .unwrap();
    run_file["drafter"] = toml::Table::from_iter([("mtp".to_owned(), mtp.into())]).into();
    place.write("other.toml", &run_file.to_string());
    for stage in ["capture", "train"] {
        let outcome = place.run(&[stage, "other.toml"]);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        let nothing = "capture: 0 tokens";
        assert!(
            stage != "capture" || outcome.stderr.contains(nothing),
            "{}",
            outcome.stderr
        );
    }
    assert_eq!(
        fs_err::read_dir(place.path("out/states")).unwrap().count(),
        1
    );
}

/// States captured before there were figures: nothing runs again by itself, training takes them as they are, and a capture
/// that is asked for adds what is missing.
#[test]
fn a_capture_that_is_asked_for_adds_the_figures_that_finished_states_lack() {
    let place = Workplace::new();
    place.edit("[optimizer]", "[capture]\nmode = \"cached\"\n\n[optimizer]");
    for stage in ["prepare", "regenerate", "capture"] {
        assert_eq!(place.run(&[stage, "run.toml"]).code, 0);
    }
    let mut folders = fs_err::read_dir(place.path("out/states")).unwrap();
    let path = folders
        .next()
        .unwrap()
        .unwrap()
        .path()
        .join("manifest.json");
    let captured = fs_err::read_to_string(&path).unwrap();
    let mut manifest: Value = serde_json::from_str(&captured).unwrap();
    let shard = manifest["shards"][0].as_object_mut().unwrap();
    assert!(shard.remove("teacher").is_some());
    fs_err::write(&path, manifest.to_string()).unwrap();

    let outcome = place.run(&["train", "run.toml"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let hint = "rows have no teacher figures, without which steps take longer";
    assert!(outcome.stderr.contains(hint), "{}", outcome.stderr);
    let outcome = place.run(&["capture", "run.toml"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let reason = "capture: 12 rows have no teacher figures yet";
    assert!(outcome.stderr.contains(reason), "{}", outcome.stderr);
    assert_eq!(fs_err::read_to_string(&path).unwrap(), captured);
    for (stage, expected) in [
        ("capture", "capture: up to date"),
        ("train", "train: up to date"),
    ] {
        let outcome = place.run(&[stage, "run.toml"]);
        assert!(outcome.stderr.contains(expected), "{}", outcome.stderr);
        assert!(!outcome.stderr.contains(hint), "{}", outcome.stderr);
    }
}

/// Parameters of the drafter in a folder below the workplace.
fn parameters(place: &Workplace, folder: &str) -> Vec<u8> {
    fs_err::read(place.path(&format!("{folder}/drafter.safetensors"))).unwrap()
}

/// The checkpoint that counts as the result of a training.
fn best(place: &Workplace, drafter: &str) -> String {
    let name = place.read(&format!("{drafter}/checkpoints/best"));
    format!("{drafter}/checkpoints/{}", name.trim())
}

fn done(place: &Workplace, arguments: &[&str]) -> String {
    let outcome = place.run(arguments);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    outcome.stderr
}

#[test]
fn a_drafter_starts_from_that_of_another_run_and_trains_again_when_that_one_changes() {
    let place = Workplace::new();
    place.edit("[optimizer]", "[export]\ndtype = \"f32\"\n\n[optimizer]");
    done(&place, &["run", "run.toml"]);
    let from = ["--set", "drafter.eagle3.start_from=out/eagle3"];
    let second = [&["run", "run.toml", "--out", "again"][..], &from].concat();
    let said = done(&place, &second);
    let start = "train eagle3: starts from `out/eagle3`, a `eagle3` drafter of step ";
    assert!(said.contains(start), "{said}");
    let source = parameters(&place, &best(&place, "out/eagle3"));
    assert_eq!(parameters(&place, "again/eagle3/untrained"), source);
    assert_ne!(parameters(&place, &best(&place, "again/eagle3")), source);
    let provenance = json(&place, "again/provenance.json");
    let record = &provenance["starts"]["eagle3"];
    assert_eq!(record["from"], "out/eagle3");
    assert_eq!(record["parameters"]["fresh"], serde_json::json!([]));
    assert_eq!(*record, json(&place, "again/eagle3/start.json"));

    assert!(done(&place, &second).contains("train: up to date"));
    fs_err::remove_file(place.path("again/train.stamp.json")).unwrap();
    let resumed = ["train", "run.toml", "--out", "again", "--resume"];
    let resumed = done(&place, &[&resumed[..], &from].concat());
    assert!(!resumed.contains("starts from"), "{resumed}");
    assert_eq!(parameters(&place, "again/eagle3/untrained"), source);

    let other = ["run", "run.toml", "--set", "optimizer.learning_rate=2e-3"];
    done(&place, &other);
    let said = done(&place, &second);
    assert!(
        said.contains("train: `drafter.eagle3.start_from` changed"),
        "{said}"
    );
    let source = parameters(&place, &best(&place, "out/eagle3"));
    assert_eq!(parameters(&place, "again/eagle3/untrained"), source);
    assert!(place.path("again/superseded/eagle3-1/start.json").exists());
}

#[test]
fn a_drafter_starts_from_a_checkpoint_and_from_an_export() {
    let place = Workplace::new();
    place.edit("[optimizer]", "[export]\ndtype = \"f32\"\n\n[optimizer]");
    done(&place, &["run", "run.toml"]);
    let checkpoint = best(&place, "out/eagle3");
    for (out, from) in [
        ("a", checkpoint.as_str()),
        ("b", "out/eagle3/export/native"),
        ("c", "out/eagle3/export/speculators"),
    ] {
        let from = format!("drafter.eagle3.start_from={from}");
        done(&place, &["run", "run.toml", "--out", out, "--set", &from]);
        assert_eq!(
            parameters(&place, &format!("{out}/eagle3/untrained")),
            parameters(&place, &checkpoint),
            "{from}"
        );
    }
}

/// A head in the layout of MiMo beside the blocks of the workplace's target.
fn add_head(place: &Workplace) {
    let mut shapes = weights();
    let mut add = |name: &str, shape: &[usize], scale: f64| {
        let name = format!("model.mtp_layers.0.{name}.weight");
        shapes.insert(name, (shape.to_vec(), scale));
    };
    for norm in ["token_layernorm", "hidden_layernorm", "final_layernorm"] {
        add(norm, &[16], 0.0);
    }
    add("input_proj", &[16, 32], 0.2);
    add("input_layernorm", &[16], 0.0);
    add("post_attention_layernorm", &[16], 0.0);
    for (name, out, width) in [("q", 16, 16), ("k", 8, 16), ("v", 8, 16), ("o", 16, 16)] {
        add(&format!("self_attn.{name}_proj"), &[out, width], 0.3);
    }
    for (name, out, width) in [("gate", 32, 16), ("up", 32, 16), ("down", 16, 32)] {
        add(&format!("mlp.{name}_proj"), &[out, width], 0.3);
    }
    write_target(&place.path("target"), &shapes);
    let mut config = json(place, "target/config.json");
    config["num_nextn_predict_layers"] = 1.into();
    place.write("target/config.json", &config.to_string());
}

#[test]
fn a_head_of_the_target_is_tuned_and_stitched_back() {
    let place = Workplace::new();
    add_head(&place);
    place.edit(
        "[drafter.eagle3]\nttt_steps = 2\ndraft_vocab = 128\n",
        "[drafter.mtp]\ndepths = 2\nstart_from = \"target\"\n\n[export]\nformats = [\"target\"]\n",
    );
    let said = done(&place, &["run", "run.toml"]);
    let start = "train mtp: starts from `target`, a `mtp` drafter of step 0: 13 tensors taken, 0 fresh, 1 the target's";
    assert!(said.contains(start), "{said}");
    let stitched = "out/mtp/export/target";
    let name = |file: &str| format!("{stitched}/{file}");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(
            place.read(&name(file)),
            place.read(&format!("target/{file}"))
        );
    }
    let bytes = |name: &str| fs_err::read(place.path(name)).unwrap();
    let (before, after) = (
        bytes("target/model.safetensors"),
        bytes(&name("model.safetensors")),
    );
    assert_eq!(before.len(), after.len());
    assert_ne!(before, after);
    // What was stitched is a target again, with the tuned head in it.
    let path = format!("target.path={stitched}");
    done(
        &place,
        &["run", "run.toml", "--out", "again", "--set", &path],
    );
    let best = best(&place, "out/mtp");
    assert_eq!(
        parameters(&place, "again/mtp/untrained"),
        parameters(&place, &best)
    );
}

/// The embedded target of the quick start, with little of everything.
#[test]
fn the_quick_start_works_in_small() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    if !root.join("assets/tiny-target").exists() {
        return;
    }
    let place = Workplace::new();
    let copy = fs_err::read_to_string(root.join("configs/quickstart.toml")).unwrap();
    place.write(
        "quick.toml",
        &copy.replace("assets/", &format!("{}/assets/", root.display())),
    );
    let outcome = place.run(&[
        "run",
        "quick.toml",
        "--out",
        "out",
        "--set",
        "data.max_rows=12",
        "--set",
        "regenerate.max_new_tokens=16",
        "--set",
        "train.max_steps=3",
        "--set",
        "train.epochs=1",
        "--set",
        "eval.max_new_tokens=8",
    ]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(
        outcome.stdout.contains("greedy output identical: yes"),
        "{}",
        outcome.stdout
    );
}
