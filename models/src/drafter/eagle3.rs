//! EAGLE-3 (Li et al. 2025, 2503.01840): one decoder layer over fused target states, trained by
//! unrolling it over its own outputs ("training-time test").
//!
//! Slot (anchor `a`, depth `d`) is row `t = a - 1`, step `d` of the unroll: it reads token `x_{a+d}` and
//! the fused states `g_{a-1}` at step 0 (without captured states the normed final one), its own output of the same row at later steps. Attention sees
//! the step-0 keys of rows `<= t` and the same row's keys of steps `1 ..= d`; the rotary position is
//! `t + d`. So a training row computes exactly what step-by-step decoding with a cache computes.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::head::HeadMode;
use super::unroll_plan::UnrollPlan;
use super::{
    AnchorDraw, Committed, DraftState, Drafter, DrafterContext, Meaning, TrainedHead, aux_layers,
    last_rows, params, rope_table,
};
use crate::batch::{DraftBatch, StateSpec, TokenBatch, index_tensor};
use crate::error::ModelError;
use crate::layers::attention::{Causal, HeadShape, attend};
use crate::layers::follow;
use crate::layers::linear::{gated_mlp, linear};
use crate::layers::norm::rms_norm;
use crate::layers::ragged::Ragged;
use crate::layers::rope::RopeTable;
use crate::layers::unrolled::unrolled_attention;
use crate::slot::{Slot, batch_slots};
use crate::target::forward::positions;
use crate::target::kv_cache::CacheShape;
use crate::target::{KvCache, TargetEnds, TargetSpec};

/// Name of the family.
const FAMILY: &str = "eagle3";

/// `[drafter.eagle3]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Eagle3Config {
    /// Captured blocks, zero-based index of the block whose output is taken; unset means
    /// `[1, N/2 - 1, N - 4]` for a target of N blocks (the published rule), and an empty list none: then the
    /// drafter starts from the target's final state after its final norm, without a fusion.
    pub aux_layer_ids: Option<Vec<usize>>,
    /// Steps of the training-time test, K.
    pub ttt_steps: usize,
    /// Whether and how the captured states are normed before they are fused.
    pub aux_norm: AuxNorm,
    /// Whether the residual starts from the normed fused state (vLLM and speculators only).
    pub norm_before_residual: bool,
    /// Whether the normed output is fed back to the next depth, as in EAGLE-3.1, or the raw one.
    pub norm_output: bool,
    /// Whether the head is trained or stays the target's rows.
    pub head: HeadMode,
    /// Width of the gated MLP; unset means the target's.
    pub intermediate_size: Option<usize>,
}

impl Default for Eagle3Config {
    fn default() -> Self {
        Self {
            aux_layer_ids: None,
            ttt_steps: 7,
            aux_norm: AuxNorm::None,
            norm_before_residual: false,
            norm_output: false,
            head: HeadMode::Trained,
            intermediate_size: None,
        }
    }
}

impl Eagle3Config {
    /// Whether the only state it reads is the target's final one.
    pub fn reads_final_state(&self) -> bool {
        self.aux_layer_ids.as_ref().is_some_and(Vec::is_empty)
    }
}

/// Norm in front of the fusion of the captured states.
///
/// The states of deep blocks may be thousands of times larger than those of the first ones, and a few
/// channels larger still: without a norm they decide alone what the fusion sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuxNorm {
    /// The states as they are, as published for EAGLE-3.
    None,
    /// One RMSNorm over the concatenation (`norm_before_fc` of vLLM and speculators).
    Concatenated,
    /// One RMSNorm with a gain of its own for each state, as in EAGLE-3.1 (`fc_norm` of engines and speculators).
    Each,
}

