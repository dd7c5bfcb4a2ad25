//! Checkpoints to resume from, and the finished model folder.

use std::path::{Path, PathBuf};

use burn::optim::ModuleOptimizer;
use burn::tensor::Device;
use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::target::TargetSpec;
use draftsmith_models::weights::{WeightFolder, write_safetensors};
use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use super::State;
use super::model::{Source, TinyLlama};
use super::settings;

/// `state.json`, written last: it names files that are already whole.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    step: usize,
    weights: String,
    optimizer: String,
}

/// A checkpoint on disk.
#[derive(Debug)]
pub(crate) struct Found {
    folder: PathBuf,
    manifest: Manifest,
}

/// The checkpoint of a run folder, if there is one.
pub(crate) fn latest(folder: &Path) -> Result<Option<Found>, ModelError> {
    let path = folder.join("state.json");
    if !path.exists() {
        return Ok(None);
    }
    Ok(Some(Found {
        folder: folder.to_owned(),
        manifest: file::read_json(&path)?,
    }))
}

impl Found {
    /// Loads weights and moments.
    pub(crate) fn load(
        &self,
        spec: TargetSpec,
        optimizer: ModuleOptimizer,
        device: &Device,
    ) -> Result<State, ModelError> {
        let weights = WeightFolder::open_file(&self.folder.join(&self.manifest.weights))?;
        let model = TinyLlama::new(spec, &Source::Weights(&weights), device)?;
        let path = self.folder.join(&self.manifest.optimizer);
        let optimizer = optimizer
            .load(&path)
            .map_err(|e| ModelError::malformed(&path, "optimizer state", format!("{e:?}")))?;
        Ok(State {
            model,
            optimizer,
            step: self.manifest.step,
        })
    }
}

/// Writes weights and moments, then the manifest, then removes the files of the previous checkpoint.
pub(crate) fn save(state: &State, folder: &Path) -> Result<(), ModelError> {
    let previous = latest(folder)?;
    let manifest = Manifest {
        step: state.step,
        weights: format!("weights-{:06}.safetensors", state.step),
        optimizer: format!("optimizer-{:06}.bpk", state.step),
    };
    write_safetensors(
        &folder.join(&manifest.weights),
        &state.model.to_tensors(Dtype::F32),
        &[],
    )?;
    let path = folder.join(&manifest.optimizer);
    let bytes = state
        .optimizer
        .into_bytes()
        .map_err(|e| ModelError::malformed(&path, "optimizer state", format!("{e:?}")))?;
    file::write_atomic(&path, &bytes)?;
    file::write_json(&folder.join("state.json"), &manifest)?;
    if let Some(old) = previous.filter(|old| old.manifest.step != state.step) {
        for name in [&old.manifest.weights, &old.manifest.optimizer] {
            // A file that is already gone is what we want.
            let _ignored = fs_err::remove_file(folder.join(name));
        }
    }
    Ok(())
}

/// Writes the model folder: configuration and bf16 weights.
pub(crate) fn export(model: &TinyLlama, folder: &Path) -> Result<(), ModelError> {
    file::write_json(&folder.join("config.json"), &settings::model_config())?;
    file::write_json(
        &folder.join("generation_config.json"),
        &settings::generation_config(),
    )?;
    write_safetensors(
        &folder.join("model.safetensors"),
        &model.to_tensors(Dtype::BF16),
        &[],
    )
}
