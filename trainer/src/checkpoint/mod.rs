//! Checkpoints: `step-000400/{drafter.safetensors, drafter.json, optimizer.bin, state.json}`.
//!
//! A checkpoint is written under a temporary name, synced and renamed, and names the checksums of its
//! files in `state.json`: a folder under its final name is complete, or it is not taken. Everything
//! random in a run is a pure function of (seed, step), so no generator state is stored.

mod compare;
mod find;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, Device};
use draftsmith_models::checkpoint::{self as drafter_files, DrafterCard};
use draftsmith_models::drafter::AnyDrafter;
use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::target::TargetEnds;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use compare::{Difference, differences};
pub use find::{Found, Ignored, find, read_state, resolve};

use crate::error::TrainerError;
use crate::order::Position;

/// Version of `state.json`; readers refuse others.
pub const FORMAT_VERSION: u32 = 1;
/// Folder of all checkpoints in a run folder.
pub const FOLDER: &str = "checkpoints";
/// Name of the pointer to the newest checkpoint.
pub const LATEST: &str = "latest";
/// Name of the pointer to the checkpoint with the best validation score.
pub const BEST: &str = "best";

const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer.bin";
const HASHED: [&str; 3] = ["drafter.safetensors", "drafter.json", OPTIMIZER];

/// Everything of a run that is neither parameter nor optimizer moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Version of this format.
    pub format_version: u32,
    /// Finished optimizer steps.
    pub step: u64,
    /// Pass over the data of the next step, from 0.
    pub epoch: u64,
    /// Steps already taken in that pass.
    pub step_in_epoch: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Sums since the first step.
    pub counters: Counters,
    /// Best validation so far.
    pub best: Option<Best>,
    /// The resolved settings.
    pub config: Value,
    /// blake3 of the settings as compact JSON, hex.
    pub config_blake3: String,
    /// blake3 over all training rows, hex.
    pub rows_blake3: String,
    /// blake3 of the other files by name, hex.
    pub files: BTreeMap<String, String>,
}

/// Sums since the first step of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counters {
    /// Real tokens trained on.
    pub tokens: u64,
    /// Slots trained on.
    pub slots: u64,
    /// Micro-batches without a slot.
    pub empty_batches: u64,
    /// Steps without any slot.
    pub empty_steps: u64,
    /// Steps without an update because the gradient was not finite.
    pub skipped_steps: u64,
    /// How many of the latest steps were skipped one after another.
    pub consecutive_skips: u64,
}

/// The best validation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Step after which it was measured.
    pub step: u64,
    /// Its score.
    pub score: f64,
}

/// What a run must have in common with a checkpoint to continue it.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The resolved settings.
    pub config: Value,
    /// blake3 over all training rows, hex.
    pub rows_blake3: String,
    /// Description of the drafter; its step and checksum are not compared.
    pub card: DrafterCard,
}

impl RunState {
    /// The state after `step` steps; `files` is filled in when it is saved.
    pub fn new(identity: &Identity, seed: u64, step: u64, position: Position) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            step,
            epoch: position.epoch,
            step_in_epoch: position.step_in_epoch,
            seed,
            counters: Counters::default(),
            best: None,
            config_blake3: hash(identity.config.to_string().as_bytes()),
            config: identity.config.clone(),
            rows_blake3: identity.rows_blake3.clone(),
            files: BTreeMap::new(),
        }
    }
}

/// Whether `folder` is named like a checkpoint, complete or not.
pub fn is_checkpoint(folder: &Path) -> bool {
    let name = folder.file_name().unwrap_or_default();
    folder.join(STATE).exists() || find::step_of(&name.to_string_lossy()).is_some()
}

/// Name of the checkpoint of a step.
pub fn name(step: u64) -> String {
    format!("step-{step:06}")
}

