//! Identity of a target: which weights, configuration, tokenizer and template produced some data.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::error::ModelError;
use crate::file;

/// Version of the memory, and of what is hashed and how.
const FORMAT_VERSION: u32 = 1;

/// Files of a model folder that belong to its identity, beside the weights.
const TEXT_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// The blake3 hash (hex) over configuration, tokenizer, template and all weight files of a folder.
///
/// Every file is read through, whole weights included.
///
/// # Errors
/// [`ModelError::Io`] naming the file that cannot be read.
pub fn target_fingerprint(folder: &Path) -> Result<String, ModelError> {
    let mut hasher = blake3::Hasher::new();
    for name in identity_files(folder)? {
        hash_file(&mut hasher, &name, &folder.join(&name))?;
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// [`target_fingerprint`], remembered in the file `memory` for as long as no file of the folder changes
/// its path, size or time of modification.
///
/// Reading a target of many gigabytes takes as long as loading it. A memory that cannot be read or
/// written costs that time again and nothing else.
///
/// # Errors
/// As [`target_fingerprint`].
pub fn remembered_fingerprint(folder: &Path, memory: &Path) -> Result<String, ModelError> {
    let files = file_states(folder)?;
    if let Ok(known) = file::read_json::<Memory>(memory)
        && known.format_version == FORMAT_VERSION
        && known.files == files
    {
        return Ok(known.fingerprint);
    }
    let fingerprint = target_fingerprint(folder)?;
    let known = Memory {
        format_version: FORMAT_VERSION,
        files,
        fingerprint,
    };
    let _is_remembered = file::write_json(memory, &known).is_ok();
    Ok(known.fingerprint)
}

#[derive(Debug, Serialize, Deserialize)]
struct Memory {
    format_version: u32,
    files: Vec<FileState>,
    fingerprint: String,
}

/// What changes when a file changes.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileState {
    path: PathBuf,
    bytes: u64,
    modified: SystemTime,
}

fn file_states(folder: &Path) -> Result<Vec<FileState>, ModelError> {
    let state = |name: String| {
        let path = folder.join(name);
        let failed = |e| ModelError::io(&path, e);
        let found = fs_err::metadata(&path).map_err(failed)?;
        Ok(FileState {
            bytes: found.len(),
            modified: found.modified().map_err(failed)?,
            path: fs_err::canonicalize(&path).map_err(failed)?,
        })
    };
    identity_files(folder)?.into_iter().map(state).collect()
}

/// Names of the files that make the identity, in the order they are hashed.
fn identity_files(folder: &Path) -> Result<Vec<String>, ModelError> {
    let present = |name: &&str| folder.join(name).exists();
    let texts = TEXT_FILES.iter().copied().filter(present);
    let mut names: Vec<String> = texts.map(str::to_owned).collect();
    names.extend(weight_files(folder)?);
    Ok(names)
}

fn hash_file(hasher: &mut blake3::Hasher, name: &str, path: &Path) -> Result<(), ModelError> {
    let failed = |e| ModelError::io(path, e);
    let file = fs_err::File::open(path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    hasher.update(name.as_bytes());
    hasher.update(&len.to_le_bytes());
    // Piece by piece: the weights may be larger than the memory.
    hasher.update_reader(file).map_err(failed)?;
    Ok(())
}

/// Names of the safetensors files of a folder, sorted.
///
/// # Errors
/// [`ModelError::Io`] when the folder cannot be listed.
pub fn weight_files(folder: &Path) -> Result<Vec<String>, ModelError> {
    let mut names = Vec::new();
    for entry in fs_err::read_dir(folder).map_err(|e| ModelError::io(folder, e))? {
        let entry = entry.map_err(|e| ModelError::io(folder, e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red with the comparison of the file states replaced by `true`.
    #[test]
    fn a_changed_file_is_hashed_again_and_an_unchanged_one_is_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("memory.json");
        let model = folder.path().join("model");
        fs_err::create_dir(&model).unwrap();
        fs_err::write(model.join("config.json"), "{}").unwrap();
        fs_err::write(model.join("model.safetensors"), "one").unwrap();
        let recall = || remembered_fingerprint(&model, &memory).unwrap();
        let first = recall();
        assert_eq!(first, target_fingerprint(&model).unwrap());

        let known = fs_err::read_to_string(&memory).unwrap();
        fs_err::write(&memory, known.replace(&first, "remembered")).unwrap();
        assert_eq!(recall(), "remembered");

        fs_err::write(model.join("model.safetensors"), "other").unwrap();
        assert_eq!(recall(), target_fingerprint(&model).unwrap());
        fs_err::write(&memory, "not JSON").unwrap();
        assert_eq!(recall(), target_fingerprint(&model).unwrap());
    }
}
