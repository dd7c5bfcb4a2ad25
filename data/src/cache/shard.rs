//! One shard of states: encoding rows when capturing, decoding it row by row when training.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, FixedSizeBinaryArray, LargeBinaryArray, RecordBatch, StringArray,
    UInt32Array,
};
use arrow::buffer::{Buffer, OffsetBuffer};
use arrow::datatypes::UInt32Type;
use arrow::error::ArrowError;

use super::format::{ShardEntry, schema};
use super::row_file::{self, Expected, Kind, RowFile};
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
    let file = format!("states-{first_row:08}.arrow");
    let num_rows = rows.len();
    let num_tokens = rows.iter().map(|row| u64::from(row.num_tokens)).sum();
    let rows = rows.into_iter().map(StoredRow::into_batch);
    let (bytes, blake3) = row_file::write(folder, &file, &schema(), rows)?;
    Ok(ShardEntry {
        file,
        first_row,
        num_rows,
        num_tokens,
        bytes,
        blake3,
        teacher: None,
    })
}

impl StoredRow {
    fn into_batch(self) -> Result<RecordBatch, ArrowError> {
        let one_value = |bytes: Buffer| -> ArrayRef {
            let offsets = OffsetBuffer::<i64>::from_lengths([bytes.len()]);
            Arc::new(LargeBinaryArray::new(offsets, bytes, None))
        };
        let columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from(vec![self.key])),
            Arc::new(UInt32Array::from(vec![self.num_tokens])),
            Arc::new(hash_column(&self.ids_blake3)?),
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
        Some(Self {
            key: batch.column(0).as_string_opt::<i32>()?.value(0).to_owned(),
            num_tokens: batch.column(1).as_primitive_opt::<UInt32Type>()?.value(0),
            ids_blake3: read_hash(batch.column(2))?,
            aux: value(3)?,
            final_hidden: value(4)?,
        })
    }
}

/// A hash as a column of one row.
pub(crate) fn hash_column(hash: &[u8; 32]) -> Result<FixedSizeBinaryArray, ArrowError> {
    FixedSizeBinaryArray::try_new(32, Buffer::from_vec(hash.to_vec()), None)
}

/// The hash in a column of one row.
pub(crate) fn read_hash(column: &ArrayRef) -> Option<[u8; 32]> {
    let hash = column.as_fixed_size_binary_opt()?;
    hash.value(0).try_into().ok()
}

/// A finished shard.
#[derive(Debug)]
pub(crate) struct ShardFile(RowFile);

impl ShardFile {
    /// Opens a shard and compares its whole content with the checksum of its entry.
    pub(crate) fn open(folder: &Path, entry: &ShardEntry) -> Result<Self, DataError> {
        let kind = Kind {
            name: "state shard",
            schema: schema(),
        };
        let expected = Expected {
            bytes: entry.bytes,
            blake3: &entry.blake3,
            num_rows: entry.num_rows,
        };
        RowFile::open(folder.join(&entry.file), kind, expected).map(Self)
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.0.num_rows()
    }

    /// Row `index`.
    pub(crate) fn row(&self, index: usize) -> Result<StoredRow, DataError> {
        self.0.row(index, StoredRow::from_batch)
    }
}
