//! `draftsmith capture`: the target's states of every row, written shard by shard, resumable.
//!
//! A shard is computed in memory, written under a temporary name, renamed, and only then entered in the
//! manifest, which is replaced atomically. The teacher's figures of a shard are computed and entered with it, or later
//! from the states it holds. Whatever a crash leaves behind, the manifest names whole
//! files only; resuming checks their checksums, removes everything else and computes what is missing.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::Path;

use arrow::buffer::Buffer;
use draftsmith_models::batch::{StateSpec, TargetStates, TokenBatch, TokenRow};
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::host_values;
use half::bf16;

use super::config::CaptureConfig;
use super::figures::{self, FiguresFile, StoredFigures};
use super::format::{CacheIdentity, CacheManifest, MANIFEST, ShardEntry, ids_hash};
use super::reader::{CheckedRow, check, scan};
use super::shard::{self, ShardFile, StoredRow};
use super::space;
use crate::error::DataError;
use crate::hidden::check_spec;

/// Whether a capture computes the teacher's figures too: they cost a product with the whole head for each token that the
/// target generated, and spare it in every step of a training on a reduced draft vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureFigures {
    /// Those of all rows, also of shards captured without them earlier.
    Compute,
    /// None; those found stay.
    Skip,
}

/// What to capture and where to.
#[derive(Clone, Copy, Debug)]
pub struct CaptureJob<'a> {
    /// What the states belong to; written into the manifest.
    pub identity: &'a CacheIdentity,
    /// Sizes of batches and shards.
    pub config: &'a CaptureConfig,
    /// The cache folder.
    pub folder: &'a Path,
    /// What to do about the teacher's figures.
    pub figures: CaptureFigures,
}

/// How far a capture is; rows found finished count as done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureProgress {
    /// Rows that lack nothing.
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
    /// Rows of kept shards that had lacked the teacher's figures and got them now.
    pub completed_rows: usize,
    /// Their tokens.
    pub completed_tokens: u64,
    /// Positions whose states are all zero, among those captured now.
    pub zero_positions: u64,
    /// False when `progress` ended the work early.
    pub is_complete: bool,
}

/// Captures the states of `rows` that the cache does not hold yet, and the teacher's figures that it lacks.
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
    let manifest = open_or_create(rows.len(), job)?;
    let needed = needed_bytes(rows, &manifest, &spec, job);
    space::refuse_beyond_free_space(job.folder, needed)?;
    write_manifest(&manifest, job.folder)?;
    let mut work = Work {
        target,
        spec: &spec,
        job,
        rows,
        state: progress_so_far(rows, &manifest, job),
        report: CaptureReport {
            kept_rows: manifest.shards.iter().map(|shard| shard.num_rows).sum(),
            captured_rows: 0,
            captured_tokens: 0,
            completed_rows: 0,
            completed_tokens: 0,
            zero_positions: 0,
            is_complete: false,
            manifest,
        },
        progress,
    };
    let is_complete = work.capture_missing()?.is_continue() && work.add_figures()?.is_continue();
    Ok(CaptureReport {
        is_complete,
        ..work.report
    })
}

/// Whether a shard lacks figures that the job wants.
fn lacks_figures(shard: &ShardEntry, job: CaptureJob<'_>) -> bool {
    job.figures == CaptureFigures::Compute && shard.teacher.is_none()
}

/// Bytes that the job will add.
fn needed_bytes(
    rows: &[TokenRow],
    manifest: &CacheManifest,
    spec: &StateSpec,
    job: CaptureJob<'_>,
) -> u64 {
    let missing = manifest.missing_ranges().into_iter().map(|(first, end)| {
        let rows = &rows[first..end];
        let states = space::forecast(rows, spec, job.identity.hidden_size);
        match job.figures {
            CaptureFigures::Compute => states + space::forecast_figures(rows),
            CaptureFigures::Skip => states,
        }
    });
    let shards = manifest.shards.iter();
    let lacking = shards
        .filter(|shard| lacks_figures(shard, job))
        .map(|shard| space::forecast_figures(&rows[shard.rows()]));
    missing.chain(lacking).sum()
}

