//! A toy family, for the test of the recipe in `CONTRIBUTING.md`: one linear layer without attention or memory.
//!
//! Slot (anchor `a`, depth `d`) reads the target's normed final state of `a - 1` and the embedding of token
//! `x_{a+d}`: its output row is `RMSNorm(proj [norm(h_{a-1}); x])`.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

use super::{
    AnchorDraw, Committed, DraftState, Drafter, DrafterContext, TrainedHead, last_rows, params,
};
use crate::batch::{DraftBatch, StateSpec, TokenBatch, index_tensor};
use crate::error::ModelError;
use crate::layers::attention::HeadShape;
use crate::layers::follow;
use crate::layers::norm::rms_norm;
use crate::slot::{Slot, batch_slots};
use crate::target::kv_cache::CacheShape;
use crate::target::{TargetEnds, TargetSpec};

/// `[drafter.toy]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToyConfig {
    /// Depths trained for one anchor.
    pub depths: usize,
}

/// The drafter. Field names are the names in `drafter.safetensors`.
#[derive(Module, Debug)]
pub struct Toy {
    /// `[H, 2H]`; the state's half comes first.
    pub proj: Param<Tensor<2>>,
    /// Norm in front of the head, `[H]`.
    pub norm: Param<Tensor<1>>,
    /// The target's head rows of the draft vocabulary, `[V_draft, H]`; frozen.
    pub head: Param<Tensor<2>>,
    #[module(skip)]
    shape: ToyShape,
}

/// Constants of a built drafter.
#[derive(Clone, Debug)]
struct ToyShape {
    heads: HeadShape,
    num_depths: usize,
    eps: f64,
}

impl Drafter for Toy {
    type Config = ToyConfig;

    fn check(config: &ToyConfig, _target: &TargetSpec) -> Result<StateSpec, ModelError> {
        if config.depths == 0 {
            return Err(ModelError::setting(
                "`drafter.toy.depths` is 0, expected at least 1",
                "3 is the usual value",
            ));
        }
        Ok(StateSpec {
            aux_layer_ids: Vec::new(),
        })
    }

    fn init(
        config: &ToyConfig,
        context: DrafterContext<'_>,
        seed: u64,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let target = context.target;
        Self::check(config, target)?;
        let hidden = target.hidden_size;
        Ok(Self {
            proj: params::random_matrix("proj", [hidden, 2 * hidden], seed, device),
            norm: params::unit_gain("norm", hidden, device),
            head: params::named("head", context.head_rows(device)).set_require_grad(false),
            shape: ToyShape {
                heads: target.heads(),
                num_depths: config.depths,
                eps: target.rms_norm_eps,
            },
        })
    }

    fn state_spec(&self) -> StateSpec {
        StateSpec {
            aux_layer_ids: Vec::new(),
        }
    }

    fn num_depths(&self) -> usize {
        self.shape.num_depths
    }

    fn training_slots(&self, tokens: &TokenBatch, _draw: AnchorDraw) -> Vec<Slot> {
        batch_slots(tokens, self.shape.num_depths)
    }

    fn draft_slots(
        &self,
        batch: &DraftBatch,
        slots: &[Slot],
        ends: &TargetEnds,
        compute: FloatDType,
    ) -> Tensor<2> {
        let states = batch.states.final_hidden.clone();
        let [_, len, _] = states.dims();
        let places = slots.iter().map(|slot| slot.row * len + slot.anchor - 1);
        let places = index_tensor(places, &states.device());
        let states = states.flatten::<2>(0, 1).select(0, places);
        let token = |slot: &Slot| batch.tokens.rows[slot.row].ids[slot.teacher_position()];
        self.rows(ends.normed(states), slots.iter().map(token), ends, compute)
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
            num_layers: 0,
            heads: self.shape.heads,
            num_rows,
            capacity,
        };
        DraftState::new(shape, &self.norm.val().device())
    }

    fn observe(&self, state: &mut DraftState, committed: Committed, ends: &TargetEnds) {
        let last = last_rows(committed.final_hidden.clone(), &committed.lens);
        let [num_rows, len, hidden] = last.dims();
        let normed = ends.normed(last.flatten(0, 1));
        state.feedback = Some(normed.reshape([num_rows, len, hidden]));
        state.commit(&committed);
    }

    fn next_logits(
        &self,
        state: &mut DraftState,
        previous: Option<&[u32]>,
        ends: &TargetEnds,
    ) -> Tensor<2> {
        let tokens = previous.unwrap_or(&state.anchors).iter().copied();
        if let Some(normed) = state.feedback.clone() {
            let normed = normed.squeeze_dim::<2>(1);
            let rows = self.rows(normed, tokens, ends, FloatDType::F32);
            state.outputs = Some(rows.unsqueeze_dim(1));
        }
        state.output().matmul(self.head.val().transpose())
    }
}

impl Toy {
    /// Output rows `[N, H]` of normed states `[N, H]` and tokens, in f32.
    fn rows(
        &self,
        normed: Tensor<2>,
        tokens: impl Iterator<Item = u32>,
        ends: &TargetEnds,
        compute: FloatDType,
    ) -> Tensor<2> {
        let ids = index_tensor(tokens.map(|id| id as usize), &normed.device());
        let embedded = ends.embed(ids.unsqueeze_dim(0)).squeeze_dim::<2>(0);
        let both = Tensor::cat(vec![normed, embedded.cast(FloatDType::F32)], 1);
        let both = follow(&self.proj.val().device(), both).cast(compute);
        let rows = both.matmul(self.proj.val().cast(compute).transpose());
        rms_norm(rows, self.norm.val(), self.shape.eps).cast(FloatDType::F32)
    }
}
