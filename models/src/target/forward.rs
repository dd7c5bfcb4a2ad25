//! [`TargetModel`]: the decoder stack with captured states and an optional cache.

use std::path::Path;

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};

use crate::batch::{StateSpec, TargetStates, padded_ids};
use crate::error::ModelError;
use crate::layers::attention::{Causal, HeadShape, attend};
use crate::layers::linear::{gated_mlp, linear};
use crate::layers::norm::rms_norm;
use crate::layers::ragged::Ragged;
use crate::layers::rope::{RopeAngles, RopeTable};
use crate::target::config::TargetSpec;
use crate::target::ends::TargetEnds;
use crate::target::kv_cache::{CacheShape, KvCache};
use crate::target::tree::TreeAttention;
use crate::weights::WeightFolder;

/// A frozen decoder: Llama, Qwen2 and Qwen3 as values of one shape.
///
/// Its tensors live on a device without gradient tracking; they never require a gradient.
#[derive(Clone, Debug)]
pub struct TargetModel {
    spec: TargetSpec,
    ends: TargetEnds,
    blocks: Vec<Block>,
    rope: RopeTable,
    dtype: FloatDType,
    device: Device,
}

/// Where the tokens of a pass are; all blocks share it. Everything but attention is computed for real tokens only,
/// flat `[1, N, ..]`; attention pads the rows to the longest.
pub(super) struct Places {
    rows: Ragged,
    /// At the positions of the padded rows, `[B, S, D]`.
    angles: RopeAngles,
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    input_norm: Tensor<1>,
    q: Projection,
    k: Projection,
    v: Projection,
    o: Tensor<2>,
    qk_norm: Option<(Tensor<1>, Tensor<1>)>,
    mlp_norm: Tensor<1>,
    gate: Tensor<2>,
    up: Tensor<2>,
    down: Tensor<2>,
}

#[derive(Clone, Debug)]
struct Projection {
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
}

impl Projection {
    fn apply(&self, x: Tensor<3>) -> Tensor<3> {
        let y = linear(x, self.weight.clone());
        match &self.bias {
            Some(bias) => y + bias.clone().unsqueeze::<3>(),
            None => y,
        }
    }
}

impl TargetModel {
    /// Loads a model folder (`config.json` and safetensors) in compute type `dtype`.
    ///
    /// # Errors
    /// [`ModelError`] naming the file, key or tensor at fault.
    pub fn load(folder: &Path, dtype: FloatDType, device: &Device) -> Result<Self, ModelError> {
        let spec = TargetSpec::from_folder(folder)?;
        let weights = WeightFolder::open(folder)?;
        Self::from_weights(spec, &weights, dtype, device)
    }

    /// Builds a model from a configuration and its weights.
    ///
    /// # Errors
    /// [`ModelError`] when a tensor is missing or misshapen.
    pub fn from_weights(
        spec: TargetSpec,
        weights: &WeightFolder,
        dtype: FloatDType,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let ends = TargetEnds::load(weights, &spec, dtype, device)?;
        let loader = BlockLoader {
            spec: &spec,
            weights,
            dtype,
            device,
        };
        let blocks = (0..spec.num_layers)
            .map(|i| loader.block(i))
            .collect::<Result<_, _>>()?;
        let rope = RopeTable::new(
            &spec.rope,
            spec.head_dim,
            spec.max_position_embeddings,
            device,
        );
        Ok(Self {
            ends,
            blocks,
            rope,
            dtype,
            device: device.clone(),
            spec,
        })
    }

    /// Shape and constants of the model.
    pub fn spec(&self) -> &TargetSpec {
        &self.spec
    }

    /// Embedding, final norm and head.
    pub fn ends(&self) -> &TargetEnds {
        &self.ends
    }

    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// An empty cache for `num_rows` sequences of up to `capacity` tokens.
    pub fn new_cache(&self, num_rows: usize, capacity: usize) -> KvCache {
        let shape = CacheShape {
            num_layers: self.spec.num_layers,
            heads: self.spec.heads(),
            num_rows,
            capacity,
        };
        KvCache::new(shape, self.dtype, &self.device)
    }

