//! What can go wrong while measuring a drafter.

use draftsmith_data::error::DataError;
use draftsmith_models::error::{Diagnose, ModelError};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// A model, checkpoint or file is at fault.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The states of the target could not be had.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A setting is outside its range or names something unknown.
    #[error("{message}")]
    Setting {
        /// What, where, expected and found.
        message: String,
        /// A way out.
        hint: String,
    },
    /// A prompt is empty or leaves no room for its continuation.
    #[error(
        "prompt `{id}` has {len} tokens, expected 1 to {most} (the target's context less \
         `max_new_tokens` and `gamma`)"
    )]
    PromptLength {
        /// Identity of the prompt.
        id: String,
        /// Tokens it has.
        len: usize,
        /// Most tokens it may have.
        most: usize,
    },
    /// A prompt holds a token that the target does not know.
    #[error("prompt `{id}` holds token {token}, but the target has {vocab_size} tokens")]
    UnknownToken {
        /// Identity of the prompt.
        id: String,
        /// The token.
        token: u32,
        /// Tokens of the target.
        vocab_size: usize,
    },
    /// A model computed NaN or infinity.
    #[error("{what} for `{id}` hold a value that is not finite")]
    NotFinite {
        /// Which values, in words.
        what: &'static str,
        /// Sequence or row they were computed for.
        id: String,
    },
    /// No row has two generated tokens in one turn, so there is no round to measure.
    #[error("none of the {num_rows} rows has a round to measure")]
    NothingToMeasure {
        /// Rows given.
        num_rows: usize,
    },
    /// The caller asked to stop.
    #[error("the evaluation was interrupted")]
    Interrupted,
}

impl EvalError {
    /// A setting that does not fit, with a way out.
    pub fn setting(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Setting {
            message: message.into(),
            hint: hint.into(),
        }
    }
}

impl Diagnose for EvalError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Model(error) => error.hint(),
            Self::Data(error) => error.hint(),
            Self::Setting { hint, .. } => Some(hint.clone()),
            Self::PromptLength { .. } => {
                Some("lower `eval.max_new_tokens` or remove the prompt".to_owned())
            }
            Self::UnknownToken { .. } => {
                Some("were the prompts tokenised with this target's tokenizer?".to_owned())
            }
            Self::NotFinite { .. } => Some(
                "the weights are damaged, or the compute type is too narrow: try `f32`".to_owned(),
            ),
            Self::NothingToMeasure { .. } => Some(
                "a round needs two tokens that the target generated in one turn: check the marks \
                 with `draftsmith inspect`"
                    .to_owned(),
            ),
            Self::Interrupted => None,
        }
    }

    fn is_user_error(&self) -> bool {
        match self {
            Self::Model(error) => error.is_user_error(),
            Self::Data(error) => error.is_user_error(),
            Self::Interrupted => false,
            _ => true,
        }
    }
}