fn progress_so_far(
    rows: &[TokenRow],
    manifest: &CacheManifest,
    job: CaptureJob<'_>,
) -> CaptureProgress {
    let shards = manifest.shards.iter();
    let done: Vec<&ShardEntry> = shards.filter(|shard| !lacks_figures(shard, job)).collect();
    CaptureProgress {
        done_rows: done.iter().map(|shard| shard.num_rows).sum(),
        num_rows: rows.len(),
        done_tokens: done.iter().map(|shard| shard.num_tokens).sum(),
        num_tokens: rows.iter().map(|row| row.len() as u64).sum(),
    }
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

/// The manifest to go on from: files that are whole stay in it, everything else is removed.
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
        let fits = entry.rows().end <= num_rows;
        fits && ShardFile::open(folder, entry).is_ok()
    });
    for entry in &mut manifest.shards {
        if FiguresFile::open(folder, entry).is_err() {
            entry.teacher = None;
        }
    }
    let states = manifest.shards.iter().map(|shard| &shard.file);
    let figures = manifest.shards.iter().filter_map(|s| s.teacher.as_ref());
    let kept = states.chain(figures.map(|entry| &entry.file));
    remove_strays(folder, &kept.map(String::as_str).collect::<Vec<_>>())?;
    Ok(manifest)
}

