//! MTP: a recursive multi-token-prediction head (DeepSeek-V3, 2412.19437, as one shared module that is
//! unrolled, FastMTP 2509.18362), one block of the target's shape over its final state.
//!
//! Slot (anchor `a`, depth `d`) is row `t = a - 1`, step `d`: it reads token `x_{a+d}` and the target's
//! normed final state of `t` at step 0, its own normed output of the same row at later steps. Attention
//! is that of EAGLE-3: the step-0 keys of rows `<= t` and the same row's keys of steps `1 ..= d`; the
//! rotary position is `t + d`. Training so computes what step-by-step decoding computes.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::decoder_layer::{DecoderLayer, LayerShape, LayerWeights};
use super::unroll_plan::UnrollPlan;
use super::{
    AnchorDraw, Committed, DraftState, Drafter, DrafterContext, Meaning, TrainedHead, last_rows,
    params, rope_table,
};
use crate::batch::{DraftBatch, StateSpec, TokenBatch, index_tensor};
use crate::error::ModelError;
use crate::layers::attention::{Causal, HeadShape, attend};
use crate::layers::follow;
use crate::layers::linear::linear;
use crate::layers::norm::rms_norm;
use crate::layers::rope::RopeTable;
use crate::layers::unrolled::unrolled_attention;
use crate::slot::{Slot, batch_slots};
use crate::target::forward::positions;
use crate::target::kv_cache::CacheShape;
use crate::target::{KvCache, TargetEnds, TargetSpec};

/// `[drafter.mtp]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MtpConfig {
    /// Depths the head is unrolled over in training, K.
    pub depths: usize,
    /// Order of the two halves of the input projection.
    pub half_order: HalfOrder,
    /// Whether the embedding at position 0 is replaced by zeros, as vLLM does for most of these heads.
    pub zero_first_embedding: bool,
}

impl Default for MtpConfig {
    fn default() -> Self {
        Self {
            depths: 3,
            half_order: HalfOrder::HiddenFirst,
            zero_first_embedding: true,
        }
    }
}

/// Order of state and embedding in front of the input projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HalfOrder {
    /// `[norm(h); norm(e)]`, as MiMo.
    HiddenFirst,
    /// `[norm(e); norm(h)]`, as DeepSeek and Qwen.
    EmbeddingFirst,
}

/// The drafter. Field names are the names in `drafter.safetensors`.
#[derive(Module, Debug)]
pub struct Mtp {
    /// Norm of the token embedding, `[H]`.
    pub embed_norm: Param<Tensor<1>>,
    /// Norm of the recurrent state, `[H]`.
    pub hidden_norm: Param<Tensor<1>>,
    /// Joins both, `[H, 2H]`.
    pub input_proj: Param<Tensor<2>>,
    /// The block, of the target's shape.
    pub layer: DecoderLayer,
    /// Norm in front of the head and of the recurrence, `[H]`.
    pub norm: Param<Tensor<1>>,
    /// The target's head rows of the draft vocabulary, `[V_draft, H]`; frozen.
    pub head: Param<Tensor<2>>,
    #[module(skip)]
    shape: MtpShape,
    #[module(skip)]
    rope: RopeTable,
}

/// Constants of a built drafter.
#[derive(Clone, Debug)]
struct MtpShape {
    heads: HeadShape,
    num_steps: usize,
    half_order: HalfOrder,
    zero_first_embedding: bool,
    eps: f64,
}

impl Drafter for Mtp {
    type Config = MtpConfig;

    fn meaning(config: &MtpConfig) -> Vec<Meaning> {
        vec![
            Meaning::new(
                "half_order",
                &config.half_order,
                "it says which columns of the input projection read the state",
            ),
            Meaning::new(
                "zero_first_embedding",
                &config.zero_first_embedding,
                "it says what the head reads at position 0",
            ),
        ]
    }

    fn check(config: &MtpConfig, _target: &TargetSpec) -> Result<StateSpec, ModelError> {
        if config.depths == 0 {
            return Err(ModelError::setting(
                "`drafter.mtp.depths` is 0, expected at least 1",
                "3 is the usual value",
            ));
        }
        Ok(StateSpec {
            aux_layer_ids: Vec::new(),
        })
    }