    /// Runs whole documents and returns the states of every position, `[B, S, ..]` with S the length of the longest.
    ///
    /// No row may be empty. States behind the end of a row repeat those of its first token.
    pub fn forward(&self, rows: &[&[u32]], want: &StateSpec) -> TargetStates {
        self.run(rows, &vec![0; rows.len()], want, None)
    }

    /// Runs new tokens after those in `cache`, commits them and returns their states, as [`TargetModel::forward`] does.
    pub fn forward_cached(
        &self,
        new: &[&[u32]],
        want: &StateSpec,
        cache: &mut KvCache,
    ) -> TargetStates {
        let starts = cache.lens().to_vec();
        let states = self.run(new, &starts, want, Some(cache));
        for (row, new) in new.iter().enumerate() {
            cache.advance(row, new.len());
        }
        states
    }

    fn run(
        &self,
        rows: &[&[u32]],
        starts: &[usize],
        want: &StateSpec,
        mut cache: Option<&mut KvCache>,
    ) -> TargetStates {
        let len = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        let places = self.places(rows, positions(starts, len, &self.device));
        let num_keys = starts.iter().max().copied().unwrap_or(0) + len;
        let causal = Causal::new(starts, len, num_keys);
        self.through_blocks(rows, &places, want, |index, block, hidden| {
            let layer_cache = cache.as_deref_mut().map(|cache| (cache, index));
            block.forward(&self.spec, hidden, &places, &causal, layer_cache)
        })
    }

    /// Rows whose tokens are at `positions` `[B, S]`, those of the padding included.
    pub(super) fn places(&self, rows: &[&[u32]], positions: Tensor<2, Int>) -> Places {
        Places {
            rows: Ragged::new(rows.iter().map(|row| row.len()).collect()),
            angles: self.rope.at(positions),
        }
    }

    /// Embeds the tokens, runs `run_block` for every block on states `[1, N, H]` and returns the wanted outputs,
    /// padded `[B, S, ..]`.
    pub(super) fn through_blocks(
        &self,
        rows: &[&[u32]],
        places: &Places,
        want: &StateSpec,
        mut run_block: impl FnMut(usize, &Block, Tensor<3>) -> Tensor<3>,
    ) -> TargetStates {
        let mut hidden = self.ends.embed(padded_ids(&[&rows.concat()], &self.device));
        let mut captured = Vec::with_capacity(want.aux_layer_ids.len());
        for (index, block) in self.blocks.iter().enumerate() {
            hidden = run_block(index, block, hidden);
            if want.aux_layer_ids.contains(&index) {
                captured.push(hidden.clone());
            }
        }
        let final_hidden = places.rows.pad(hidden);
        let [num_rows, len, _] = final_hidden.dims();
        let aux = match captured.len() {
            // No block is captured, as in plain generation: `[B, S, 0]`, which `narrow` refuses to make.
            0 => Tensor::zeros([num_rows, len, 0], (&self.device, final_hidden.dtype())),
            _ => places.rows.pad(Tensor::cat(captured, 2)),
        };
        TargetStates {
            aux,
            final_hidden,
            teacher: None,
        }
    }
}

/// Positions `[B, S]` of new tokens that follow `starts[b]` committed ones.
pub fn positions(starts: &[usize], len: usize, device: &Device) -> Tensor<2, Int> {
    let flat: Vec<i32> = starts
        .iter()
        .flat_map(|&start| (start..start + len).map(|p| p as i32))
        .collect();
    Tensor::from_data(TensorData::new(flat, [starts.len(), len]), device)
}

/// Rotated queries and keys, and values, `[B, heads, S, D]` each; padding repeats the first token of its row.
struct Heads {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
}

impl Block {
    fn forward(
        &self,
        spec: &TargetSpec,
        hidden: Tensor<3>,
        places: &Places,
        causal: &Causal,
        cache: Option<(&mut KvCache, usize)>,
    ) -> Tensor<3> {
        let Heads { q, k, v } = self.heads(spec, hidden.clone(), places);
        let (k, v) = match cache {
            Some((cache, layer)) => cache.append(layer, k, v),
            None => (k, v),
        };
        let mixed = attend(spec.heads(), q, k, v, causal);
        self.finish(spec, hidden, mixed, places)
    }