/// Removes shards and figures that are not in `kept`, and temporary files of a run that was killed.
fn remove_strays(folder: &Path, kept: &[&str]) -> Result<(), DataError> {
    if !folder.exists() {
        return Ok(());
    }
    for entry in fs_err::read_dir(folder).map_err(|e| DataError::io(folder, e))? {
        let path = entry.map_err(|e| DataError::io(folder, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let extension = path.extension().unwrap_or_default();
        let is_temporary = name.starts_with('.') && extension == "tmp";
        let is_ours = name.starts_with("states-") || name.starts_with("teacher-");
        let is_shard = is_ours && extension == "arrow";
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
    job: CaptureJob<'a>,
    rows: &'a [TokenRow],
    state: CaptureProgress,
    report: CaptureReport,
    progress: &'a mut dyn FnMut(CaptureProgress) -> bool,
}

/// What a shard is written from, rows in their order.
struct Computed {
    states: Vec<StoredRow>,
    /// Absent where the job skips them.
    figures: Option<Vec<StoredFigures>>,
}

impl Work<'_> {
    /// Computes and writes the shards that are not there, each with the teacher's figures.
    fn capture_missing(&mut self) -> Result<ControlFlow<()>, DataError> {
        let (all, job) = (self.rows, self.job);
        let missing = self.report.manifest.missing_ranges();
        let ranges = missing
            .iter()
            .flat_map(|&(first, end)| split(&all[..end], first, job));
        for (first, end) in ranges {
            let Some(computed) = self.states_of(&all[first..end])? else {
                return Ok(ControlFlow::Break(()));
            };
            let mut entry = shard::write(job.folder, first, computed.states)?;
            if let Some(rows) = computed.figures {
                entry.teacher = Some(figures::write(job.folder, first, rows)?);
            }
            let (num_rows, num_tokens) = (entry.num_rows, entry.num_tokens);
            let shards = &mut self.report.manifest.shards;
            shards.push(entry);
            shards.sort_by_key(|shard| shard.first_row);
            write_manifest(&self.report.manifest, job.folder)?;
            self.report.captured_rows += num_rows;
            self.report.captured_tokens += num_tokens;
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Computes the teacher's figures of shards that lack them from the states they hold; no block of the target runs.
    fn add_figures(&mut self) -> Result<ControlFlow<()>, DataError> {
        for index in 0..self.report.manifest.shards.len() {
            let entry = self.report.manifest.shards[index].clone();
            if !lacks_figures(&entry, self.job) {
                continue;
            }
            let Some(rows) = self.figures_of(&entry)? else {
                return Ok(ControlFlow::Break(()));
            };
            let written = figures::write(self.job.folder, entry.first_row, rows)?;
            self.report.manifest.shards[index].teacher = Some(written);
            write_manifest(&self.report.manifest, self.job.folder)?;
            self.report.completed_rows += entry.num_rows;
            self.report.completed_tokens += entry.num_tokens;
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Figures of the rows of a finished shard, in their order; `None` when the work is to stop.
    fn figures_of(&mut self, entry: &ShardEntry) -> Result<Option<Vec<StoredFigures>>, DataError> {
        let CaptureJob {
            identity, folder, ..
        } = self.job;
        let rows = &self.rows[entry.rows()];
        let shard = ShardFile::open(folder, entry)?;
        let mut found: Vec<Option<StoredFigures>> = vec![None; rows.len()];
        for batch in length_batches(rows, self.job.config.batch_tokens) {
            let stored: Vec<CheckedRow> = batch
                .iter()
                .map(|&index| check(&rows[index], shard.row(index)?, identity, folder))
                .collect::<Result<_, _>>()?;
            let of_batch: Vec<&TokenRow> = batch.iter().map(|&index| &rows[index]).collect();
            let states = stored.iter().map(|row| &row.stored);
            let pairs: Vec<_> = of_batch.iter().copied().zip(states).collect();
            let figures = figures::compute(self.target, &pairs)?;
            for (&index, figures) in batch.iter().zip(figures) {
                found[index] = Some(figures);
            }
            if self.advance(&of_batch).is_break() {
                return Ok(None);
            }
        }
        Ok(found.into_iter().collect())
    }

    /// States of the rows of one shard, and the teacher's figures; `None` when the work is to stop.
    fn states_of(&mut self, rows: &[TokenRow]) -> Result<Option<Computed>, DataError> {
        let mut stored: Vec<Option<StoredRow>> = vec![None; rows.len()];
        let mut found: Vec<Option<StoredFigures>> = vec![None; rows.len()];
        let mut zero_positions = 0;
        for batch in length_batches(rows, self.job.config.batch_tokens) {
            let tokens = TokenBatch {
                rows: batch.iter().map(|&index| rows[index].clone()).collect(),
            };
            let states = HostStates::read(&self.target.forward(&tokens.ids(), self.spec));
            let mut of_batch = Vec::with_capacity(batch.len());
            for (place, row) in tokens.rows.iter().enumerate() {
                let (row, zeros) = stored_row(row, &states, place)?;
                of_batch.push(row);
                zero_positions += zeros;
            }
            if self.job.figures == CaptureFigures::Compute {
                let pairs: Vec<_> = tokens.rows.iter().zip(&of_batch).collect();
                let figures = figures::compute(self.target, &pairs)?;
                for (&index, figures) in batch.iter().zip(figures) {
                    found[index] = Some(figures);
                }
            }
            for (&index, row) in batch.iter().zip(of_batch) {
                stored[index] = Some(row);
            }
            if self
                .advance(&tokens.rows.iter().collect::<Vec<_>>())
                .is_break()
            {
                return Ok(None);
            }
        }
        self.report.zero_positions += zero_positions;
        let states: Option<Vec<StoredRow>> = stored.into_iter().collect();
        Ok(states.map(|states| Computed {
            states,
            figures: found.into_iter().collect(),
        }))
    }

    /// Counts rows as done; breaks when the work is to stop.
    fn advance(&mut self, rows: &[&TokenRow]) -> ControlFlow<()> {
        for row in rows {
            self.state.done_rows += 1;
            self.state.done_tokens += row.len() as u64;
        }
        if (self.progress)(self.state) {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    }
}

/// Row `place` of a batch, checked and rounded, and how many of its states are all zero.
fn stored_row(
    row: &TokenRow,
    states: &HostStates,
    place: usize,
) -> Result<(StoredRow, u64), DataError> {
    let aux = states.row(&states.aux, place, row.len());
    let final_hidden = states.row(&states.final_hidden, place, row.len());
    let mut zero_positions = 0;
    for (bytes, part) in [(&aux, "aux state"), (&final_hidden, "final hidden state")] {
        zero_positions += scan(bytes, row.len(), &row.key, part)?;
    }
    let stored = StoredRow {
        key: row.key.clone(),
        num_tokens: row.len() as u32,
        ids_blake3: ids_hash(&row.ids),
        aux,
        final_hidden,
    };
    Ok((stored, zero_positions))
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
