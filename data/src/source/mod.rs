//! Conversations as they come from files, before any template or tokenizer has seen them.

pub mod counts;
pub mod jsonl;
mod row;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::error::DataError;
pub use counts::{Counts, DropReason, RowProblem};

/// Roles that templates know.
pub const KNOWN_ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// Names that other data formats use for a known role.
const ROLE_ALIASES: [(&str, &str); 2] = [("human", "user"), ("gpt", "assistant")];

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Message {
    /// One of [`KNOWN_ROLES`].
    pub role: String,
    /// The text; empty when the file holds null, an empty list or no such key.
    pub content: String,
    /// All other fields of the turn, given to the template as they are; null fields are left out.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A turn that holds text only.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
            extra: Map::new(),
        }
    }

    /// Whether the target wrote this turn.
    pub fn is_assistant(&self) -> bool {
        self.role == "assistant"
    }

    /// Whether the turn holds neither text nor any other field.
    pub fn is_empty(&self) -> bool {
        self.content.is_empty() && self.extra.is_empty()
    }
}

/// Why the target stopped writing the last answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// It wrote its end-of-turn token.
    Stop,
    /// A length limit cut the answer; an end-of-turn token after it was not generated.
    Length,
}

/// The exact tokens of a generation; they are used as they are and never made from text again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenIds {
    /// Everything up to the first generated token.
    pub prompt: Vec<u32>,
    /// The generated tokens, the end-of-turn token included when the target wrote it.
    pub answer: Vec<u32>,
}

/// One row of an input file.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// The row's own id, else file stem and line number.
    pub id: String,
    /// Where the row came from in words: its `source` key, else the file stem.
    pub source: String,
    /// Its `category` key: what kind of prompt it is, for reports.
    pub category: Option<String>,
    /// The turns; empty when the row holds token ids only.
    pub messages: Vec<Message>,
    /// Tool descriptions for the template.
    pub tools: Option<Value>,
    /// Why the last answer ended, when the file says so.
    pub finish_reason: Option<FinishReason>,
    /// Exact tokens, when the file holds them.
    pub ids: Option<TokenIds>,
}

/// How role names of the input are understood.
#[derive(Clone, Debug, Default)]
pub struct Roles {
    mapping: BTreeMap<String, String>,
}

impl Roles {
    /// Known roles, their aliases and a mapping from the configuration, which wins.
    ///
    /// # Errors
    /// [`DataError::Setting`] when the mapping names a role that is not known.
    pub fn new(mapping: &BTreeMap<String, String>) -> Result<Self, DataError> {
        for (from, to) in mapping {
            if !KNOWN_ROLES.contains(&to.as_str()) {
                return Err(DataError::setting(
                    format!("`data.roles` maps `{from}` to `{to}`, which is not a role"),
                    format!("the roles are: {}", KNOWN_ROLES.join(", ")),
                ));
            }
        }
        Ok(Self {
            mapping: mapping.clone(),
        })
    }

    /// The known role that `name` stands for.
    pub fn resolve(&self, name: &str) -> Option<&str> {
        if let Some(role) = self.mapping.get(name) {
            return Some(role);
        }
        let alias = ROLE_ALIASES.iter().find(|(alias, _)| *alias == name);
        let name = alias.map_or(name, |(_, role)| *role);
        KNOWN_ROLES.iter().find(|known| **known == name).copied()
    }
}

/// Role names that could not be resolved, with the number of turns that use them.
#[derive(Clone, Debug, Default)]
pub struct RoleCensus(BTreeMap<String, usize>);

impl RoleCensus {
    fn add(&mut self, name: &str) {
        *self.0.entry(name.to_owned()).or_default() += 1;
    }

    /// All counts of several files.
    pub fn merged(all: impl IntoIterator<Item = Self>) -> Self {
        let mut merged = Self::default();
        for (name, count) in all.into_iter().flat_map(|census| census.0) {
            *merged.0.entry(name).or_default() += count;
        }
        merged
    }

    /// Succeeds when every role was resolved.
    ///
    /// # Errors
    /// [`DataError::UnknownRoles`] listing all names and counts: a guess would train on text that
    /// the target did not write, and skipping would lose turns in silence.
    pub fn check(&self) -> Result<(), DataError> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(DataError::UnknownRoles {
            roles: self
                .0
                .iter()
                .map(|(name, count)| (name.clone(), *count))
                .collect(),
        })
    }
}

/// A row of a file with its place.
#[derive(Clone, Debug)]
pub struct PlacedRow {
    /// The file.
    pub path: PathBuf,
    /// Line number, from 1.
    pub line: usize,
    /// The row, or why it cannot be used.
    pub row: Result<Conversation, RowProblem>,
}
