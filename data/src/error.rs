//! What can go wrong between text and batches.

use std::path::{Path, PathBuf};

use draftsmith_models::error::{Diagnose, ModelError};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A model file, or the file layer below it, failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A line of a JSON Lines file is not one JSON object, for example because it was cut.
    #[error("`{}` line {line}, column {column}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Column in bytes, from 1.
        column: usize,
        /// What is wrong.
        reason: String,
    },
    /// Conversations use roles that are neither known nor mapped by the configuration.
    #[error("unknown roles: {}", listed(roles))]
    UnknownRoles {
        /// Role names with the number of turns that use them, ordered by name.
        roles: Vec<(String, usize)>,
    },
    /// The chat template does not parse or failed on a conversation.
    #[error("chat template `{name}`: {reason}")]
    Template {
        /// Where the template comes from.
        name: String,
        /// What the template engine said.
        reason: String,
    },
    /// The tokenizer file is not usable.
    #[error("tokenizer `{}`: {reason}", path.display())]
    Tokenizer {
        /// The tokenizer file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A token id does not fit the target.
    #[error("{place}: token id {id} is outside the target's vocabulary of {vocab_size} tokens")]
    TokenOutsideVocabulary {
        /// The row or file.
        place: String,
        /// The id.
        id: u32,
        /// Size of the target's vocabulary.
        vocab_size: usize,
    },
    /// No row is left to train on.
    #[error("the data set is empty: {read} rows read, none kept ({reasons})")]
    EmptyDataset {
        /// Rows read.
        read: usize,
        /// Reasons with counts.
        reasons: String,
    },
    /// A file of this crate's own formats is damaged or of another version.
    #[error("`{}` is not a usable {format}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Which format.
        format: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// A setting does not fit the data, the target or another setting.
    #[error("{message}")]
    Setting {
        /// What, where, expected and found.
        message: String,
        /// A way out.
        hint: String,
    },
}

impl DataError {
    /// Wraps an operating system error with the path it happened on.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Model(ModelError::io(path, source))
    }

    /// A file of this crate's own formats that cannot be used.
    pub fn format(path: &Path, format: &'static str, reason: impl std::fmt::Display) -> Self {
        Self::Format {
            path: path.to_owned(),
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

impl Diagnose for DataError {
    fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Model(error) => return error.hint(),
            Self::Setting { hint, .. } => return Some(hint.clone()),
            Self::Line { .. } => "the file may be cut off: each line is one whole JSON object",
            Self::UnknownRoles { .. } => {
                "map them, for example `roles = { critic = \"assistant\" }` in `[data]`"
            }
            Self::Template { .. } => {
                "the template comes from `tokenizer_config.json` or `chat_template.jinja` of the target"
            }
            Self::Tokenizer { .. } | Self::TokenOutsideVocabulary { .. } => {
                "do the tokenizer, the data and the target belong together?"
            }
            Self::EmptyDataset { .. } => {
                "see the reasons above; `data.max_len` and `data.files` decide what is kept"
            }
            Self::Format { .. } => "remove it and run the stage that wrote it again",
        };
        Some(text.to_owned())
    }

    fn is_user_error(&self) -> bool {
        match self {
            Self::Model(error) => error.is_user_error(),
            _ => true,
        }
    }
}

fn listed(roles: &[(String, usize)]) -> String {
    let entries: Vec<String> = roles
        .iter()
        .map(|(name, count)| format!("`{name}` ({count} turns)"))
        .collect();
    entries.join(", ")
}