    fn init(
        config: &MtpConfig,
        context: DrafterContext<'_>,
        seed: u64,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let target = context.target;
        Self::check(config, target)?;
        let hidden = target.hidden_size;
        let shape = LayerShape {
            heads: target.heads(),
            hidden_size: hidden,
            intermediate_size: target.intermediate_size,
            qk_norm: target.qk_norm,
            qkv_bias: target.qkv_bias,
        };
        let gain = |name: &str| params::unit_gain(name, hidden, device);
        Ok(Self {
            embed_norm: gain("embed_norm"),
            hidden_norm: gain("hidden_norm"),
            input_proj: params::random_matrix("input_proj", [hidden, 2 * hidden], seed, device),
            layer: DecoderLayer::init("layer", shape, seed, device),
            norm: gain("norm"),
            head: params::named("head", context.head_rows(device)).set_require_grad(false),
            shape: MtpShape {
                heads: shape.heads,
                num_steps: config.depths,
                half_order: config.half_order,
                zero_first_embedding: config.zero_first_embedding,
                eps: target.rms_norm_eps,
            },
            rope: rope_table(target, config.depths, device),
        })
    }

    fn state_spec(&self) -> StateSpec {
        StateSpec {
            aux_layer_ids: Vec::new(),
        }
    }

    fn num_depths(&self) -> usize {
        self.shape.num_steps
    }

    fn training_slots(&self, tokens: &TokenBatch, _draw: AnchorDraw) -> Vec<Slot> {
        batch_slots(tokens, self.shape.num_steps)
    }

    fn draft_slots(
        &self,
        batch: &DraftBatch,
        slots: &[Slot],
        ends: &TargetEnds,
        compute: FloatDType,
    ) -> Tensor<2> {
        let plan = UnrollPlan::new(batch, slots);
        let steps = self.unroll(&plan, &batch.states.final_hidden, ends, compute);
        plan.slot_rows(steps, slots)
    }

    fn head(&self) -> Tensor<2> {
        self.head.val().inner()
    }

    fn trained_head(&self) -> Option<TrainedHead> {
        None
    }

    fn vocabulary_params(&self) -> Vec<ParamId> {
        vec![self.head.id]
    }

    fn open(&self, num_rows: usize, capacity: usize) -> DraftState {
        let shape = CacheShape {
            num_layers: 1,
            heads: self.shape.heads,
            num_rows,
            capacity,
        };
        DraftState::new(shape, &self.norm.val().device())
    }

    fn observe(&self, state: &mut DraftState, committed: Committed, ends: &TargetEnds) {
        state.roll_back();
        let [num_rows, len, hidden] = committed.final_hidden.dims();
        let normed = ends
            .normed(committed.final_hidden.clone().flatten(0, 1))
            .reshape([num_rows, len, hidden]);
        let embedded = ends.embed(committed.next_ids.clone()).cast(FloatDType::F32);
        let embedded = embedded * self.embedding_scale(&state.observed, len);
        let outputs = self.decode(&mut state.cache, embedded, normed, &committed.lens);
        state.outputs = Some(last_rows(outputs, &committed.lens));
        state.commit(&committed);
    }

    fn next_logits(
        &self,
        state: &mut DraftState,
        previous: Option<&[u32]>,
        ends: &TargetEnds,
    ) -> Tensor<2> {
        if let (Some(tokens), Some(feedback)) = (previous, state.outputs.clone()) {
            let ids = index_tensor(tokens.iter().map(|&id| id as usize), &feedback.device());
            let embedded = ends.embed(ids.unsqueeze_dim(1)).cast(FloatDType::F32);
            let lens = vec![1; tokens.len()];
            state.outputs = Some(self.decode(&mut state.cache, embedded, feedback, &lens));
        }
        state.output().matmul(self.head.val().transpose())
    }
}

