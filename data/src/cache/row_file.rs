//! Arrow IPC files of one row a record batch: written atomically, compared with their checksum, read a row at a time.
//!
//! Rows are read into memory of their own, not mapped: pages of a mapping would count as memory of the program until the system
//! wants them back, and a training reads each row once an epoch.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use arrow::array::RecordBatch;
use arrow::buffer::{Buffer, MutableBuffer};
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use arrow::ipc::convert::fb_to_schema;
use arrow::ipc::reader::{FileDecoder, read_footer_length};
use arrow::ipc::writer::FileWriter;
use arrow::ipc::{Block, root_as_footer};
use draftsmith_models::file;

use crate::error::DataError;

/// What is known of a file beside its content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected<'a> {
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// blake3, hex.
    pub(crate) blake3: &'a str,
    /// Record batches.
    pub(crate) num_rows: usize,
}

/// A kind of file.
#[derive(Clone, Debug)]
pub(crate) struct Kind {
    /// Its name in messages.
    pub(crate) name: &'static str,
    /// Its columns.
    pub(crate) schema: SchemaRef,
}

/// Writes rows as one file, atomically; returns its size and its blake3 in hex.
pub(crate) fn write(
    folder: &Path,
    file_name: &str,
    schema: &SchemaRef,
    rows: impl Iterator<Item = Result<RecordBatch, ArrowError>>,
) -> Result<(u64, String), DataError> {
    let path = folder.join(file_name);
    file::write_atomic_with(&path, |out| {
        let mut writer = FileWriter::try_new(out, schema).map_err(arrow_to_io)?;
        for row in rows {
            let row = row.map_err(arrow_to_io)?;
            writer.write(&row).map_err(arrow_to_io)?;
        }
        writer.finish().map_err(arrow_to_io)
    })
    .map_err(|e| DataError::or_disk_full(e, folder))?;
    let mut file = fs_err::File::open(&path).map_err(|e| DataError::io(&path, e))?;
    checksum(&mut file).map_err(|e| DataError::io(&path, e))
}

/// Size and blake3, in hex, of a file that is read from its start.
fn checksum(file: &mut fs_err::File) -> std::io::Result<(u64, String)> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file)?;
    Ok((hasher.count(), hasher.finalize().to_hex().to_string()))
}

/// Keeps the operating system's error kind, so that a full disk is recognised.
fn arrow_to_io(error: ArrowError) -> std::io::Error {
    match error {
        ArrowError::IoError(_, source) => source,
        other => std::io::Error::other(other),
    }
}

/// A file of which rows are read.
#[derive(Debug)]
pub(crate) struct RowFile {
    path: PathBuf,
    kind: Kind,
    /// Locked while a row is read, because its place is that of the file.
    file: Mutex<fs_err::File>,
    len: u64,
    decoder: FileDecoder,
    blocks: Vec<Block>,
}

impl RowFile {
    /// Opens a file and compares its whole content with its checksum.
    ///
    /// The check reads the file once; it also is what makes decoding trust the file's inner offsets.
    pub(crate) fn open(
        path: PathBuf,
        kind: Kind,
        expected: Expected<'_>,
    ) -> Result<Self, DataError> {
        let damaged = |reason: String| DataError::format(&path, kind.name, reason);
        let io = |error| DataError::io(&path, error);
        let mut file = fs_err::File::open(&path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        if len != expected.bytes {
            return Err(damaged(format!("{len} bytes, expected {}", expected.bytes)));
        }
        let (_, blake3) = checksum(&mut file).map_err(io)?;
        if blake3 != expected.blake3 {
            let reason = "its checksum differs from the one in the manifest";
            return Err(damaged(reason.to_owned()));
        }
        let footer = read_footer(&mut file, len).map_err(io)?;
        let (decoder, blocks) = parse_footer(footer.as_deref(), &kind).map_err(damaged)?;
        if blocks.len() != expected.num_rows {
            let found = blocks.len();
            return Err(damaged(format!(
                "{found} rows, expected {}",
                expected.num_rows
            )));
        }
        Ok(Self {
            path,
            kind,
            file: Mutex::new(file),
            len,
            decoder,
            blocks,
        })
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.blocks.len()
    }

    /// Row `index`, decoded by `read`.
    pub(crate) fn row<R>(
        &self,
        index: usize,
        read: impl FnOnce(&RecordBatch) -> Option<R>,
    ) -> Result<R, DataError> {
        let damaged = |reason: String| DataError::format(&self.path, self.kind.name, reason);
        let block = &self.blocks[index];
        let (start, len) = (block.offset() as u64, block_len(block));
        let end = start.checked_add(len as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(damaged(format!("row {index} lies outside the file")));
        }
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = read_at(&mut file, start, len).map_err(|e| DataError::io(&self.path, e))?;
        drop(file);
        let batch = self
            .decoder
            .read_record_batch(block, &bytes)
            .map_err(|e| damaged(e.to_string()))?;
        batch
            .filter(|batch| {
                batch.num_rows() == 1 && batch.schema().fields() == self.kind.schema.fields()
            })
            .and_then(|batch| read(&batch))
            .ok_or_else(|| {
                let name = self.kind.name;
                damaged(format!("record batch {index} is not one row of a {name}"))
            })
    }
}

fn block_len(block: &Block) -> usize {
    block.bodyLength() as usize + block.metaDataLength() as usize
}

/// Bytes of a place of the file, aligned as Arrow wants them.
fn read_at(file: &mut fs_err::File, start: u64, len: usize) -> std::io::Result<Buffer> {
    let mut bytes = MutableBuffer::from_len_zeroed(len);
    file.seek(SeekFrom::Start(start))?;
    file.read_exact(bytes.as_slice_mut())?;
    Ok(bytes.into())
}

/// The footer at the end of a file of `len` bytes; `None` when the file is too short to hold what its end promises.
fn read_footer(file: &mut fs_err::File, len: u64) -> std::io::Result<Option<Buffer>> {
    /// Length of the footer, then the format's name.
    const TRAILER: usize = 10;
    let Some(trailer_start) = len.checked_sub(TRAILER as u64) else {
        return Ok(None);
    };
    let trailer = read_at(file, trailer_start, TRAILER)?;
    let footer_len = trailer.as_slice().try_into().ok();
    let footer_len = footer_len.and_then(|trailer| read_footer_length(trailer).ok());
    let start = footer_len.and_then(|len| trailer_start.checked_sub(len as u64));
    match (start, footer_len) {
        (Some(start), Some(footer_len)) => read_at(file, start, footer_len).map(Some),
        _ => Ok(None),
    }
}

fn parse_footer(footer: Option<&[u8]>, kind: &Kind) -> Result<(FileDecoder, Vec<Block>), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let footer = root_as_footer(footer.ok_or("its footer is cut off")?).map_err(|e| text(&e))?;
    let stored = fb_to_schema(footer.schema().ok_or("it has no schema")?);
    if stored != *kind.schema {
        return Err(format!("it is not a {} of this version", kind.name));
    }
    let blocks = footer.recordBatches().ok_or("it has no rows")?;
    let decoder = FileDecoder::new(kind.schema.clone(), footer.version());
    Ok((decoder, blocks.iter().copied().collect()))
}
