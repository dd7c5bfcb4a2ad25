//! The cache on disk, version 1: `manifest.json` beside Arrow IPC files of one row a record batch.
//!
//! Columns of a shard: `key` (utf8), `num_tokens` (u32, S), `ids_blake3` (32 bytes, hash of the token
//! ids as little-endian u32), `aux` (binary, bf16 `[S, K*H]` little-endian), `final_hidden` (binary,
//! bf16 `[S, H]`, before the final norm). Rows stand in the order of the data set; a shard holds the
//! range of rows that the manifest states.
//!
//! Columns of the teacher's figures beside a shard, same rows in the same order: `key`, `ids_blake3`, and lists of S
//! numbers `log_z` (f32), `log_p_next` (f32) and `argmax` (u32), as `TeacherFigures` says.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use draftsmith_models::checkpoint::TemplateRecord;
use draftsmith_models::file;
use serde::{Deserialize, Serialize};

use crate::error::DataError;

/// Version of the manifest and of the shards; readers refuse others.
pub const FORMAT_VERSION: u32 = 1;

/// Bytes a stored number takes (bf16).
pub(crate) const NUMBER_BYTES: usize = 2;

/// Bytes that the teacher's figures of one token take on disk.
pub const TEACHER_BYTES_PER_TOKEN: u64 = 12;

/// Name of the manifest in the cache folder.
pub const MANIFEST: &str = "manifest.json";

/// Everything that decides which numbers a cache holds; caches of another identity are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheIdentity {
    /// Hash over weights, configuration, tokenizer and template of the target.
    pub target_fingerprint: String,
    /// Zero-based ids of the captured blocks, strictly increasing.
    pub aux_layer_ids: Vec<usize>,
    /// Width of one state, H.
    pub hidden_size: usize,
    /// blake3 of the tokenizer file, hex.
    pub tokenizer_blake3: String,
    /// Chat template and its options.
    pub template: TemplateRecord,
    /// Hash of the data set whose rows were captured, hex.
    pub dataset_blake3: String,
    /// Longest row, in tokens; longer ones were dropped or cut when the data set was made.
    pub max_len: usize,
    /// Type the target computed in, such as `f32`; the stored type is always bf16.
    pub compute_dtype: String,
}

impl CacheIdentity {
    /// The first field in which two identities differ, as (name, expected, found).
    ///
    /// The fingerprint comes last, since it changes with several of the others.
    pub fn difference(&self, found: &Self) -> Option<(&'static str, String, String)> {
        let Self {
            target_fingerprint,
            aux_layer_ids,
            hidden_size,
            tokenizer_blake3,
            template,
            dataset_blake3,
            max_len,
            compute_dtype,
        } = self;
        let template_text = |template: &TemplateRecord| {
            let options = serde_json::Value::Object(template.options.clone());
            format!("{} with options {options}", template.blake3)
        };
        let (ids, found_ids) = (
            format!("{aux_layer_ids:?}"),
            format!("{:?}", found.aux_layer_ids),
        );
        [
            ("aux_layer_ids", ids, found_ids),
            (
                "hidden_size",
                hidden_size.to_string(),
                found.hidden_size.to_string(),
            ),
            (
                "tokenizer_blake3",
                tokenizer_blake3.clone(),
                found.tokenizer_blake3.clone(),
            ),
            (
                "template",
                template_text(template),
                template_text(&found.template),
            ),
            ("max_len", max_len.to_string(), found.max_len.to_string()),
            (
                "compute_dtype",
                compute_dtype.clone(),
                found.compute_dtype.clone(),
            ),
            (
                "dataset_blake3",
                dataset_blake3.clone(),
                found.dataset_blake3.clone(),
            ),
            (
                "target_fingerprint",
                target_fingerprint.clone(),
                found.target_fingerprint.clone(),
            ),
        ]
        .into_iter()
        .find(|(_, expected, found)| expected != found)
    }

    /// Bytes that the states of one token take on disk.
    pub fn bytes_per_token(&self) -> u64 {
        bytes_per_token(self.aux_layer_ids.len(), self.hidden_size)
    }
}

pub(crate) fn bytes_per_token(num_aux_layers: usize, hidden_size: usize) -> u64 {
    ((num_aux_layers + 1) * hidden_size * NUMBER_BYTES) as u64
}

/// One finished shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// File name in the cache folder.
    pub file: String,
    /// Index of its first row in the data set.
    pub first_row: usize,
    /// Rows in it.
    pub num_rows: usize,
    /// Tokens in it.
    pub num_tokens: u64,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// blake3 of the file, hex.
    pub blake3: String,
    /// The teacher's figures of its rows; absent where they were not computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TeacherEntry>,
}

/// The teacher's figures of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TeacherEntry {
    /// File name in the cache folder.
    pub file: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// blake3 of the file, hex.
    pub blake3: String,
}

impl ShardEntry {
    /// Indices of its rows in the data set.
    pub fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.num_rows
    }
}