/// The drafter. Field names are the names in `drafter.safetensors`.
#[derive(Module, Debug)]
pub struct Eagle3 {
    /// Fuses the captured states, `[H, K*H]`; absent where there are none.
    pub fc: Option<Param<Tensor<2>>>,
    /// Norm over the concatenated states, `[K*H]`; only with [`AuxNorm::Concatenated`].
    pub aux_norm: Option<Param<Tensor<1>>>,
    /// Norms of the K captured states in the order of their blocks, `[H]` each; none but with [`AuxNorm::Each`].
    pub aux_norms: Vec<Param<Tensor<1>>>,
    /// Norm of the token embedding, `[H]`.
    pub embed_norm: Param<Tensor<1>>,
    /// Norm of the fused state, `[H]`.
    pub hidden_norm: Param<Tensor<1>>,
    /// `[heads * D, 2H]`; the embedding half comes first.
    pub q_proj: Param<Tensor<2>>,
    /// `[kv heads * D, 2H]`.
    pub k_proj: Param<Tensor<2>>,
    /// `[kv heads * D, 2H]`.
    pub v_proj: Param<Tensor<2>>,
    /// `[H, heads * D]`.
    pub o_proj: Param<Tensor<2>>,
    /// Norm in front of the MLP, `[H]`.
    pub mlp_norm: Param<Tensor<1>>,
    /// `[I, H]`.
    pub gate_proj: Param<Tensor<2>>,
    /// `[I, H]`.
    pub up_proj: Param<Tensor<2>>,
    /// `[H, I]`.
    pub down_proj: Param<Tensor<2>>,
    /// Norm in front of the head, `[H]`.
    pub norm: Param<Tensor<1>>,
    /// `[V_draft, H]`.
    pub head: Param<Tensor<2>>,
    #[module(skip)]
    shape: Eagle3Shape,
    #[module(skip)]
    rope: RopeTable,
}

/// Constants of a built drafter.
#[derive(Clone, Debug)]
struct Eagle3Shape {
    heads: HeadShape,
    aux_layer_ids: Vec<usize>,
    num_steps: usize,
    norm_before_residual: bool,
    norm_output: bool,
    head: HeadMode,
    eps: f64,
}

/// The settings of a drafter without captured states; returns what is to be read.
fn check_final_state(config: &Eagle3Config) -> Result<StateSpec, ModelError> {
    if config.aux_norm != AuxNorm::None {
        let found = json!(config.aux_norm);
        return Err(ModelError::setting(
            format!(
                "`drafter.eagle3.aux_norm` is {found}, but `aux_layer_ids` is empty: there is nothing to norm"
            ),
            "leave `aux_norm` out; the final state is normed by the target's own final norm",
        ));
    }
    Ok(StateSpec {
        aux_layer_ids: Vec::new(),
    })
}

/// Gains in front of the fusion of `num_captured` states of width `hidden`: over the concatenation, and of each.
fn aux_gains(
    norm: AuxNorm,
    [num_captured, hidden]: [usize; 2],
    device: &Device,
) -> (Option<Param<Tensor<1>>>, Vec<Param<Tensor<1>>>) {
    let gain = |name: &str, width| params::unit_gain(name, width, device);
    match norm {
        AuxNorm::None => (None, Vec::new()),
        AuxNorm::Concatenated => (Some(gain("aux_norm", num_captured * hidden)), Vec::new()),
        AuxNorm::Each => {
            let names = (0..num_captured).map(|index| format!("aux_norms.{index}"));
            (None, names.map(|name| gain(&name, hidden)).collect())
        }
    }
}

impl Drafter for Eagle3 {
    type Config = Eagle3Config;

    fn meaning(config: &Eagle3Config) -> Vec<Meaning> {
        vec![
            Meaning::new(
                "aux_norm",
                &config.aux_norm,
                "it says whether the captured states are normed before they are fused",
            ),
            Meaning::new(
                "norm_before_residual",
                &config.norm_before_residual,
                "it says what the residual starts from",
            ),
            Meaning::new(
                "norm_output",
                &config.norm_output,
                "it says what is fed to the next depth",
            ),
        ]
    }

    fn check(config: &Eagle3Config, target: &TargetSpec) -> Result<StateSpec, ModelError> {
        if config.ttt_steps == 0 {
            return Err(ModelError::setting(
                "`drafter.eagle3.ttt_steps` is 0, expected at least 1",
                "7 is the published value, 3 is cheaper",
            ));
        }
        if config.reads_final_state() {
            return check_final_state(config);
        }
        let num_layers = target.num_layers;
        let default = aux_layers::low_middle_high(num_layers);
        let explicit = config.aux_layer_ids.as_ref();
        Ok(StateSpec {
            aux_layer_ids: aux_layers::choose(FAMILY, explicit, default, num_layers)?,
        })
    }

