//! DFlash (2602.06036): a block of masked positions, filled in one pass by a few decoder layers that
//! see the target's states as keys and values of their own.
//!
//! The block opened at anchor `a` is `[x_a, mask, mask, ..]` at positions `a, a+1, ..`. In every layer
//! its tokens attend to the context `RMSNorm(fc(aux states))` of positions `j < a`, projected by the
//! layer's own keys and values, and to each other in both directions; never to another block. Slot
//! (anchor `a`, depth `d`) is block position `d + 1` where the anchor is the bonus token, and `d` where
//! the anchor predicts.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::block_plan::{BlockPlan, passes};
use super::decoder_layer::{DecoderLayer, LayerShape, LayerWeights};
use super::token::{MaskToken, check_mask_token};
use super::{
    AnchorDraw, AnchorLimit, Committed, DraftState, Drafter, DrafterContext, Meaning, TrainedHead,
    aux_layers, params, rope_table,
};
use crate::batch::{DraftBatch, StateSpec, TokenBatch, index_tensor};
use crate::error::ModelError;
use crate::layers::attention::{Causal, HeadShape};
use crate::layers::blocks::{BlockStates, block_attention, context_of_blocks};
use crate::layers::follow;
use crate::layers::linear::linear;
use crate::layers::norm::rms_norm;
use crate::layers::ragged::Ragged;
use crate::layers::rope::{RopeAngles, RopeTable};
use crate::slot::{Slot, batch_slots};
use crate::target::forward::positions;
use crate::target::kv_cache::CacheShape;
use crate::target::{TargetEnds, TargetSpec};

/// Gain of the norm in front of the head, at first. The head's rows are the target's, made for hidden rows that point somewhere;
/// random ones under a unit gain give logits so far apart that the loss starts at several times that of a uniform guess
/// (SmolLM2: 35 nats against 9), and the first hundred steps go into shrinking them.
const INITIAL_GAIN: f32 = 0.4;

/// Name of the family.
const FAMILY: &str = "dflash";
/// Number of captured blocks when none are named, as published.
const NUM_AUX_LAYERS: usize = 5;

/// `[drafter.dflash]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DflashConfig {
    /// A reserved token that the template never writes; it fills the block behind the anchor.
    pub mask_token: MaskToken,
    /// Captured blocks, zero-based index of the block whose output is taken; unset means five blocks
    /// spread evenly from the second to the third-last (the published rule).
    #[serde(default)]
    pub aux_layer_ids: Option<Vec<usize>>,
    /// Decoder layers.
    #[serde(default = "default_num_layers")]
    pub num_layers: usize,
    /// Tokens of a block, the anchor included.
    #[serde(default = "default_block_size")]
    pub block_size: usize,
    /// Which block position predicts which token.
    #[serde(default)]
    pub layout: BlockLayout,
    /// Most blocks trained for each row and step, drawn without replacement. A cap that binds gives short rows more weight than
    /// their text has.
    #[serde(default = "default_anchors_per_row")]
    pub anchors_per_row: usize,
    /// Share of a row's blocks that is trained, drawn without replacement: all rows keep the weight of their text.
    #[serde(default = "default_anchor_share")]
    pub anchor_share: f64,
    /// Blocks computed together, over all rows of a micro-batch; bounds memory.
    #[serde(default = "default_blocks_per_pass")]
    pub blocks_per_pass: usize,
    /// Width of the gated MLP; unset means the target's.
    #[serde(default)]
    pub intermediate_size: Option<usize>,
    /// Positions that a token sees in every layer, itself and those before it; unset means all. At least the block,
    /// which is seen in both directions.
    #[serde(default)]
    pub sliding_window: Option<usize>,
}

pub(super) const fn default_num_layers() -> usize {
    5
}

const fn default_block_size() -> usize {
    8
}

pub(super) const fn default_anchors_per_row() -> usize {
    512
}

pub(super) const fn default_anchor_share() -> f64 {
    1.0
}

pub(super) const fn default_blocks_per_pass() -> usize {
    512
}

