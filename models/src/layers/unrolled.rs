//! Attention of a drafter that is unrolled over its own outputs.

use burn::tensor::{FloatDType, Tensor};

use super::attention::{Causal, HeadShape, attend, scores};

/// Attention of unroll step `s`: causal over the step-0 keys, plus the same row's keys of steps `1 ..= s`.
///
/// `q` `[B, heads, A, D]`; `keys` and `values` hold steps `0 ..= s`, `[B, kv heads, S, D]` of all rows at step
/// 0 and `[B, kv heads, A, D]` of the queries' rows at later ones.
pub fn unrolled_attention(
    heads: HeadShape,
    q: Tensor<4>,
    keys: &[Tensor<4>],
    values: &[Tensor<4>],
    causal: &Causal,
) -> Tensor<4> {
    let [_, _, len, head_dim] = q.dims();
    let num_keys = keys[0].dims()[2];
    if keys.len() == 1 {
        return attend(heads, q, keys[0].clone(), values[0].clone(), causal);
    }
    let dtype: FloatDType = q.dtype().into();
    let scale = 1.0 / (head_dim as f64).sqrt();
    let past = scores(heads, q.clone(), keys[0].clone(), head_dim);
    let diagonal = |key: &Tensor<4>| {
        let products = q.clone() * repeat_heads(heads, key.clone());
        products.sum_dim(3).mul_scalar(scale).cast(FloatDType::F32) // [B, heads, A, 1]
    };
    let own = keys[1..].iter().map(diagonal).collect();
    let weights = causal.softmax_with(past, own).cast(dtype);
    let past = heads
        .fold_queries(weights.clone().narrow(3, 0, num_keys))
        .matmul(values[0].clone());
    let mut mixed = heads.unfold_queries(past, len);
    for (index, value) in values[1..].iter().enumerate() {
        let weight = weights.clone().narrow(3, num_keys + index, 1);
        mixed = mixed + weight * repeat_heads(heads, value.clone());
    }
    mixed
}

/// `[B, kv heads, S, D]` to `[B, heads, S, D]`, each key-value head repeated for its group.
fn repeat_heads(heads: HeadShape, x: Tensor<4>) -> Tensor<4> {
    let [batch, num_kv_heads, len, head_dim] = x.dims();
    let group = heads.group();
    x.reshape([batch, num_kv_heads, 1, len, head_dim])
        .expand([batch, num_kv_heads, group, len, head_dim])
        .reshape([batch, heads.num_heads, len, head_dim])
}
