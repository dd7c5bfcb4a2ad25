//! Text to data set: reading, templates, turn marks, the data set on disk.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests may; the lints know test functions but not their helpers"
)]

mod dataset;
mod fixture;
mod marks;
mod reading;
mod real_data;
mod templates;