    fn init(
        config: &Eagle3Config,
        context: DrafterContext<'_>,
        seed: u64,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let target = context.target;
        let aux_layer_ids = Self::check(config, target)?.aux_layer_ids;
        let heads = target.heads();
        let hidden = target.hidden_size;
        let intermediate = config.intermediate_size.unwrap_or(target.intermediate_size);
        let (q_width, kv_width) = (
            heads.num_heads * heads.head_dim,
            heads.num_kv_heads * heads.head_dim,
        );
        let matrix =
            |name: &str, shape: [usize; 2]| params::random_matrix(name, shape, seed, device);
        let gain = |name: &str| params::unit_gain(name, hidden, device);
        let aux_width = aux_layer_ids.len() * hidden;
        let sizes = [aux_layer_ids.len(), hidden];
        let (aux_norm, aux_norms) = aux_gains(config.aux_norm, sizes, device);
        let drafter = Self {
            aux_norm,
            aux_norms,
            fc: (aux_width > 0).then(|| matrix("fc", [hidden, aux_width])),
            embed_norm: gain("embed_norm"),
            hidden_norm: gain("hidden_norm"),
            q_proj: matrix("q_proj", [q_width, 2 * hidden]),
            k_proj: matrix("k_proj", [kv_width, 2 * hidden]),
            v_proj: matrix("v_proj", [kv_width, 2 * hidden]),
            o_proj: matrix("o_proj", [hidden, q_width]),
            mlp_norm: gain("mlp_norm"),
            gate_proj: matrix("gate_proj", [intermediate, hidden]),
            up_proj: matrix("up_proj", [intermediate, hidden]),
            down_proj: matrix("down_proj", [hidden, intermediate]),
            norm: gain("norm"),
            head: params::named("head", context.head_rows(device)),
            shape: Eagle3Shape {
                heads,
                aux_layer_ids,
                num_steps: config.ttt_steps,
                norm_before_residual: config.norm_before_residual,
                norm_output: config.norm_output,
                head: config.head,
                eps: target.rms_norm_eps,
            },
            rope: rope_table(target, config.ttt_steps, device),
        };
        Ok(drafter.with_head_mode())
    }

    fn state_spec(&self) -> StateSpec {
        StateSpec {
            aux_layer_ids: self.shape.aux_layer_ids.clone(),
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
        let states = self.read_of(&batch.states.aux, &batch.states.final_hidden);
        let steps = self.unroll(&plan, states, ends, compute);
        plan.slot_rows(steps, slots)
    }

    fn head(&self) -> Tensor<2> {
        self.head.val().inner()
    }

    fn trained_head(&self) -> Option<TrainedHead> {
        let [_, width] = self.head.val().dims();
        (self.shape.head == HeadMode::Trained).then_some(TrainedHead {
            id: self.head.id,
            columns: 0..width,
        })
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
        let layer = self.layer(FloatDType::F32);
        let embedded = ends.embed(committed.next_ids.clone()).cast(FloatDType::F32);
        let states = self.read_of(&committed.aux, &committed.final_hidden);
        let states = self.prepared(states.clone(), ends).cast(FloatDType::F32);
        let fused = self.fuse(&layer, states);
        let hidden = self.decode(&layer, &mut state.cache, embedded, fused, &committed.lens);
        state.commit(&committed);
        self.remember(state, last_rows(hidden, &committed.lens));
    }

    fn next_logits(
        &self,
        state: &mut DraftState,
        previous: Option<&[u32]>,
        ends: &TargetEnds,
    ) -> Tensor<2> {
        if let (Some(tokens), Some(feedback)) = (previous, state.feedback.clone()) {
            let layer = self.layer(FloatDType::F32);
            let device = feedback.device();
            let ids = index_tensor(tokens.iter().map(|&id| id as usize), &device);
            let embedded = ends.embed(ids.unsqueeze_dim(1)).cast(FloatDType::F32);
            let lens = vec![1; tokens.len()];
            let hidden = self.decode(&layer, &mut state.cache, embedded, feedback, &lens);
            self.remember(state, hidden);
        }
        state.output().matmul(self.head.val().transpose())
    }
}

/// The layer's weights in the compute type.
struct Layer {
    fc: Option<Tensor<2>>,
    q: Tensor<2>,
    k: Tensor<2>,
    v: Tensor<2>,
    o: Tensor<2>,
    gate: Tensor<2>,
    up: Tensor<2>,
    down: Tensor<2>,
}

impl Eagle3 {
    fn with_head_mode(mut self) -> Self {
        if self.shape.head == HeadMode::Frozen {
            self.head = self.head.set_require_grad(false);
        }
        self
    }

