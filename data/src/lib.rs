//! Text to tokens to target states to batches.

pub mod cache;
pub mod dataset;
pub mod error;
pub mod hidden;
pub mod import;
pub mod inspect;
pub mod mask;
pub mod prepare;
pub mod prompts;
pub mod regenerate;
pub mod source;
pub mod template;
pub mod tokenizer;