impl Mtp {
    /// Outputs of the queries after the head's own final norm for every step, `[1, N, H]` each, in f32.
    fn unroll(
        &self,
        plan: &UnrollPlan<'_>,
        final_hidden: &Tensor<3>,
        ends: &TargetEnds,
        compute: FloatDType,
    ) -> Vec<Tensor<3>> {
        let device = self.norm.val().device();
        let inner = device.clone().inner();
        let weights = self.weights(compute);
        let input = |x: Tensor<3>| follow(&device, x).cast(compute);
        let embed = |ids: Tensor<2, Int>| ends.embed(ids).cast(FloatDType::F32);
        let causal = plan.causal();
        let normed = ends.normed(plan.context_of(final_hidden).squeeze_dim::<2>(0));
        let mut embedded = embed(plan.context_ids(&inner));
        if self.shape.zero_first_embedding {
            embedded = embedded * plan.is_not_first(&inner); // later steps never stand at position 0
        }
        let context = self.join(&weights, input(embedded), input(normed.unsqueeze_dim(0)));
        let angles = self.rope.at(plan.context_positions(&inner)).follow(&device);
        let layer = &weights.layer;
        let x = layer.normed(context.clone());
        let padded = plan.context.pad(x.clone());
        let mut keys = vec![angles.rotate(layer.keys(padded.clone()))];
        let mut values = vec![layer.values(padded)];
        let mut joined = plan.queries_of(context);
        let mut x = plan.queries.pad(plan.queries_of(x)); // [B, A, H]
        let mut outputs: Vec<Tensor<3>> = Vec::with_capacity(plan.num_steps);
        for step in 0..plan.num_steps {
            let angles = self
                .rope
                .at(plan.query_positions(step, &inner))
                .follow(&device);
            if let Some(hidden) = outputs.last() {
                let embedded = embed(plan.query_ids(step, &inner));
                joined = self.join(&weights, input(embedded), hidden.clone().cast(compute));
                x = plan.queries.pad(layer.normed(joined.clone()));
                keys.push(angles.rotate(layer.keys(x.clone())));
                values.push(layer.values(x.clone()));
            }
            let q = angles.rotate(layer.queries(x.clone()));
            let mixed = unrolled_attention(self.shape.heads, q, &keys, &values, &causal);
            let mixed = plan.queries.flatten(HeadShape::merge(mixed));
            let hidden = self.finish(&weights, joined.clone(), mixed);
            outputs.push(hidden.cast(FloatDType::F32));
        }
        outputs
    }

    fn weights(&self, compute: FloatDType) -> Weights {
        let MtpShape { heads, eps, .. } = self.shape;
        Weights {
            input_proj: self.input_proj.val().cast(compute),
            layer: self.layer.weights(heads, eps, compute),
        }
    }

    /// 1 for every embedding, 0 for that of position 0 where it is left out, `[B, S, 1]`.
    fn embedding_scale(&self, starts: &[usize], len: usize) -> Tensor<3> {
        let scale = |position: usize| {
            if position == 0 && self.shape.zero_first_embedding {
                0.0_f32
            } else {
                1.0
            }
        };
        let values: Vec<f32> = starts
            .iter()
            .flat_map(|&start| (start..start + len).map(scale))
            .collect();
        let device = self.norm.val().device().inner();
        Tensor::from_data(TensorData::new(values, [starts.len(), len, 1]), &device)
    }

    /// The block's input `[B, S, H]` from embeddings and recurrent states.
    fn join(&self, weights: &Weights, embedded: Tensor<3>, hidden: Tensor<3>) -> Tensor<3> {
        let eps = self.shape.eps;
        let embedded = rms_norm(embedded, self.embed_norm.val(), eps);
        let hidden = rms_norm(hidden, self.hidden_norm.val(), eps);
        let halves = match self.shape.half_order {
            HalfOrder::HiddenFirst => vec![hidden, embedded],
            HalfOrder::EmbeddingFirst => vec![embedded, hidden],
        };
        linear(Tensor::cat(halves, 2), weights.input_proj.clone())
    }

    fn finish(&self, weights: &Weights, joined: Tensor<3>, mixed: Tensor<3>) -> Tensor<3> {
        let hidden = weights.layer.finish(joined, mixed);
        rms_norm(hidden, self.norm.val(), self.shape.eps)
    }

    /// One cached pass over `[B, M, H]`; returns the outputs after the final norm.
    fn decode(
        &self,
        cache: &mut KvCache,
        embedded: Tensor<3>,
        hidden: Tensor<3>,
        lens: &[usize],
    ) -> Tensor<3> {
        let weights = self.weights(FloatDType::F32);
        let len = embedded.dims()[1];
        let starts = cache.lens().to_vec();
        let angles = self.rope.at(positions(&starts, len, &embedded.device()));
        let joined = self.join(&weights, embedded, hidden);
        let x = weights.layer.normed(joined.clone());
        let q = angles.rotate(weights.layer.queries(x.clone()));
        let k = angles.rotate(weights.layer.keys(x.clone()));
        let v = weights.layer.values(x);
        let num_keys = starts.iter().max().copied().unwrap_or(0) + len;
        let causal = Causal::new(&starts, len, num_keys);
        let (keys, values) = cache.append(0, k, v);
        let mixed = attend(self.shape.heads, q, keys, values, &causal);
        for (row, &new) in lens.iter().enumerate() {
            cache.advance(row, new);
        }
        self.finish(&weights, joined, HeadShape::merge(mixed))
    }
}

/// The weights in the compute type, for one pass.
struct Weights {
    input_proj: Tensor<2>,
    layer: LayerWeights,
}