/// The two label layouts in use; a checkpoint of one read as the other accepts nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockLayout {
    /// Block position `k >= 1` predicts `x_{a+k}`, position 0 nothing: `block_size - 1` drafts.
    #[default]
    AnchorAsBonus,
    /// Block position `k >= 0` predicts `x_{a+k+1}`: `block_size` drafts.
    AnchorPredicts,
}

impl BlockLayout {
    /// Block position of depth 0.
    fn first(self) -> usize {
        match self {
            Self::AnchorAsBonus => 1,
            Self::AnchorPredicts => 0,
        }
    }
}

/// The drafter. Field names are the names in `drafter.safetensors`.
#[derive(Module, Debug)]
pub struct Dflash {
    /// Fuses the captured states, `[H, K*H]`.
    pub fc: Param<Tensor<2>>,
    /// Norm of the fused states, `[H]`.
    pub context_norm: Param<Tensor<1>>,
    /// The decoder layers.
    pub layers: Vec<DecoderLayer>,
    /// Norm in front of the head, `[H]`.
    pub norm: Param<Tensor<1>>,
    /// The target's head rows of the draft vocabulary, `[V_draft, H]`; frozen.
    pub head: Param<Tensor<2>>,
    #[module(skip)]
    shape: DflashShape,
    #[module(skip)]
    rope: RopeTable,
}

/// Constants of a built drafter.
#[derive(Clone, Debug)]
struct DflashShape {
    heads: HeadShape,
    aux_layer_ids: Vec<usize>,
    mask_id: u32,
    block_size: usize,
    layout: BlockLayout,
    anchors: AnchorLimit,
    blocks_per_pass: usize,
    sliding_window: Option<usize>,
    eps: f64,
}

impl DflashShape {
    fn num_depths(&self) -> usize {
        self.block_size - self.layout.first()
    }
}

/// Checks the settings of a block drafter, which messages call `family`.
///
/// # Errors
/// [`ModelError::Setting`] when they do not fit the target.
pub(super) fn check_as(
    family: &str,
    config: &DflashConfig,
    target: &TargetSpec,
) -> Result<StateSpec, ModelError> {
    check_mask_token(family, &config.mask_token, target)?;
    let at_least = |name: &str, value: usize, least: usize| {
        if value >= least {
            return Ok(());
        }
        Err(ModelError::setting(
            format!("`drafter.{family}.{name}` is {value}, expected at least {least}"),
            "see `configs/smollm2-dflash.toml` for usual values",
        ))
    };
    at_least("num_layers", config.num_layers, 1)?;
    at_least("block_size", config.block_size, 2)?;
    at_least("anchors_per_row", config.anchors_per_row, 1)?;
    let share = config.anchor_share;
    if !(share > 0.0 && share <= 1.0) {
        return Err(ModelError::setting(
            format!(
                "`drafter.{family}.anchor_share` is {share}, expected a share above 0 and at most 1"
            ),
            "1 trains the blocks of all anchors, up to `anchors_per_row`",
        ));
    }
    at_least("blocks_per_pass", config.blocks_per_pass, 1)?;
    if let Some(window) = config.sliding_window {
        at_least("sliding_window", window, config.block_size)?;
    }
    let num_layers = target.num_layers;
    let default = aux_layers::evenly_spread(num_layers, NUM_AUX_LAYERS);
    let explicit = config.aux_layer_ids.as_ref();
    Ok(StateSpec {
        aux_layer_ids: aux_layers::choose(family, explicit, default, num_layers)?,
    })
}

impl Drafter for Dflash {
    type Config = DflashConfig;

    fn meaning(config: &DflashConfig) -> Vec<Meaning> {
        vec![
            Meaning::new(
                "layout",
                &config.layout,
                "it says which token a block position predicts (a `dspark` always has `anchor_predicts`), and \
                 every draft of the other layout would be shifted by one",
            ),
            Meaning::new(
                "mask_token",
                &config.mask_token,
                "its embedding is what the block reads in place of drafts",
            ),
        ]
    }

