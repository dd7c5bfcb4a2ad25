//! [`Dataset`]: token rows with turn marks in one Arrow IPC file, described by `manifest.json`.
//!
//! The manifest is written last and carries the checksum of the data file, so a folder with a manifest is
//! a whole data set or a damaged one, never a half-written one that looks whole.

mod file;
mod statistics;

use std::path::Path;

use draftsmith_models::batch::TokenRow;
use draftsmith_models::checkpoint::TemplateRecord;
use draftsmith_models::file as model_file;
use draftsmith_models::rng::{Purpose, Stream, stable_hash};
use draftsmith_models::sample::Sampling;
use draftsmith_models::slot;
use serde::{Deserialize, Serialize};

use crate::error::DataError;
use crate::mask::MarkedTokens;
use crate::source::Counts;
use file::Columns;
pub use statistics::{SourceSummary, Summary};

/// Version of the manifest and of the columns; readers refuse others.
pub const FORMAT_VERSION: u32 = 2;

const MANIFEST: &str = "manifest.json";
const DATA: &str = "tokens.arrow";
const FORMAT: &str = "data set";

/// A row on its way into a data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetRow {
    /// Identity, unique in the data set.
    pub key: String,
    /// Which corpus it came from.
    pub source: String,
    /// Tokens and marks.
    pub tokens: MarkedTokens,
    /// Whether it was cut to the maximum length.
    pub clipped: bool,
    /// Place of its text among [`Manifest::texts`].
    pub text: usize,
}

/// Rows whose answers were drawn alike: the text to train on, or one that only measures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Text {
    /// How the target drew the answers; unset where nobody knows.
    pub sampling: Option<Sampling>,
    /// Number of rows.
    pub rows: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of tokens that the target generated.
    pub generated_tokens: usize,
    /// Number of valid slots of depth 0: the anchors that serving can visit.
    pub anchors: usize,
}

impl Text {
    fn of(sampling: Option<Sampling>, rows: &[&DatasetRow]) -> Self {
        let mut text = Self {
            sampling,
            rows: 0,
            tokens: 0,
            generated_tokens: 0,
            anchors: 0,
        };
        for row in rows {
            text.rows += 1;
            text.tokens += row.tokens.ids.len();
            text.generated_tokens += row.tokens.num_generated();
            text.anchors += num_anchors(&row.tokens.turns);
        }
        text
    }
}

/// What a data set holds and what it was made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format.
    pub format_version: u32,
    /// Number of rows.
    pub rows: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// The text to train on, then those of the prompts set aside under other settings.
    pub texts: Vec<Text>,
    /// Maximum row length that was set.
    pub max_len: usize,
    /// What happened to the input rows of the text to train on.
    pub counts: Counts,
    /// Lengths and sources of the text to train on.
    pub summary: Summary,
    /// blake3 of `tokenizer.json`, hex.
    pub tokenizer_blake3: String,
    /// Template and options; empty when no row was rendered.
    pub template: TemplateRecord,
    /// blake3 of the data file, hex.
    pub data_blake3: String,
}

impl Manifest {
    /// The text to train on; panics for a manifest that was not read or made here.
    pub fn training_text(&self) -> &Text {
        &self.texts[0]
    }
}

/// Where a data set comes from.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    /// Maximum row length that was set.
    pub max_len: usize,
    /// What happened to the input rows.
    pub counts: Counts,
    /// blake3 of `tokenizer.json`, hex.
    pub tokenizer_blake3: String,
    /// Template and options.
    pub template: TemplateRecord,
    /// How the answers of each text were drawn, that of the training text first.
    pub samplings: Vec<Option<Sampling>>,
}

/// Rows for training and rows that only measure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SplitIndices {
    /// Indices of training rows, ascending.
    pub train: Vec<usize>,
    /// Indices of validation rows of each text of the manifest, ascending.
    pub validation: Vec<Vec<usize>>,
}

/// An opened data set.
#[derive(Clone, Debug)]
pub struct Dataset {
    manifest: Manifest,
    columns: Columns,
}

