//! Real decoding, the exact evaluator and whole reports on a tiny random target.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod cache;
mod calibration;
mod enumeration;
mod exactness;
#[path = "../../../models/tests/shared/families.rs"]
mod families;
mod greedy;
mod invariant;
mod sampling_law;
mod schedule;
mod stop_tokens;
mod suites;
mod tiny;
mod trees;
