//! Attention of draft blocks: every block sees the context before its anchor and itself, nothing else.

use burn::tensor::{FloatDType, Tensor};

use super::attention::{Causal, HeadShape, scores};
use super::ragged::Ragged;

/// Queries, keys and values of N blocks of `n` tokens, `[N, heads, n, D]`.
#[derive(Clone, Debug)]
pub struct BlockStates {
    /// Rotated queries.
    pub q: Tensor<4>,
    /// Rotated keys, with the key-value heads.
    pub k: Tensor<4>,
    /// Values, with the key-value heads.
    pub v: Tensor<4>,
}

/// Attention of blocks over the context `[B, kv heads, S, D]` of their row and over themselves.
///
/// `rows` says how many blocks each of the B rows has, at most A; `seen` says what of the context each of the `A * n` tokens
/// of a row sees. Inside a block every token sees every other. All blocks are one product; softmax in f32
/// over both parts together. Returns `[N, heads, n, D]`.
pub fn block_attention(
    heads: HeadShape,
    block: BlockStates,
    context: (Tensor<4>, Tensor<4>),
    rows: &Ragged,
    seen: &Causal,
) -> Tensor<4> {
    let (keys, values) = context;
    let [_, _, num_keys, head_dim] = keys.dims();
    let [_, _, size, _] = block.q.dims();
    let dtype: FloatDType = block.q.dtype().into();
    let num_queries = rows.padded_len() * size;
    let past = scores(heads, row_by_row(block.q.clone(), rows), keys, head_dim);
    let own = row_by_row(scores(heads, block.q, block.k, head_dim), rows);
    let weights = seen.softmax_with(past, vec![own]).cast(dtype);
    let past = heads.fold_queries(weights.clone().narrow(3, 0, num_keys));
    let past = heads.unfold_queries(past.matmul(values), num_queries);
    let own = block_by_block(weights.narrow(3, num_keys, size), rows, size);
    let own = heads.unfold_queries(heads.fold_queries(own).matmul(block.v), size);
    block_by_block(past, rows, size) + own
}

/// `[N, heads, n, X]` to `[B, heads, A * n, X]`.
fn row_by_row(x: Tensor<4>, rows: &Ragged) -> Tensor<4> {
    let [num_blocks, num_heads, size, width] = x.dims();
    let (num_rows, per_row) = (rows.num_lists(), rows.padded_len());
    let flat = x.reshape([1, num_blocks, num_heads * size * width]);
    rows.pad(flat)
        .reshape([num_rows, per_row, num_heads, size * width])
        .swap_dims(1, 2)
        .reshape([num_rows, num_heads, per_row * size, width])
}

/// The inverse of [`row_by_row`].
fn block_by_block(x: Tensor<4>, rows: &Ragged, size: usize) -> Tensor<4> {
    let [num_rows, num_heads, len, width] = x.dims();
    let per_row = len / size;
    let padded = x
        .reshape([num_rows, num_heads, per_row, size * width])
        .swap_dims(1, 2)
        .reshape([num_rows, per_row, num_heads * size * width]);
    let flat = rows.flatten(padded);
    let num_blocks = flat.dims()[1];
    flat.reshape([num_blocks, num_heads, size, width])
}

/// What the blocks opened at `anchors` see of `num_keys` context keys, for [`block_attention`]: those before
/// their anchor, **strictly** (the states of the anchor itself do not exist yet when serving). With a `window` W a
/// token at position `p` sees the positions `p - W < j` only; its block, shorter than W, it always sees.
///
/// # Panics
/// When rows differ in their number of anchors.
pub fn context_of_blocks(
    anchors: &[Vec<usize>],
    size: usize,
    window: Option<usize>,
    num_keys: usize,
) -> Causal {
    let per_row = anchors.first().map_or(0, Vec::len);
    assert!(
        anchors.iter().all(|row| row.len() == per_row),
        "rows are padded to one number of blocks"
    );
    let first = |position: usize| window.map_or(0, |window| (position + 1).saturating_sub(window));
    let of_tokens = anchors
        .iter()
        .flatten()
        .flat_map(|&anchor| (anchor..anchor + size).map(move |position| first(position)..anchor));
    Causal::seeing(of_tokens, anchors.len(), num_keys)
}
