//! [`ExportConfig`]: the `[export]` section of a run file.

use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use crate::error::ExportError;

/// `[export]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExportConfig {
    /// Layouts to write, each into its own folder; default all but `target`.
    pub formats: Vec<String>,
    /// Element type of the float tensors; `target` keeps the types of the target's files.
    pub dtype: ExportDtype,
    /// Name under which an engine finds the target, such as `org/model`; unset means the name in the
    /// target's own configuration, else its folder.
    pub target_name: Option<String>,
    /// Drafted tokens a round that the configuration proposes; unset means as many as were trained.
    pub speculative_tokens: Option<usize>,
    /// Divide the logits by the draft temperature that `draftsmith calibrate` found, for engines that draw drafts.
    pub calibrated: bool,
}

impl Default for ExportConfig {
    fn default() -> Self {
        Self {
            formats: crate::EXPORTERS
                .iter()
                .filter(|exporter| exporter.is_default())
                .map(|exporter| exporter.name().to_owned())
                .collect(),
            dtype: ExportDtype::Bf16,
            target_name: None,
            speculative_tokens: None,
            calibrated: true,
        }
    }
}

impl ExportConfig {
    /// Checks names and ranges before any work.
    ///
    /// # Errors
    /// [`ExportError`] naming the setting.
    pub fn validate(&self) -> Result<(), ExportError> {
        for format in &self.formats {
            crate::find(format)?;
        }
        if self.speculative_tokens == Some(0) {
            return Err(ExportError::NoSpeculativeTokens);
        }
        Ok(())
    }
}

/// Element type of exported float tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportDtype {
    /// bfloat16, as published drafters are.
    Bf16,
    /// float32, bit-equal to the training state.
    F32,
}

impl ExportDtype {
    /// The type in a safetensors file.
    pub fn element(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::BF16,
            Self::F32 => Dtype::F32,
        }
    }

    /// The type as configurations spell it.
    pub fn spelled(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
        }
    }
}
