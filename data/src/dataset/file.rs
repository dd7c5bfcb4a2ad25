//! The data file: an Arrow IPC file with the columns key, source, ids, turns, prompt_len and text.

use std::io::{Cursor, Write};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, ListArray, ListBuilder, RecordBatch, StringArray, UInt32Array, UInt32Builder,
};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::reader::FileReader;
use arrow::ipc::writer::FileWriter;
use draftsmith_models::file::write_atomic_with;

use super::{DatasetRow, FORMAT};
use crate::error::DataError;

/// Rows of one record batch; list offsets are 32 bits, far from their limit at this size.
const BATCH_ROWS: usize = 1024;

fn schema() -> SchemaRef {
    let list = || DataType::List(Arc::new(Field::new_list_field(DataType::UInt32, true)));
    Arc::new(Schema::new(vec![
        Field::new("key", DataType::Utf8, false),
        Field::new("source", DataType::Utf8, false),
        Field::new("ids", list(), false),
        Field::new("turns", list(), false),
        Field::new("prompt_len", DataType::UInt32, false),
        Field::new("text", DataType::UInt32, false),
    ]))
}

/// Passes bytes on and hashes them.
struct Hashing<W> {
    inner: W,
    hasher: blake3::Hasher,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}

/// Writes the rows and returns the checksum of the file, hex.
pub(super) fn write(path: &Path, rows: &[DatasetRow]) -> Result<String, DataError> {
    let mut checksum = String::new();
    write_atomic_with(path, |file| {
        let hashing = Hashing {
            inner: file,
            hasher: blake3::Hasher::new(),
        };
        let mut writer = FileWriter::try_new(hashing, &schema()).map_err(std::io::Error::other)?;
        for chunk in rows.chunks(BATCH_ROWS) {
            let batch = record_batch(chunk).map_err(std::io::Error::other)?;
            writer.write(&batch).map_err(std::io::Error::other)?;
        }
        let hashing = writer.into_inner().map_err(std::io::Error::other)?;
        checksum = hashing.hasher.finalize().to_hex().to_string();
        Ok(())
    })?;
    Ok(checksum)
}

fn record_batch(rows: &[DatasetRow]) -> Result<RecordBatch, ArrowError> {
    let keys = rows.iter().map(|row| row.key.as_str());
    let sources = rows.iter().map(|row| row.source.as_str());
    let prompt_lens = rows.iter().map(|row| row.tokens.prompt_len as u32);
    let texts = rows.iter().map(|row| row.text as u32);
    let columns: Vec<ArrayRef> = vec![
        Arc::new(StringArray::from_iter_values(keys)),
        Arc::new(StringArray::from_iter_values(sources)),
        Arc::new(lists(rows, |row| &row.tokens.ids)),
        Arc::new(lists(rows, |row| &row.tokens.turns)),
        Arc::new(UInt32Array::from_iter_values(prompt_lens)),
        Arc::new(UInt32Array::from_iter_values(texts)),
    ];
    RecordBatch::try_new(schema(), columns)
}

fn lists(rows: &[DatasetRow], column: fn(&DatasetRow) -> &[u32]) -> ListArray {
    let mut builder = ListBuilder::new(UInt32Builder::new());
    for row in rows {
        builder.values().append_slice(column(row));
        builder.append(true);
    }
    builder.finish()
}

/// Columns of one record batch, with typed access.
#[derive(Clone, Debug)]
struct Part {
    key: StringArray,
    source: StringArray,
    ids: ListColumn,
    turns: ListColumn,
    prompt_len: UInt32Array,
    text: UInt32Array,
}

/// A list column as flat values with offsets.
#[derive(Clone, Debug)]
struct ListColumn {
    offsets: Vec<usize>,
    values: UInt32Array,
}

impl ListColumn {
    fn get(&self, index: usize) -> &[u32] {
        &self.values.values()[self.offsets[index]..self.offsets[index + 1]]
    }
}

/// All rows of a data file in memory.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    parts: Vec<Part>,
    /// Index of the first row of each part, and the number of all rows.
    starts: Vec<usize>,
}

impl Columns {
    /// Reads a data file from its bytes.
    pub(super) fn read(path: &Path, bytes: Vec<u8>) -> Result<Self, DataError> {
        let wrong = |reason: &dyn std::fmt::Display| DataError::format(path, FORMAT, reason);
        let reader = FileReader::try_new(Cursor::new(bytes), None).map_err(|e| wrong(&e))?;
        if reader.schema().fields() != schema().fields() {
            return Err(wrong(&"its columns are not those of this version"));
        }
        let mut parts = Vec::new();
        let mut starts = vec![0];
        for batch in reader {
            let batch = batch.map_err(|e| wrong(&e))?;
            let part = part(&batch).ok_or_else(|| wrong(&"ids and turns differ in length"))?;
            starts.push(starts[starts.len() - 1] + batch.num_rows());
            parts.push(part);
        }
        Ok(Self { parts, starts })
    }

    pub(super) fn len(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    pub(super) fn key(&self, index: usize) -> &str {
        let (part, row) = self.at(index);
        part.key.value(row)
    }

    pub(super) fn source(&self, index: usize) -> &str {
        let (part, row) = self.at(index);
        part.source.value(row)
    }

    pub(super) fn ids(&self, index: usize) -> &[u32] {
        let (part, row) = self.at(index);
        part.ids.get(row)
    }

    pub(super) fn turns(&self, index: usize) -> &[u32] {
        let (part, row) = self.at(index);
        part.turns.get(row)
    }

    pub(super) fn prompt_len(&self, index: usize) -> usize {
        let (part, row) = self.at(index);
        part.prompt_len.value(row) as usize
    }

    pub(super) fn text(&self, index: usize) -> usize {
        let (part, row) = self.at(index);
        part.text.value(row) as usize
    }

    fn at(&self, index: usize) -> (&Part, usize) {
        let part = self.starts.partition_point(|start| *start <= index) - 1;
        (&self.parts[part], index - self.starts[part])
    }
}

fn part(batch: &RecordBatch) -> Option<Part> {
    let ids = list_column(batch.column(2))?;
    let turns = list_column(batch.column(3))?;
    (ids.offsets == turns.offsets).then_some(Part {
        key: batch
            .column(0)
            .as_any()
            .downcast_ref::<StringArray>()?
            .clone(),
        source: batch
            .column(1)
            .as_any()
            .downcast_ref::<StringArray>()?
            .clone(),
        prompt_len: numbers(batch.column(4))?,
        text: numbers(batch.column(5))?,
        ids,
        turns,
    })
}

fn numbers(column: &ArrayRef) -> Option<UInt32Array> {
    column.as_any().downcast_ref::<UInt32Array>().cloned()
}

fn list_column(column: &ArrayRef) -> Option<ListColumn> {
    let lists = column.as_any().downcast_ref::<ListArray>()?;
    let values = lists.values().as_any().downcast_ref::<UInt32Array>()?;
    Some(ListColumn {
        offsets: lists
            .value_offsets()
            .iter()
            .map(|offset| *offset as usize)
            .collect(),
        values: values.clone(),
    })
}
