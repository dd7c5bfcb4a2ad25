//! Stopping, resuming and refusing to resume.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::{Scores, World, assert_same_weights, events, records, timeless};
use draftsmith_models::error::Diagnose;
use draftsmith_trainer::checkpoint;
use draftsmith_trainer::config::OptimizerKind;
use draftsmith_trainer::{Outcome, Resume, TrainerError};
use fs_err as fs;
use serde_json::json;

fn step_folder(folder: &Path, step: u64) -> PathBuf {
    folder.join("checkpoints").join(checkpoint::name(step))
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

// Seen red: `self.state.step` of the draw replaced by the steps since the start of the process.
// Seen red: `restore` returning `optimizer(&drafter)` without its moments (gradients and weights differ
// from step 10), and `learning_rate(.., step - resumed, ..)` in `Run::rate`.
#[test]
fn pitfall_49_a_resumed_run_equals_a_straight_one_bit_for_bit() {
    // Two of five anchors are drawn for each row and step.
    let drawn = json!({ "block_size": 3, "anchors_per_row": 2, "markov_rank": 2 });
    for (kind, family) in [
        (OptimizerKind::Adamw, "eagle3"),
        (OptimizerKind::Muon, "eagle3"),
        (OptimizerKind::Muon, "dspark"),
    ] {
        let mut world = World::new(40);
        world.optimizer.kind = kind;
        if family == "dspark" {
            world = world.with_family(family, drawn.clone());
        }
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (straight, spy) = world.train(a.path(), Resume::Fresh, None);
        assert!(matches!(straight, Ok(Outcome::Finished(_))), "{straight:?}");
        assert_eq!(spy.planned, Some(20));

        let (stopped, _) = world.train(b.path(), Resume::Fresh, Some(9));
        let Ok(Outcome::Interrupted(summary)) = stopped else {
            panic!("{stopped:?}");
        };
        assert_eq!((summary.step, summary.total), (9, 20));
        let (resumed, spy) = world.train(b.path(), Resume::Latest, None);
        assert!(matches!(resumed, Ok(Outcome::Finished(_))), "{resumed:?}");
        assert_eq!(spy.steps, (10..=20).collect::<Vec<_>>());

        assert_eq!(timeless(records(a.path())), timeless(records(b.path())));
        assert_same_weights(&step_folder(a.path(), 20), &step_folder(b.path(), 20));
        let losses: Vec<f64> = records(a.path()).iter().filter_map(|r| r.loss).collect();
        let (first, last) = (&losses[..3], &losses[17..]);
        // Twenty steps on random tokens show it under AdamW only.
        let learns = last.iter().sum::<f64>() < first.iter().sum::<f64>();
        assert!(learns || kind == OptimizerKind::Muon, "{losses:?}");
    }
}

// Seen red: `found.clear()` instead of `found.retain(..)` in `checkpoint::compare::all`.
#[test]
fn pitfall_49_changed_settings_are_refused_key_by_key() {
    let mut world = World::new(8);
    let folder = tempfile::tempdir().unwrap();
    world
        .train(folder.path(), Resume::Fresh, Some(2))
        .0
        .unwrap();
    world.optimizer.learning_rate = 1e-3;
    world.train.epochs = 2;
    world.train.keep_checkpoints = 3;
    world.rows[0].ids[4] ^= 1;
    let error = world
        .train(folder.path(), Resume::Latest, None)
        .0
        .unwrap_err();
    let TrainerError::SettingsChanged { differences, .. } = &error else {
        panic!("{error:?}");
    };
    let keys: Vec<&str> = differences.iter().map(|d| d.key.as_str()).collect();
    assert_eq!(
        keys,
        [
            "optimizer.learning_rate",
            "train.epochs",
            "rows of the training data (blake3)"
        ]
    );
    assert!(error.is_user_error());
    assert!(
        error
            .to_string()
            .contains("`train.epochs` is 2, expected 1"),
        "{error}"
    );
}

// Seen red: `step_in_epoch: 0` in `Plan::position`.
#[test]
fn pitfall_50_the_data_position_survives_a_resume_without_reading_what_is_skipped() {
    let mut world = World::new(20);
    world.train.epochs = 3;
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let straight = world.source();
    world
        .train_with(a.path(), Resume::Fresh, None, &straight, None)
        .0
        .unwrap();
    let first = world.source();
    world
        .train_with(b.path(), Resume::Fresh, Some(15), &first, None)
        .0
        .unwrap();
    let second = world.source();
    world
        .train_with(b.path(), Resume::Latest, None, &second, None)
        .0
        .unwrap();

    assert_eq!((first.taken().len(), second.taken().len()), (15, 15));
    let union = [first.taken(), second.taken()].concat();
    assert_eq!(union, straight.taken());
    let mut times = BTreeMap::new();
    for row in union.into_iter().flatten() {
        *times.entry(row).or_insert(0) += 1;
    }
    assert_eq!(
        times,
        (0..20).map(|row| (format!("row-{row}"), 3)).collect()
    );
}

// Seen red: `if left <= steps` in `Plan::position` (a step of epoch 1 is run again).
#[test]
fn pitfall_52_a_resume_after_an_epoch_starts_with_the_next() {
    let mut world = World::new(8);
    world.train.epochs = 3;
    let folder = tempfile::tempdir().unwrap();
    world
        .train(folder.path(), Resume::Fresh, Some(4))
        .0
        .unwrap();
    let (resumed, spy) = world.train(folder.path(), Resume::Latest, None);
    assert!(matches!(resumed, Ok(Outcome::Finished(s)) if s.step == 12));
    assert_eq!(spy.steps, (5..=12).collect::<Vec<_>>());
    let epochs: Vec<u64> = records(folder.path()).iter().map(|r| r.epoch).collect();
    assert_eq!(epochs, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
}

// Seen red: skipping the checksum loop in `read_state` (a cut file is taken).
#[test]
fn pitfall_53_resume_takes_the_newest_complete_checkpoint_and_names_the_others() {
    let world = World::new(20);
    let origin = tempfile::tempdir().unwrap();
    world.train(origin.path(), Resume::Fresh, None).0.unwrap();
    let expected = step_folder(origin.path(), 10);
    for file in [
        "drafter.safetensors",
        "drafter.json",
        "optimizer.bin",
        "state.json",
    ] {
        for cut in [true, false] {
            let copy = tempfile::tempdir().unwrap();
            copy_folder(origin.path(), copy.path());
            let newest = step_folder(copy.path(), 10);
            if cut {
                let bytes = fs::read(newest.join(file)).unwrap();
                fs::write(newest.join(file), &bytes[..bytes.len() / 2]).unwrap();
            } else {
                fs::remove_file(newest.join(file)).unwrap();
            }
            let leftover = copy.path().join("checkpoints/.step-000011.1.tmp");
            fs::create_dir_all(&leftover).unwrap();
            let (resumed, spy) = world.train(copy.path(), Resume::Latest, None);
            resumed.unwrap();
            assert_eq!(spy.steps, (6..=10).collect::<Vec<_>>(), "{file}");
            let told = spy.notices.join("\n");
            assert!(
                told.contains("step-000010`") && told.contains(file),
                "{told}"
            );
            assert!(
                told.contains(".step-000011.1.tmp") && !leftover.exists(),
                "{told}"
            );
            assert_same_weights(&newest, &expected);
        }
    }
}

// Seen red: `Resume::From` falling back to a fresh start when `resumed` fails.
#[test]
fn pitfall_54_a_resume_that_finds_nothing_usable_is_an_error() {
    let world = World::new(8);
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    fs::create_dir_all(&empty).unwrap();
    let fails = |world: &World, run: &str, from: &Path| {
        let run = folder.path().join(run);
        let error = world
            .train(&run, Resume::From(from.to_owned()), None)
            .0
            .unwrap_err();
        assert!(!run.exists(), "nothing is written");
        assert!(error.is_user_error() && error.hint().is_some());
        error.to_string()
    };
    let missing = folder.path().join("mistyped");
    let message = fails(&world, "a", &missing);
    assert!(
        message.contains("mistyped`: there is no such folder"),
        "{message}"
    );
    let message = fails(&world, "b", &empty);
    assert!(
        message.contains("empty`: it holds no checkpoint"),
        "{message}"
    );

    let other = folder.path().join("other");
    world.train(&other, Resume::Fresh, None).0.unwrap();
    let last = step_folder(&other, 4);
    let state = fs::read(last.join("state.json")).unwrap();
    fs::write(last.join("state.json"), "{").unwrap();
    let message = fails(&world, "c", &last);
    assert!(
        message.contains("state.json") && message.contains("JSON"),
        "{message}"
    );
    let message = fails(&world, "d", &other.join("checkpoints"));
    assert!(
        message.contains("holds no complete checkpoint"),
        "{message}"
    );
    fs::write(last.join("state.json"), state).unwrap();

    let mut changed = World::new(8);
    changed.card.target_fingerprint = "another".to_owned();
    let message = fails(&changed, "e", &last);
    assert!(
        message.contains("`drafter.json.target_fingerprint` is \"another\""),
        "{message}"
    );

    let error = world.train(&other, Resume::Fresh, None).0.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("already holds a run that reached step 4"),
        "{error}"
    );
}

// Seen red: not calling `event_file::forget_after` in `RunLog::open`. Not run yet: without
// `step <= completed` in `kept_lines`.
#[test]
fn pitfall_63_the_logs_hold_every_step_once_after_a_resume() {
    let world = World::new(80);
    let folder = tempfile::tempdir().unwrap();
    world
        .train(folder.path(), Resume::Fresh, Some(23))
        .0
        .unwrap();
    // As after a crash: the log is ahead of the newest checkpoint.
    fs::remove_dir_all(step_folder(folder.path(), 23)).unwrap();
    let (resumed, spy) = world.train(folder.path(), Resume::Latest, None);
    resumed.unwrap();
    assert_eq!(spy.steps.first(), Some(&21));
    let steps: Vec<u64> = records(folder.path()).iter().map(|r| r.step).collect();
    assert_eq!(steps, (1..=40).collect::<Vec<_>>());
    assert_eq!(events(folder.path(), "train/loss"), steps);
}

#[test]
fn the_best_checkpoint_is_the_one_with_the_highest_score_and_survives_pruning() {
    let mut world = World::new(24);
    world.train.checkpoint_every = 2;
    world.train.keep_checkpoints = 1;
    world.train.validate_every = 3;
    let folder = tempfile::tempdir().unwrap();
    let mut validator = Scores(vec![1.0, 3.0, f64::NAN, 2.0]);
    let source = world.source();
    let (outcome, _) = world.train_with(
        folder.path(),
        Resume::Fresh,
        None,
        &source,
        Some(&mut validator),
    );
    let Ok(Outcome::Finished(summary)) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(summary.best.map(|best| best.step), Some(6));
    let root = folder.path().join("checkpoints");
    let resolve = |pointer| checkpoint::resolve(&root, pointer).unwrap().unwrap();
    assert_eq!(resolve("best"), step_folder(folder.path(), 6));
    assert_eq!(resolve("latest"), step_folder(folder.path(), 12));
    let mut kept: Vec<_> = fs::read_dir(&root)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    kept.sort();
    assert_eq!(kept, ["best", "latest", "step-000006", "step-000012"]);
    assert_eq!(events(folder.path(), "validation/tau_gamma_5"), [3, 6, 12]);
}

// Red under: `record.loss` replaced by the validation's score in `Run::log`.
#[test]
fn pitfall_65_validation_never_reaches_the_training_figures() {
    let mut world = World::new(20);
    world.train.validate_every = 5;
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let source = world.source();
    let mut validator = Scores(vec![0.0, 0.0]);
    world
        .train_with(a.path(), Resume::Fresh, None, &source, Some(&mut validator))
        .0
        .unwrap();
    world.train(b.path(), Resume::Fresh, None).0.unwrap();
    let mut with = timeless(records(a.path()));
    for record in &mut with {
        record.validation = None;
    }
    assert_eq!(with, timeless(records(b.path())));
}

/// Pitfall 75: acceptance on held-out rows peaks at the third of six checkpoints while the loss goes on falling. The third
/// is the one that evaluation and export take, and every checkpoint's acceptance is in the log.
/// Red under: `new.score > best.score` in `Run` replaced by `true`.
#[test]
fn pitfall_75_the_best_checkpoint_is_that_of_acceptance_not_of_loss_or_the_last() {
    let mut world = World::new(24);
    world.train.checkpoint_every = 2;
    world.train.keep_checkpoints = 6;
    world.train.validate_every = 2;
    world.train.epochs = 3;
    world.optimizer.learning_rate = 1e-2;
    let scores = [1.1, 1.4, 1.9, 1.8, 1.6, 1.5].repeat(3);
    let folder = tempfile::tempdir().unwrap();
    let source = world.source();
    let mut validator = Scores(scores.clone());
    let outcome = world.train_with(
        folder.path(),
        Resume::Fresh,
        None,
        &source,
        Some(&mut validator),
    );
    outcome.0.unwrap();
    let records = records(folder.path());
    let losses: Vec<f64> = records.iter().filter_map(|record| record.loss).collect();
    let half = losses.len() / 2;
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&losses[half..]) < mean(&losses[..half]), "{losses:?}");
    let logged: Vec<f64> = records
        .iter()
        .filter_map(|record| record.validation.as_ref()?["tau_gamma_5"])
        .collect();
    assert_eq!(logged, scores[..logged.len()]);
    assert!(logged.len() >= 6);
    let root = folder.path().join("checkpoints");
    let best = checkpoint::resolve(&root, "best").unwrap().unwrap();
    assert_eq!(best, step_folder(folder.path(), 6));
}
