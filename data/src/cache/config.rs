//! [`CaptureConfig`]: the `[capture]` section of a run file.

use serde::{Deserialize, Serialize};

use crate::error::DataError;

/// Where training takes the states of the target from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CaptureMode {
    /// The target runs beside the training; nothing is written.
    Online,
    /// The states are captured once and read from disk.
    Cached,
}

/// Settings of `[capture]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CaptureConfig {
    /// `online` (default) or `cached`.
    pub mode: CaptureMode,
    /// Most tokens of one forward pass of the target, padding included; default 2048. A single longer
    /// row still runs, alone.
    pub batch_tokens: usize,
    /// Size a shard is meant to have, in bytes; default 256 MiB. One shard is kept in memory while it
    /// is computed, and is what an interruption loses at most.
    pub shard_bytes: u64,
}

impl Default for CaptureConfig {
    fn default() -> Self {
        Self {
            mode: CaptureMode::Online,
            batch_tokens: 2048,
            shard_bytes: 256 << 20,
        }
    }
}

impl CaptureConfig {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`DataError::Setting`] naming the key.
    pub fn validate(&self) -> Result<(), DataError> {
        for (key, is_zero) in [
            ("batch_tokens", self.batch_tokens == 0),
            ("shard_bytes", self.shard_bytes == 0),
        ] {
            if is_zero {
                return Err(DataError::setting(
                    format!("`capture.{key}` is 0, expected a positive number"),
                    "leave the key out to use its default",
                ));
            }
        }
        Ok(())
    }
}
