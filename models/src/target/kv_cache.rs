//! [`KvCache`]: keys and values of committed tokens, per row, with rollback.

use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::layers::attention::HeadShape;

/// Keys and values of one layer, `[B, kv heads, C, D]` each.
#[derive(Clone, Debug)]
struct LayerCache {
    keys: Tensor<4>,
    values: Tensor<4>,
}

/// A cache for B rows that may differ in length.
///
/// Entry `j` of a row belongs to absolute position `j`. Rolling back only shortens the row; stale
/// entries beyond its length are never visible, because queries see keys up to their own position, and
/// are overwritten by the next append.
#[derive(Clone, Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    lens: Vec<usize>,
    capacity: usize,
}

/// Shape of a cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheShape {
    /// Number of layers.
    pub num_layers: usize,
    /// Heads of each layer.
    pub heads: HeadShape,
    /// Rows, B.
    pub num_rows: usize,
    /// Positions a row can hold, C.
    pub capacity: usize,
}

impl KvCache {
    /// An empty cache.
    pub fn new(shape: CacheShape, dtype: FloatDType, device: &Device) -> Self {
        let CacheShape {
            num_layers,
            heads,
            num_rows,
            capacity,
        } = shape;
        let dims = [num_rows, heads.num_kv_heads, capacity, heads.head_dim];
        let zeros = || Tensor::zeros(dims, (device, DType::from(dtype)));
        let layers = (0..num_layers)
            .map(|_| LayerCache {
                keys: zeros(),
                values: zeros(),
            })
            .collect();
        Self {
            layers,
            lens: vec![0; num_rows],
            capacity,
        }
    }

    /// Committed length of each row.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Positions a row can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets everything of `row` at positions `len ..`.
    pub fn truncate(&mut self, row: usize, len: usize) {
        self.lens[row] = self.lens[row].min(len);
    }

    /// Counts `new` more entries of `row` as committed, after every layer has appended them.
    pub fn advance(&mut self, row: usize, new: usize) {
        self.lens[row] += new;
        assert!(
            self.lens[row] <= self.capacity,
            "a cache row outgrew its capacity"
        );
    }

    /// Writes new keys and values `[B, kv heads, S, D]` of `layer` after the committed ones.
    ///
    /// Returns all keys and values up to the longest row, `[B, kv heads, T, D]`. The lengths do not
    /// change: call [`KvCache::advance`] once per row when all layers are done.
    pub fn append(
        &mut self,
        layer: usize,
        new_keys: Tensor<4>,
        new_values: Tensor<4>,
    ) -> (Tensor<4>, Tensor<4>) {
        let [num_rows, num_kv_heads, len, head_dim] = new_keys.dims();
        let longest = self.lens.iter().max().copied().unwrap_or(0) + len;
        assert!(longest <= self.capacity, "a cache row outgrew its capacity");
        let cache = &mut self.layers[layer];
        let write = |stored: &mut Tensor<4>, new: Tensor<4>| {
            // Taking the tensor out keeps it unshared, so that the write happens in place.
            let mut whole = std::mem::replace(stored, new.clone().narrow(2, 0, 1));
            if self.lens.windows(2).all(|pair| pair[0] == pair[1]) {
                let start = self.lens.first().copied().unwrap_or(0);
                let place = [
                    0..num_rows,
                    0..num_kv_heads,
                    start..start + len,
                    0..head_dim,
                ];
                whole = whole.slice_assign(place, new);
            } else {
                for (row, &start) in self.lens.iter().enumerate() {
                    let place = [
                        row..row + 1,
                        0..num_kv_heads,
                        start..start + len,
                        0..head_dim,
                    ];
                    whole = whole.slice_assign(place, new.clone().narrow(0, row, 1));
                }
            }
            *stored = whole;
        };
        write(&mut cache.keys, new_keys);
        write(&mut cache.values, new_values);
        (
            cache.keys.clone().narrow(2, 0, longest),
            cache.values.clone().narrow(2, 0, longest),
        )
    }

    /// All keys and values of `layer` up to the longest row, `[B, kv heads, T, D]` each; entries beyond
    /// the length of a row are stale.
    pub fn layer(&self, layer: usize) -> (Tensor<4>, Tensor<4>) {
        let longest = self.lens.iter().max().copied().unwrap_or(0);
        let cache = &self.layers[layer];
        (
            cache.keys.clone().narrow(2, 0, longest),
            cache.values.clone().narrow(2, 0, longest),
        )
    }

    /// Keeps only the given rows, in the given order.
    pub fn select_rows(&mut self, rows: &[usize]) {
        for layer in &mut self.layers {
            let indices = crate::batch::index_tensor(rows.iter().copied(), &layer.keys.device());
            layer.keys = layer.keys.clone().select(0, indices.clone());
            layer.values = layer.values.clone().select(0, indices);
        }
        self.lens = rows.iter().map(|&row| self.lens[row]).collect();
    }

    /// A cache of one row alone, with a copy of its entries.
    #[must_use]
    pub fn row(&self, row: usize) -> Self {
        let mut one = self.clone();
        one.select_rows(&[row]);
        one
    }

    /// Replaces one row by that of a cache of one row with the same capacity.
    pub fn set_row(&mut self, row: usize, one: Self) {
        for (layer, new) in self.layers.iter_mut().zip(one.layers) {
            for (stored, new) in [(&mut layer.keys, new.keys), (&mut layer.values, new.values)] {
                let [_, num_kv_heads, capacity, head_dim] = new.dims();
                let place = [row..row + 1, 0..num_kv_heads, 0..capacity, 0..head_dim];
                // Taking the tensor out keeps it unshared, so that the write happens in place.
                let whole = std::mem::replace(stored, new.clone());
                *stored = whole.slice_assign(place, new);
            }
        }
        self.lens[row] = one.lens[0];
    }

    /// Keys and values of `layer` for one row up to its committed length, `[kv heads, len, D]` each.
    pub fn committed(&self, layer: usize, row: usize) -> (Tensor<3>, Tensor<3>) {
        let take = |tensor: &Tensor<4>| {
            tensor
                .clone()
                .narrow(0, row, 1)
                .narrow(2, 0, self.lens[row])
                .squeeze_dim::<3>(0)
        };
        (
            take(&self.layers[layer].keys),
            take(&self.layers[layer].values),
        )
    }
}
