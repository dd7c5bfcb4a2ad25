//! Attention of draft blocks: every block sees the context before its anchor and itself, nothing else.

use burn::tensor::{Device, FloatDType, Tensor, TensorData, activation};

use super::attention::{HeadShape, MASKED, scores};

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
/// `mask` `[B, 1, A * n, S]` is added to the scores of the context. Inside a block every token sees every
/// other. All blocks are one product; softmax in f32 over both parts together. Returns `[B * A, heads, n, D]`.
pub fn block_attention(
    heads: HeadShape,
    block: BlockStates,
    context: (Tensor<4>, Tensor<4>),
    mask: &Tensor<4>,
) -> Tensor<4> {
    let (keys, values) = context;
    let [num_rows, _, num_keys, head_dim] = keys.dims();
    let [num_blocks, _, size, _] = block.q.dims();
    let dtype: FloatDType = block.q.dtype().into();
    let num_queries = num_blocks / num_rows * size;
    let past = scores(heads, row_by_row(block.q.clone(), num_rows), keys, head_dim) + mask.clone();
    let own = row_by_row(scores(heads, block.q, block.k, head_dim), num_rows);
    let weights = activation::softmax(Tensor::cat(vec![past, own], 3), 3).cast(dtype);
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

/// The mask `[B, 1, A * n, S]` of [`block_attention`]: the block opened at `anchors[b][i]` sees the context
/// `j < anchor` **strictly** (the states of the anchor itself do not exist yet when serving).
///
/// # Panics
/// When rows differ in their number of anchors.
pub fn context_mask(
    anchors: &[Vec<usize>],
    size: usize,
    num_keys: usize,
    device: &Device,
) -> Tensor<4> {
    let per_row = anchors.first().map_or(0, Vec::len);
    assert!(
        anchors.iter().all(|row| row.len() == per_row),
        "rows are padded to one number of blocks"
    );
    let mut values = vec![MASKED; anchors.len() * per_row * size * num_keys];
    let of_tokens = anchors
        .iter()
        .flatten()
        .flat_map(|&anchor| std::iter::repeat_n(anchor, size));
    for (row, anchor) in values.chunks_exact_mut(num_keys).zip(of_tokens) {
        row[..anchor.min(num_keys)].fill(0.0);
    }
    Tensor::from_data(
        TensorData::new(values, [anchors.len(), 1, per_row * size, num_keys]),
        device,
    )
}
