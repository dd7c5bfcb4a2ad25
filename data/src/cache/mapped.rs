//! Arrow IPC files of one row a record batch: written atomically, mapped, compared with their checksum.

use std::path::{Path, PathBuf};

use arrow::array::RecordBatch;
use arrow::buffer::Buffer;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use arrow::ipc::convert::fb_to_schema;
use arrow::ipc::reader::{FileDecoder, read_footer_length};
use arrow::ipc::writer::FileWriter;
use arrow::ipc::{Block, root_as_footer};
use draftsmith_models::file;

use super::mmap;
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
    let content = mmap::map(&path)?;
    let blake3 = blake3::hash(&content).to_hex().to_string();
    Ok((content.len() as u64, blake3))
}

/// Keeps the operating system's error kind, so that a full disk is recognised.
fn arrow_to_io(error: ArrowError) -> std::io::Error {
    match error {
        ArrowError::IoError(_, source) => source,
        other => std::io::Error::other(other),
    }
}

/// A mapped file.
#[derive(Debug)]
pub(crate) struct MappedRows {
    path: PathBuf,
    kind: Kind,
    content: Buffer,
    decoder: FileDecoder,
    blocks: Vec<Block>,
}

impl MappedRows {
    /// Maps a file and compares its whole content with its checksum.
    ///
    /// The check reads the file once; it also is what makes decoding trust the file's inner offsets.
    pub(crate) fn open(
        path: PathBuf,
        kind: Kind,
        expected: Expected<'_>,
    ) -> Result<Self, DataError> {
        let damaged = |reason: String| DataError::format(&path, kind.name, reason);
        let content = mmap::map(&path)?;
        if content.len() as u64 != expected.bytes {
            let found = content.len();
            return Err(damaged(format!(
                "{found} bytes, expected {}",
                expected.bytes
            )));
        }
        if blake3::hash(&content).to_hex().as_str() != expected.blake3 {
            let reason = "its checksum differs from the one in the manifest";
            return Err(damaged(reason.to_owned()));
        }
        let (decoder, blocks) = read_footer(&content, &kind).map_err(damaged)?;
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
            content,
            decoder,
            blocks,
        })
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.blocks.len()
    }

    /// Row `index`, decoded by `read`; its bytes stay in the mapping.
    pub(crate) fn row<R>(
        &self,
        index: usize,
        read: impl FnOnce(&RecordBatch) -> Option<R>,
    ) -> Result<R, DataError> {
        let damaged = |reason: String| DataError::format(&self.path, self.kind.name, reason);
        let block = &self.blocks[index];
        let (start, len) = (block.offset() as usize, block_len(block));
        if start
            .checked_add(len)
            .is_none_or(|end| end > self.content.len())
        {
            return Err(damaged(format!("row {index} lies outside the file")));
        }
        let bytes = self.content.slice_with_length(start, len);
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

fn read_footer(content: &Buffer, kind: &Kind) -> Result<(FileDecoder, Vec<Block>), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let trailer_start = content.len().checked_sub(10).ok_or("too short")?;
    let trailer: [u8; 10] = content[trailer_start..].try_into().map_err(|e| text(&e))?;
    let footer_len = read_footer_length(trailer).map_err(|e| text(&e))?;
    let footer_start = trailer_start
        .checked_sub(footer_len)
        .ok_or("its footer is cut off")?;
    let footer = root_as_footer(&content[footer_start..trailer_start]).map_err(|e| text(&e))?;
    let stored = fb_to_schema(footer.schema().ok_or("it has no schema")?);
    if stored != *kind.schema {
        return Err(format!("it is not a {} of this version", kind.name));
    }
    let blocks = footer.recordBatches().ok_or("it has no rows")?;
    let decoder = FileDecoder::new(kind.schema.clone(), footer.version());
    Ok((decoder, blocks.iter().copied().collect()))
}
