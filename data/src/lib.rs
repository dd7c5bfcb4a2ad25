//! Text to tokens to target states to batches.

pub mod error;
