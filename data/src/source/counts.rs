//! [`Counts`]: rows read, kept, dropped by reason and clipped, so that nothing vanishes in silence.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Dropped rows that are listed one by one; the rest is only counted.
const MAX_EXAMPLES: usize = 100;

/// Why a row is not part of the data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// Neither `conversations` nor `messages` nor token ids.
    NoConversation,
    /// The conversation holds no turn.
    NoTurns,
    /// A turn is not an object, or lacks its role.
    MalformedTurn,
    /// A turn holds something else than text, such as an image.
    NotText,
    /// The first turn after the system turn is the assistant's.
    FirstTurnAssistant,
    /// No turn of the assistant.
    NoAssistantTurn,
    /// A turn of the assistant without text.
    EmptyAssistantTurn,
    /// The template raised an error on this conversation.
    TemplateRefused,
    /// The prompt with generation header is not how the rendered conversation starts.
    PromptNotPrefix,
    /// The template renders earlier turns differently once later ones follow.
    HistoryRewritten,
    /// The tokenizer failed, or its tokens do not spell the text.
    Tokenizer,
    /// `prompt_ids` and `answer_ids` do not both hold token ids.
    MalformedIds,
    /// A token ids file is given, but it has no row of this id.
    IdsMissing,
    /// `finish_reason` is neither `stop` nor `length`.
    FinishReason,
    /// An earlier row has the same id.
    DuplicateId,
    /// A prompt without room for an answer.
    PromptTooLong,
    /// Fewer than two generated tokens in a turn: nothing to predict.
    NoTarget,
    /// As [`DropReason::NoTarget`], but only after the row was cut to the maximum length.
    NoTargetAfterTruncation,
}

impl DropReason {
    /// The reason in words, as it appears in counts and manifests.
    pub fn label(self) -> &'static str {
        match self {
            Self::NoConversation => "no key `conversations`, `messages` or `prompt_ids`",
            Self::NoTurns => "conversation without turns",
            Self::MalformedTurn => "turn without role",
            Self::NotText => "turn that is not text",
            Self::FirstTurnAssistant => "first turn is the assistant's",
            Self::NoAssistantTurn => "no assistant turn",
            Self::EmptyAssistantTurn => "assistant turn without text",
            Self::TemplateRefused => "template refused the conversation",
            Self::PromptNotPrefix => "prompt with generation header is not a prefix",
            Self::HistoryRewritten => "template rewrites earlier turns",
            Self::Tokenizer => "tokens do not spell the text",
            Self::MalformedIds => "malformed `prompt_ids` or `answer_ids`",
            Self::IdsMissing => "no token ids of this id in `data.ids_files`",
            Self::FinishReason => "unknown `finish_reason`",
            Self::DuplicateId => "id seen before",
            Self::PromptTooLong => "prompt is longer than the limit",
            Self::NoTarget => "no target token",
            Self::NoTargetAfterTruncation => "no target after truncation",
        }
    }
}

/// A reason with what was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowProblem {
    /// The reason.
    pub reason: DropReason,
    /// What was found; may be empty.
    pub detail: String,
}

impl RowProblem {
    /// A reason with what was found.
    pub fn new(reason: DropReason, detail: impl std::fmt::Display) -> Self {
        Self {
            reason,
            detail: detail.to_string(),
        }
    }
}

impl From<DropReason> for RowProblem {
    fn from(reason: DropReason) -> Self {
        Self {
            reason,
            detail: String::new(),
        }
    }
}

/// One dropped row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DroppedRow {
    /// The file as the configuration names it.
    pub file: String,
    /// Line number, from 1.
    pub line: usize,
    /// The reason in words.
    pub reason: String,
    /// What was found; may be empty.
    pub detail: String,
}

/// What happened to the rows of the input files; `read = kept + sum(dropped)`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Counts {
    /// Rows read.
    pub read: usize,
    /// Rows in the data set.
    pub kept: usize,
    /// Kept rows that were cut to the maximum length.
    pub clipped: usize,
    /// Dropped rows by reason.
    pub dropped: BTreeMap<String, usize>,
    /// The first dropped rows with their places.
    pub dropped_rows: Vec<DroppedRow>,
    /// Kept rows that end with an end-of-turn token which the target wrote.
    pub rows_with_generated_end: usize,
    /// Rows with exact token ids whose prompt differs from what the template renders today.
    pub prompt_differs: usize,
    /// Fields of turns that the template never reads, with the number of turns that hold them.
    pub unread_fields: BTreeMap<String, usize>,
}

impl Counts {
    /// Counts a dropped row.
    pub fn drop_row(&mut self, file: &Path, line: usize, problem: &RowProblem) {
        let reason = problem.reason.label();
        *self.dropped.entry(reason.to_owned()).or_default() += 1;
        if self.dropped_rows.len() < MAX_EXAMPLES {
            self.dropped_rows.push(DroppedRow {
                file: file.display().to_string(),
                line,
                reason: reason.to_owned(),
                detail: problem.detail.clone(),
            });
        }
    }

    /// Rows dropped for one reason.
    pub fn dropped_for(&self, reason: DropReason) -> usize {
        self.dropped.get(reason.label()).copied().unwrap_or(0)
    }

    /// All reasons with counts in one line.
    pub fn reasons(&self) -> String {
        if self.dropped.is_empty() {
            return "no row was dropped".to_owned();
        }
        let entries: Vec<String> = self
            .dropped
            .iter()
            .map(|(reason, count)| format!("{reason}: {count}"))
            .collect();
        entries.join(", ")
    }
}
