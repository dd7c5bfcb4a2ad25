//! A training process killed in the middle of anything continues bit for bit.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{World, assert_same_weights, events, records, timeless};
use draftsmith_trainer::{Outcome, Resume, checkpoint};

const FOLDER: &str = "DRAFTSMITH_TEST_KILL_FOLDER";
const STEPS: u64 = 60;

fn world() -> World {
    let mut world = World::new(2 * STEPS as usize);
    // A checkpoint after every step: most moments are in the middle of saving.
    world.train.checkpoint_every = 1;
    world.train.keep_checkpoints = 3;
    world
}

/// Starts or continues the run in this folder.
fn advance(folder: &Path) -> Outcome {
    let found = checkpoint::find(&folder.join("checkpoints")).unwrap();
    let resume = match found.newest {
        Some(_) => Resume::Latest,
        None => Resume::Fresh,
    };
    world().train(folder, resume, None).0.unwrap()
}

#[test]
#[ignore = "the child process of the test below"]
fn child() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        advance(&PathBuf::from(folder));
    }
}

fn spawn(folder: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored"])
        .env(FOLDER, folder)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

fn newest_step(folder: &Path) -> u64 {
    let found = checkpoint::find(&folder.join("checkpoints")).unwrap();
    found
        .newest
        .map_or(0, |path| checkpoint::read_state(&path).unwrap().step)
}

// Red under: without `step <= completed` in `kept_lines` (lines of repeated steps stay).
#[test]
fn pitfall_53_a_run_killed_ten_times_equals_an_undisturbed_one() {
    let straight = tempfile::tempdir().unwrap();
    assert!(matches!(advance(straight.path()), Outcome::Finished(_)));

    let folder = tempfile::tempdir().unwrap();
    let mut kills = 0;
    while kills < 10 {
        let before = newest_step(folder.path());
        if before + 5 > STEPS {
            break;
        }
        let mut child = spawn(folder.path());
        let begin = Instant::now();
        // Wait for progress, then a little longer, each time another moment.
        while newest_step(folder.path()) < before + 2 && begin.elapsed() < Duration::from_mins(1) {
            sleep(Duration::from_millis(1));
        }
        sleep(Duration::from_micros(700 * kills));
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
    }
    assert!(kills >= 3, "the run was too fast to be killed: {kills}");
    assert!(matches!(advance(folder.path()), Outcome::Finished(_)));

    assert_eq!(
        timeless(records(folder.path())),
        timeless(records(straight.path()))
    );
    let last = |folder: &Path| folder.join("checkpoints").join(checkpoint::name(STEPS));
    assert_same_weights(&last(folder.path()), &last(straight.path()));
    assert_eq!(
        events(folder.path(), "train/loss"),
        (1..=STEPS).collect::<Vec<_>>()
    );
}
