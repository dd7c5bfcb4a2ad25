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
use draftsmith_models::slot;
use serde::{Deserialize, Serialize};

use crate::error::DataError;
use crate::mask::MarkedTokens;
use crate::source::Counts;
use file::Columns;
pub use statistics::{SourceSummary, Summary};

/// Version of the manifest and of the columns; readers refuse others.
pub const FORMAT_VERSION: u32 = 1;

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
    /// Number of tokens that the target generated.
    pub generated_tokens: usize,
    /// Number of valid slots of depth 0: the anchors that serving can visit.
    pub anchors: usize,
    /// Maximum row length that was set.
    pub max_len: usize,
    /// What happened to the input rows.
    pub counts: Counts,
    /// Lengths and sources.
    pub summary: Summary,
    /// blake3 of `tokenizer.json`, hex.
    pub tokenizer_blake3: String,
    /// Template and options; empty when no row was rendered.
    pub template: TemplateRecord,
    /// Hash over settings, input files, tokenizer and template; a change makes the data set stale.
    pub inputs_blake3: String,
    /// blake3 of the data file, hex.
    pub data_blake3: String,
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
    /// Hash over everything it was made from.
    pub inputs_blake3: String,
}

/// Rows for training and rows that only measure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SplitIndices {
    /// Indices of training rows, ascending.
    pub train: Vec<usize>,
    /// Indices of validation rows, ascending.
    pub validation: Vec<usize>,
}

/// An opened data set.
#[derive(Clone, Debug)]
pub struct Dataset {
    manifest: Manifest,
    columns: Columns,
}

impl Dataset {
    /// Writes rows into `folder` and opens the result.
    ///
    /// # Errors
    /// [`DataError::EmptyDataset`] without rows, [`DataError::Model`] when a file cannot be written.
    pub fn create(folder: &Path, rows: &[DatasetRow], origin: Origin) -> Result<Self, DataError> {
        if rows.is_empty() {
            return Err(DataError::EmptyDataset {
                read: origin.counts.read,
                reasons: origin.counts.reasons(),
            });
        }
        let summary = Summary::of(rows)?;
        let data_blake3 = file::write(&folder.join(DATA), rows)?;
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            rows: rows.len(),
            tokens: rows.iter().map(|row| row.tokens.ids.len()).sum(),
            generated_tokens: rows.iter().map(|row| row.tokens.num_generated()).sum(),
            anchors: rows.iter().map(|row| num_anchors(&row.tokens.turns)).sum(),
            max_len: origin.max_len,
            counts: origin.counts,
            summary,
            tokenizer_blake3: origin.tokenizer_blake3,
            template: origin.template,
            inputs_blake3: origin.inputs_blake3,
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

    /// How often each token id was generated, length `vocab_size`.
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
            for (id, turn) in ids.iter().zip(self.columns.turns(index)) {
                counts[*id as usize] += u64::from(*turn != 0);
            }
        }
        Ok(counts)
    }

    /// Training and validation rows, chosen by a hash of each row's key.
    ///
    /// A row's side depends on seed, fraction and its own key only: rows that are added or removed move
    /// no other row.
    pub fn split(&self, fraction: f64, seed: u64) -> SplitIndices {
        let mut split = SplitIndices::default();
        for index in 0..self.len() {
            let stream = stable_hash(self.key(index));
            let draw = Stream::new(seed, Purpose::Split, stream).uniform();
            if draw < fraction {
                split.validation.push(index);
            } else {
                split.train.push(index);
            }
        }
        split
    }
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