    fn layer(&self, compute: FloatDType) -> Layer {
        let cast = |param: &Param<Tensor<2>>| param.val().cast(compute);
        Layer {
            fc: self.fc.as_ref().map(cast),
            q: cast(&self.q_proj),
            k: cast(&self.k_proj),
            v: cast(&self.v_proj),
            o: cast(&self.o_proj),
            gate: cast(&self.gate_proj),
            up: cast(&self.up_proj),
            down: cast(&self.down_proj),
        }
    }

    /// Outputs in front of the head of the queries for every step, `[1, N, H]` each, in f32.
    fn unroll(
        &self,
        plan: &UnrollPlan<'_>,
        states: &Tensor<3>,
        ends: &TargetEnds,
        compute: FloatDType,
    ) -> Vec<Tensor<3>> {
        let device = self.norm.val().device();
        let inner = device.clone().inner();
        let layer = self.layer(compute);
        let input = |x: Tensor<3>| follow(&device, x).cast(compute);
        let causal = plan.causal();
        let states = self.prepared(plan.context_of(states), ends);
        let fused = self.fuse(&layer, input(states));
        let embedded = input(ends.embed(plan.context_ids(&inner)));
        let context = self.join(embedded, fused.clone()); // [1, M, 2H]
        let angles = self.rope.at(plan.context_positions(&inner)).follow(&device);
        let HeadShape {
            num_heads,
            num_kv_heads,
            ..
        } = self.shape.heads;
        let split = |rows: &Ragged, x: &Tensor<3>, weight: &Tensor<2>, num_heads| {
            HeadShape::split(rows.pad(linear(x.clone(), weight.clone())), num_heads)
        };
        let mut keys = vec![angles.rotate(split(&plan.context, &context, &layer.k, num_kv_heads))];
        let mut values = vec![split(&plan.context, &context, &layer.v, num_kv_heads)];
        let mut hidden = plan.queries_of(fused);
        let mut joined = plan.queries_of(context); // [1, N, 2H]
        let mut outputs = Vec::with_capacity(plan.num_steps);
        for step in 0..plan.num_steps {
            let angles = self
                .rope
                .at(plan.query_positions(step, &inner))
                .follow(&device);
            if step > 0 {
                let embedded = input(ends.embed(plan.query_ids(step, &inner)));
                joined = self.join(embedded, hidden.clone());
                let k = split(&plan.queries, &joined, &layer.k, num_kv_heads);
                keys.push(angles.rotate(k));
                values.push(split(&plan.queries, &joined, &layer.v, num_kv_heads));
            }
            let q = angles.rotate(split(&plan.queries, &joined, &layer.q, num_heads));
            let mixed = unrolled_attention(self.shape.heads, q, &keys, &values, &causal);
            let mixed = plan.queries.flatten(HeadShape::merge(mixed));
            hidden = self.finish(&layer, hidden, mixed);
            let output = rms_norm(hidden.clone(), self.norm.val(), self.shape.eps);
            if self.shape.norm_output {
                hidden = output.clone();
            }
            outputs.push(output.cast(FloatDType::F32));
        }
        outputs
    }

    /// Which of the target's states are read: captured ones `[B, S, K*H]`, or the final one `[B, S, H]`.
    fn read_of<'a>(&self, aux: &'a Tensor<3>, final_hidden: &'a Tensor<3>) -> &'a Tensor<3> {
        match self.fc {
            Some(_) => aux,
            None => final_hidden,
        }
    }

