//! Identity of a target: which weights, configuration, tokenizer and template produced some data.

use std::path::Path;

use crate::error::ModelError;

/// Files of a model folder that belong to its identity, beside the weights.
const TEXT_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// The blake3 hash (hex) over configuration, tokenizer, template and all weight files of a folder.
///
/// Every file is read through, whole weights included; a caller that needs the hash twice keeps it.
///
/// # Errors
/// [`ModelError::Io`] naming the file that cannot be read.
pub fn target_fingerprint(folder: &Path) -> Result<String, ModelError> {
    let mut hasher = blake3::Hasher::new();
    for name in TEXT_FILES {
        let path = folder.join(name);
        if path.exists() {
            hash_file(&mut hasher, name, &path)?;
        }
    }
    for name in weight_files(folder)? {
        hash_file(&mut hasher, &name, &folder.join(&name))?;
    }
    Ok(hasher.finalize().to_hex().to_string())
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
