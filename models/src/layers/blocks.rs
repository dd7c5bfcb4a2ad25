//! Attention of draft blocks: every block sees the context before its anchor and itself, nothing else.

use burn::tensor::{FloatDType, Tensor};

use super::attention::{Causal, HeadShape, scores};

/// Queries, keys and values of blocks of `n` tokens, `[B * A, heads, n, D]`: A blocks for each of B rows.
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
/// `seen` says what of the context each of the `A * n` tokens of a row sees. Inside a block every token sees every
/// other. All blocks are one product; softmax in f32 over both parts together. Returns `[B * A, heads, n, D]`.
pub fn block_attention(
    heads: HeadShape,
    block: BlockStates,
    context: (Tensor<4>, Tensor<4>),
    seen: &Causal,
) -> Tensor<4> {
    let (keys, values) = context;
    let [num_rows, _, num_keys, head_dim] = keys.dims();
    let [num_blocks, _, size, _] = block.q.dims();
    let dtype: FloatDType = block.q.dtype().into();
    let num_queries = num_blocks / num_rows * size;
    let past = scores(heads, row_by_row(block.q.clone(), num_rows), keys, head_dim);
    let own = row_by_row(scores(heads, block.q, block.k, head_dim), num_rows);
    let weights = seen.softmax_with(past, vec![own]).cast(dtype);
    let past = heads.fold_queries(weights.clone().narrow(3, 0, num_keys));
    let past = heads.unfold_queries(past.matmul(values), num_queries);
    let own = block_by_block(weights.narrow(3, num_keys, size), num_blocks);
    let own = heads.unfold_queries(heads.fold_queries(own).matmul(block.v), size);
    block_by_block(past, num_blocks) + own
}

/// `[B * A, heads, n, X]` to `[B, heads, A * n, X]`.
fn row_by_row(x: Tensor<4>, num_rows: usize) -> Tensor<4> {
    let [num_blocks, num_heads, size, width] = x.dims();
    let per_row = num_blocks / num_rows;
    x.reshape([num_rows, per_row, num_heads, size * width])
        .swap_dims(1, 2)
        .reshape([num_rows, num_heads, per_row * size, width])
}

/// The inverse of [`row_by_row`].
fn block_by_block(x: Tensor<4>, num_blocks: usize) -> Tensor<4> {
    let [num_rows, num_heads, len, width] = x.dims();
    let per_row = num_blocks / num_rows;
    let size = len / per_row;
    x.reshape([num_rows, num_heads, per_row, size * width])
        .swap_dims(1, 2)
        .reshape([num_blocks, num_heads, size, width])
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