    /// The states as the drafter takes them in, `[B, S, X]`: a final one after the target's final norm, which is
    /// what engines give to a drafter without captured states.
    fn prepared(&self, states: Tensor<3>, ends: &TargetEnds) -> Tensor<3> {
        if self.fc.is_some() {
            return states;
        }
        let shape = states.dims();
        ends.normed(states.flatten(0, 1)).reshape(shape)
    }

    /// What step 0 starts from, `[B, S, H]`: captured states `[B, S, K*H]` fused, a final one as it is.
    fn fuse(&self, layer: &Layer, states: Tensor<3>) -> Tensor<3> {
        match &layer.fc {
            Some(fc) => linear(self.normed(states), fc.clone()),
            None => states,
        }
    }

    /// Captured states `[B, S, K*H]` as the fusion takes them: normed as one, each by itself, or as they are.
    fn normed(&self, states: Tensor<3>) -> Tensor<3> {
        let eps = self.shape.eps;
        if let Some(gain) = &self.aux_norm {
            return rms_norm(states, gain.val(), eps);
        }
        if self.aux_norms.is_empty() {
            return states;
        }
        let each = states.chunk(self.aux_norms.len(), 2).into_iter(); // K of [B, S, H]
        let normed = each
            .zip(&self.aux_norms)
            .map(|(state, gain)| rms_norm(state, gain.val(), eps));
        Tensor::cat(normed.collect(), 2)
    }

    /// Attention inputs `[B, S, 2H]` from embeddings and hidden states `[B, S, H]`.
    fn join(&self, embedded: Tensor<3>, hidden: Tensor<3>) -> Tensor<3> {
        let eps = self.shape.eps;
        let embedded = rms_norm(embedded, self.embed_norm.val(), eps);
        let hidden = rms_norm(hidden, self.hidden_norm.val(), eps);
        Tensor::cat(vec![embedded, hidden], 2)
    }

    /// Residual, output projection and MLP after attention; returns the pre-norm output `[B, S, H]`.
    fn finish(&self, layer: &Layer, hidden: Tensor<3>, mixed: Tensor<3>) -> Tensor<3> {
        let eps = self.shape.eps;
        let residual = if self.shape.norm_before_residual {
            rms_norm(hidden, self.hidden_norm.val(), eps)
        } else {
            hidden
        };
        let hidden = residual + linear(mixed, layer.o.clone());
        let x = rms_norm(hidden.clone(), self.mlp_norm.val(), eps);
        hidden + gated_mlp(x, layer.gate.clone(), layer.up.clone(), layer.down.clone())
    }

    /// One cached pass over `[B, M, H]`; returns the pre-norm outputs.
    fn decode(
        &self,
        layer: &Layer,
        cache: &mut KvCache,
        embedded: Tensor<3>,
        hidden: Tensor<3>,
        lens: &[usize],
    ) -> Tensor<3> {
        let len = embedded.dims()[1];
        let device = embedded.device();
        let starts = cache.lens().to_vec();
        let angles = self.rope.at(positions(&starts, len, &device));
        let joined = self.join(embedded, hidden.clone());
        let HeadShape {
            num_heads,
            num_kv_heads,
            ..
        } = self.shape.heads;
        let split = |weight: &Tensor<2>, num_heads| {
            HeadShape::split(linear(joined.clone(), weight.clone()), num_heads)
        };
        let q = angles.rotate(split(&layer.q, num_heads));
        let k = angles.rotate(split(&layer.k, num_kv_heads));
        let v = split(&layer.v, num_kv_heads);
        let num_keys = starts.iter().max().copied().unwrap_or(0) + len;
        let causal = Causal::new(&starts, len, num_keys);
        let (keys, values) = cache.append(0, k, v);
        let mixed = attend(self.shape.heads, q, keys, values, &causal);
        for (row, new) in lens.iter().enumerate() {
            cache.advance(row, *new);
        }
        self.finish(layer, hidden, HeadShape::merge(mixed))
    }

    fn remember(&self, state: &mut DraftState, hidden: Tensor<3>) {
        let output = rms_norm(hidden.clone(), self.norm.val(), self.shape.eps);
        let feedback = if self.shape.norm_output {
            output.clone()
        } else {
            hidden
        };
        state.outputs = Some(output);
        state.feedback = Some(feedback);
    }
}
