//! Scaled dot-product attention with grouped key-value heads, in the composed form.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::tensor::{Device, FloatDType, Tensor, TensorData, activation};

use crate::host;
use crate::host::softmax::Seen;
use crate::host::tape::{self, HostValues};

/// Added to a score that must not be attended to; finite, so that a padded row stays finite.
pub const MASKED: f32 = -1e30;

/// Numbers of heads and their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads.
    pub num_heads: usize,
    /// Key-value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Size of one head, D.
    pub head_dim: usize,
}

impl HeadShape {
    /// `[B, S, heads * D]` to `[B, heads, S, D]`.
    pub fn split(x: Tensor<3>, num_heads: usize) -> Tensor<4> {
        let [batch, len, width] = x.dims();
        x.reshape([batch, len, num_heads, width / num_heads])
            .swap_dims(1, 2)
    }

    /// `[B, heads, S, D]` to `[B, S, heads * D]`.
    pub fn merge(x: Tensor<4>) -> Tensor<3> {
        let [batch, num_heads, len, head_dim] = x.dims();
        x.swap_dims(1, 2)
            .reshape([batch, len, num_heads * head_dim])
    }

    /// Query heads that share a key-value head.
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// `[B, heads, S, D]` to `[B, kv heads, group * S, D]`: query heads of a group become rows, so
    /// that keys and values are never repeated in memory.
    pub fn fold_queries(&self, q: Tensor<4>) -> Tensor<4> {
        let [batch, _, len, head_dim] = q.dims();
        q.reshape([batch, self.num_kv_heads, self.group() * len, head_dim])
    }

    /// The inverse of [`HeadShape::fold_queries`] for anything of shape `[B, kv, group * S, X]`.
    pub fn unfold_queries(&self, x: Tensor<4>, len: usize) -> Tensor<4> {
        let [batch, _, _, width] = x.dims();
        x.reshape([batch, self.num_heads, len, width])
    }
}

/// Which keys each query sees: a run of them, most often those at positions up to its own.
#[derive(Clone, Debug)]
pub struct Causal {
    /// The keys that each query sees, `[B, S]` flat.
    visible: Arc<[Range<usize>]>,
    num_rows: usize,
    num_keys: usize,
    mask: OnceLock<Tensor<4>>,
}

impl Causal {
    /// `len` queries a row after `starts[b]` earlier keys, among `num_keys` keys.
    pub fn new(starts: &[usize], len: usize, num_keys: usize) -> Self {
        let rows = starts.iter();
        let positions = rows.flat_map(|&start| start..start + len).collect();
        Self::at(positions, starts.len(), num_keys)
    }

    /// Queries at the given positions, `[B, S]` flat, among `num_keys` keys.
    pub fn at(positions: Vec<usize>, num_rows: usize, num_keys: usize) -> Self {
        let visible = positions.into_iter().map(|position| 0..position + 1);
        Self::seeing(visible, num_rows, num_keys)
    }

    /// Queries that see the given keys, `[B, S]` flat, cut to the `num_keys` that there are.
    pub fn seeing(
        visible: impl IntoIterator<Item = Range<usize>>,
        num_rows: usize,
        num_keys: usize,
    ) -> Self {
        let cut = |keys: Range<usize>| {
            let end = keys.end.min(num_keys);
            keys.start.min(end)..end
        };
        Self {
            visible: visible.into_iter().map(cut).collect(),
            num_rows,
            num_keys,
            mask: OnceLock::new(),
        }
    }

    /// The additive mask `[B, 1, S, T]` on `device`, made once.
    pub fn mask(&self, device: &Device) -> Tensor<4> {
        let make = || causal_mask(&self.visible, self.num_rows, self.num_keys, device);
        self.mask.get_or_init(make).clone()
    }

    /// Softmax of scores `[B, heads, S, T]` over the visible keys.
    pub fn softmax(&self, scores: Tensor<4>) -> Tensor<4> {
        self.softmax_with(scores, Vec::new())
    }

    /// Softmax over the visible keys of scores `[B, heads, S, T]` and further columns `[B, heads, S, ..]` that
    /// every query sees, together: `[B, heads, S, T + E]`.
    pub fn softmax_with(&self, scores: Tensor<4>, own: Vec<Tensor<4>>) -> Tensor<4> {
        let device = scores.device();
        let is_fused = host::is_host(&scores) || tape::is_taped(&scores);
        let scores = if is_fused {
            scores
        } else {
            scores + super::follow(&device, self.mask(&device.clone().inner()))
        };
        let mut columns = vec![scores];
        columns.extend(own);
        let scores = match columns.len() {
            1 => columns.remove(0),
            _ => Tensor::cat(columns, 3),
        };
        if tape::is_taped(&scores) {
            self.taped_softmax(scores)
        } else if is_fused {
            softmax_on_host(scores, &self.visible, self.num_rows, self.num_keys)
        } else {
            activation::softmax(scores, 3)
        }
    }

    /// As one operation on the tape of the CPU backend.
    fn taped_softmax(&self, scores: Tensor<4>) -> Tensor<4> {
        let (scores, input) = tape::open(scores);
        let num_columns = scores.dims()[3];
        let p = softmax_on_host(scores, &self.visible, self.num_rows, self.num_keys);
        let values = HostValues::of(p.clone());
        tape::record([input], p, move |mut gradient, _| {
            host::softmax::softmax_gradient(&mut gradient, values.as_slice(), num_columns);
            [gradient]
        })
    }
}

fn softmax_on_host(
    scores: Tensor<4>,
    visible: &[Range<usize>],
    num_rows: usize,
    num_keys: usize,
) -> Tensor<4> {
    let (shape, device) = (scores.dims(), scores.device());
    let mut values = host::take(scores);
    let seen = Seen {
        visible,
        num_rows,
        num_keys,
        num_columns: shape[3],
    };
    host::softmax::softmax(&mut values, seen);
    host::give(values, shape, &device)
}

/// `softmax(q k^T / sqrt(D)) v` over the visible keys.
///
/// `q` `[B, heads, S, D]`, `k` and `v` `[B, kv heads, T, D]`. Returns `[B, heads, S, D]`; the softmax is
/// computed in f32.
pub fn attend(
    shape: HeadShape,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    causal: &Causal,
) -> Tensor<4> {
    let [_, _, len, head_dim] = q.dims();
    let dtype: FloatDType = q.dtype().into();
    let weights = causal.softmax(scores(shape, q, k, head_dim)).cast(dtype);
    let mixed = shape.fold_queries(weights).matmul(v);
    shape.unfold_queries(mixed, len)
}

/// `q k^T / sqrt(D)` in f32, `[B, heads, S, T]`.
pub fn scores(shape: HeadShape, q: Tensor<4>, k: Tensor<4>, head_dim: usize) -> Tensor<4> {
    let len = q.dims()[2];
    let scale = 1.0 / (head_dim as f64).sqrt();
    let folded = shape
        .fold_queries(q)
        .mul_scalar(scale)
        .matmul(k.swap_dims(2, 3));
    shape.unfold_queries(folded, len).cast(FloatDType::F32)
}

fn causal_mask(
    visible: &[Range<usize>],
    num_rows: usize,
    num_keys: usize,
    device: &Device,
) -> Tensor<4> {
    let mut values = vec![MASKED; visible.len() * num_keys];
    for (row, seen) in values.chunks_exact_mut(num_keys.max(1)).zip(visible) {
        row[seen.clone()].fill(0.0);
    }
    let len = visible.len() / num_rows.max(1);
    Tensor::from_data(
        TensorData::new(values, [num_rows, 1, len, num_keys]),
        device,
    )
}
