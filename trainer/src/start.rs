//! Where a run starts: at its first step, or at a checkpoint that fits it.

use std::path::Path;

use draftsmith_models::drafter::AnyDrafter;

use crate::checkpoint::{self, Found, Identity, Restored, RunState};
use crate::error::TrainerError;
use crate::observe::Observer;
use crate::optimizer::optimizer;
use crate::order::Position;
use crate::run::{Parts, Resume, RunSettings};

/// The drafter, optimizer and state a run begins with. Writes nothing.
pub(crate) fn start(
    settings: &RunSettings<'_>,
    identity: &Identity,
    parts: &mut Parts<'_>,
) -> Result<Restored, TrainerError> {
    let root = settings.folder.join(checkpoint::FOLDER);
    match &settings.resume {
        Resume::Fresh => {
            refuse_existing_run(&root)?;
            Ok(fresh(settings, identity, parts.drafter.clone()))
        }
        Resume::Latest => resumed(&root, settings, identity, parts),
        Resume::From(folder) => resumed(folder, settings, identity, parts),
    }
}

fn refuse_existing_run(root: &Path) -> Result<(), TrainerError> {
    match checkpoint::find(root)?.newest {
        None => Ok(()),
        Some(newest) => Err(TrainerError::RunExists {
            path: root.to_owned(),
            step: checkpoint::read_state(&newest)?.step,
        }),
    }
}

fn fresh(settings: &RunSettings<'_>, identity: &Identity, drafter: AnyDrafter) -> Restored {
    let position = Position {
        epoch: 0,
        step_in_epoch: 0,
    };
    Restored {
        optimizer: optimizer(settings.optimizer, &drafter),
        state: RunState::new(identity, settings.train.seed, 0, position),
        drafter,
    }
}

fn resumed(
    folder: &Path,
    settings: &RunSettings<'_>,
    identity: &Identity,
    parts: &mut Parts<'_>,
) -> Result<Restored, TrainerError> {
    let checkpoint = if checkpoint::is_checkpoint(folder) {
        folder.to_owned()
    } else {
        newest(folder, parts.observer)?
    };
    let restored =
        checkpoint::restore(&checkpoint, identity, parts.ends, parts.device, |drafter| {
            optimizer(settings.optimizer, drafter)
        })?;
    parts.observer.notice(&format!(
        "continuing after step {} from `{}`",
        restored.state.step,
        checkpoint.display()
    ));
    Ok(restored)
}

fn newest(folder: &Path, observer: &mut dyn Observer) -> Result<std::path::PathBuf, TrainerError> {
    let nothing = |reason: String| TrainerError::Resume {
        path: folder.to_owned(),
        reason,
    };
    if !folder.exists() {
        return Err(nothing("there is no such folder".to_owned()));
    }
    let Found { newest, ignored } = checkpoint::find(folder)?;
    for ignored in &ignored {
        observer.notice(&format!(
            "ignoring the incomplete checkpoint `{}`: {}",
            ignored.path.display(),
            ignored.reason
        ));
    }
    newest.ok_or_else(|| match ignored.last() {
        None => nothing("it holds no checkpoint".to_owned()),
        Some(last) => nothing(format!(
            "it holds no complete checkpoint; `{}`: {}",
            last.path.display(),
            last.reason
        )),
    })
}
