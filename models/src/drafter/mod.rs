//! The drafter families behind one interface: slots in training, logits by depth when decoding.
//!
//! [`drafter_families!`](self) lists them; a new family is one file, one row of that list, one golden
//! folder and one configuration. Nothing outside this folder (and the foreign names in `export`) matches
//! on a family.

pub mod aux_layers;
mod block_plan;
mod confidence;
mod decoder_layer;
pub mod dflash;
pub mod dspark;
pub mod eagle3;
mod head;
pub mod mtp;
mod params;
mod start;
mod state;
mod token;
mod unroll_plan;

use std::ops::Range;

use burn::module::{Module, ParamId};
use burn::tensor::{Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

use crate::batch::{DraftBatch, StateSpec, TokenBatch};
use crate::error::ModelError;
use crate::layers::rope::RopeTable;
use crate::rng::{Purpose, Stream, stable_hash};
use crate::slot::{Slot, batch_slots};
use crate::target::{TargetEnds, TargetSpec};
use crate::vocab::VocabMap;
use crate::weights::{NamedTensor, WeightFolder};

pub use confidence::Confidence;
pub use head::HeadMode;
pub use start::{Meaning, Origin, Started};
pub use state::{Committed, DraftState};
pub use token::MaskToken;

use state::last_rows;

/// What a drafter is built for.
#[derive(Clone, Copy, Debug)]
pub struct DrafterContext<'a> {
    /// Shape of the target.
    pub target: &'a TargetSpec,
    /// Embedding, final norm and head of the target.
    pub ends: &'a TargetEnds,
    /// Draft vocabulary.
    pub vocab: &'a VocabMap,
}

/// Which anchors of a batch are trained, for families that do not train all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnchorDraw {
    /// Seed of the run.
    pub seed: u64,
    /// Optimizer step, counted from the start of the run.
    pub step: u64,
}

/// How many anchors of a row are trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnchorLimit {
    /// Share of the row's anchors, rounded up.
    pub share: f64,
    /// Most of them.
    pub per_row: usize,
}

impl AnchorLimit {
    fn of(self, num_anchors: usize) -> usize {
        let share = (self.share * num_anchors as f64).ceil() as usize;
        share.min(self.per_row).min(num_anchors)
    }
}

impl AnchorDraw {
    /// Ascending anchors of each row, as many as `limit` says, drawn without replacement from those with a slot.
    ///
    /// A row's draw depends on its key and nothing else of the batch.
    pub fn anchors(self, tokens: &TokenBatch, limit: AnchorLimit) -> Vec<Vec<usize>> {
        let mut anchors = vec![Vec::new(); tokens.num_rows()];
        for slot in batch_slots(tokens, 1) {
            anchors[slot.row].push(slot.anchor);
        }
        for (row, anchors) in tokens.rows.iter().zip(&mut anchors) {
            let limit = limit.of(anchors.len());
            if anchors.len() > limit {
                let stream = stable_hash(&format!("{} {}", self.step, row.key));
                let mut stream = Stream::new(self.seed, Purpose::Anchors, stream);
                let order = stream.permutation(anchors.len());
                *anchors = order[..limit].iter().map(|&place| anchors[place]).collect();
                anchors.sort_unstable();
            }
        }
        anchors
    }
}

/// The part of a head that is trained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainedHead {
    /// The parameter that its gradient is registered under.
    pub id: ParamId,
    /// Its columns of the head.
    pub columns: Range<usize>,
}

/// Everything that differs between families, and nothing else.
pub trait Drafter: Module {
    /// Settings of the family, as written in `[drafter.<family>]`.
    type Config: Serialize + serde::de::DeserializeOwned;

    /// Other families that this one contains, each with the field its parameters stand in.
    const PARTS: &'static [(&'static str, &'static str)] = &[];

    /// The settings under other values of which the same parameters would compute something else.
    fn meaning(config: &Self::Config) -> Vec<Meaning>;

    /// The mask token of the settings, for families that have one.
    fn mask_token(_config: &mut Self::Config) -> Option<&mut MaskToken> {
        None
    }

