//! Tests of the models crate against goldens, finite differences and step-by-step decoding.
//!
//! One binary, because every test binary links the whole tensor library once more.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod alignment;
mod coupled;
mod drafter_golden;
#[path = "../shared/families.rs"]
mod families;
mod kv_cache;
mod mispredict;
mod objective;
mod packing;
mod parity;
mod settings;
mod start;
mod support;
mod target_files;
mod target_golden;
