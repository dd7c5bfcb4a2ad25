//! Errors of the command line, how errors are printed, and which exit status they mean.

use std::process::ExitCode;

use draftsmith_data::error::DataError;
use draftsmith_eval::error::EvalError;
use draftsmith_export::ExportError;
use draftsmith_models::error::{Diagnose, ModelError};
use draftsmith_trainer::TrainerError;

/// Exit status for a mistake of the user: nothing was written.
const USER_MISTAKE: u8 = 2;
/// Exit status for a failure: what is finished stays valid.
const FAILURE: u8 = 1;
/// Exit status after Ctrl-C, 128 + SIGINT.
const INTERRUPTED: u8 = 130;

/// What can go wrong in the command line itself.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// A run file, or a `--set`, that is refused.
    #[error("{message}{snippet}")]
    RunFile {
        /// What is wrong.
        message: String,
        /// Place and caret, on lines of their own; may be empty.
        snippet: String,
        /// A way out.
        hint: Option<String>,
    },
    /// Arguments that do not fit together or the state of the run folder.
    #[error("{message}")]
    Usage {
        /// What is wrong.
        message: String,
        /// A way out.
        hint: String,
    },
    /// A device that this build or machine does not have.
    #[error("{message}")]
    Device {
        /// What is wrong.
        message: String,
        /// A way out.
        hint: &'static str,
    },
    /// Ctrl-C; everything finished was saved.
    #[error("interrupted; {0}")]
    Interrupted(String),
}

impl CliError {
    /// Arguments that do not fit, with a way out.
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage {
            message: message.into(),
            hint: hint.into(),
        }
    }
}

impl Diagnose for CliError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::RunFile { hint, .. } => hint.clone(),
            Self::Usage { hint, .. } => Some(hint.clone()),
            Self::Device { hint, .. } => Some((*hint).to_owned()),
            Self::Interrupted(_) => None,
        }
    }

    fn is_user_error(&self) -> bool {
        !matches!(self, Self::Interrupted(_))
    }
}

/// The text of an error: message, causes, hint.
pub(crate) fn render(error: &anyhow::Error) -> String {
    let mut text = format!("error: {error}");
    let mut previous = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if cause != previous {
            text.extend(["\n  caused by: ", &cause]);
        }
        previous = cause;
    }
    if let Some(hint) = diagnoses(error).find_map(Diagnose::hint) {
        text.extend(["\nhint: ", &hint]);
    }
    text
}

/// The exit status an error means.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    let interrupted = error
        .chain()
        .any(|cause| matches!(cause.downcast_ref(), Some(CliError::Interrupted(_))));
    if interrupted {
        ExitCode::from(INTERRUPTED)
    } else if diagnoses(error).any(Diagnose::is_user_error) {
        ExitCode::from(USER_MISTAKE)
    } else {
        ExitCode::from(FAILURE)
    }
}

/// The errors of a chain that know whose mistake they are, outermost first.
fn diagnoses(error: &anyhow::Error) -> impl Iterator<Item = &dyn Diagnose> {
    error.chain().filter_map(as_diagnose)
}

fn as_diagnose<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a dyn Diagnose> {
    fn of<'a, E: Diagnose + 'static>(
        error: &'a (dyn std::error::Error + 'static),
    ) -> Option<&'a dyn Diagnose> {
        error
            .downcast_ref::<E>()
            .map(|found| found as &dyn Diagnose)
    }
    of::<CliError>(error)
        .or_else(|| of::<ModelError>(error))
        .or_else(|| of::<DataError>(error))
        .or_else(|| of::<EvalError>(error))
        .or_else(|| of::<TrainerError>(error))
        .or_else(|| of::<ExportError>(error))
}
