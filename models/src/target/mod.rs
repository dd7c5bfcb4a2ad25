//! The frozen large model: configuration, loading, forward pass with a rollback cache.

mod alone;
pub mod config;
pub mod ends;
pub mod forward;
pub mod kv_cache;
pub mod tree;

pub use config::TargetSpec;
pub use ends::TargetEnds;
pub use forward::TargetModel;
pub use kv_cache::KvCache;
