//! [`StateCache`]: finished shards, with every row checked before it is used.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use draftsmith_models::batch::{TeacherFigures, TokenRow};

use super::figures::FiguresFile;
use super::format::{CacheIdentity, CacheManifest, NUMBER_BYTES, ids_hash};
use super::shard::{ShardFile, StoredRow};
use crate::error::DataError;

/// A complete cache of states, open for reading.
#[derive(Debug)]
pub struct StateCache {
    folder: PathBuf,
    manifest: CacheManifest,
    shards: Vec<OpenShard>,
    /// Shard and place in it of each row.
    places: HashMap<String, (usize, usize)>,
}

/// A shard of states, with the teacher's figures of its rows if it has them.
#[derive(Debug)]
struct OpenShard {
    states: ShardFile,
    figures: Option<FiguresFile>,
}

/// The checked states of one row.
#[derive(Clone, Debug)]
pub(crate) struct CheckedRow {
    pub(crate) stored: StoredRow,
    /// The teacher's figures, one a token, where the cache has them.
    pub(crate) figures: Option<Vec<TeacherFigures>>,
    /// Positions whose aux states, or whose final hidden state, are all zero.
    pub(crate) zero_positions: u64,
}

impl StateCache {
    /// Opens a cache that must be complete and of the expected identity.
    ///
    /// Every file is read once to compare its checksum.
    ///
    /// # Errors
    /// [`DataError::OtherCache`] naming the field that differs; [`DataError`] when the cache is
    /// incomplete, a shard is missing or damaged.
    pub fn open(folder: &Path, expected: &CacheIdentity) -> Result<Self, DataError> {
        let manifest = CacheManifest::read(folder)?;
        manifest.require(folder, expected)?;
        let missing: usize = manifest.missing_ranges().iter().map(|(a, b)| b - a).sum();
        if missing > 0 {
            return Err(DataError::setting(
                format!(
                    "the state cache `{}` holds {} of {} rows",
                    folder.display(),
                    manifest.num_rows - missing,
                    manifest.num_rows
                ),
                "finish it with `draftsmith capture`",
            ));
        }
        let mut shards = Vec::with_capacity(manifest.shards.len());
        let mut places = HashMap::with_capacity(manifest.num_rows);
        for entry in &manifest.shards {
            let shard = OpenShard {
                states: ShardFile::open(folder, entry)?,
                figures: FiguresFile::open(folder, entry)?,
            };
            for index in 0..shard.states.num_rows() {
                let key = shard.states.row(index)?.key;
                places.insert(key, (shards.len(), index));
            }
            shards.push(shard);
        }
        Ok(Self {
            folder: folder.to_owned(),
            manifest,
            shards,
            places,
        })
    }

    /// What the cache belongs to.
    pub fn identity(&self) -> &CacheIdentity {
        &self.manifest.identity
    }

    /// The manifest.
    pub fn manifest(&self) -> &CacheManifest {
        &self.manifest
    }

    /// The states of a row, after every check.
    pub(crate) fn row(&self, row: &TokenRow) -> Result<CheckedRow, DataError> {
        let Some(&(shard, index)) = self.places.get(&row.key) else {
            return Err(DataError::NotCaptured {
                key: row.key.clone(),
                folder: self.folder.clone(),
            });
        };
        let shard = &self.shards[shard];
        let states = shard.states.row(index)?;
        let mut checked = check(row, states, &self.manifest.identity, &self.folder)?;
        checked.figures = match &shard.figures {
            Some(figures) => Some(figures.row(index, row, &self.folder)?),
            None => None,
        };
        Ok(checked)
    }
}

/// Compares a stored row with the row of the data set that wants it.
///
/// Lengths come first and are never mended: states cut to the shortest of the three would be those of
/// other tokens.
pub(crate) fn check(
    row: &TokenRow,
    stored: StoredRow,
    identity: &CacheIdentity,
    folder: &Path,
) -> Result<CheckedRow, DataError> {
    let final_bytes = identity.hidden_size * NUMBER_BYTES;
    let aux_bytes = identity.aux_layer_ids.len() * final_bytes;
    let states = stored.final_hidden.len() / final_bytes.max(1);
    let len = row.ids.len();
    let agree = row.turns.len() == len
        && stored.num_tokens as usize == len
        && stored.final_hidden.len() == len * final_bytes
        && stored.aux.len() == len * aux_bytes;
    if !agree {
        let aux_states = stored.aux.len().checked_div(aux_bytes).unwrap_or(states);
        return Err(DataError::RowLengths {
            key: row.key.clone(),
            ids: len,
            marks: row.turns.len(),
            states: states.min(aux_states).min(stored.num_tokens as usize),
        });
    }
    if stored.ids_blake3 != ids_hash(&row.ids) {
        return Err(DataError::RowTokens {
            key: row.key.clone(),
            folder: folder.to_owned(),
        });
    }
    let mut zero_positions = 0;
    for (bytes, part) in [
        (&stored.aux, "aux state"),
        (&stored.final_hidden, "final hidden state"),
    ] {
        zero_positions += scan(bytes, len, &row.key, part)?;
    }
    Ok(CheckedRow {
        stored,
        figures: None,
        zero_positions,
    })
}

/// Looks at every number of `len` positions of bf16 states; returns how many positions are all zero.
///
/// # Errors
/// [`DataError::StateNotFinite`] for the first NaN or infinity.
pub(crate) fn scan(
    bytes: &[u8],
    len: usize,
    key: &str,
    part: &'static str,
) -> Result<u64, DataError> {
    const EXPONENT: u16 = 0x7f80;
    const ALL_BUT_SIGN: u16 = 0x7fff;
    let width = bytes.len() / len.max(1);
    let mut zero_positions = 0;
    if width == 0 {
        return Ok(0);
    }
    for (position, state) in bytes.chunks_exact(width).enumerate() {
        let mut any = 0;
        let mut is_finite = true;
        for number in state.chunks_exact(NUMBER_BYTES) {
            let bits = u16::from_le_bytes([number[0], number[1]]);
            any |= bits & ALL_BUT_SIGN;
            is_finite &= bits & EXPONENT != EXPONENT;
        }
        if !is_finite {
            return Err(DataError::StateNotFinite {
                key: key.to_owned(),
                position,
                part,
            });
        }
        zero_positions += u64::from(any == 0);
    }
    Ok(zero_positions)
}