    fn mask_token(config: &mut DflashConfig) -> Option<&mut MaskToken> {
        Some(&mut config.mask_token)
    }

    fn draws_anchors(_config: &DflashConfig) -> bool {
        true
    }

    fn check(config: &DflashConfig, target: &TargetSpec) -> Result<StateSpec, ModelError> {
        check_as(FAMILY, config, target)
    }

    fn init(
        config: &DflashConfig,
        context: DrafterContext<'_>,
        seed: u64,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let target = context.target;
        let aux_layer_ids = Self::check(config, target)?.aux_layer_ids;
        let hidden = target.hidden_size;
        let layer = LayerShape {
            heads: target.heads(),
            hidden_size: hidden,
            intermediate_size: config.intermediate_size.unwrap_or(target.intermediate_size),
            qk_norm: true, // every engine builds these layers as Qwen3 blocks
            qkv_bias: false,
        };
        let fc = [hidden, aux_layer_ids.len() * hidden];
        let layers = (0..config.num_layers)
            .map(|index| DecoderLayer::init(&format!("layers.{index}"), layer, seed, device));
        Ok(Self {
            fc: params::random_matrix("fc", fc, seed, device),
            context_norm: params::unit_gain("context_norm", hidden, device),
            layers: layers.collect(),
            norm: params::even_gain("norm", hidden, INITIAL_GAIN, device),
            head: params::named("head", context.head_rows(device)).set_require_grad(false),
            shape: DflashShape {
                heads: layer.heads,
                aux_layer_ids,
                mask_id: config.mask_token.id(FAMILY)?,
                block_size: config.block_size,
                layout: config.layout,
                anchors: AnchorLimit {
                    share: config.anchor_share,
                    per_row: config.anchors_per_row,
                },
                blocks_per_pass: config.blocks_per_pass,
                sliding_window: config.sliding_window,
                eps: target.rms_norm_eps,
            },
            rope: rope_table(target, config.block_size, device),
        })
    }

    fn state_spec(&self) -> StateSpec {
        StateSpec {
            aux_layer_ids: self.shape.aux_layer_ids.clone(),
        }
    }

    fn num_depths(&self) -> usize {
        self.shape.num_depths()
    }

    fn max_depths(&self) -> Option<usize> {
        Some(self.shape.num_depths())
    }

    fn reads_drafts(&self) -> bool {
        false
    }

    fn num_layers(&self) -> usize {
        self.layers.len()
    }

    fn training_slots(&self, tokens: &TokenBatch, draw: AnchorDraw) -> Vec<Slot> {
        let drawn = draw.anchors(tokens, self.shape.anchors);
        let mut slots = batch_slots(tokens, self.num_depths());
        slots.retain(|slot| drawn[slot.row].binary_search(&slot.anchor).is_ok());
        slots
    }

    fn passes(&self, slots: Vec<Slot>) -> Vec<Vec<Slot>> {
        passes(slots, self.shape.blocks_per_pass)
    }

    fn draft_slots(
        &self,
        batch: &DraftBatch,
        slots: &[Slot],
        ends: &TargetEnds,
        compute: FloatDType,
    ) -> Tensor<2> {
        let plan = BlockPlan::new(slots);
        let (first, size) = (self.shape.layout.first(), self.shape.block_size);
        let blocks = plan.blocks_of(slots).into_iter();
        let places = blocks
            .zip(slots)
            .map(|(block, slot)| block * size + first + slot.depth);
        self.outputs(batch, &plan, places, ends, compute)
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
            num_layers: self.layers.len(),
            heads: self.shape.heads,
            num_rows,
            capacity,
        };
        DraftState::new(shape, &self.fc.val().device())
    }

    fn observe(&self, state: &mut DraftState, committed: Committed, _ends: &TargetEnds) {
        let len = committed.aux.dims()[1];
        let starts = state.observed.clone();
        let angles = self
            .rope
            .at(positions(&starts, len, &committed.aux.device()));
        let context = self.context(committed.aux.clone().cast(FloatDType::F32), FloatDType::F32);
        for (index, layer) in self.layer_weights(FloatDType::F32).iter().enumerate() {
            let (keys, values) = context_states(layer, &context, &angles);
            state.cache.append(index, keys, values);
        }
        for (row, &new) in committed.lens.iter().enumerate() {
            state.cache.advance(row, new);
        }
        state.commit(&committed);
    }

    fn next_logits(
        &self,
        state: &mut DraftState,
        previous: Option<&[u32]>,
        ends: &TargetEnds,
    ) -> Tensor<2> {
        let output = self.next_output(state, previous.is_some(), ends);
        output.matmul(self.head.val().transpose())
    }
}

