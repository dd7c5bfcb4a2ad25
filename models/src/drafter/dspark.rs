//! DSpark (2607.05147): DFlash whose drafts depend on each other through a low-rank Markov bias, with a
//! head that says how likely a draft is accepted.
//!
//! Slot (anchor `a`, depth `d`) adds `W2 W1[x_{a+d}]` to the logits of block position `d`: the token in
//! front of the predicted one, given in training, the drafter's own choice when decoding. Written as
//! `[head, W2] [h; W1[x]]` the sum is one product, so that objective and evaluator see a head like any other.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

use super::dflash::{
    BlockLayout, Dflash, DflashConfig, check_as, default_anchor_share, default_anchors_per_row,
    default_blocks_per_pass, default_num_layers,
};
use super::token::MaskToken;
use super::{
    AnchorDraw, Committed, Confidence, DraftState, Drafter, DrafterContext, Meaning, TrainedHead,
    params,
};
use crate::batch::{DraftBatch, StateSpec, TokenBatch, index_tensor};
use crate::error::ModelError;
use crate::slot::Slot;
use crate::target::{TargetEnds, TargetSpec};

/// Name of the family.
const FAMILY: &str = "dspark";

/// `[drafter.dspark]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DsparkConfig {
    /// A reserved token that the template never writes; it fills the block behind the anchor.
    pub mask_token: MaskToken,
    /// Captured blocks, as for DFlash.
    #[serde(default)]
    pub aux_layer_ids: Option<Vec<usize>>,
    /// Decoder layers.
    #[serde(default = "default_num_layers")]
    pub num_layers: usize,
    /// Tokens of a block, the anchor included; as many drafts, because the anchor's position predicts.
    #[serde(default = "default_block_size")]
    pub block_size: usize,
    /// Rank of the Markov bias.
    #[serde(default = "default_markov_rank")]
    pub markov_rank: usize,
    /// Weight of the confidence loss; 0 trains no confidence.
    #[serde(default = "default_confidence_weight")]
    pub confidence_weight: f64,
    /// Blocks trained for each row and step, as for DFlash.
    #[serde(default = "default_anchors_per_row")]
    pub anchors_per_row: usize,
    /// Share of a row's blocks that is trained.
    #[serde(default = "default_anchor_share")]
    pub anchor_share: f64,
    /// Blocks computed together, as for DFlash.
    #[serde(default = "default_blocks_per_pass")]
    pub blocks_per_pass: usize,
    /// Width of the gated MLP; unset means the target's.
    #[serde(default)]
    pub intermediate_size: Option<usize>,
    /// Positions that a token sees in every layer, as for DFlash; unset means all.
    #[serde(default)]
    pub sliding_window: Option<usize>,
}

const fn default_block_size() -> usize {
    7
}

const fn default_markov_rank() -> usize {
    256
}

const fn default_confidence_weight() -> f64 {
    1.0
}

impl DsparkConfig {
    /// Whether a confidence head is trained.
    pub fn has_confidence(&self) -> bool {
        self.confidence_weight > 0.0
    }

    /// The DFlash drafter inside.
    pub fn core(&self) -> DflashConfig {
        DflashConfig {
            mask_token: self.mask_token.clone(),
            aux_layer_ids: self.aux_layer_ids.clone(),
            num_layers: self.num_layers,
            block_size: self.block_size,
            layout: BlockLayout::AnchorPredicts,
            anchors_per_row: self.anchors_per_row,
            anchor_share: self.anchor_share,
            blocks_per_pass: self.blocks_per_pass,
            intermediate_size: self.intermediate_size,
            sliding_window: self.sliding_window,
        }
    }
}

/// The drafter. Field names are the names in `drafter.safetensors`.
#[derive(Module, Debug)]
pub struct Dspark {
    /// Block drafter without the bias.
    pub core: Dflash,
    /// What the previous token says, `[V, r]`; indexed by target ids.
    pub markov_in: Param<Tensor<2>>,
    /// What it changes, `[V_draft, r]`; starts at zero, so that training starts from DFlash.
    pub markov_out: Param<Tensor<2>>,
    /// Confidence of `[h; W1[x]]`, `[1, H + r]`; starts at zero.
    pub confidence_proj: Param<Tensor<2>>,
    /// `[1]`.
    pub confidence_bias: Param<Tensor<1>>,
    #[module(skip)]
    confidence_weight: f64,
}

impl Dspark {
    /// Rows `[N, H + r]`: outputs of the block with the embedding of the token in front, `previous`.
    fn with_previous(
        &self,
        hidden: Tensor<2>,
        previous: impl IntoIterator<Item = u32>,
    ) -> Tensor<2> {
        let ids = previous.into_iter().map(|id| id as usize);
        let ids = index_tensor(ids, &hidden.device());
        Tensor::cat(vec![hidden, self.markov_in.val().select(0, ids)], 1)
    }
}

impl Drafter for Dspark {
    type Config = DsparkConfig;

    const PARTS: &'static [(&'static str, &'static str)] = &[("dflash", "core")];

