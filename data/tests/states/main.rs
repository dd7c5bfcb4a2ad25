//! States of the target: where they come from, how they are stored, and answers regenerated in process.

#![expect(
    clippy::unwrap_used,
    reason = "tests may; the lint knows test functions but not their helpers"
)]

mod cached;
mod capture;
mod figures;
mod regenerate;
mod sources;
mod tiny;