impl Dflash {
    /// Output rows `[B, H]` of the first depth, for which the whole block is drafted, or of the next one.
    pub(super) fn next_output(
        &self,
        state: &mut DraftState,
        is_later: bool,
        ends: &TargetEnds,
    ) -> Tensor<2> {
        if !is_later {
            state.outputs = Some(self.draft_block(state, ends));
        }
        state.next_output(is_later)
    }

    fn layer_weights(&self, compute: FloatDType) -> Vec<LayerWeights> {
        let shape = &self.shape;
        let weights = |layer: &DecoderLayer| layer.weights(shape.heads, shape.eps, compute);
        self.layers.iter().map(weights).collect()
    }

    /// Context `[B, S, H]` of captured states `[B, S, K*H]`.
    fn context(&self, aux: Tensor<3>, compute: FloatDType) -> Tensor<3> {
        let fused = linear(aux, self.fc.val().cast(compute));
        rms_norm(fused, self.context_norm.val(), self.shape.eps)
    }

    /// Outputs `[N, H]` in front of the head, in f32, at N places among the tokens of all blocks of a plan.
    fn outputs(
        &self,
        batch: &DraftBatch,
        plan: &BlockPlan,
        places: impl Iterator<Item = usize>,
        ends: &TargetEnds,
        compute: FloatDType,
    ) -> Tensor<2> {
        let device = self.fc.val().device();
        let inner = device.clone().inner();
        let size = self.shape.block_size;
        let input = |x: Tensor<3>| follow(&device, x).cast(compute);
        let context = self.context(input(plan.context_of(&batch.states.aux)), compute);
        let context_angles = self.rope.at(plan.context_positions(&inner)).follow(&device);
        let block_angles = self.rope.at(positions(&plan.starts(), size, &inner));
        let ids = plan.anchor_ids(|row| &batch.tokens.rows[row].ids);
        let hidden = input(ends.embed(self.block_ids(ids, &inner)));
        let (anchors, window) = (plan.padded_anchors(), self.shape.sliding_window);
        let pass = BlockPass {
            heads: self.shape.heads,
            angles: block_angles.follow(&device),
            rows: plan.blocks.clone(),
            seen: context_of_blocks(&anchors, size, window, plan.context.padded_len()),
            places: index_tensor(places, &device),
        };
        let layers = self.layer_weights(compute);
        let hidden = pass.run(&layers, hidden, |layer, _| {
            let padded = |x| self.padded(&plan.context, x);
            let (keys, values) = context_states(layer, &context, &context_angles);
            (padded(keys), padded(values))
        });
        rms_norm(hidden, self.norm.val(), self.shape.eps).cast(FloatDType::F32)
    }

    /// Keys or values of all context rows `[1, kv heads, M, D]`, one list a row: `[B, kv heads, S, D]`.
    fn padded(&self, context: &Ragged, states: Tensor<4>) -> Tensor<4> {
        let lists = context.pad(HeadShape::merge(states));
        HeadShape::split(lists, self.shape.heads.num_kv_heads)
    }

    /// Token ids `[blocks, n]`: the anchors, each followed by masks.
    fn block_ids(&self, anchors: Vec<u32>, device: &Device) -> Tensor<2, Int> {
        let size = self.shape.block_size;
        let shape = [anchors.len(), size];
        let mut ids = vec![self.shape.mask_id as i32; anchors.len() * size];
        for (block, anchor) in ids.chunks_exact_mut(size).zip(anchors) {
            block[0] = anchor as i32;
        }
        Tensor::from_data(TensorData::new(ids, shape), device)
    }

