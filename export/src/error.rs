//! What can go wrong when a drafter leaves or enters the project.

use std::path::PathBuf;

use draftsmith_models::error::{Diagnose, ModelError};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// A file, tensor or configuration is at fault.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A layout that does not exist.
    #[error("export format `{found}` is unknown, expected one of {known:?}")]
    UnknownFormat {
        /// The name given.
        found: String,
        /// The names there are.
        known: Vec<&'static str>,
    },
    /// A layout without a place for this family.
    #[error("the layout `{format}` has no place for a drafter of the family `{family}`")]
    NoLayout {
        /// The layout.
        format: &'static str,
        /// The family of the drafter.
        family: &'static str,
    },
    /// An engine could load the drafter but would draft something else.
    #[error("the layout `{format}` cannot express this drafter: {reason}")]
    NotExpressible {
        /// The layout.
        format: &'static str,
        /// The setting and what the engines do instead.
        reason: String,
    },
    /// `speculative_tokens = 0`.
    #[error("`export.speculative_tokens` is 0, expected at least 1")]
    NoSpeculativeTokens,
    /// The target folder is not the one the drafter was trained on.
    #[error(
        "the drafter in `{}` was trained on the target with {what} {expected}, but `{}` has {found}",
        checkpoint.display(), target.display()
    )]
    OtherTarget {
        /// The checkpoint folder.
        checkpoint: PathBuf,
        /// The target folder given.
        target: PathBuf,
        /// The property that differs.
        what: &'static str,
        /// Value of the drafter's target.
        expected: String,
        /// Value of the folder given.
        found: String,
    },
    /// A file holds a tensor that nothing would read.
    #[error("tensor `{name}` in `{}` belongs to no part of a `{family}` drafter", path.display())]
    UnexpectedTensor {
        /// Tensor name.
        name: String,
        /// The file.
        path: PathBuf,
        /// The family of the drafter.
        family: &'static str,
    },
    /// A foreign folder holds a drafter of a family that is not read back.
    #[error("`{}` describes a drafter of another family than EAGLE-3: {key} is {found}", path.display())]
    OtherFamily {
        /// The key that says so.
        key: &'static str,
        /// The configuration file.
        path: PathBuf,
        /// What the file says.
        found: String,
    },
    /// A foreign folder holds a drafter that this build cannot compute.
    #[error("`{key}` in `{}` is {found}, but this build drafts with {expected}", path.display())]
    Unsupported {
        /// Dotted key.
        key: String,
        /// The configuration file.
        path: PathBuf,
        /// What is supported.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// The vocabulary tables of a foreign folder are inconsistent.
    #[error("tensor `{name}` in `{}` is not a valid vocabulary table: {reason}", path.display())]
    VocabTable {
        /// Tensor name.
        name: &'static str,
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The target brings no head along, or one that this build cannot compute.
    #[error("the MTP head of the target in `{}` cannot be used: {reason}", path.display())]
    TargetHead {
        /// The folder of the target.
        path: PathBuf,
        /// The key or tensor, with what is expected.
        reason: String,
    },
    /// The place of the export is taken by something else.
    #[error("`{}` exists and is not an earlier export: it holds `{found}`", path.display())]
    OutTaken {
        /// The folder.
        path: PathBuf,
        /// The first entry that no export writes.
        found: String,
    },
}

impl Diagnose for ExportError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Model(error) => error.hint(),
            Self::UnknownFormat { .. } => Some("set `export.formats`".to_owned()),
            Self::NoLayout { .. } => Some(
                "choose another of `export.formats`; without one the drafter is trained and measured only"
                    .to_owned(),
            ),
            Self::NotExpressible { .. } => {
                Some("train with the setting that the engines use, or choose other `export.formats`".to_owned())
            }
            Self::NoSpeculativeTokens => {
                Some("leave it out to propose as many tokens as were trained".to_owned())
            }
            Self::OtherTarget { .. } => Some(
                "a drafter fits only the target whose states it was trained on; set `target.path` \
                 to that folder"
                    .to_owned(),
            ),
            Self::UnexpectedTensor { .. } => {
                Some("the file was written by another version or for another family".to_owned())
            }
            Self::OtherFamily { .. } => Some(
                "exports of EAGLE-3 can be read back; of another family, name the checkpoint it was exported from"
                    .to_owned(),
            ),
            Self::Unsupported { .. } => Some(
                "serve this drafter with the engine it was made for; it cannot be converted"
                    .to_owned(),
            ),
            Self::VocabTable { .. } => Some(
                "`d2t` holds offsets: target id = draft id + `d2t`, strictly increasing".to_owned(),
            ),
            Self::TargetHead { .. } => Some(
                "train a fresh head or a drafter of another family for this target: leave out `start_from` and \
                 the export format `target`"
                    .to_owned(),
            ),
            Self::OutTaken { .. } => Some("choose another folder, or remove this one".to_owned()),
        }
    }

    fn is_user_error(&self) -> bool {
        match self {
            Self::Model(error) => error.is_user_error(),
            _ => true,
        }
    }
}
