//! `[data]`: from input files to a [`Dataset`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use draftsmith_models::checkpoint::TemplateRecord;
use draftsmith_models::sample::Sampling;
use serde::{Deserialize, Serialize};

use crate::dataset::{Dataset, DatasetRow, Origin};
use crate::error::DataError;
use crate::mask::{MarkedTokens, Marker, mark_ids};
use crate::source::jsonl::{JsonlObjects, JsonlRows};
use crate::source::{Conversation, Counts, DropReason, PlacedRow, Roles, RowProblem, TokenIds};
use crate::template::TemplateOptions;
use crate::tokenizer::ChatTokenizer;

/// `[data]`: which rows, and how they become tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// JSON Lines files of conversations, read in this order. Default: none, which is an error.
    pub files: Vec<PathBuf>,
    /// JSON Lines files of `{id, prompt_ids, answer_ids}` for the same ids; rows of `files` then use these
    /// exact tokens and are never made from text. Default: none.
    pub ids_files: Vec<PathBuf>,
    /// Meaning of further role names, for example `{ critic = "assistant" }`. Default: none.
    pub roles: BTreeMap<String, String>,
    /// Options for the chat template, the same as in serving, for example `{ enable_thinking = false }`.
    /// Default: none.
    pub template_options: TemplateOptions,
    /// Longest row in tokens; longer ones are cut. Default: 2048.
    pub max_len: usize,
    /// Share of the rows kept for validation, chosen by hash of the id. Default: 0.05.
    pub validation_fraction: f64,
    /// Reading stops after this many kept rows. Default: no limit.
    pub max_rows: Option<usize>,
    /// Reading stops at the first row with which the kept rows hold at least this many tokens that the
    /// target generated. Default: no limit.
    pub max_generated_tokens: Option<usize>,
    /// Temperature at which the target wrote the answers in `files`, sampled without truncation; unset
    /// where nobody knows, or where `[regenerate]` replaces them. Validation decodes at it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_temperature: Option<f64>,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            files: Vec::new(),
            ids_files: Vec::new(),
            roles: BTreeMap::new(),
            template_options: TemplateOptions::new(),
            max_len: 2048,
            validation_fraction: 0.05,
            max_rows: None,
            max_generated_tokens: None,
            text_temperature: None,
        }
    }
}

impl DataConfig {
    /// Checks ranges, before any file is opened.
    ///
    /// # Errors
    /// [`DataError::Setting`] naming the key.
    pub fn validate(&self) -> Result<(), DataError> {
        if self.files.is_empty() {
            return Err(DataError::setting(
                "`data.files` is empty, expected at least one JSON Lines file",
                "for example `files = [\"prompts.jsonl\"]`",
            ));
        }
        if self.max_len < 2 {
            return Err(DataError::setting(
                format!("`data.max_len` is {}, expected at least 2", self.max_len),
                "a row needs a token to anchor on and one to predict",
            ));
        }
        if !(0.0..1.0).contains(&self.validation_fraction) {
            let found = self.validation_fraction;
            return Err(DataError::setting(
                format!("`data.validation_fraction` is {found}, expected at least 0 and below 1"),
                "0.05 keeps one row of twenty for validation",
            ));
        }
        if let Some(found) = self.text_temperature
            && !(found.is_finite() && found >= 0.0)
        {
            return Err(DataError::setting(
                format!("`data.text_temperature` is {found}, expected a number of at least 0"),
                "0 is greedy; leave the key out where nobody knows",
            ));
        }
        Roles::new(&self.roles).map(drop)
    }
}

/// Answers to prompts that are set aside, drawn otherwise than the text to train on.
#[derive(Clone, Debug)]
pub struct ValidationFile {
    /// How the target drew them.
    pub sampling: Sampling,
    /// JSON Lines file of conversations.
    pub path: PathBuf,
}

/// How the answers of a data set were drawn.
#[derive(Clone, Debug, Default)]
pub struct Texts {
    /// Those of the files of [`DataConfig`]; unset where nobody knows.
    pub training: Option<Sampling>,
    /// Further answers, which only measure.
    pub validation: Vec<ValidationFile>,
}