    /// Whether a step trains anchors that are drawn, and not all of them.
    fn draws_anchors(_config: &Self::Config) -> bool {
        false
    }

    /// Checks settings against a target, without building anything; returns the states to be read.
    ///
    /// # Errors
    /// [`ModelError::Setting`] when the settings do not fit the target.
    fn check(config: &Self::Config, target: &TargetSpec) -> Result<StateSpec, ModelError>;

    /// Builds a drafter with fresh parameters drawn from `seed`.
    ///
    /// # Errors
    /// [`ModelError::Setting`] when the settings do not fit the target.
    fn init(
        config: &Self::Config,
        context: DrafterContext<'_>,
        seed: u64,
        device: &Device,
    ) -> Result<Self, ModelError>;

    /// The target states this drafter reads.
    fn state_spec(&self) -> StateSpec;

    /// Depths trained for one anchor.
    fn num_depths(&self) -> usize;

    /// Depths it can draft in a round when serving; `None` where there is no limit.
    fn max_depths(&self) -> Option<usize> {
        None
    }

    /// Whether the logits of a depth depend on the tokens chosen at the depths before it.
    fn reads_drafts(&self) -> bool {
        true
    }

    /// Decoder layers, each with keys and values of the target's head shape.
    fn num_layers(&self) -> usize {
        1
    }

    /// Numbers that a drafting pass reads, the head included.
    fn num_weights(&self) -> usize {
        self.num_params()
    }

    /// The slots trained in one step, row after row, each ordered as by [`crate::slot::valid_slots`].
    fn training_slots(&self, tokens: &TokenBatch, draw: AnchorDraw) -> Vec<Slot>;

    /// Cuts slots into the parts that are computed one after the other, to bound memory.
    fn passes(&self, slots: Vec<Slot>) -> Vec<Vec<Slot>> {
        vec![slots]
    }

    /// Output rows of the given valid slots, which the head turns into logits, `[N, H]`, in f32; part of
    /// the gradient graph.
    fn draft_slots(
        &self,
        batch: &DraftBatch,
        slots: &[Slot],
        ends: &TargetEnds,
        compute: FloatDType,
    ) -> Tensor<2>;

    /// Head weight `[V_draft, H]`, without gradient graph; H is the width of the rows of `draft_slots`.
    fn head(&self) -> Tensor<2>;

    /// The part of the head that is trained; `None` for a frozen head.
    fn trained_head(&self) -> Option<TrainedHead>;

    /// Matrices that Muon must not orthogonalise: those with a row for each token, and single rows.
    fn vocabulary_params(&self) -> Vec<ParamId>;

    /// How likely the drafts of output rows `[N, H]` are accepted, for families that say so; part of the
    /// gradient graph.
    fn confidence(&self, _rows: Tensor<2>) -> Option<Confidence> {
        None
    }

    /// An empty decoding state for `num_rows` sequences of up to `capacity` positions.
    fn open(&self, num_rows: usize, capacity: usize) -> DraftState;

    /// Takes in newly committed positions and forgets what was drafted in the last round.
    fn observe(&self, state: &mut DraftState, committed: Committed, ends: &TargetEnds);

    /// Logits `[B, V_draft]` (f32) of the next depth.
    ///
    /// `previous` holds the target ids chosen at the depth before, one a row; `None` at depth 0.
    fn next_logits(
        &self,
        state: &mut DraftState,
        previous: Option<&[u32]>,
        ends: &TargetEnds,
    ) -> Tensor<2>;

    /// Parameters by name, as f32.
    fn to_tensors(&self) -> Vec<NamedTensor> {
        params::to_tensors(self)
    }

    /// Replaces all parameters by those of a file.
    ///
    /// # Errors
    /// [`ModelError`] when one is missing, misshapen or not finite.
    fn load_tensors(self, weights: &WeightFolder) -> Result<Self, ModelError> {
        params::load_tensors(self, weights)
    }

