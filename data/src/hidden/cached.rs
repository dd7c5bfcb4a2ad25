//! [`CachedSource`]: states captured earlier, read from shards row by row.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{Device, Tensor, TensorData};
use draftsmith_models::batch::{StateSpec, TargetStates, TokenBatch};

use super::HiddenStateSource;
use crate::cache::format::numbers;
use crate::cache::reader::CheckedRow;
use crate::cache::{CacheIdentity, StateCache};
use crate::error::DataError;

/// Reads states from a cache; every row is checked each time it is used.
#[derive(Debug)]
pub struct CachedSource {
    cache: StateCache,
    spec: StateSpec,
    /// Places of the wanted blocks among the stored ones.
    columns: Vec<usize>,
    device: Device,
    zero_positions: AtomicU64,
}

impl CachedSource {
    /// Opens the cache in `folder`; tensors will be made on `device`, which must not track gradients.
    ///
    /// # Errors
    /// As [`StateCache::open`].
    pub fn open(
        folder: &Path,
        expected: &CacheIdentity,
        device: &Device,
    ) -> Result<Self, DataError> {
        let cache = StateCache::open(folder, expected)?;
        let stored = cache.identity().aux_layer_ids.clone();
        Ok(Self {
            columns: (0..stored.len()).collect(),
            spec: StateSpec {
                aux_layer_ids: stored,
            },
            cache,
            device: device.clone(),
            zero_positions: AtomicU64::new(0),
        })
    }

    /// The same source, giving only some of the stored blocks.
    ///
    /// # Errors
    /// [`DataError::Model`] when one of them is not stored.
    pub fn select(mut self, wanted: &StateSpec) -> Result<Self, DataError> {
        let stored = &self.cache.identity().aux_layer_ids;
        let column = |id: &usize| stored.iter().position(|other| other == id);
        let columns: Option<Vec<usize>> = wanted.aux_layer_ids.iter().map(column).collect();
        let Some(columns) = columns else {
            return Err(DataError::setting(
                format!(
                    "the stored states are those of the blocks {stored:?}, expected {:?} among them",
                    wanted.aux_layer_ids
                ),
                "capture the states again for this drafter",
            ));
        };
        self.columns = columns;
        self.spec = wanted.clone();
        Ok(self)
    }

    /// Wanted blocks `[B, S, K*H]` of all stored ones.
    fn selected(&self, aux: Tensor<3>, hidden: usize) -> Tensor<3> {
        let [num_rows, len, width] = aux.dims();
        if self.columns.len() * hidden == width {
            return aux;
        }
        if self.columns.is_empty() {
            return Tensor::zeros([num_rows, len, 0], &self.device);
        }
        let column = |&place: &usize| aux.clone().narrow(2, place * hidden, hidden);
        Tensor::cat(self.columns.iter().map(column).collect(), 2)
    }

    /// The cache itself.
    pub fn cache(&self) -> &StateCache {
        &self.cache
    }

    /// Rows `[B, S, width]` of one part, padded with zeros.
    fn tensor(&self, parts: &[&[u8]], shape: [usize; 3]) -> Tensor<3> {
        let [num_rows, padded_len, width] = shape;
        let mut flat = Vec::with_capacity(num_rows * padded_len * width);
        for (index, bytes) in parts.iter().enumerate() {
            flat.extend(numbers(bytes));
            flat.resize((index + 1) * padded_len * width, 0.0);
        }
        Tensor::from_data(TensorData::new(flat, shape), &self.device)
    }
}

impl HiddenStateSource for CachedSource {
    fn spec(&self) -> &StateSpec {
        &self.spec
    }

    fn states(&self, batch: &TokenBatch) -> Result<TargetStates, DataError> {
        let mut rows: Vec<CheckedRow> = batch
            .rows
            .iter()
            .map(|row| self.cache.row(row))
            .collect::<Result<_, _>>()?;
        let zeros = rows.iter().map(|row| row.zero_positions).sum();
        self.zero_positions.fetch_add(zeros, Ordering::Relaxed);
        let figures = rows.iter_mut().map(|row| row.figures.take());
        let teacher = figures.collect(); // of all rows, or none
        let hidden = self.cache.identity().hidden_size;
        let aux_width = self.cache.identity().aux_layer_ids.len() * hidden;
        let (num_rows, len) = (batch.num_rows(), batch.padded_len());
        let aux: Vec<&[u8]> = rows.iter().map(|row| row.stored.aux.as_slice()).collect();
        let final_hidden: Vec<&[u8]> = rows
            .iter()
            .map(|row| row.stored.final_hidden.as_slice())
            .collect();
        Ok(TargetStates {
            aux: self.selected(self.tensor(&aux, [num_rows, len, aux_width]), hidden),
            final_hidden: self.tensor(&final_hidden, [num_rows, len, hidden]),
            teacher,
        })
    }

    fn num_zero_positions(&self) -> u64 {
        self.zero_positions.load(Ordering::Relaxed)
    }
}