    /// Output rows of the block behind the committed tokens, in order of depth, `[B, depths, H]`.
    fn draft_block(&self, state: &DraftState, ends: &TargetEnds) -> Tensor<3> {
        let device = self.fc.val().device();
        let size = self.shape.block_size;
        let longest = state.observed.iter().max().copied().unwrap_or(0);
        let anchors: Vec<Vec<usize>> = state.observed.iter().map(|&anchor| vec![anchor]).collect();
        let first = self.shape.layout.first();
        let num_rows = anchors.len();
        let drafts = (0..num_rows).flat_map(|row| row * size + first..(row + 1) * size);
        let pass = BlockPass {
            heads: self.shape.heads,
            angles: self.rope.at(positions(&state.observed, size, &device)),
            rows: Ragged::new(vec![1; num_rows]),
            seen: context_of_blocks(&anchors, size, self.shape.sliding_window, longest),
            places: index_tensor(drafts, &device),
        };
        let ids = self.block_ids(state.anchors.clone(), &device);
        let hidden = ends.embed(ids).cast(FloatDType::F32);
        let layers = self.layer_weights(FloatDType::F32);
        let hidden = pass.run(&layers, hidden, |_, index| state.cache.layer(index));
        let [_, width] = hidden.dims();
        let output = rms_norm(hidden, self.norm.val(), self.shape.eps);
        output.reshape([num_rows, size - first, width])
    }
}

/// Keys and values that a layer makes of the context `[B, S, H]`: `[B, kv heads, S, D]` each.
fn context_states(
    layer: &LayerWeights,
    context: &Tensor<3>,
    angles: &RopeAngles,
) -> (Tensor<4>, Tensor<4>) {
    let keys = angles.rotate(layer.keys(context.clone()));
    (keys, layer.values(context.clone()))
}

/// What all layers of one pass over N blocks share.
struct BlockPass {
    heads: HeadShape,
    angles: RopeAngles,
    /// Blocks of each row.
    rows: Ragged,
    seen: Causal,
    /// Which of the `N * n` tokens the last layer finishes; nothing else of it is read.
    places: Tensor<1, Int>,
}

impl BlockPass {
    /// All layers over blocks `[N, n, H]`, given the keys and values of the context: the rows of the asked places.
    fn run(
        &self,
        layers: &[LayerWeights],
        mut hidden: Tensor<3>,
        context: impl Fn(&LayerWeights, usize) -> (Tensor<4>, Tensor<4>),
    ) -> Tensor<2> {
        for (index, layer) in layers.iter().enumerate() {
            let mut mixed = self.mixed(layer, &hidden, context(layer, index));
            if index + 1 == layers.len() {
                (hidden, mixed) = (self.asked(hidden), self.asked(mixed));
            }
            hidden = layer.finish(hidden, mixed);
        }
        hidden.squeeze_dim(0)
    }

    /// What the attention of a layer reads for every token, heads merged: `[N, n, heads * D]`.
    fn mixed(
        &self,
        layer: &LayerWeights,
        hidden: &Tensor<3>,
        context: (Tensor<4>, Tensor<4>),
    ) -> Tensor<3> {
        let x = layer.normed(hidden.clone());
        let block = BlockStates {
            q: self.angles.rotate(layer.queries(x.clone())),
            k: self.angles.rotate(layer.keys(x.clone())),
            v: layer.values(x),
        };
        let mixed = block_attention(self.heads, block, context, &self.rows, &self.seen);
        HeadShape::merge(mixed)
    }

    /// `[N, n, X]` at the asked places, `[1, P, X]`.
    fn asked(&self, x: Tensor<3>) -> Tensor<3> {
        let [num_blocks, size, width] = x.dims();
        let flat = x.reshape([1, num_blocks * size, width]);
        flat.select(1, self.places.clone())
    }
}