/// Reads, renders, tokenises and marks all rows, and writes the data set into `out`.
///
/// Nothing is written unless every line of every file was understood. Rows of validation texts keep their key, with
/// the label of their sampling behind it.
///
/// # Errors
/// [`DataError`]: a damaged line, unknown roles, an option that the template never reads, no row left, or
/// a file that cannot be read or written.
pub fn prepare(
    config: &DataConfig,
    texts: &Texts,
    tokenizer: &ChatTokenizer,
    out: &Path,
) -> Result<Dataset, DataError> {
    config.validate()?;
    let mut collected = collect(config, tokenizer)?;
    let mut samplings = vec![texts.training];
    for file in &texts.validation {
        let rows = validation_rows(config, file, samplings.len(), tokenizer)?;
        collected.rows.extend(rows);
        samplings.push(Some(file.sampling));
    }
    let template = match tokenizer.template_if_any() {
        Some(template) if collected.rendered => template.record(&config.template_options),
        _ => TemplateRecord::default(),
    };
    let origin = Origin {
        max_len: config.max_len,
        counts: collected.counts,
        tokenizer_blake3: tokenizer.hash().to_owned(),
        template,
        samplings,
    };
    Dataset::create(out, &collected.rows, origin)
}

/// The rows of one text that only measures, `text` among those of the data set.
fn validation_rows(
    config: &DataConfig,
    file: &ValidationFile,
    text: usize,
    tokenizer: &ChatTokenizer,
) -> Result<Vec<DatasetRow>, DataError> {
    let config = DataConfig {
        files: vec![file.path.clone()],
        ids_files: Vec::new(),
        max_rows: None,
        max_generated_tokens: None,
        ..config.clone()
    };
    let rows = collect(&config, tokenizer)?.rows.into_iter();
    Ok(rows
        .map(|row| DatasetRow {
            key: format!("{}@{}", row.key, file.sampling.label()),
            text,
            ..row
        })
        .collect())
}

/// Kept rows with what happened to the others.
struct Collected {
    rows: Vec<DatasetRow>,
    counts: Counts,
    /// Whether the template took part.
    rendered: bool,
}

fn collect(config: &DataConfig, tokenizer: &ChatTokenizer) -> Result<Collected, DataError> {
    if let Some(template) = tokenizer.template_if_any() {
        template.check_options(&config.template_options)?;
    }
    let roles = Roles::new(&config.roles)?;
    let mut collector = Collector::new(config, tokenizer)?;
    let mut unknown_roles = Vec::new();
    for path in &config.files {
        let mut rows = JsonlRows::open(path, &roles)?;
        while !collector.is_full() {
            let Some(row) = rows.next() else { break };
            collector.add(row?)?;
        }
        unknown_roles.push(rows.census);
    }
    crate::source::RoleCensus::merged(unknown_roles).check()?;
    Ok(collector.collected)
}

struct Collector<'a> {
    config: &'a DataConfig,
    tokenizer: &'a ChatTokenizer,
    exact_ids: BTreeMap<String, TokenIds>,
    seen: BTreeSet<String>,
    generated: usize,
    collected: Collected,
}

impl<'a> Collector<'a> {
    fn new(config: &'a DataConfig, tokenizer: &'a ChatTokenizer) -> Result<Self, DataError> {
        Ok(Self {
            config,
            tokenizer,
            exact_ids: read_ids_files(&config.ids_files)?,
            seen: BTreeSet::new(),
            generated: 0,
            collected: Collected {
                rows: Vec::new(),
                counts: Counts::default(),
                rendered: false,
            },
        })
    }

    fn is_full(&self) -> bool {
        let config = self.config;
        config
            .max_rows
            .is_some_and(|most| self.collected.rows.len() >= most)
            || config
                .max_generated_tokens
                .is_some_and(|enough| self.generated >= enough)
    }

