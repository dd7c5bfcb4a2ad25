//! A pass over a tree of tokens: several continuations of a cached text at once.
//!
//! Entry 0 of a row is the last committed token, whose states do not exist yet; every other entry names its parent. An entry
//! sees the cached text, its ancestors and itself, and stands at the position of its depth. Nothing is cached until a path
//! through the tree is committed.

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};

use super::KvCache;
use super::forward::TargetModel;
use crate::batch::{StateSpec, TargetStates, index_tensor};
use crate::layers::attention::{Causal, HeadShape, MASKED, scores};

/// Tokens of every row with their parents.
#[derive(Clone, Debug)]
pub struct TreeTokens {
    /// Ids of every row, none of them empty.
    pub ids: Vec<Vec<u32>>,
    /// Parent of every entry of each row, before its child; entry 0 is its own. Padding hangs on entry 0.
    pub parents: Vec<Vec<usize>>,
}

/// A pass that nothing was committed of.
#[derive(Clone, Debug)]
pub struct TreePass {
    /// States of every entry, `[B, S, ..]`.
    pub states: TargetStates,
    /// Keys and values of every entry by layer, `[B, kv heads, S, D]`.
    layers: Vec<(Tensor<4>, Tensor<4>)>,
}

/// What the attention of all layers of a pass shares.
pub(super) struct TreeAttention {
    /// The cached text that the entries see.
    past: Causal,
    /// Added to the scores between entries, `[B, 1, S, S]`.
    mask: Tensor<4>,
}

impl TreeAttention {
    fn new(tokens: &TreeTokens, starts: &[usize], device: &Device) -> Self {
        let len = tokens.padded_len();
        let longest = starts.iter().max().copied().unwrap_or(0);
        let visible = starts.iter().flat_map(|&start| vec![0..start; len]);
        let mut mask = vec![MASKED; starts.len() * len * len];
        for (row, parents) in tokens.parents.iter().enumerate() {
            for entry in 0..len {
                let seen = &mut mask[(row * len + entry) * len..][..len];
                let mut at = entry;
                seen[at] = 0.0;
                while at != 0 {
                    at = parents.get(at).copied().unwrap_or(0);
                    seen[at] = 0.0;
                }
            }
        }
        let shape = [starts.len(), 1, len, len];
        Self {
            past: Causal::seeing(visible, starts.len(), longest),
            mask: Tensor::from_data(TensorData::new(mask, shape), device),
        }
    }

    /// Attention of new entries over the cached text and their ancestors, `[B, heads, S, D]`.
    pub(super) fn attend(
        &self,
        heads: HeadShape,
        q: Tensor<4>,
        cached: (Tensor<4>, Tensor<4>),
        own: (Tensor<4>, Tensor<4>),
    ) -> Tensor<4> {
        let [_, _, len, head_dim] = q.dims();
        let dtype: FloatDType = q.dtype().into();
        let num_keys = cached.0.dims()[2];
        let past = scores(heads, q.clone(), cached.0, head_dim);
        let between = scores(heads, q, own.0, head_dim) + self.mask.clone();
        let weights = self.past.softmax_with(past, vec![between]).cast(dtype);
        let mix = |weights: Tensor<4>, values: Tensor<4>| {
            heads.unfold_queries(heads.fold_queries(weights).matmul(values), len)
        };
        mix(weights.clone().narrow(3, 0, num_keys), cached.1)
            + mix(weights.narrow(3, num_keys, len), own.1)
    }
}

impl TreeTokens {
    /// Entries of the largest tree, S.
    fn padded_len(&self) -> usize {
        self.ids.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Positions `[B, S]` of entries behind `starts[b]` cached tokens.
    fn positions(&self, starts: &[usize], device: &Device) -> Tensor<2, Int> {
        let len = self.padded_len();
        let mut positions = Vec::with_capacity(starts.len() * len);
        for (parents, start) in self.parents.iter().zip(starts) {
            let mut depths = vec![0; len];
            for entry in 1..len {
                depths[entry] = parents.get(entry).map_or(1, |&parent| depths[parent] + 1);
            }
            positions.extend(depths.iter().map(|depth| (start + depth) as i32));
        }
        let shape = [starts.len(), len];
        Tensor::from_data(TensorData::new(positions, shape), device)
    }
}

impl TargetModel {
    /// Runs a tree of tokens behind those in `cache`, which stays as it is.
    pub fn forward_tree(&self, tokens: &TreeTokens, want: &StateSpec, cache: &KvCache) -> TreePass {
        let starts = cache.lens();
        let device = self.device();
        let attention = TreeAttention::new(tokens, starts, device);
        let rows: Vec<&[u32]> = tokens.ids.iter().map(Vec::as_slice).collect();
        let places = self.places(&rows, tokens.positions(starts, device));
        let mut layers = Vec::new();
        let states = self.through_blocks(&rows, &places, want, |index, block, hidden| {
            let (hidden, own) =
                block.forward_tree(self.spec(), hidden, &places, &attention, cache.layer(index));
            layers.push(own);
            hidden
        });
        TreePass { states, layers }
    }
}

impl TreePass {
    /// Commits a path through the tree of each row, entries from entry 0 on, to `cache`; returns their states
    /// `[B, M, ..]`, padded on the right.
    pub fn commit(self, paths: &[Vec<usize>], cache: &mut KvCache) -> TargetStates {
        let longest = paths.iter().map(Vec::len).max().unwrap_or(0);
        let len = self.states.final_hidden.dims()[1];
        let places: Vec<usize> = paths
            .iter()
            .enumerate()
            .flat_map(|(row, path)| {
                let entry = move |at: usize| row * len + path.get(at).copied().unwrap_or(0);
                (0..longest).map(entry)
            })
            .collect();
        let device = self.states.final_hidden.device();
        let places = index_tensor(places, &device);
        for (index, (keys, values)) in self.layers.into_iter().enumerate() {
            let gather = |x: Tensor<4>| {
                let [num_rows, num_heads, _, width] = x.dims();
                let flat = x
                    .swap_dims(1, 2)
                    .reshape([num_rows * len, num_heads * width]);
                let path = flat.select(0, places.clone());
                path.reshape([num_rows, longest, num_heads, width])
                    .swap_dims(1, 2)
            };
            cache.append(index, gather(keys), gather(values));
        }
        for (row, path) in paths.iter().enumerate() {
            cache.advance(row, path.len());
        }
        let gather = |x: Tensor<3>| {
            let [num_rows, _, width] = x.dims();
            let flat = x.reshape([num_rows * len, width]);
            flat.select(0, places.clone())
                .reshape([num_rows, longest, width])
        };
        let aux = match self.states.aux.dims()[2] {
            0 => self.states.aux.narrow(1, 0, longest.min(len)),
            _ => gather(self.states.aux),
        };
        TargetStates {
            aux,
            final_hidden: gather(self.states.final_hidden),
            teacher: None,
        }
    }
}
