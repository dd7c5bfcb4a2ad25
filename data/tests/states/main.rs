//! States of the target: where they come from, how they are stored, and answers regenerated in process.

mod cached;
mod capture;
mod regenerate;
mod sources;
mod tiny;