/// `manifest.json`: what a cache belongs to and which shards are finished.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheManifest {
    /// Version of this format.
    pub format_version: u32,
    /// What the states belong to.
    pub identity: CacheIdentity,
    /// Type of the stored numbers, always `bf16` in this version.
    pub dtype: String,
    /// Rows of the data set.
    pub num_rows: usize,
    /// Finished shards, ordered by first row.
    pub shards: Vec<ShardEntry>,
}

impl CacheManifest {
    /// An empty cache.
    pub fn new(identity: CacheIdentity, num_rows: usize) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            identity,
            dtype: "bf16".to_owned(),
            num_rows,
            shards: Vec::new(),
        }
    }

    /// Reads the manifest of a cache folder.
    ///
    /// # Errors
    /// [`DataError`] when it is missing, malformed or of another version.
    pub fn read(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join(MANIFEST);
        let value: serde_json::Value = file::read_json(&path)?;
        let version = &value["format_version"];
        if *version != FORMAT_VERSION {
            let reason = format!("format version {version}, expected {FORMAT_VERSION}");
            return Err(DataError::format(&path, "state cache", reason));
        }
        let manifest: Self = serde_json::from_value(value)
            .map_err(|e| DataError::format(&path, "state cache", e))?;
        if manifest.dtype != "bf16" {
            let reason = format!("`dtype` is `{}`, expected `bf16`", manifest.dtype);
            return Err(DataError::format(&path, "state cache", reason));
        }
        Ok(manifest)
    }

    /// Writes the manifest atomically.
    ///
    /// # Errors
    /// [`DataError`] when it cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), DataError> {
        Ok(file::write_json(&folder.join(MANIFEST), self)?)
    }

    /// Refuses a cache of another identity, naming the field that differs.
    ///
    /// # Errors
    /// [`DataError::OtherCache`].
    pub fn require(&self, folder: &Path, expected: &CacheIdentity) -> Result<(), DataError> {
        match expected.difference(&self.identity) {
            None => Ok(()),
            Some((field, expected, found)) => Err(DataError::OtherCache {
                folder: folder.to_owned(),
                field,
                expected,
                found,
            }),
        }
    }

    /// Ranges of rows that no finished shard covers, as (first, end).
    pub fn missing_ranges(&self) -> Vec<(usize, usize)> {
        let mut missing = Vec::new();
        let mut next = 0;
        for shard in &self.shards {
            if shard.first_row > next {
                missing.push((next, shard.first_row));
            }
            next = shard.first_row + shard.num_rows;
        }
        if next < self.num_rows {
            missing.push((next, self.num_rows));
        }
        missing
    }

    /// Tokens in all finished shards.
    pub fn num_tokens(&self) -> u64 {
        self.shards.iter().map(|shard| shard.num_tokens).sum()
    }

    /// Bytes of all finished shards and of the teacher's figures beside them.
    pub fn num_bytes(&self) -> u64 {
        let figures = |shard: &ShardEntry| shard.teacher.as_ref().map_or(0, |entry| entry.bytes);
        let bytes = |shard: &ShardEntry| shard.bytes + figures(shard);
        self.shards.iter().map(bytes).sum()
    }

    /// Rows of finished shards that have no teacher's figures.
    pub fn rows_without_figures(&self) -> usize {
        let lacking = self.shards.iter().filter(|shard| shard.teacher.is_none());
        lacking.map(|shard| shard.num_rows).sum()
    }
}

/// The columns of a shard.
pub(crate) fn schema() -> SchemaRef {
    let fields = vec![
        Field::new("key", DataType::Utf8, false),
        Field::new("num_tokens", DataType::UInt32, false),
        Field::new("ids_blake3", DataType::FixedSizeBinary(32), false),
        Field::new("aux", DataType::LargeBinary, false),
        Field::new("final_hidden", DataType::LargeBinary, false),
    ];
    schema_of("state_shard", fields)
}

/// The columns of the teacher's figures of a shard.
pub(crate) fn teacher_schema() -> SchemaRef {
    let fields = vec![
        Field::new("key", DataType::Utf8, false),
        Field::new("ids_blake3", DataType::FixedSizeBinary(32), false),
        list_field("log_z", DataType::Float32),
        list_field("log_p_next", DataType::Float32),
        list_field("argmax", DataType::UInt32),
    ];
    schema_of("teacher_figures", fields)
}

fn list_field(name: &str, item: DataType) -> Field {
    Field::new_list(name, Field::new_list_field(item, false), false)
}

fn schema_of(format: &str, fields: Vec<Field>) -> SchemaRef {
    let metadata = [
        ("draftsmith_format".to_owned(), format.to_owned()),
        ("format_version".to_owned(), FORMAT_VERSION.to_string()),
    ];
    Arc::new(Schema::new_with_metadata(fields, metadata.into()))
}

/// Stored numbers in f32.
pub(crate) fn numbers(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.chunks_exact(NUMBER_BYTES).map(|b| {
        // A bf16 number is the upper half of an f32.
        f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)
    })
}

/// blake3 of the token ids of a row.
pub fn ids_hash(ids: &[u32]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for id in ids {
        hasher.update(&id.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}
