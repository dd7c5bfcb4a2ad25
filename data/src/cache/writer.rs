//! `draftsmith capture`: the target's states of every row, written shard by shard, resumable.
//!
//! A shard is computed in memory, written under a temporary name, renamed, and only then entered in the
//! manifest, which is replaced atomically. Whatever a crash leaves behind, the manifest names whole
//! shards only; resuming checks their checksums, removes everything else and computes the missing rows.

use std::collections::HashSet;
use std::path::Path;

use arrow::buffer::Buffer;
use draftsmith_models::batch::{StateSpec, TargetStates, TokenBatch, TokenRow};
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::host_values;
use half::bf16;

use super::config::CaptureConfig;
use super::format::{CacheIdentity, CacheManifest, MANIFEST, ids_hash};
use super::reader::scan;
use super::shard::{self, MappedShard, StoredRow};
use super::space;
use crate::error::DataError;
use crate::hidden::check_spec;

/// What to capture and where to.
#[derive(Clone, Copy, Debug)]
pub struct CaptureJob<'a> {
    /// What the states belong to; written into the manifest.
    pub identity: &'a CacheIdentity,
    /// Sizes of batches and shards.
    pub config: &'a CaptureConfig,
    /// The cache folder.
    pub folder: &'a Path,
}

/// How far a capture is; rows found finished count as done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureProgress {
    /// Rows whose states are computed.
    pub done_rows: usize,
    /// Rows of the data set.
    pub num_rows: usize,
    /// Tokens of the rows done.
    pub done_tokens: u64,
    /// Tokens of the data set.
    pub num_tokens: u64,
}

/// What a capture did.
#[derive(Clone, Debug, PartialEq)]
pub struct CaptureReport {
    /// The manifest as it stands on disk.
    pub manifest: CacheManifest,
    /// Rows whose finished shards were kept.
    pub kept_rows: usize,
    /// Rows computed and written now.
    pub captured_rows: usize,
    /// Their tokens.
    pub captured_tokens: u64,
    /// Positions whose states are all zero, among those captured now.
    pub zero_positions: u64,
    /// False when `progress` ended the work early.
    pub is_complete: bool,
}

/// Captures the states of `rows` that the cache does not hold yet.
///
/// `progress` is called after each batch; when it returns false the work stops at once, and the
/// finished shards stay.
///
/// # Errors
/// [`DataError::OtherCache`] when the folder holds states of another identity,
/// [`DataError::DiskSpace`] before anything is written, [`DataError::DiskFull`] later,
/// [`DataError::StateNotFinite`] naming the row, [`DataError`] for files that cannot be accessed.
pub fn capture(
    target: &TargetModel,
    rows: &[TokenRow],
    job: CaptureJob<'_>,
    progress: &mut dyn FnMut(CaptureProgress) -> bool,
) -> Result<CaptureReport, DataError> {
    let spec = StateSpec {
        aux_layer_ids: job.identity.aux_layer_ids.clone(),
    };
    job.config.validate()?;
    check_spec(&spec, target.spec())?;
    check_rows(rows, target)?;
    let mut manifest = open_or_create(rows.len(), job)?;
    let missing = manifest.missing_ranges();
    let needed = missing
        .iter()
        .map(|&(first, end)| space::forecast(&rows[first..end], &spec, job.identity.hidden_size))
        .sum();
    space::refuse_beyond_free_space(job.folder, needed)?;
    write_manifest(&manifest, job.folder)?;

    let mut report = CaptureReport {
        kept_rows: manifest.shards.iter().map(|shard| shard.num_rows).sum(),
        captured_rows: 0,
        captured_tokens: 0,
        zero_positions: 0,
        is_complete: false,
        manifest: manifest.clone(),
    };
    let mut work = Work {
        target,
        spec: &spec,
        batch_tokens: job.config.batch_tokens,
        state: CaptureProgress {
            done_rows: report.kept_rows,
            num_rows: rows.len(),
            done_tokens: manifest.num_tokens(),
            num_tokens: rows.iter().map(|row| row.len() as u64).sum(),
        },
        zero_positions: 0,
        progress,
    };
    let ranges = missing
        .iter()
        .flat_map(|&(first, end)| split(&rows[..end], first, job));
    for (first, end) in ranges {
        let Some(stored) = work.states_of(&rows[first..end])? else {
            return Ok(report);
        };
        let entry = shard::write(job.folder, first, stored)?;
        report.captured_rows += entry.num_rows;
        report.captured_tokens += entry.num_tokens;
        report.zero_positions = work.zero_positions;
        manifest.shards.push(entry);
        manifest.shards.sort_by_key(|shard| shard.first_row);
        write_manifest(&manifest, job.folder)?;
        report.manifest = manifest.clone();
    }
    report.is_complete = true;
    Ok(report)
}