    fn meaning(config: &DsparkConfig) -> Vec<Meaning> {
        Dflash::meaning(&config.core())
    }

    fn mask_token(config: &mut DsparkConfig) -> Option<&mut MaskToken> {
        Some(&mut config.mask_token)
    }

    fn draws_anchors(_config: &DsparkConfig) -> bool {
        true
    }

    fn check(config: &DsparkConfig, target: &TargetSpec) -> Result<StateSpec, ModelError> {
        if config.markov_rank == 0 {
            return Err(ModelError::setting(
                "`drafter.dspark.markov_rank` is 0, expected at least 1",
                "256 is the published value; without the bias it is `drafter.dflash`",
            ));
        }
        if !config.confidence_weight.is_finite() || config.confidence_weight < 0.0 {
            return Err(ModelError::setting(
                format!(
                    "`drafter.dspark.confidence_weight` is {}, expected 0 or more",
                    config.confidence_weight
                ),
                "1 is the published value",
            ));
        }
        check_as(FAMILY, &config.core(), target)
    }

    fn init(
        config: &DsparkConfig,
        context: DrafterContext<'_>,
        seed: u64,
        device: &Device,
    ) -> Result<Self, ModelError> {
        Self::check(config, context.target)?;
        let (rank, hidden) = (config.markov_rank, context.target.hidden_size);
        let zeros = |name: &str, shape: [usize; 2]| params::zero_matrix(name, shape, device);
        Ok(Self {
            core: Dflash::init(&config.core(), context, seed, device)?,
            markov_in: params::random_table(
                "markov_in",
                [context.target.vocab_size, rank],
                seed,
                device,
            ),
            markov_out: zeros("markov_out", [context.vocab.len(), rank]),
            confidence_proj: zeros("confidence_proj", [1, hidden + rank]),
            confidence_bias: params::named("confidence_bias", Tensor::zeros([1], device)),
            confidence_weight: config.confidence_weight,
        })
    }

    fn state_spec(&self) -> StateSpec {
        self.core.state_spec()
    }

    fn num_depths(&self) -> usize {
        self.core.num_depths()
    }

    fn max_depths(&self) -> Option<usize> {
        self.core.max_depths()
    }

    fn num_layers(&self) -> usize {
        self.core.num_layers()
    }

    /// Of the embedding of the previous token one row is read.
    fn num_weights(&self) -> usize {
        self.num_params() - self.markov_in.val().shape().num_elements()
    }

    fn training_slots(&self, tokens: &TokenBatch, draw: AnchorDraw) -> Vec<Slot> {
        self.core.training_slots(tokens, draw)
    }

    fn passes(&self, slots: Vec<Slot>) -> Vec<Vec<Slot>> {
        self.core.passes(slots)
    }

    fn draft_slots(
        &self,
        batch: &DraftBatch,
        slots: &[Slot],
        ends: &TargetEnds,
        compute: FloatDType,
    ) -> Tensor<2> {
        let hidden = self.core.draft_slots(batch, slots, ends, compute);
        let token = |slot: &Slot| batch.tokens.rows[slot.row].ids[slot.teacher_position()];
        self.with_previous(hidden, slots.iter().map(token))
    }

    fn head(&self) -> Tensor<2> {
        Tensor::cat(vec![self.core.head(), self.markov_out.val().inner()], 1)
    }

    fn trained_head(&self) -> Option<TrainedHead> {
        let [_, width] = self.core.head().dims();
        let [_, rank] = self.markov_out.val().dims();
        Some(TrainedHead {
            id: self.markov_out.id,
            columns: width..width + rank,
        })
    }

    fn vocabulary_params(&self) -> Vec<ParamId> {
        let mut ids = self.core.vocabulary_params();
        ids.extend([
            self.markov_in.id,
            self.markov_out.id,
            self.confidence_proj.id,
        ]);
        ids
    }

    fn confidence(&self, rows: Tensor<2>) -> Option<Confidence> {
        (self.confidence_weight > 0.0).then(|| Confidence {
            logits: rows
                .matmul(self.confidence_proj.val().transpose())
                .squeeze_dim::<1>(1)
                + self.confidence_bias.val(),
            weight: self.confidence_weight,
        })
    }

    fn open(&self, num_rows: usize, capacity: usize) -> DraftState {
        self.core.open(num_rows, capacity)
    }

    fn observe(&self, state: &mut DraftState, committed: Committed, ends: &TargetEnds) {
        self.core.observe(state, committed, ends);
    }

    fn next_logits(
        &self,
        state: &mut DraftState,
        previous: Option<&[u32]>,
        ends: &TargetEnds,
    ) -> Tensor<2> {
        let hidden = self.core.next_output(state, previous.is_some(), ends);
        let previous = previous.unwrap_or(&state.anchors);
        let ids = index_tensor(previous.iter().map(|&id| id as usize), &hidden.device());
        // Two products: the joined head would be copied whole at every depth.
        let bias = self.markov_in.val().select(0, ids);
        let bias = bias.matmul(self.markov_out.val().transpose());
        hidden.matmul(self.core.head().transpose()) + bias
    }
}
