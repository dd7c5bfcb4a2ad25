//! The drafter families behind one interface: slots in training, logits by depth when decoding.
//!
//! [`drafter_families!`](self) lists them; a new family is one file, one row of that list, one golden
//! folder and one configuration. Nothing outside this folder (and the foreign names in `export`) matches
//! on a family.

pub mod eagle3;
mod params;

use burn::module::{Module, ParamId};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::batch::{DraftBatch, StateSpec, index_tensor};
use crate::error::ModelError;
use crate::slot::Slot;
use crate::target::{KvCache, TargetEnds, TargetSpec};
use crate::vocab::VocabMap;
use crate::weights::{NamedTensor, WeightFolder};

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

/// Hidden rows of a training batch, one a slot.
#[derive(Clone, Debug)]
pub struct DraftSlots {
    /// Output rows that the head turns into logits, `[N, H]`; part of the gradient graph.
    pub hidden: Tensor<2>,
    /// The slots, row after row, each ordered as by [`crate::slot::valid_slots`].
    pub slots: Vec<Slot>,
}

/// Newly committed positions of every row, with the target states that are now known.
///
/// Entry `i` of row `b` is position `t = (positions already observed) + i`: its states and the token
/// `x_{t+1}` that follows it, which is committed too.
#[derive(Clone, Debug)]
pub struct Committed {
    /// Captured states, concatenated, `[B, M, K*H]`; padded on the right.
    pub aux: Tensor<3>,
    /// Output of the last target block, before the final norm, `[B, M, H]`.
    pub final_hidden: Tensor<3>,
    /// The tokens that follow, `[B, M]`.
    pub next_ids: Tensor<2, Int>,
    /// Real entries of each row, at least 1 and at most M.
    pub lens: Vec<usize>,
}

/// What a drafter remembers between rounds of decoding.
#[derive(Clone, Debug)]
pub struct DraftState {
    /// Keys and values of observed positions, then of the tokens drafted in this round.
    pub cache: KvCache,
    /// Observed positions of each row; what the cache is rolled back to before each round.
    pub observed: Vec<usize>,
    /// State fed to the next depth, `[B, 1, H]`.
    pub feedback: Option<Tensor<3>>,
    /// Output rows of the depth computed last, `[B, H]`.
    pub output: Option<Tensor<2>>,
}

impl DraftState {
    /// Keeps only the given rows, in the given order.
    pub fn select_rows(&mut self, rows: &[usize]) {
        self.cache.select_rows(rows);
        self.observed = rows.iter().map(|&row| self.observed[row]).collect();
        self.feedback = self.feedback.take().map(|x| kept_rows(x, rows));
        self.output = self.output.take().map(|x| kept_rows(x, rows));
    }
}

fn kept_rows<const D: usize>(x: Tensor<D>, rows: &[usize]) -> Tensor<D> {
    let indices = index_tensor(rows.iter().copied(), &x.device());
    x.select(0, indices)
}

/// Everything that differs between families, and nothing else.
pub trait Drafter: Module {
    /// Settings of the family, as written in `[drafter.<family>]`.
    type Config: Serialize + serde::de::DeserializeOwned;

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

    /// Output rows of all valid slots of a training batch.
    fn draft_slots(&self, batch: &DraftBatch, ends: &TargetEnds, compute: FloatDType)
    -> DraftSlots;

    /// Head weight `[V_draft, H]`.
    fn head(&self) -> Tensor<2>;

    /// Identity of the head parameter, under which its gradient is registered.
    fn head_param_id(&self) -> ParamId;

    /// Whether the head is trained.
    fn is_head_trained(&self) -> bool;

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
    fn to_tensors(&self) -> Vec<NamedTensor>;

    /// Replaces all parameters by those of a file.
    ///
    /// # Errors
    /// [`ModelError`] when one is missing, misshapen or not finite.
    fn load_tensors(self, weights: &WeightFolder) -> Result<Self, ModelError>;
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
        pub enum DrafterConfig {
            $(#[doc = concat!("`[drafter.", $name, "]`")] #[serde(rename = $name)] $variant($config)),+
        }

        /// A drafter of any family.
        #[derive(Module, Debug)]
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

        dispatch! { ($($variant),+)
            /// See [`Drafter::state_spec`].
            fn state_spec(&self) -> StateSpec;
            /// See [`Drafter::num_depths`].
            fn num_depths(&self) -> usize;
            /// See [`Drafter::draft_slots`].
            fn draft_slots(&self, batch: &DraftBatch, ends: &TargetEnds, compute: FloatDType) -> DraftSlots;
            /// See [`Drafter::head`].
            fn head(&self) -> Tensor<2>;
            /// See [`Drafter::head_param_id`].
            fn head_param_id(&self) -> ParamId;
            /// See [`Drafter::is_head_trained`].
            fn is_head_trained(&self) -> bool;
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
}