    fn add(&mut self, placed: PlacedRow) -> Result<(), DataError> {
        self.collected.counts.read += 1;
        let row = match placed.row {
            Ok(conversation) => self.row(conversation)?,
            Err(problem) => Err(problem),
        };
        let counts = &mut self.collected.counts;
        match row {
            Err(problem) => counts.drop_row(&placed.path, placed.line, &problem),
            Ok(row) => {
                counts.kept += 1;
                counts.clipped += usize::from(row.clipped);
                counts.rows_with_generated_end += usize::from(row.tokens.end_index.is_some());
                self.generated += row.tokens.num_generated();
                self.collected.rows.push(row);
            }
        }
        Ok(())
    }

    /// Tokens of one row, or why it is dropped. Truncation comes before the check for targets.
    fn row(
        &mut self,
        mut conversation: Conversation,
    ) -> Result<Result<DatasetRow, RowProblem>, DataError> {
        if !self.seen.insert(conversation.id.clone()) {
            return Ok(Err(RowProblem::new(
                DropReason::DuplicateId,
                conversation.id,
            )));
        }
        if !self.config.ids_files.is_empty() && conversation.ids.is_none() {
            match self.exact_ids.remove(&conversation.id) {
                Some(ids) => conversation.ids = Some(ids),
                None => {
                    return Ok(Err(RowProblem::new(
                        DropReason::IdsMissing,
                        conversation.id,
                    )));
                }
            }
        }
        let mut tokens = match self.mark(&conversation)? {
            Ok(tokens) => tokens,
            Err(problem) => return Ok(Err(problem)),
        };
        if !tokens.has_slot() {
            return Ok(Err(DropReason::NoTarget.into()));
        }
        let clipped = tokens.truncate(self.config.max_len);
        if !tokens.has_slot() {
            return Ok(Err(DropReason::NoTargetAfterTruncation.into()));
        }
        Ok(Ok(DatasetRow {
            key: conversation.id,
            source: conversation.source,
            tokens,
            clipped,
            text: 0,
        }))
    }

    fn mark(
        &mut self,
        conversation: &Conversation,
    ) -> Result<Result<MarkedTokens, RowProblem>, DataError> {
        if let Some(ids) = &conversation.ids {
            self.compare_prompt(conversation, ids);
            return Ok(mark_ids(ids, self.tokenizer.end_ids()));
        }
        let template = self.tokenizer.template()?;
        let marker = Marker::new(self.tokenizer, template, &self.config.template_options);
        self.collected.rendered = true;
        let counts = &mut self.collected.counts;
        for message in &conversation.messages {
            for name in message.extra.keys().filter(|name| !template.reads(name)) {
                *counts.unread_fields.entry(name.clone()).or_default() += 1;
            }
        }
        Ok(marker.mark(conversation))
    }

    /// Counts rows whose exact prompt is not what the template renders: trained so, a drafter would see
    /// other prompts than in serving.
    fn compare_prompt(&mut self, conversation: &Conversation, ids: &TokenIds) {
        let Some(template) = self.tokenizer.template_if_any() else {
            return;
        };
        let messages = &conversation.messages;
        let Some(last) = messages
            .iter()
            .rposition(crate::source::Message::is_assistant)
        else {
            return;
        };
        let marker = Marker::new(self.tokenizer, template, &self.config.template_options);
        let prompt = marker.prompt_ids(&messages[..last], conversation.tools.as_ref());
        self.collected.rendered = true;
        let differs = prompt.as_ref() != Ok(&ids.prompt);
        self.collected.counts.prompt_differs += usize::from(differs);
    }
}

/// One line of an ids file.
#[derive(Deserialize)]
struct IdsRow {
    id: String,
    prompt_ids: Vec<u32>,
    answer_ids: Vec<u32>,
}

fn read_ids_files(paths: &[PathBuf]) -> Result<BTreeMap<String, TokenIds>, DataError> {
    let mut all = BTreeMap::new();
    for path in paths {
        for object in JsonlObjects::open(path)? {
            let (line, object) = object?;
            let row: IdsRow =
                serde_json::from_value(object.into()).map_err(|e| DataError::Line {
                    path: path.clone(),
                    line,
                    column: 1,
                    reason: e.to_string(),
                })?;
            let ids = TokenIds {
                prompt: row.prompt_ids,
                answer: row.answer_ids,
            };
            all.insert(row.id, ids);
        }
    }
    Ok(all)
}
