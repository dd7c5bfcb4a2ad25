//! Opening a GGUF file that lies on disk by itself or inside a zip archive such as a Python wheel.

use std::io::{BufReader, Cursor, Read, Seek};
use std::path::{Path, PathBuf};

use draftsmith_models::error::ModelError;
use zip::ZipArchive;

use crate::error::DataError;

/// A reader that can jump.
pub(super) trait ReadSeek: Read + Seek {}

impl<T: Read + Seek> ReadSeek for T {}

/// An opened GGUF file.
pub(super) struct GgufSource {
    /// Positioned at its first byte.
    pub(super) reader: Box<dyn ReadSeek>,
    /// The file or archive, for messages.
    pub(super) path: PathBuf,
    /// Name of the GGUF file itself.
    pub(super) name: String,
}

/// Opens `source` by its first bytes, not by its name.
///
/// # Errors
/// [`DataError`] when it cannot be read, is of another kind, or does not hold exactly one GGUF file.
pub(super) fn open(source: &Path) -> Result<GgufSource, DataError> {
    let mut file = fs_err::File::open(source).map_err(|e| DataError::io(source, e))?;
    let mut magic = [0_u8; 4];
    let filled = file
        .read(&mut magic)
        .map_err(|e| DataError::io(source, e))?;
    file.rewind().map_err(|e| DataError::io(source, e))?;
    match &magic[..filled] {
        b"GGUF" => Ok(GgufSource {
            reader: Box::new(BufReader::new(file)),
            path: source.to_owned(),
            name: file_name(source),
        }),
        b"PK\x03\x04" => from_archive(source, file),
        _ => Err(ModelError::malformed(
            source,
            "GGUF file or archive that carries one",
            "its first bytes are neither `GGUF` nor those of a zip archive",
        )
        .into()),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn from_archive(source: &Path, file: fs_err::File) -> Result<GgufSource, DataError> {
    let malformed = |e: zip::result::ZipError| ModelError::malformed(source, "zip archive", e);
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(malformed)?;
    let mut found = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index(index).map_err(malformed)?;
        let name = entry.name().map_err(malformed)?.into_owned();
        if Path::new(&name)
            .extension()
            .is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
        {
            found.push((index, name));
        }
    }
    let [(index, name)] = found.as_slice() else {
        let names: Vec<&str> = found.iter().map(|(_, name)| name.as_str()).collect();
        let reason = format!(
            "it holds {} GGUF files, expected one {names:?}",
            found.len()
        );
        return Err(ModelError::malformed(source, "archive with a GGUF file", reason).into());
    };
    let mut entry = archive.by_index(*index).map_err(malformed)?;
    let mut bytes = Vec::with_capacity(entry.size() as usize);
    // The archive checks the entry's CRC at its end.
    entry
        .read_to_end(&mut bytes)
        .map_err(|e| DataError::io(source, e))?;
    Ok(GgufSource {
        reader: Box::new(Cursor::new(bytes)),
        path: source.to_owned(),
        name: name.clone(),
    })
}
