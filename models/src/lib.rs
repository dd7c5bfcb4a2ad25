//! Target models, drafters and losses: tensors in, tensors out.
//!
//! The principal types are [`target::TargetModel`] (the frozen large model), the drafter families of
//! [`drafter`] and the [`objective::Objective`] that turns draft slots into a loss and its gradient.
//! The crate reads weights and writes checkpoints; it knows no data set, no tokenizer and no clock.

pub mod batch;
pub mod checkpoint;
pub mod drafter;
pub mod error;
pub mod file;
pub mod fingerprint;
pub mod generate;
pub mod gumbel;
pub mod host;
pub mod layers;
pub mod loss;
pub mod objective;
pub mod parity;
pub mod rng;
pub mod sample;
pub mod slot;
pub mod target;
pub mod vocab;
pub mod weights;
