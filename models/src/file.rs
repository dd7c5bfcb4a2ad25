//! Files that are either whole or absent: written under a temporary name, synced, renamed.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::ModelError;

/// Writes `bytes` to `path` so that a crash at any moment leaves the old file or the new one.
///
/// # Errors
/// [`ModelError::Io`] naming `path`; no temporary file stays behind when the write itself fails.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), ModelError> {
    write_atomic_with(path, |file| file.write_all(bytes))
}

/// Like [`write_atomic`], for content that is produced piece by piece.
///
/// # Errors
/// [`ModelError::Io`] naming `path`.
pub fn write_atomic_with(
    path: &Path,
    write: impl FnOnce(&mut std::io::BufWriter<fs_err::File>) -> std::io::Result<()>,
) -> Result<(), ModelError> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    fs_err::create_dir_all(parent).map_err(|e| ModelError::io(parent, e))?;
    let temporary = temporary_name(path);
    let result = (|| {
        let mut file = std::io::BufWriter::new(fs_err::File::create(&temporary)?);
        write(&mut file)?;
        file.flush()?;
        file.get_ref().sync_all()?;
        fs_err::rename(&temporary, path)?;
        sync_folder(parent)
    })();
    result.map_err(|e| {
        // The write already failed; a left-over temporary file is the lesser evil.
        let _ignored = fs_err::remove_file(&temporary);
        ModelError::io(path, e)
    })
}

/// Makes the entries of a folder (new names, renames) durable.
///
/// # Errors
/// The operating system's error.
pub fn sync_folder(folder: &Path) -> std::io::Result<()> {
    fs_err::File::open(folder)?.sync_all()
}

/// The name under which a file is written before it is renamed; ends in `.tmp`.
pub fn temporary_name(path: &Path) -> PathBuf {
    let name = path
        .file_name()
        .map_or_else(Default::default, |n| n.to_string_lossy().into_owned());
    path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
}

/// Reads a whole file.
///
/// # Errors
/// [`ModelError::Io`] naming `path`.
pub fn read(path: &Path) -> Result<Vec<u8>, ModelError> {
    fs_err::read(path).map_err(|e| ModelError::io(path, e))
}

/// Reads a UTF-8 text file.
///
/// # Errors
/// [`ModelError::Io`] naming `path`, or [`ModelError::Malformed`] when it is not UTF-8.
pub fn read_text(path: &Path) -> Result<String, ModelError> {
    String::from_utf8(read(path)?).map_err(|e| ModelError::malformed(path, "UTF-8 text file", e))
}

/// Reads a JSON file into `T`.
///
/// # Errors
/// [`ModelError::Io`] or [`ModelError::Malformed`] with line and column.
pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    serde_json::from_str(&read_text(path)?).map_err(|e| ModelError::malformed(path, "JSON file", e))
}

/// Writes `value` as indented JSON with a final newline, atomically.
///
/// # Errors
/// [`ModelError::Io`] naming `path`.
pub fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> Result<(), ModelError> {
    let mut text = serde_json::to_vec_pretty(value)
        .map_err(|e| ModelError::malformed(path, "JSON value", e))?;
    text.push(b'\n');
    write_atomic(path, &text)
}
