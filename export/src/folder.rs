//! Export folders that are complete or absent.

use std::path::{Path, PathBuf};

use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::weights::write_safetensors;

use crate::Layout;
use crate::error::ExportError;

/// The configuration file of an export.
pub const CONFIG: &str = "config.json";
/// The weights of an export.
pub const WEIGHTS: &str = "model.safetensors";

/// Refuses a place that holds any entry but those of an earlier export.
///
/// # Errors
/// [`ExportError::OutTaken`] naming the entry that is in the way.
pub fn check_replaceable(out: &Path, own: &[impl AsRef<str>]) -> Result<(), ExportError> {
    if !out.exists() {
        return Ok(());
    }
    let io = |source| ModelError::io(out, source);
    for entry in fs_err::read_dir(out).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        let name = name.to_string_lossy();
        if own.iter().all(|own| own.as_ref() != name) {
            return Err(ExportError::OutTaken {
                path: out.to_owned(),
                found: name.into_owned(),
            });
        }
    }
    Ok(())
}

/// Lets `fill` write the files into a folder beside `out` under a temporary name, then puts it in place.
///
/// # Errors
/// The error of `fill`, or [`ModelError::Io`] naming the path; a temporary folder does not stay behind.
pub fn write(
    out: &Path,
    fill: impl FnOnce(&Path) -> Result<(), ExportError>,
) -> Result<(), ExportError> {
    let staging = file::temporary_name(out);
    remove_if_present(&staging)?;
    let result = fill(&staging).and_then(|()| put_in_place(&staging, out));
    if result.is_err() {
        // The write already failed; a left-over temporary folder is the lesser evil.
        let _ignored = fs_err::remove_dir_all(&staging);
    }
    result
}

/// Writes configuration and weights of a layout into `staging`.
pub(crate) fn fill(staging: &Path, layout: &Layout) -> Result<(), ExportError> {
    write_safetensors(&staging.join(WEIGHTS), &layout.tensors, &[])?;
    file::write_json(&staging.join(CONFIG), &layout.config)?;
    Ok(())
}

/// A folder cannot be renamed over a full one, so an earlier export steps aside first; a crash
/// between the two renames leaves no folder at `out`, never a mixed one.
fn put_in_place(staging: &Path, out: &Path) -> Result<(), ExportError> {
    let io = |source| ModelError::io(out, source);
    let old = old_name(out);
    remove_if_present(&old)?;
    if out.exists() {
        fs_err::rename(out, &old).map_err(io)?;
    }
    fs_err::rename(staging, out).map_err(io)?;
    if let Some(parent) = out.parent().filter(|path| !path.as_os_str().is_empty()) {
        file::sync_folder(parent).map_err(io)?;
    }
    remove_if_present(&old)
}

fn remove_if_present(folder: &Path) -> Result<(), ExportError> {
    if folder.exists() {
        fs_err::remove_dir_all(folder).map_err(|source| ModelError::io(folder, source))?;
    }
    Ok(())
}

fn old_name(out: &Path) -> PathBuf {
    file::temporary_name(out).with_extension("old")
}
