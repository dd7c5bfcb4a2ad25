//! What can go wrong in a training run.

use std::path::PathBuf;

use draftsmith_models::error::{Diagnose, ModelError};

use crate::checkpoint::Difference;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum TrainerError {
    /// The model layer or the file layer failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A part of the run that lives in another crate failed.
    #[error(transparent)]
    Part(#[from] PartError),
    /// A setting is outside its range.
    #[error("`{key}` is {found}, expected {expected}")]
    Setting {
        /// Dotted key.
        key: &'static str,
        /// Accepted values in words.
        expected: String,
        /// Value found.
        found: String,
    },
    /// The data set cannot be trained on.
    #[error("{message}")]
    Rows {
        /// What is wrong and where.
        message: String,
        /// A way out.
        hint: String,
    },
    /// A fresh run was asked for where another one has checkpoints.
    #[error("`{}` already holds a run that reached step {step}", path.display())]
    RunExists {
        /// The folder of checkpoints.
        path: PathBuf,
        /// Step of its newest checkpoint.
        step: u64,
    },
    /// A resume found nothing it can start from.
    #[error("cannot resume from `{}`: {reason}", path.display())]
    Resume {
        /// Folder or file at fault.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A resume found a checkpoint of other settings.
    #[error("cannot resume from `{}`: {}", path.display(), listed(differences))]
    SettingsChanged {
        /// The checkpoint.
        path: PathBuf,
        /// The keys that differ.
        differences: Vec<Difference>,
    },
    /// The optimizer state could not be written or read.
    #[error("`{}` is not a usable optimizer state: {reason}", path.display())]
    OptimizerState {
        /// The file.
        path: PathBuf,
        /// What the optimizer library said.
        reason: String,
    },
    /// Too many steps in a row had a gradient that is not finite.
    #[error(
        "the gradient of `{tensor}` was not finite in {count} consecutive steps, the last one step {step}"
    )]
    NonFiniteGradient {
        /// First parameter with a gradient that is not finite.
        tensor: String,
        /// Consecutive skipped steps.
        count: u64,
        /// The step that ended the run.
        step: u64,
    },
}

/// An error of a state source or a [`crate::parts::Validator`].
pub struct PartError(Box<dyn Diagnose + Send + Sync>);

impl PartError {
    /// Wraps the error of another crate.
    pub fn new(error: impl Diagnose + Send + Sync + 'static) -> Self {
        Self(Box::new(error))
    }
}

impl std::fmt::Debug for PartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.0, f)
    }
}

impl std::fmt::Display for PartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for PartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

fn listed(differences: &[Difference]) -> String {
    let lines: Vec<String> = differences.iter().map(ToString::to_string).collect();
    format!("the settings differ: {}", lines.join("; "))
}

impl Diagnose for TrainerError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Model(error) => error.hint(),
            Self::Part(error) => error.0.hint(),
            Self::Setting { .. } => Some("see the comments in `configs/quickstart.toml`".to_owned()),
            Self::Rows { hint, .. } => Some(hint.clone()),
            Self::RunExists { .. } => {
                Some("continue it with `--resume`, or choose another folder with `--out`".to_owned())
            }
            Self::Resume { .. } => {
                Some("check the path; start without `--resume` for a fresh run".to_owned())
            }
            Self::SettingsChanged { .. } => Some(
                "restore the settings of the checkpoint, or start a fresh run in another folder"
                    .to_owned(),
            ),
            Self::OptimizerState { .. } => {
                Some("the file may be cut off or damaged: resume from an older checkpoint".to_owned())
            }
            Self::NonFiniteGradient { .. } => Some(
                "lower `optimizer.learning_rate`, or set `train.compute` to `f32`; the last checkpoint is whole"
                    .to_owned(),
            ),
        }
    }

    fn is_user_error(&self) -> bool {
        match self {
            Self::Model(error) => error.is_user_error(),
            Self::Part(error) => error.0.is_user_error(),
            Self::NonFiniteGradient { .. } | Self::OptimizerState { .. } => false,
            _ => true,
        }
    }
}
