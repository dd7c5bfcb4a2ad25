//! Real decoding, the exact evaluator and whole reports on a tiny random target.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

mod cache;
mod exactness;
mod greedy;
mod sampling_law;
mod stop_tokens;
mod suites;
mod tiny;