impl Dataset {
    /// Writes rows, those of the training text first, into `folder` and opens the result.
    ///
    /// # Errors
    /// [`DataError::EmptyDataset`] without rows to train on, [`DataError::Model`] when a file cannot be written.
    pub fn create(folder: &Path, rows: &[DatasetRow], origin: Origin) -> Result<Self, DataError> {
        if rows.first().is_none_or(|row| row.text != 0) {
            return Err(DataError::EmptyDataset {
                read: origin.counts.read,
                reasons: origin.counts.reasons(),
            });
        }
        let training = rows.iter().take_while(|row| row.text == 0).count();
        let summary = Summary::of(&rows[..training])?;
        let data_blake3 = file::write(&folder.join(DATA), rows)?;
        let texts = origin.samplings.into_iter().enumerate();
        let texts = texts.map(|(text, sampling)| {
            let rows: Vec<&DatasetRow> = rows.iter().filter(|row| row.text == text).collect();
            Text::of(sampling, &rows)
        });
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            rows: rows.len(),
            tokens: rows.iter().map(|row| row.tokens.ids.len()).sum(),
            texts: texts.collect(),
            max_len: origin.max_len,
            counts: origin.counts,
            summary,
            tokenizer_blake3: origin.tokenizer_blake3,
            template: origin.template,
            data_blake3,
        };
        model_file::write_json(&folder.join(MANIFEST), &manifest)?;
        Self::open(folder)
    }

    /// Opens a data set, checking version and checksum.
    ///
    /// # Errors
    /// [`DataError`] naming the file that is missing, damaged or of another version.
    pub fn open(folder: &Path) -> Result<Self, DataError> {
        let manifest = read_manifest(folder)?;
        let path = folder.join(DATA);
        let bytes = model_file::read(&path)?;
        if blake3::hash(&bytes).to_hex().as_str() != manifest.data_blake3 {
            let reason = "its checksum differs from the one in `manifest.json`";
            return Err(DataError::format(&path, FORMAT, reason));
        }
        let columns = Columns::read(&path, bytes)?;
        if columns.len() != manifest.rows {
            let reason = format!(
                "it holds {} rows, expected {}",
                columns.len(),
                manifest.rows
            );
            return Err(DataError::format(&path, FORMAT, reason));
        }
        let num_texts = manifest.texts.len();
        if num_texts == 0 || (0..columns.len()).any(|row| columns.text(row) >= num_texts) {
            let reason = "it holds rows of texts that `manifest.json` does not name";
            return Err(DataError::format(&path, FORMAT, reason));
        }
        Ok(Self { manifest, columns })
    }

    /// The description.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.columns.len()
    }

    /// Whether there is no row; never true for an opened data set.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Row `index`; panics when there is none.
    pub fn row(&self, index: usize) -> TokenRow {
        TokenRow {
            key: self.key(index).to_owned(),
            ids: self.columns.ids(index).to_vec(),
            turns: self.columns.turns(index).to_vec(),
        }
    }

    /// Identity of row `index`.
    pub fn key(&self, index: usize) -> &str {
        self.columns.key(index)
    }

    /// Corpus of row `index`.
    pub fn source(&self, index: usize) -> &str {
        self.columns.source(index)
    }

    /// Number of tokens of row `index`.
    pub fn row_len(&self, index: usize) -> usize {
        self.columns.ids(index).len()
    }

    /// Number of tokens before the first generated one of row `index`.
    pub fn prompt_len(&self, index: usize) -> usize {
        self.columns.prompt_len(index)
    }

    /// How often each token id was generated in the text to train on, length `vocab_size`.
    ///
    /// # Errors
    /// [`DataError::TokenOutsideVocabulary`] when any id of a row, prompts included, does not fit.
    pub fn token_counts(&self, vocab_size: usize) -> Result<Vec<u64>, DataError> {
        let mut counts = vec![0; vocab_size];
        for index in 0..self.len() {
            let ids = self.columns.ids(index);
            let place = || format!("row `{}`", self.key(index));
            if ids.iter().any(|id| *id as usize >= vocab_size) {
                crate::tokenizer::check_ids(&place(), ids, vocab_size)?;
            }
            if self.columns.text(index) != 0 {
                continue;
            }
            for (id, turn) in ids.iter().zip(self.columns.turns(index)) {
                counts[*id as usize] += u64::from(*turn != 0);
            }
        }
        Ok(counts)
    }

    /// Training and validation rows: of the training text as [`is_set_aside`] says, of the others all.
    pub fn split(&self, fraction: f64, seed: u64) -> SplitIndices {
        let mut split = SplitIndices {
            train: Vec::new(),
            validation: vec![Vec::new(); self.manifest.texts.len()],
        };
        for index in 0..self.len() {
            let text = self.columns.text(index);
            if text > 0 || is_set_aside(self.key(index), fraction, seed) {
                split.validation[text].push(index);
            } else {
                split.train.push(index);
            }
        }
        split
    }
}

/// Whether the row or prompt of this key only measures.
///
/// That depends on seed, fraction and its own key only: rows that are added or removed move no other row.
pub fn is_set_aside(key: &str, fraction: f64, seed: u64) -> bool {
    Stream::new(seed, Purpose::Split, stable_hash(key)).uniform() < fraction
}

/// Reads only the description of a data set.
///
/// # Errors
/// [`DataError`] when it is missing, malformed or of another version.
pub fn read_manifest(folder: &Path) -> Result<Manifest, DataError> {
    let path = folder.join(MANIFEST);
    let value: serde_json::Value = model_file::read_json(&path)?;
    let version = &value["format_version"];
    if *version != FORMAT_VERSION {
        let reason = format!("format version {version}, expected {FORMAT_VERSION}");
        return Err(DataError::format(&path, FORMAT, reason));
    }
    serde_json::from_value(value).map_err(|e| DataError::format(&path, FORMAT, e))
}

fn num_anchors(turns: &[u32]) -> usize {
    (1..turns.len())
        .filter(|&anchor| slot::is_valid(turns, anchor, 0))
        .count()
}
