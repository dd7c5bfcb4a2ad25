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
    /// A state cache was captured under other circumstances than the run asks for.
    #[error(
        "the states in `{}` belong to another `{field}`: expected {expected}, found {found}",
        folder.display()
    )]
    OtherCache {
        /// The cache folder.
        folder: PathBuf,
        /// The field of its identity that differs.
        field: &'static str,
        /// Value that the run asks for.
        expected: String,
        /// Value in the manifest.
        found: String,
    },
    /// The disk cannot hold, or could not hold, the states.
    #[error("the states need {needed} more bytes in `{}`, but {free} are free", folder.display())]
    DiskSpace {
        /// The cache folder.
        folder: PathBuf,
        /// Bytes still to be written.
        needed: u64,
        /// Bytes free for this user.
        free: u64,
    },
    /// The disk became full while states were written.
    #[error("no space is left for `{}`", folder.display())]
    DiskFull {
        /// The folder written to.
        folder: PathBuf,
        /// What the operating system said.
        #[source]
        source: Box<ModelError>,
    },
    /// A row is not in the state cache.
    #[error("row `{key}` is not in the state cache `{}`", folder.display())]
    NotCaptured {
        /// The row.
        key: String,
        /// The cache folder.
        folder: PathBuf,
    },
    /// Ids, marks and states of a row differ in length.
    #[error("row `{key}` has {ids} token ids, {marks} marks and {states} states")]
    RowLengths {
        /// The row.
        key: String,
        /// Token ids of the data set row.
        ids: usize,
        /// Marks of the data set row (which tokens the target generated).
        marks: usize,
        /// Positions with states.
        states: usize,
    },
    /// The states of a row were captured from other tokens.
    #[error("row `{key}`: its states in `{}` were captured from other token ids", folder.display())]
    RowTokens {
        /// The row.
        key: String,
        /// The cache folder.
        folder: PathBuf,
    },
    /// A state of the target is NaN or infinite.
    #[error("row `{key}`, position {position}: the {part} holds a value that is not finite")]
    StateNotFinite {
        /// The row.
        key: String,
        /// Position in the row, from 0.
        position: usize,
        /// `aux state` or `final hidden state`.
        part: &'static str,
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

    /// Names a full disk as such; any other error stays what it is.
    pub(crate) fn or_disk_full(error: ModelError, folder: &Path) -> Self {
        match &error {
            ModelError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
                Self::DiskFull {
                    folder: folder.to_owned(),
                    source: Box::new(error),
                }
            }
            _ => Self::Model(error),
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
            Self::OtherCache { .. }
            | Self::NotCaptured { .. }
            | Self::RowLengths { .. }
            | Self::RowTokens { .. } => {
                "move that folder away or remove it, then run `draftsmith capture` again"
            }
            Self::DiskSpace { .. } => {
                "free space, capture fewer rows or layers, or set `capture.mode = \"online\"`"
            }
            Self::DiskFull { .. } => {
                "what is finished stays valid: free space and run the same command again"
            }
            Self::StateNotFinite { .. } => {
                "do the target's weights fit its configuration and compute type? then remove the states and run \
                 `draftsmith capture` again"
            }
            Self::Format { .. } => "remove it and run the stage that wrote it again",
        };
        Some(text.to_owned())
    }

    fn is_user_error(&self) -> bool {
        match self {
            Self::Model(error) => error.is_user_error(),
            Self::DiskFull { .. } => false,
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