    /// Takes over what `weights` holds for the trained parameters below the field `place` (empty for all),
    /// by name and shape; on a device that tracks gradients.
    ///
    /// # Errors
    /// [`ModelError`] when one is misshapen or not finite, or when the file holds one without a place.
    fn take_tensors(
        self,
        weights: &WeightFolder,
        place: &str,
    ) -> Result<(Self, Started), ModelError> {
        start::take_tensors(self, weights, place)
    }
}

macro_rules! dispatch {
    ($variants:tt $($(#[$doc:meta])* fn $name:ident $args:tt -> $out:ty;)+) => {
        impl AnyDrafter {
            $(dispatch! { @one $variants $(#[$doc])* fn $name $args $args -> $out; })+
        }
    };
    (@one ($($variant:ident),+) $(#[$doc:meta])* fn $name:ident
        (&self $(, $arg:ident: $type:ty)*) $args:tt -> $out:ty;) => {
        $(#[$doc])*
        pub fn $name(&self $(, $arg: $type)*) -> $out {
            match self { $(Self::$variant(drafter) => dispatch!(@call drafter.$name $args)),+ }
        }
    };
    (@call $drafter:ident . $name:ident (&self $(, $arg:ident: $type:ty)*)) => {
        $drafter.$name($($arg),*)
    };
}

macro_rules! drafter_families {
    ($($name:literal => $variant:ident($config:path, $module:path)),+ $(,)?) => {
        /// Settings of one drafter, tagged by the name of its family.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[non_exhaustive] // a match outside this crate says what holds for a family it does not know
        pub enum DrafterConfig {
            $(#[doc = concat!("`[drafter.", $name, "]`")] #[serde(rename = $name)] $variant($config)),+
        }

        /// A drafter of any family.
        #[derive(Module, Debug)]
        #[expect(
            clippy::large_enum_variant,
            reason = "few drafters exist at a time, and their parameters lie elsewhere"
        )]
        pub enum AnyDrafter {
            $(#[doc = concat!("A `", $name, "` drafter.")] $variant($module)),+
        }

        /// Names of all families, as written in run files.
        pub const FAMILIES: &[&str] = &[$($name),+];

        impl DrafterConfig {
            /// Name of the family.
            pub fn family(&self) -> &'static str {
                match self { $(Self::$variant(_) => $name),+ }
            }

            /// See [`Drafter::check`].
            ///
            /// # Errors
            /// As [`Drafter::check`].
            pub fn check(&self, target: &TargetSpec) -> Result<StateSpec, ModelError> {
                match self { $(Self::$variant(config) => <$module as Drafter>::check(config, target)),+ }
            }

            /// See [`Drafter::mask_token`].
            pub fn mask_token(&mut self) -> Option<&mut MaskToken> {
                match self { $(Self::$variant(config) => <$module as Drafter>::mask_token(config)),+ }
            }

            /// See [`Drafter::draws_anchors`].
            pub fn draws_anchors(&self) -> bool {
                match self { $(Self::$variant(config) => <$module as Drafter>::draws_anchors(config)),+ }
            }

            /// See [`Drafter::meaning`].
            pub fn meaning(&self) -> Vec<Meaning> {
                match self { $(Self::$variant(config) => <$module as Drafter>::meaning(config)),+ }
            }

            /// Families whose parameters this one can start from, each with the field they stand in.
            pub fn origins(&self) -> Vec<(&'static str, &'static str)> {
                let parts = match self { $(Self::$variant(_) => <$module as Drafter>::PARTS),+ };
                std::iter::once((self.family(), "")).chain(parts.iter().copied()).collect()
            }

            /// Settings of a family read by `deserializer`, for run files with one table a family.
            ///
            /// # Errors
            /// The deserializer's error, or an unknown family listing the known ones.
            pub fn deserialize_family<'de, D: serde::Deserializer<'de>>(
                family: &str,
                deserializer: D,
            ) -> Result<Self, D::Error> {
                match family {
                    $($name => <$config>::deserialize(deserializer).map(Self::$variant),)+
                    other => Err(serde::de::Error::unknown_variant(other, FAMILIES)),
                }
            }
        }

        impl AnyDrafter {
            /// Builds a drafter with fresh parameters; see [`Drafter::init`].
            ///
            /// # Errors
            /// As [`Drafter::init`].
            pub fn init(
                config: &DrafterConfig,
                context: DrafterContext<'_>,
                seed: u64,
                device: &Device,
            ) -> Result<Self, ModelError> {
                match config {
                    $(DrafterConfig::$variant(config) => {
                        <$module as Drafter>::init(config, context, seed, device).map(Self::$variant)
                    })+
                }
            }

            /// Name of the family.
            pub fn family(&self) -> &'static str {
                match self { $(Self::$variant(_) => $name),+ }
            }

            /// See [`Drafter::load_tensors`].
            ///
            /// # Errors
            /// As [`Drafter::load_tensors`].
            pub fn load_tensors(self, weights: &WeightFolder) -> Result<Self, ModelError> {
                match self { $(Self::$variant(d) => d.load_tensors(weights).map(Self::$variant)),+ }
            }
        }

        impl AnyDrafter {
            /// See [`Drafter::take_tensors`].
            fn take_tensors(self, weights: &WeightFolder, place: &str) -> Result<(Self, Started), ModelError> {
                match self {
                    $(Self::$variant(drafter) => {
                        let (drafter, started) = drafter.take_tensors(weights, place)?;
                        Ok((Self::$variant(drafter), started))
                    })+
                }
            }
        }

        dispatch! { ($($variant),+)
            /// See [`Drafter::state_spec`].
            fn state_spec(&self) -> StateSpec;
            /// See [`Drafter::num_depths`].
            fn num_depths(&self) -> usize;
            /// See [`Drafter::max_depths`].
            fn max_depths(&self) -> Option<usize>;
            /// See [`Drafter::reads_drafts`].
            fn reads_drafts(&self) -> bool;
            /// See [`Drafter::num_layers`].
            fn num_layers(&self) -> usize;
            /// See [`Drafter::num_weights`].
            fn num_weights(&self) -> usize;
            /// See [`Drafter::training_slots`].
            fn training_slots(&self, tokens: &TokenBatch, draw: AnchorDraw) -> Vec<Slot>;
            /// See [`Drafter::passes`].
            fn passes(&self, slots: Vec<Slot>) -> Vec<Vec<Slot>>;
            /// See [`Drafter::draft_slots`].
            fn draft_slots(&self, batch: &DraftBatch, slots: &[Slot], ends: &TargetEnds, compute: FloatDType) -> Tensor<2>;
            /// See [`Drafter::head`].
            fn head(&self) -> Tensor<2>;
            /// See [`Drafter::trained_head`].
            fn trained_head(&self) -> Option<TrainedHead>;
            /// See [`Drafter::vocabulary_params`].
            fn vocabulary_params(&self) -> Vec<ParamId>;
            /// See [`Drafter::confidence`].
            fn confidence(&self, rows: Tensor<2>) -> Option<Confidence>;
            /// See [`Drafter::open`].
            fn open(&self, num_rows: usize, capacity: usize) -> DraftState;
            /// See [`Drafter::observe`].
            fn observe(&self, state: &mut DraftState, committed: Committed, ends: &TargetEnds) -> ();
            /// See [`Drafter::next_logits`].
            fn next_logits(&self, state: &mut DraftState, previous: Option<&[u32]>, ends: &TargetEnds) -> Tensor<2>;
            /// See [`Drafter::to_tensors`].
            fn to_tensors(&self) -> Vec<NamedTensor>;
        }
    };
}

drafter_families! {
    "eagle3" => Eagle3(eagle3::Eagle3Config, eagle3::Eagle3),
    "mtp" => Mtp(mtp::MtpConfig, mtp::Mtp),
    "dflash" => Dflash(dflash::DflashConfig, dflash::Dflash),
    "dspark" => Dspark(dspark::DsparkConfig, dspark::Dspark),
}

/// Rotary tables for all positions of the target and `extra` more, in which a draft may run past them.
fn rope_table(target: &TargetSpec, extra: usize, device: &Device) -> RopeTable {
    let num_positions = target.max_position_embeddings + extra;
    let device = device.clone().inner();
    RopeTable::new(&target.rope, target.head_dim, num_positions, &device)
}
