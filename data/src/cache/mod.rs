//! States of the target on disk: Arrow shards, the teacher's figures beside them, a manifest that says what they
//! belong to, their writer and their reader.

pub mod config;
pub(crate) mod figures;
pub mod format;
pub mod reader;
pub(crate) mod row_file;
pub(crate) mod shard;
pub mod space;
pub mod writer;

pub use config::{CaptureConfig, CaptureMode};
pub use format::{CacheIdentity, CacheManifest};
pub use reader::StateCache;
pub use writer::{CaptureFigures, CaptureJob, CaptureProgress, CaptureReport, capture, discard};
