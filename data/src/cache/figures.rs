//! The teacher's figures beside a shard of states: computed when capturing, read when training.
//!
//! They are those of the states as stored, rounded to bf16, because these are what training sees: the log-sum-exp of
//! other states would not normalise the teacher's logits.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, Float32Array, ListArray, RecordBatch, StringArray, UInt32Array,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{ArrowPrimitiveType, Field, Float32Type, UInt32Type};
use arrow::error::ArrowError;
use burn::tensor::{Tensor, TensorData};
use draftsmith_models::batch::{TeacherFigures, TokenRow, teaching_positions};
use draftsmith_models::objective::teacher_figures;
use draftsmith_models::target::TargetModel;

use super::format::{NUMBER_BYTES, ShardEntry, TeacherEntry, ids_hash, numbers, teacher_schema};
use super::row_file::{self, Expected, Kind, RowFile};
use super::shard::{StoredRow, hash_column, read_hash};
use crate::error::DataError;

/// Figures of one row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredFigures {
    pub(crate) key: String,
    pub(crate) ids_blake3: [u8; 32],
    /// One a token.
    pub(crate) figures: Vec<TeacherFigures>,
}

/// Figures of rows whose states are `stored`, `[S, H]` each: every position that teaches, through the code that the
/// objective computes its teacher with.
///
/// # Errors
/// [`DataError::StateNotFinite`] naming the first position whose figures are no numbers.
pub(crate) fn compute(
    target: &TargetModel,
    rows: &[(&TokenRow, &StoredRow)],
) -> Result<Vec<StoredFigures>, DataError> {
    let width = target.spec().hidden_size;
    let mut values: Vec<f32> = Vec::new();
    let mut next = Vec::new();
    for (row, stored) in rows {
        for position in teaching_positions(&row.turns) {
            let bytes = width * NUMBER_BYTES;
            let state = &stored.final_hidden[position * bytes..(position + 1) * bytes];
            values.extend(numbers(state));
            next.push(row.ids[position + 1]);
        }
    }
    let computed = if next.is_empty() {
        Vec::new()
    } else {
        let states = TensorData::new(values, [next.len(), width]);
        let states = Tensor::from_data(states, target.device());
        teacher_figures(target.ends(), states, &next)
    };
    let mut computed = computed.into_iter();
    rows.iter()
        .map(|(row, _)| {
            let mut figures = vec![TeacherFigures::ABSENT; row.len()];
            for (position, found) in teaching_positions(&row.turns).zip(&mut computed) {
                figures[position] = found;
            }
            refuse_unknown(row, &figures)?;
            Ok(StoredFigures {
                key: row.key.clone(),
                ids_blake3: ids_hash(&row.ids),
                figures,
            })
        })
        .collect()
}

/// Refuses rows without figures where a slot may be taught.
fn refuse_unknown(row: &TokenRow, figures: &[TeacherFigures]) -> Result<(), DataError> {
    let is_known = |at: TeacherFigures| at.log_z.is_finite() && at.log_p_next.is_finite();
    match teaching_positions(&row.turns).find(|&position| !is_known(figures[position])) {
        None => Ok(()),
        Some(position) => Err(DataError::StateNotFinite {
            key: row.key.clone(),
            position,
            part: "teacher's log-sum-exp",
        }),
    }
}

/// Writes the figures of a shard beside it, atomically, and returns their entry.
pub(crate) fn write(
    folder: &Path,
    first_row: usize,
    rows: Vec<StoredFigures>,
) -> Result<TeacherEntry, DataError> {
    let file = format!("teacher-{first_row:08}.arrow");
    let rows = rows.into_iter().map(StoredFigures::into_batch);
    let (bytes, blake3) = row_file::write(folder, &file, &teacher_schema(), rows)?;
    Ok(TeacherEntry {
        file,
        bytes,
        blake3,
    })
}

impl StoredFigures {
    fn into_batch(self) -> Result<RecordBatch, ArrowError> {
        let list = |values: ArrayRef| -> Result<ArrayRef, ArrowError> {
            let field = Arc::new(Field::new_list_field(values.data_type().clone(), false));
            let offsets = OffsetBuffer::from_lengths([values.len()]);
            Ok(Arc::new(ListArray::try_new(field, offsets, values, None)?))
        };
        let floats = |value: fn(&TeacherFigures) -> f32| -> Result<ArrayRef, ArrowError> {
            let values: Vec<f32> = self.figures.iter().map(value).collect();
            list(Arc::new(Float32Array::from(values)))
        };
        let argmax: Vec<u32> = self.figures.iter().map(|at| at.argmax).collect();
        let columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from(vec![self.key.clone()])),
            Arc::new(hash_column(&self.ids_blake3)?),
            floats(|at| at.log_z)?,
            floats(|at| at.log_p_next)?,
            list(Arc::new(UInt32Array::from(argmax)))?,
        ];
        RecordBatch::try_new(teacher_schema(), columns)
    }

    fn from_batch(batch: &RecordBatch) -> Option<Self> {
        let log_z = list_values::<Float32Type>(batch.column(2))?;
        let log_p_next = list_values::<Float32Type>(batch.column(3))?;
        let argmax = list_values::<UInt32Type>(batch.column(4))?;
        if log_z.len() != log_p_next.len() || log_z.len() != argmax.len() {
            return None;
        }
        let numbers = log_z.into_iter().zip(log_p_next).zip(argmax);
        Some(Self {
            key: batch.column(0).as_string_opt::<i32>()?.value(0).to_owned(),
            ids_blake3: read_hash(batch.column(1))?,
            figures: numbers
                .map(|((log_z, log_p_next), argmax)| TeacherFigures {
                    log_z,
                    log_p_next,
                    argmax,
                })
                .collect(),
        })
    }
}

/// The only list of a column of one row.
fn list_values<T: ArrowPrimitiveType>(column: &ArrayRef) -> Option<Vec<T::Native>> {
    let list = column.as_list_opt::<i32>()?.value(0);
    Some(list.as_primitive_opt::<T>()?.values().to_vec())
}

/// The figures of a shard.
#[derive(Debug)]
pub(crate) struct FiguresFile(RowFile);

impl FiguresFile {
    /// Opens the figures of a shard, if it has any, and compares their content with their checksum.
    pub(crate) fn open(folder: &Path, shard: &ShardEntry) -> Result<Option<Self>, DataError> {
        let Some(entry) = &shard.teacher else {
            return Ok(None);
        };
        let kind = Kind {
            name: "file of teacher figures",
            schema: teacher_schema(),
        };
        let expected = Expected {
            bytes: entry.bytes,
            blake3: &entry.blake3,
            num_rows: shard.num_rows,
        };
        let rows = RowFile::open(folder.join(&entry.file), kind, expected)?;
        Ok(Some(Self(rows)))
    }

    /// Figures of `row`, whose states are checked and stand at the same `index` of their shard.
    pub(crate) fn row(
        &self,
        index: usize,
        row: &TokenRow,
        folder: &Path,
    ) -> Result<Vec<TeacherFigures>, DataError> {
        let stored = self.0.row(index, StoredFigures::from_batch)?;
        if stored.key != row.key || stored.ids_blake3 != ids_hash(&row.ids) {
            return Err(DataError::RowTokens {
                key: row.key.clone(),
                folder: folder.to_owned(),
            });
        }
        if stored.figures.len() != row.len() {
            return Err(DataError::RowLengths {
                key: row.key.clone(),
                ids: row.len(),
                marks: row.turns.len(),
                states: stored.figures.len(),
            });
        }
        refuse_unknown(row, &stored.figures)?;
        Ok(stored.figures)
    }
}