/// Removes the cache in `folder`: manifest first, then shards and left-over temporary files.
///
/// Other files stay. A folder that does not exist is fine.
///
/// # Errors
/// [`DataError`] when a file cannot be removed.
pub fn discard(folder: &Path) -> Result<(), DataError> {
    let manifest = folder.join(MANIFEST);
    if manifest.exists() {
        fs_err::remove_file(&manifest).map_err(|e| DataError::io(&manifest, e))?;
    }
    remove_strays(folder, &[])
}

fn write_manifest(manifest: &CacheManifest, folder: &Path) -> Result<(), DataError> {
    manifest.write(folder).map_err(|error| match error {
        DataError::Model(error) => DataError::or_disk_full(error, folder),
        other => other,
    })
}

fn check_rows(rows: &[TokenRow], target: &TargetModel) -> Result<(), DataError> {
    let vocab_size = target.spec().vocab_size;
    let longest = target.spec().max_position_embeddings;
    let mut keys = HashSet::with_capacity(rows.len());
    for row in rows {
        let hint = "make the data set again: `draftsmith prepare`";
        if !keys.insert(row.key.as_str()) {
            let message = format!("row key `{}` appears twice in the data set", row.key);
            return Err(DataError::setting(message, hint));
        }
        if row.is_empty() || row.len() > longest {
            let message = format!(
                "row `{}` has {} tokens, expected 1 to {longest}, the longest context of the target",
                row.key,
                row.len()
            );
            return Err(DataError::setting(message, hint));
        }
        if let Some(&id) = row.ids.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(DataError::TokenOutsideVocabulary {
                place: format!("row `{}`", row.key),
                id,
                vocab_size,
            });
        }
    }
    Ok(())
}

/// The manifest to go on from: shards that are whole stay in it, everything else is removed.
fn open_or_create(num_rows: usize, job: CaptureJob<'_>) -> Result<CacheManifest, DataError> {
    let CaptureJob {
        identity, folder, ..
    } = job;
    let mut manifest = if folder.join(MANIFEST).exists() {
        let manifest = CacheManifest::read(folder)?;
        manifest.require(folder, identity)?;
        manifest
    } else {
        CacheManifest::new(identity.clone(), num_rows)
    };
    manifest.num_rows = num_rows;
    manifest.shards.retain(|entry| {
        let fits = entry.first_row + entry.num_rows <= num_rows;
        fits && MappedShard::open(&folder.join(&entry.file), entry).is_ok()
    });
    let kept: Vec<&str> = manifest.shards.iter().map(|s| s.file.as_str()).collect();
    remove_strays(folder, &kept)?;
    Ok(manifest)
}

