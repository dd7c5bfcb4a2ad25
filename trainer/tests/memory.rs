//! Memory of a long run.
#![expect(clippy::unwrap_used, reason = "a test may panic")]
#![cfg(target_os = "linux")]

mod common;

use common::World;
use draftsmith_trainer::Resume;
use draftsmith_trainer::observe::{Observer, Progress};

fn resident_kilobytes() -> u64 {
    let status = fs_err::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Runs in its own test binary, so that no other test allocates meanwhile.
//
// It sees growth of more than about 15 KB a step only: with these tiny tensors it stayed green when
// `Learner::micro_batch` dropped a second forward pass or forgot its hidden rows. Larger tensors are needed.
#[test]
fn memory_is_flat_over_two_hundred_steps() {
    struct Watch(Vec<u64>);
    impl Observer for Watch {
        fn step(&mut self, progress: &Progress) {
            if progress.step.is_multiple_of(50) {
                self.0.push(resident_kilobytes());
            }
        }
    }
    let mut world = World::new(50);
    world.train.epochs = 10;
    world.train.checkpoint_every = 0;
    let folder = tempfile::tempdir().unwrap();
    let mut watch = Watch(Vec::new());
    draftsmith_trainer::train(
        draftsmith_trainer::RunSettings {
            optimizer: &world.optimizer,
            train: &world.train,
            objective: &world.objective,
            log: &world.log,
            resolved: world.resolved(),
            folder: folder.path(),
            resume: Resume::Fresh,
        },
        draftsmith_trainer::Parts {
            drafter: world.drafter(),
            card: &world.card,
            ends: world.target.ends(),
            device: &world.device,
            rows: &world.rows,
            source: &world.source(),
            validator: None,
            observer: &mut watch,
            interrupter: draftsmith_trainer::Interrupter::new(),
        },
    )
    .unwrap();
    let (early, late) = (watch.0[0], watch.0[4]);
    // One kept graph of this model is about 60 KB: 200 of them would be 12 MB.
    assert!(
        late < early + 3000,
        "kilobytes after 50, 100, .. steps: {:?}",
        watch.0
    );
}