/// Writes a checkpoint below `root` and moves the pointer [`LATEST`] to it.
///
/// # Errors
/// [`TrainerError`] when a parameter is not finite or a file cannot be written; earlier checkpoints
/// stay as they are.
pub fn save(
    root: &Path,
    drafter: &AnyDrafter,
    optimizer: &ModuleOptimizer,
    card: &DrafterCard,
    mut state: RunState,
) -> Result<PathBuf, TrainerError> {
    let folder = root.join(name(state.step));
    let temporary = file::temporary_name(&folder);
    remove_folder(&temporary)?;
    drafter_files::save(&temporary, drafter, card.clone())?;
    let path = temporary.join(OPTIMIZER);
    let bytes = optimizer
        .into_bytes()
        .map_err(|e| optimizer_error(&path, e))?;
    file::write_atomic(&path, &bytes)?;
    for name in HASHED {
        let digest = hash(&file::read(&temporary.join(name))?);
        state.files.insert(name.to_owned(), digest);
    }
    file::write_json(&temporary.join(STATE), &state)?;
    // A folder of this name is one that a resume has just found incomplete.
    remove_folder(&folder)?;
    fs_err::rename(&temporary, &folder).map_err(|e| ModelError::io(&folder, e))?;
    file::sync_folder(root).map_err(|e| ModelError::io(root, e))?;
    point(root, LATEST, state.step)?;
    Ok(folder)
}

/// Moves a pointer to the checkpoint of a step.
///
/// # Errors
/// [`TrainerError::Model`] naming the pointer.
pub fn point(root: &Path, pointer: &str, step: u64) -> Result<(), TrainerError> {
    let text = format!("{}\n", name(step));
    Ok(file::write_atomic(&root.join(pointer), text.as_bytes())?)
}

/// Removes all but the newest `keep` checkpoints and the best one.
///
/// # Errors
/// [`TrainerError::Model`] naming the folder that cannot be removed.
pub fn prune(root: &Path, keep: usize, best: Option<u64>) -> Result<(), TrainerError> {
    let folders = find::step_folders(root)?;
    let surplus = folders.len().saturating_sub(keep);
    for (step, folder) in &folders[..surplus] {
        if best != Some(*step) {
            remove_folder(folder)?;
        }
    }
    Ok(())
}

/// Removes what a killed process left under temporary names.
///
/// # Errors
/// [`TrainerError::Model`] naming the folder that cannot be removed.
pub fn remove_leftovers(root: &Path) -> Result<(), TrainerError> {
    find::leftovers(root)?
        .iter()
        .try_for_each(|folder| remove_folder(folder))
}

/// A checkpoint in memory.
pub struct Restored {
    /// The drafter, on the device it was asked for.
    pub drafter: AnyDrafter,
    /// The optimizer with its moments.
    pub optimizer: ModuleOptimizer,
    /// Position, counters and settings.
    pub state: RunState,
}

impl std::fmt::Debug for Restored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restored")
            .field("drafter", &self.drafter.family())
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// Restores the complete checkpoint in `folder`; `optimizer` makes an optimizer for a drafter.
///
/// # Errors
/// [`TrainerError`] when a file is damaged, the family is another, or settings or rows differ.
pub fn restore(
    folder: &Path,
    identity: &Identity,
    ends: &TargetEnds,
    device: &Device,
    optimizer: impl FnOnce(&AnyDrafter) -> ModuleOptimizer,
) -> Result<Restored, TrainerError> {
    let state = read_state(folder)?;
    let card = drafter_files::load_card(folder)?;
    refuse_another_family(folder, &card, &identity.card)?;
    let differences = compare::all(&state, &card, identity)?;
    if !differences.is_empty() {
        return Err(TrainerError::SettingsChanged {
            path: folder.to_owned(),
            differences,
        });
    }
    let (drafter, _) = drafter_files::load(folder, ends, device)?;
    let path = folder.join(OPTIMIZER);
    let bytes = Bytes::from_bytes_vec(file::read(&path)?);
    let optimizer = optimizer(&drafter)
        .from_bytes(bytes)
        .map_err(|e| optimizer_error(&path, e))?;
    Ok(Restored {
        drafter,
        optimizer,
        state,
    })
}

fn refuse_another_family(
    folder: &Path,
    found: &DrafterCard,
    expected: &DrafterCard,
) -> Result<(), TrainerError> {
    let (found, expected) = (found.drafter.family(), expected.drafter.family());
    if found == expected {
        return Ok(());
    }
    Err(TrainerError::Resume {
        path: folder.to_owned(),
        reason: format!("it is a checkpoint of family `{found}`, expected `{expected}`"),
    })
}

fn optimizer_error(path: &Path, error: impl std::fmt::Display) -> TrainerError {
    TrainerError::OptimizerState {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

fn remove_folder(folder: &Path) -> Result<(), TrainerError> {
    match fs_err::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(ModelError::io(folder, error).into())
        }
        _ => Ok(()),
    }
}

fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}
