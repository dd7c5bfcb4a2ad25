//! What can go wrong with models, weights and their files, and how every crate reports it.

use std::path::PathBuf;

/// What a user should know besides the message: a way out, and whose mistake it was.
///
/// Every error type of the workspace implements it; the command line prints the hint after the
/// message and chooses the exit status from [`Diagnose::is_user_error`].
pub trait Diagnose: std::error::Error {
    /// A way out, printed after the message as `hint: ...`.
    fn hint(&self) -> Option<String>;
    /// True when the input is at fault (exit status 2), false for a failure of the machine (1).
    fn is_user_error(&self) -> bool;
}

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read or written; the source names the path.
    #[error("cannot access `{}`", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// A file exists but its content is not what its name promises.
    #[error("`{}` is not a valid {format}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The expected format, such as `safetensors file`.
        format: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that the model needs is in no file of the folder.
    #[error("tensor `{name}` is missing in `{}`", path.display())]
    MissingTensor {
        /// Full tensor name.
        name: String,
        /// File or folder searched.
        path: PathBuf,
    },
    /// A tensor in the file has another shape than the configuration asks for.
    #[error("tensor `{name}` in `{}` has shape {found:?}, expected {expected:?}", path.display())]
    TensorShape {
        /// Full tensor name.
        name: String,
        /// The file.
        path: PathBuf,
        /// Shape from the configuration.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// A tensor holds NaN or infinity.
    #[error("tensor `{name}` in `{}` holds a value that is not finite", path.display())]
    NotFinite {
        /// Full tensor name.
        name: String,
        /// The file.
        path: PathBuf,
    },
    /// A file would hold NaN or infinity.
    #[error(
        "`{}` is not written: tensor `{name}` would hold a value that is not finite in {dtype}",
        path.display()
    )]
    NotWritten {
        /// Full tensor name.
        name: String,
        /// The file.
        path: PathBuf,
        /// Element type in the file.
        dtype: String,
    },
    /// A key of a configuration file has a value that this build does not understand.
    #[error("`{key}` in `{}` is {found}, expected {expected}", path.display())]
    ConfigKey {
        /// Dotted key.
        key: String,
        /// The configuration file.
        path: PathBuf,
        /// Accepted values in words.
        expected: String,
        /// Value found.
        found: String,
    },
    /// A setting does not fit the target or another setting.
    #[error("{message}")]
    Setting {
        /// What, where, expected and found.
        message: String,
        /// A way out.
        hint: String,
    },
}

impl ModelError {
    /// Wraps an operating system error with the path it happened on.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io {
            path: path.into(),
            source,
        }
    }

    /// A file whose content is not the format its name promises.
    pub fn malformed(
        path: impl Into<PathBuf>,
        format: &'static str,
        reason: impl std::fmt::Display,
    ) -> Self {
        Self::Malformed {
            path: path.into(),
            format,
            reason: reason.to_string(),
        }
    }

    /// A setting that does not fit, with a way out.
    pub fn setting(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Setting {
            message: message.into(),
            hint: hint.into(),
        }
    }
}

impl Diagnose for ModelError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Some("check the path; relative paths start at the current folder".to_owned())
            }
            Self::Io { .. } => None,
            Self::Malformed { .. } | Self::NotFinite { .. } => {
                Some("the file may be cut off or damaged: fetch or write it again".to_owned())
            }
            Self::NotWritten { .. } => Some(
                "the training diverged: lower `optimizer.learning_rate`; if the checkpoint is sound, set \
                 `export.dtype` to \"f32\""
                    .to_owned(),
            ),
            Self::MissingTensor { .. } | Self::TensorShape { .. } => {
                Some("do `config.json` and the weights belong together?".to_owned())
            }
            Self::ConfigKey { .. } => {
                Some("a setting that is not understood is never replaced by a default".to_owned())
            }
            Self::Setting { hint, .. } => Some(hint.clone()),
        }
    }

    fn is_user_error(&self) -> bool {
        match self {
            Self::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            _ => true,
        }
    }
}
