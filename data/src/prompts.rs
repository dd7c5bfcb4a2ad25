//! Prompt suites: conversations as prompts, with the header of the assistant's next turn.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use crate::error::DataError;
use crate::mask::Marker;
use crate::source::jsonl::JsonlRows;
use crate::source::{Conversation, Counts, DropReason, Message, RoleCensus, Roles, RowProblem};
use crate::template::TemplateOptions;
use crate::tokenizer::ChatTokenizer;

/// A prompt, ready for a target.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prompt {
    /// Identity, unique in its suite.
    pub key: String,
    /// Which corpus it came from.
    pub source: String,
    /// What kind of prompt it is, for reports.
    pub category: Option<String>,
    /// The turns that are rendered.
    pub messages: Vec<Message>,
    /// User turns that may be asked later, each behind the answer to the one before.
    pub later: Vec<Message>,
    /// Tool descriptions for the template.
    pub tools: Option<Value>,
    /// Token ids, generation header included.
    pub ids: Vec<u32>,
}

impl Prompt {
    /// The conversation after `answer`, as a prompt with the next user turn; `None` when there is none.
    ///
    /// # Errors
    /// [`RowProblem`] when the template refuses the conversation.
    pub fn next(&self, answer: &str, marker: &Marker<'_>) -> Result<Option<Self>, RowProblem> {
        let Some((asked, later)) = self.later.split_first() else {
            return Ok(None);
        };
        let mut next = Self {
            later: later.to_vec(),
            ..self.clone()
        };
        next.messages.push(Message::new("assistant", answer));
        next.messages.push(asked.clone());
        next.ids = marker.prompt_ids(&next.messages, self.tools.as_ref())?;
        Ok(Some(next))
    }
}

/// Prompts with what happened to the other rows.
#[derive(Clone, Debug, Default)]
pub struct Prompts {
    /// The prompts in file order.
    pub prompts: Vec<Prompt>,
    /// Rows read, kept and dropped.
    pub counts: Counts,
}

/// How conversations become prompts.
#[derive(Clone, Debug)]
pub struct PromptSettings<'a> {
    /// Role names.
    pub roles: &'a Roles,
    /// Options for the chat template.
    pub options: &'a TemplateOptions,
    /// Reading stops after this many prompts.
    pub limit: Option<usize>,
    /// Prompts of more tokens are dropped and counted.
    pub max_len: usize,
}

/// Reads prompt suites: of each conversation, the turns up to the first user turn's end.
///
/// That is the first user turn with the system turn before it; further user turns (MT-Bench has them in a row) are kept for
/// [`Prompt::next`]. Answers that a file already holds are not used.
///
/// # Errors
/// [`DataError`] for a damaged line, unknown roles, a folder without template, or a file that cannot be
/// read.
pub fn read(
    files: &[PathBuf],
    tokenizer: &ChatTokenizer,
    settings: &PromptSettings<'_>,
) -> Result<Prompts, DataError> {
    let marker = Marker::new(tokenizer, tokenizer.template()?, settings.options);
    let mut all = Reading::default();
    let mut unknown_roles = Vec::new();
    for path in files {
        unknown_roles.push(read_file(path, &marker, settings, &mut all)?);
    }
    RoleCensus::merged(unknown_roles).check()?;
    Ok(all.found)
}

#[derive(Default)]
struct Reading {
    found: Prompts,
    seen: BTreeSet<String>,
}

impl Reading {
    fn prompt(
        &mut self,
        row: Conversation,
        marker: &Marker<'_>,
        settings: &PromptSettings<'_>,
    ) -> Result<Prompt, RowProblem> {
        if !self.seen.insert(row.id.clone()) {
            return Err(RowProblem::new(DropReason::DuplicateId, row.id));
        }
        let (messages, later) = first_turns(row.messages)?;
        let ids = marker.prompt_ids(&messages, row.tools.as_ref())?;
        if ids.len() > settings.max_len {
            let detail = format!("{} tokens", ids.len());
            return Err(RowProblem::new(DropReason::PromptTooLong, detail));
        }
        Ok(Prompt {
            key: row.id,
            source: row.source,
            category: row.category,
            messages,
            later,
            tools: row.tools,
            ids,
        })
    }
}

fn read_file(
    path: &Path,
    marker: &Marker<'_>,
    settings: &PromptSettings<'_>,
    all: &mut Reading,
) -> Result<RoleCensus, DataError> {
    let mut rows = JsonlRows::open(path, settings.roles)?;
    while settings
        .limit
        .is_none_or(|limit| all.found.prompts.len() < limit)
    {
        let Some(placed) = rows.next() else { break };
        let placed = placed?;
        let prompt = placed.row.and_then(|row| all.prompt(row, marker, settings));
        let found = &mut all.found;
        found.counts.read += 1;
        match prompt {
            Err(problem) => found.counts.drop_row(path, placed.line, &problem),
            Ok(prompt) => {
                found.counts.kept += 1;
                found.prompts.push(prompt);
            }
        }
    }
    Ok(rows.census)
}

/// The turns through the first user turn, and the user turns behind it up to one of another role than the two speakers'.
fn first_turns(mut messages: Vec<Message>) -> Result<(Vec<Message>, Vec<Message>), RowProblem> {
    let first = messages.iter().position(|message| message.role == "user");
    let Some(first) = first else {
        return Err(DropReason::NoTurns.into());
    };
    let mut later = messages.split_off(first + 1);
    let is_spoken = |message: &Message| message.role == "user" || message.is_assistant();
    let spoken = later.iter().position(|message| !is_spoken(message));
    later.truncate(spoken.unwrap_or(later.len()));
    later.retain(|message| message.role == "user");
    Ok((messages, later))
}
