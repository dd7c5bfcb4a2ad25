//! One shard file: encoding rows when capturing, decoding a mapped file when training.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, FixedSizeBinaryArray, LargeBinaryArray, RecordBatch, StringArray,
    UInt32Array,
};
use arrow::buffer::{Buffer, OffsetBuffer};
use arrow::datatypes::UInt32Type;
use arrow::error::ArrowError;
use arrow::ipc::convert::fb_to_schema;
use arrow::ipc::reader::{FileDecoder, read_footer_length};
use arrow::ipc::writer::FileWriter;
use arrow::ipc::{Block, root_as_footer};
use draftsmith_models::file;

use super::format::{ShardEntry, schema};
use super::mmap;
use crate::error::DataError;

/// States of one row, as bf16 bytes.
#[derive(Clone, Debug)]
pub(crate) struct StoredRow {
    pub(crate) key: String,
    pub(crate) num_tokens: u32,
    pub(crate) ids_blake3: [u8; 32],
    /// `[S, K*H]`.
    pub(crate) aux: Buffer,
    /// `[S, H]`.
    pub(crate) final_hidden: Buffer,
}

/// Writes rows as one shard, atomically, and returns its entry.
pub(crate) fn write(
    folder: &Path,
    first_row: usize,
    rows: Vec<StoredRow>,
) -> Result<ShardEntry, DataError> {
    let file_name = format!("states-{first_row:08}.arrow");
    let path = folder.join(&file_name);
    let num_rows = rows.len();
    let num_tokens = rows.iter().map(|row| u64::from(row.num_tokens)).sum();
    file::write_atomic_with(&path, |out| {
        let schema = schema();
        let mut writer = FileWriter::try_new(out, &schema).map_err(arrow_to_io)?;
        for row in rows {
            writer
                .write(&row.into_batch().map_err(arrow_to_io)?)
                .map_err(arrow_to_io)?;
        }
        writer.finish().map_err(arrow_to_io)
    })
    .map_err(|e| DataError::or_disk_full(e, folder))?;
    let content = mmap::map(&path)?;
    Ok(ShardEntry {
        file: file_name,
        first_row,
        num_rows,
        num_tokens,
        bytes: content.len() as u64,
        blake3: blake3::hash(&content).to_hex().to_string(),
    })
}

/// Keeps the operating system's error kind, so that a full disk is recognised.
fn arrow_to_io(error: ArrowError) -> std::io::Error {
    match error {
        ArrowError::IoError(_, source) => source,
        other => std::io::Error::other(other),
    }
}

impl StoredRow {
    fn into_batch(self) -> Result<RecordBatch, ArrowError> {
        let one_value = |bytes: Buffer| -> ArrayRef {
            let offsets = OffsetBuffer::<i64>::from_lengths([bytes.len()]);
            Arc::new(LargeBinaryArray::new(offsets, bytes, None))
        };
        let hash =
            FixedSizeBinaryArray::try_new(32, Buffer::from_vec(self.ids_blake3.to_vec()), None)?;
        let columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from(vec![self.key])),
            Arc::new(UInt32Array::from(vec![self.num_tokens])),
            Arc::new(hash),
            one_value(self.aux),
            one_value(self.final_hidden),
        ];
        RecordBatch::try_new(schema(), columns)
    }

    fn from_batch(batch: &RecordBatch) -> Option<Self> {
        let value = |index: usize| {
            let array = batch.column(index).as_binary_opt::<i64>()?;
            let offsets = array.value_offsets();
            let (start, end) = (*offsets.first()?, *offsets.get(1)?);
            Some(
                array
                    .values()
                    .slice_with_length(start as usize, (end - start) as usize),
            )
        };
        let hash = batch.column(2).as_fixed_size_binary_opt()?;
        Some(Self {
            key: batch.column(0).as_string_opt::<i32>()?.value(0).to_owned(),
            num_tokens: batch.column(1).as_primitive_opt::<UInt32Type>()?.value(0),
            ids_blake3: hash.value(0).try_into().ok()?,
            aux: value(3)?,
            final_hidden: value(4)?,
        })
    }
}

/// A mapped shard.
#[derive(Debug)]
pub(crate) struct MappedShard {
    content: Buffer,
    decoder: FileDecoder,
    blocks: Vec<Block>,
}

impl MappedShard {
    /// Maps a shard and compares its whole content with the checksum of its entry.
    ///
    /// The check reads the file once; it also is what makes decoding trust the file's inner offsets.
    pub(crate) fn open(path: &Path, entry: &ShardEntry) -> Result<Self, DataError> {
        let content = mmap::map(path)?;
        if content.len() as u64 != entry.bytes {
            let reason = format!("{} bytes, expected {}", content.len(), entry.bytes);
            return Err(damaged(path, reason));
        }
        if blake3::hash(&content).to_hex().as_str() != entry.blake3 {
            let reason = "its checksum differs from the one in the manifest";
            return Err(damaged(path, reason));
        }
        let (decoder, blocks) = read_footer(&content).map_err(|reason| damaged(path, reason))?;
        if blocks.len() != entry.num_rows {
            let reason = format!("{} rows, expected {}", blocks.len(), entry.num_rows);
            return Err(damaged(path, reason));
        }
        Ok(Self {
            content,
            decoder,
            blocks,
        })
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.blocks.len()
    }

    /// Row `index`; its bytes stay in the mapping.
    pub(crate) fn row(&self, path: &Path, index: usize) -> Result<StoredRow, DataError> {
        let block = &self.blocks[index];
        let (start, len) = (block.offset() as usize, block_len(block));
        if start
            .checked_add(len)
            .is_none_or(|end| end > self.content.len())
        {
            return Err(damaged(path, format!("row {index} lies outside the file")));
        }
        let bytes = self.content.slice_with_length(start, len);
        let batch = self
            .decoder
            .read_record_batch(block, &bytes)
            .map_err(|e| damaged(path, e))?;
        batch
            .filter(|batch| batch.num_rows() == 1 && batch.schema().fields() == schema().fields())
            .and_then(|batch| StoredRow::from_batch(&batch))
            .ok_or_else(|| {
                damaged(
                    path,
                    format!("record batch {index} is not one row of states"),
                )
            })
    }
}

fn block_len(block: &Block) -> usize {
    block.bodyLength() as usize + block.metaDataLength() as usize
}

fn read_footer(content: &Buffer) -> Result<(FileDecoder, Vec<Block>), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let trailer_start = content.len().checked_sub(10).ok_or("too short")?;
    let trailer: [u8; 10] = content[trailer_start..].try_into().map_err(|e| text(&e))?;
    let footer_len = read_footer_length(trailer).map_err(|e| text(&e))?;
    let footer_start = trailer_start
        .checked_sub(footer_len)
        .ok_or("its footer is cut off")?;
    let footer = root_as_footer(&content[footer_start..trailer_start]).map_err(|e| text(&e))?;
    let stored = fb_to_schema(footer.schema().ok_or("it has no schema")?);
    if stored != *schema() {
        return Err("it is not a state shard of this version".to_owned());
    }
    let blocks = footer.recordBatches().ok_or("it has no rows")?;
    let decoder = FileDecoder::new(schema(), footer.version());
    Ok((decoder, blocks.iter().copied().collect()))
}

fn damaged(path: &Path, reason: impl std::fmt::Display) -> DataError {
    DataError::format(path, "state shard", reason)
}
