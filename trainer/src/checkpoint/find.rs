//! Which checkpoints a folder holds, and which of them are complete.

use std::path::{Path, PathBuf};

use draftsmith_models::error::ModelError;
use draftsmith_models::file;

use super::{FORMAT_VERSION, HASHED, RunState, STATE, hash};
use crate::error::TrainerError;

/// A checkpoint that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignored {
    /// Its folder.
    pub path: PathBuf,
    /// Why it is not complete.
    pub reason: String,
}

/// The checkpoints of a run.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The newest complete checkpoint.
    pub newest: Option<PathBuf>,
    /// Newer folders that are not complete, and what killed processes left.
    pub ignored: Vec<Ignored>,
}

/// Looks for the newest complete checkpoint below `root`; a missing `root` holds none.
///
/// # Errors
/// [`TrainerError::Model`] when `root` cannot be listed.
pub fn find(root: &Path) -> Result<Found, TrainerError> {
    let mut found = Found::default();
    for path in leftovers(root)? {
        let reason = "its writing was interrupted".to_owned();
        found.ignored.push(Ignored { path, reason });
    }
    for (_, path) in step_folders(root)?.into_iter().rev() {
        match read_state(&path) {
            Ok(_) => {
                found.newest = Some(path);
                break;
            }
            Err(error) => found.ignored.push(Ignored {
                path,
                reason: described(&error),
            }),
        }
    }
    Ok(found)
}

/// The message of an error with those of its causes.
fn described(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Reads `state.json` of a checkpoint and checks the other files against their checksums.
///
/// # Errors
/// [`TrainerError`] naming the file that is missing, damaged or of another version.
pub fn read_state(folder: &Path) -> Result<RunState, TrainerError> {
    let path = folder.join(STATE);
    let state: RunState = file::read_json(&path)?;
    if state.format_version != FORMAT_VERSION {
        let found = state.format_version;
        let reason = format!("format version {found}, expected {FORMAT_VERSION}");
        return Err(ModelError::malformed(path, "run state", reason).into());
    }
    for name in HASHED {
        let path = folder.join(name);
        if Some(&hash(&file::read(&path)?)) != state.files.get(name) {
            let reason = "its checksum differs from the one in `state.json`";
            return Err(ModelError::malformed(path, "checkpoint file", reason).into());
        }
    }
    Ok(state)
}

/// The checkpoint a pointer ([`super::LATEST`], [`super::BEST`]) names, if the pointer exists.
///
/// # Errors
/// [`TrainerError`] when the pointer cannot be read or names something that is no checkpoint.
pub fn resolve(root: &Path, pointer: &str) -> Result<Option<PathBuf>, TrainerError> {
    let path = root.join(pointer);
    if !path.exists() {
        return Ok(None);
    }
    let text = file::read_text(&path)?;
    let name = text.trim_end();
    if step_of(name).is_none() {
        let reason = format!("it names `{name}`, expected a folder `step-<number>`");
        return Err(ModelError::malformed(path, "checkpoint pointer", reason).into());
    }
    Ok(Some(root.join(name)))
}

/// Folders under final names, by step ascending.
pub(super) fn step_folders(root: &Path) -> Result<Vec<(u64, PathBuf)>, TrainerError> {
    let mut folders: Vec<(u64, PathBuf)> = entries(root)?
        .into_iter()
        .filter_map(|path| Some((step_of(&name_of(&path))?, path)))
        .collect();
    folders.sort();
    Ok(folders)
}

/// Folders under temporary names.
pub(super) fn leftovers(root: &Path) -> Result<Vec<PathBuf>, TrainerError> {
    let mut folders = entries(root)?;
    folders.retain(|path| {
        let is_temporary = path.extension().is_some_and(|extension| extension == "tmp");
        is_temporary && name_of(path).starts_with(".step-")
    });
    folders.sort();
    Ok(folders)
}

fn entries(root: &Path) -> Result<Vec<PathBuf>, TrainerError> {
    if !root.exists() {
        return Ok(Vec::new());
    }
    let list = || -> std::io::Result<Vec<PathBuf>> {
        fs_err::read_dir(root)?
            .map(|entry| Ok(entry?.path()))
            .collect()
    };
    let mut paths = list().map_err(|e| ModelError::io(root, e))?;
    paths.retain(|path| path.is_dir());
    Ok(paths)
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The step of a folder name `step-<number>`.
pub(super) fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}
