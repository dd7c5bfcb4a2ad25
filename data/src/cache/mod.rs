//! States of the target on disk: Arrow shards, a manifest that says what they belong to, their writer
//! and their reader.

pub mod config;
pub mod format;
pub(crate) mod mmap;
pub mod reader;
pub(crate) mod shard;
pub mod space;
pub mod writer;

pub use config::{CaptureConfig, CaptureMode};
pub use format::{CacheIdentity, CacheManifest};
pub use reader::StateCache;
pub use writer::{CaptureJob, CaptureProgress, CaptureReport, capture, discard};