    /// New entries of a tree behind the `cached` keys and values; also returns theirs.
    pub(super) fn forward_tree(
        &self,
        spec: &TargetSpec,
        hidden: Tensor<3>,
        places: &Places,
        attention: &TreeAttention,
        cached: (Tensor<4>, Tensor<4>),
    ) -> (Tensor<3>, (Tensor<4>, Tensor<4>)) {
        let Heads { q, k, v } = self.heads(spec, hidden.clone(), places);
        let own = (k, v);
        let mixed = attention.attend(spec.heads(), q, cached, own.clone());
        (self.finish(spec, hidden, mixed, places), own)
    }

    fn heads(&self, spec: &TargetSpec, hidden: Tensor<3>, places: &Places) -> Heads {
        let heads = spec.heads();
        let eps = spec.rms_norm_eps;
        let x = rms_norm(hidden, self.input_norm.clone(), eps);
        let split = |flat, num_heads| HeadShape::split(places.rows.pad(flat), num_heads);
        let q = split(self.q.apply(x.clone()), heads.num_heads);
        let k = split(self.k.apply(x.clone()), heads.num_kv_heads);
        let v = split(self.v.apply(x), heads.num_kv_heads);
        let (q, k) = match &self.qk_norm {
            Some((q_norm, k_norm)) => (
                rms_norm(q, q_norm.clone(), eps),
                rms_norm(k, k_norm.clone(), eps),
            ),
            None => (q, k),
        };
        Heads {
            q: places.angles.rotate(q),
            k: places.angles.rotate(k),
            v,
        }
    }

    /// What follows attention `[B, heads, S, D]`.
    fn finish(
        &self,
        spec: &TargetSpec,
        hidden: Tensor<3>,
        mixed: Tensor<4>,
        places: &Places,
    ) -> Tensor<3> {
        let mixed = places.rows.flatten(HeadShape::merge(mixed));
        let hidden = hidden + linear(mixed, self.o.clone());
        let x = rms_norm(hidden.clone(), self.mlp_norm.clone(), spec.rms_norm_eps);
        hidden + gated_mlp(x, self.gate.clone(), self.up.clone(), self.down.clone())
    }
}

struct BlockLoader<'a> {
    spec: &'a TargetSpec,
    weights: &'a WeightFolder,
    dtype: FloatDType,
    device: &'a Device,
}

impl BlockLoader<'_> {
    fn block(&self, index: usize) -> Result<Block, ModelError> {
        let spec = self.spec;
        let hidden = spec.hidden_size;
        let (q_width, kv_width) = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
        );
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let matrix = |part: &str, out: usize, width: usize| {
            self.weights
                .float(&name(part), [out, width], self.dtype, self.device)
        };
        let gain = |part: &str, width: usize| {
            self.weights
                .float(&name(part), [width], FloatDType::F32, self.device)
        };
        let projection = |letter: &str, out: usize| -> Result<Projection, ModelError> {
            let weight = matrix(&format!("self_attn.{letter}_proj.weight"), out, hidden)?;
            let bias_name = name(&format!("self_attn.{letter}_proj.bias"));
            let bias = spec
                .qkv_bias
                .then(|| {
                    self.weights
                        .float(&bias_name, [out], self.dtype, self.device)
                })
                .transpose()?;
            Ok(Projection { weight, bias })
        };
        let qk_norm = spec
            .qk_norm
            .then(|| -> Result<_, ModelError> {
                Ok((
                    gain("self_attn.q_norm.weight", spec.head_dim)?,
                    gain("self_attn.k_norm.weight", spec.head_dim)?,
                ))
            })
            .transpose()?;
        Ok(Block {
            input_norm: gain("input_layernorm.weight", hidden)?,
            q: projection("q", q_width)?,
            k: projection("k", kv_width)?,
            v: projection("v", kv_width)?,
            o: matrix("self_attn.o_proj.weight", hidden, q_width)?,
            qk_norm,
            mlp_norm: gain("post_attention_layernorm.weight", hidden)?,
            gate: matrix("mlp.gate_proj.weight", spec.intermediate_size, hidden)?,
            up: matrix("mlp.up_proj.weight", spec.intermediate_size, hidden)?,
            down: matrix("mlp.down_proj.weight", hidden, spec.intermediate_size)?,
        })
    }
}