/// Removes shards that are not in `kept`, and temporary files of a run that was killed.
fn remove_strays(folder: &Path, kept: &[&str]) -> Result<(), DataError> {
    if !folder.exists() {
        return Ok(());
    }
    for entry in fs_err::read_dir(folder).map_err(|e| DataError::io(folder, e))? {
        let path = entry.map_err(|e| DataError::io(folder, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let extension = path.extension().unwrap_or_default();
        let is_temporary = name.starts_with('.') && extension == "tmp";
        let is_shard = name.starts_with("states-") && extension == "arrow";
        if is_temporary || (is_shard && !kept.contains(&name.as_ref())) {
            fs_err::remove_file(&path).map_err(|e| DataError::io(&path, e))?;
        }
    }
    Ok(())
}

/// Splits rows `first ..` into ranges that fill a shard each.
fn split(rows: &[TokenRow], first: usize, job: CaptureJob<'_>) -> Vec<(usize, usize)> {
    let per_token = job.identity.bytes_per_token();
    let mut ranges = Vec::new();
    let (mut start, mut bytes) = (first, 0);
    for (index, row) in rows.iter().enumerate().skip(first) {
        let row_bytes = space::row_bytes(row.len(), per_token);
        if index > start && bytes + row_bytes > job.config.shard_bytes {
            ranges.push((start, index));
            (start, bytes) = (index, 0);
        }
        bytes += row_bytes;
    }
    if start < rows.len() {
        ranges.push((start, rows.len()));
    }
    ranges
}

struct Work<'a> {
    target: &'a TargetModel,
    spec: &'a StateSpec,
    batch_tokens: usize,
    state: CaptureProgress,
    zero_positions: u64,
    progress: &'a mut dyn FnMut(CaptureProgress) -> bool,
}

impl Work<'_> {
    /// States of the rows of one shard, in their order; `None` when the work is to stop.
    fn states_of(&mut self, rows: &[TokenRow]) -> Result<Option<Vec<StoredRow>>, DataError> {
        let mut stored: Vec<Option<StoredRow>> = vec![None; rows.len()];
        for batch in length_batches(rows, self.batch_tokens) {
            let tokens = TokenBatch {
                rows: batch.iter().map(|&index| rows[index].clone()).collect(),
            };
            let ids = tokens.ids(self.target.device());
            let states = HostStates::read(&self.target.forward(ids, self.spec));
            for (place, &index) in batch.iter().enumerate() {
                stored[index] = Some(self.stored_row(&rows[index], &states, place)?);
            }
            self.state.done_rows += batch.len();
            self.state.done_tokens += tokens.rows.iter().map(|r| r.len() as u64).sum::<u64>();
            if !(self.progress)(self.state) {
                return Ok(None);
            }
        }
        Ok(stored.into_iter().collect())
    }

    fn stored_row(
        &mut self,
        row: &TokenRow,
        states: &HostStates,
        place: usize,
    ) -> Result<StoredRow, DataError> {
        let aux = states.row(&states.aux, place, row.len());
        let final_hidden = states.row(&states.final_hidden, place, row.len());
        for (bytes, part) in [(&aux, "aux state"), (&final_hidden, "final hidden state")] {
            self.zero_positions += scan(bytes, row.len(), &row.key, part)?;
        }
        Ok(StoredRow {
            key: row.key.clone(),
            num_tokens: row.len() as u32,
            ids_blake3: ids_hash(&row.ids),
            aux,
            final_hidden,
        })
    }
}

/// States of one batch on the host, `[B, S, K*H]` and `[B, S, H]`.
struct HostStates {
    aux: Vec<f32>,
    final_hidden: Vec<f32>,
    padded_len: usize,
    num_rows: usize,
}

impl HostStates {
    fn read(states: &TargetStates) -> Self {
        let [num_rows, padded_len, _] = states.final_hidden.dims();
        Self {
            aux: host_values(&states.aux),
            final_hidden: host_values(&states.final_hidden),
            padded_len,
            num_rows,
        }
    }

    /// The first `len` positions of row `place`, rounded to bf16 (nearest even).
    fn row(&self, values: &[f32], place: usize, len: usize) -> Buffer {
        let width = values.len() / (self.num_rows * self.padded_len);
        let start = place * self.padded_len * width;
        let rounded: Vec<u16> = values[start..start + len * width]
            .iter()
            .map(|&value| bf16::from_f32(value).to_bits().to_le())
            .collect();
        Buffer::from_vec(rounded)
    }
}

/// Row indices in batches of similar length, so that little padding is computed.
///
/// A batch takes rows while (rows x longest) stays within `batch_tokens`; it holds at least one.
pub(crate) fn length_batches(rows: &[TokenRow], batch_tokens: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(rows[index].len()));
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for index in order {
        match batches.last_mut() {
            // Rows come in descending length: the first of a batch is its longest.
            Some(batch) if (batch.len() + 1) * rows[batch[0]].len() <= batch_tokens => {
                batch.push(index);
            }
            _ => batches.push(vec![index]),
        }
    }
    batches
}
