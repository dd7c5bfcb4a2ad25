//! `capture`: hidden states of the target on disk, when `[capture] mode = "cached"`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use draftsmith_data::cache::format::MANIFEST;
use draftsmith_data::cache::{
    CacheIdentity, CacheManifest, CaptureFigures, CaptureJob, CaptureMode, capture, discard, space,
};
use draftsmith_data::dataset::{Dataset, Manifest, read_manifest};
use draftsmith_data::hidden::{CachedSource, HiddenStateSource, OnlineSource};
use draftsmith_models::batch::{StateSpec, TokenRow};

use crate::errors::CliError;
use crate::progress::Progress;
use crate::run_file::DrafterRun;
use crate::session::Session;
use crate::stage::{Inputs, Stage, hash_section};

/// The stage.
#[derive(Debug)]
pub(crate) struct Capture;

impl Stage for Capture {
    fn name(&self) -> &'static str {
        "capture"
    }

    fn needs(&self) -> &'static [&'static dyn Stage] {
        &[&super::regenerate::Regenerate]
    }

    fn inputs(&self, session: &Session) -> anyhow::Result<Inputs> {
        let config = &session.run_file().capture;
        let mut inputs = Inputs::from([("[capture]".to_owned(), hash_section(config)?)]);
        if is_cached(session) {
            super::insert_target(session, &mut inputs)?;
            let families = &session.run_file().drafter;
            inputs.insert("[drafter]".to_owned(), hash_section(families)?);
        }
        Ok(inputs)
    }

    fn outputs(&self, session: &Session) -> anyhow::Result<Vec<PathBuf>> {
        if !is_cached(session) {
            return Ok(Vec::new());
        }
        let specs = layer_sets(session)?;
        let folders = specs.iter().map(|ids| folder(session, ids).join(MANIFEST));
        Ok(folders.collect())
    }

    fn lacking(&self, session: &Session) -> anyhow::Result<Option<String>> {
        if !is_cached(session) || figures(session) == CaptureFigures::Skip {
            return Ok(None);
        }
        let mut num_rows = 0;
        for ids in layer_sets(session)? {
            num_rows += CacheManifest::read(&folder(session, &ids))?.rows_without_figures();
        }
        Ok((num_rows > 0).then(|| format!("{num_rows} rows have no teacher figures yet")))
    }

    fn execute(&self, session: &Session) -> anyhow::Result<()> {
        if !is_cached(session) {
            session
                .console()
                .detail("capture: the target runs beside the training, nothing is stored");
            return Ok(());
        }
        let dataset = super::dataset(session)?;
        for run in &session.run_file().drafter.0 {
            super::train::refuse_masked_text(run, &dataset)?;
        }
        for ids in layer_sets(session)? {
            capture_one(session, &dataset, &ids)?;
        }
        Ok(())
    }
}

/// Bytes that the cached states of all drafters take on disk; 0 where nothing is cached.
pub(crate) fn forecast(session: &Session, dataset: &Dataset) -> anyhow::Result<u64> {
    if !is_cached(session) {
        return Ok(0);
    }
    let rows: Vec<TokenRow> = (0..dataset.len()).map(|row| dataset.row(row)).collect();
    let of_figures = match figures(session) {
        CaptureFigures::Compute => space::forecast_figures(&rows),
        CaptureFigures::Skip => 0,
    };
    let sets = layer_sets(session)?.into_iter();
    let of_set = |aux_layer_ids| {
        let spec = StateSpec { aux_layer_ids };
        space::forecast(&rows, &spec, session.spec().hidden_size) + of_figures
    };
    Ok(sets.map(of_set).sum())
}

/// The source of states that `[capture]` asks for, giving the blocks `aux_layer_ids`.
pub(super) fn source(
    session: &Session,
    aux_layer_ids: &[usize],
) -> anyhow::Result<Box<dyn HiddenStateSource>> {
    let spec = StateSpec {
        aux_layer_ids: aux_layer_ids.to_vec(),
    };
    if is_cached(session) {
        let contains = |set: &Vec<usize>| aux_layer_ids.iter().all(|id| set.contains(id));
        let stored = layer_sets(session)?.into_iter().find(contains);
        let stored = stored.unwrap_or_else(|| aux_layer_ids.to_vec());
        let identity = identity(session, super::dataset(session)?.manifest(), &stored)?;
        let folder = folder(session, &stored);
        let source = CachedSource::open(&folder, &identity, session.device())?;
        hint_at_figures(session, source.cache().manifest());
        return Ok(Box::new(source.select(&spec)?));
    }
    Ok(Box::new(OnlineSource::new(session.shared_target()?, spec)?))
}

/// The teacher's figures, wanted where some drafter has a reduced vocabulary: of a full one, training computes every logit
/// anyway.
fn figures(session: &Session) -> CaptureFigures {
    let vocab_size = session.spec().vocab_size;
    let is_reduced = |run: &DrafterRun| run.draft_vocab.is_reduced(vocab_size);
    if session.run_file().drafter.0.iter().any(is_reduced) {
        CaptureFigures::Compute
    } else {
        CaptureFigures::Skip
    }
}

fn is_cached(session: &Session) -> bool {
    session.run_file().capture.mode == CaptureMode::Cached
}

/// States captured before there were figures train as well, only slower.
fn hint_at_figures(session: &Session, manifest: &CacheManifest) {
    let num_rows = manifest.rows_without_figures();
    if num_rows > 0 && figures(session) == CaptureFigures::Compute {
        session.console().say(&format!(
            "capture: {num_rows} rows have no teacher figures, without which steps take longer; `draftsmith capture {}` \
             adds them",
            session.typed()
        ));
    }
}

/// One folder for each set of captured blocks, so that drafters which read the same ones, or some of
/// them, share it.
fn folder(session: &Session, aux_layer_ids: &[usize]) -> PathBuf {
    let ids: Vec<String> = aux_layer_ids.iter().map(ToString::to_string).collect();
    let name = format!("layers-{}", ids.join("-"));
    session.folder().join("states").join(name)
}

/// The sets of blocks to be stored: those that the drafters of the run read, without sets that are part of another one. A set
/// that lies in the run's folder as a part of a larger one is read from there, whoever that was captured for.
fn layer_sets(session: &Session) -> anyhow::Result<BTreeSet<Vec<usize>>> {
    let drafters = session.run_file().drafter.0.iter();
    let ids = |run: &DrafterRun| Ok(run.config.check(session.spec())?.aux_layer_ids);
    let all: BTreeSet<Vec<usize>> = drafters.map(ids).collect::<anyhow::Result<_>>()?;
    let is_part = |set: &Vec<usize>| {
        let mut others = all.iter().filter(|other| *other != set);
        others.any(|other| set.iter().all(|id| other.contains(id)))
    };
    let stored = stored_sets(session)?;
    let as_stored = |set: &Vec<usize>| {
        let mut larger = stored
            .iter()
            .filter(|other| set.iter().all(|id| other.contains(id)));
        larger.next().unwrap_or(set).clone()
    };
    let wanted = all.iter().filter(|set| !is_part(set));
    Ok(wanted.map(as_stored).collect())
}

/// The sets of blocks whose states of today's rows lie in the run's folder, smaller ones first.
fn stored_sets(session: &Session) -> anyhow::Result<Vec<Vec<usize>>> {
    let (rows, states) = (
        super::dataset_folder(session),
        session.folder().join("states"),
    );
    if !is_cached(session) || !rows.exists() || !states.exists() {
        return Ok(Vec::new());
    }
    let rows = read_manifest(&rows)?;
    let mut sets = Vec::new();
    for entry in fs_err::read_dir(&states)? {
        // A damaged manifest is reported when its states are asked for.
        let Ok(manifest) = CacheManifest::read(&entry?.path()) else {
            continue;
        };
        let ids = manifest.identity.aux_layer_ids.clone();
        let expected = identity(session, &rows, &ids)?;
        if expected.difference(&manifest.identity).is_none() {
            sets.push(ids);
        }
    }
    sets.sort_by(|a, b| a.len().cmp(&b.len()).then(a.cmp(b)));
    Ok(sets)
}

/// Refuses stored states of another target, before any stage replaces what they belong to.
pub(crate) fn refuse_states_of_another_target(session: &Session) -> anyhow::Result<()> {
    for ids in layer_sets(session)? {
        let folder = folder(session, &ids);
        if !is_cached(session) || !folder.join(MANIFEST).exists() {
            continue;
        }
        let found = CacheManifest::read(&folder)?.identity.target_fingerprint;
        let expected = session.target_fingerprint()?;
        if found != expected {
            return Err(CliError::usage(
                format!(
                    "`{}` holds states of another target: fingerprint {found}, expected {expected}",
                    folder.display()
                ),
                "choose another folder with `--out`, or remove the states",
            )
            .into());
        }
    }
    Ok(())
}

fn identity(
    session: &Session,
    manifest: &Manifest,
    aux_layer_ids: &[usize],
) -> anyhow::Result<CacheIdentity> {
    Ok(CacheIdentity {
        target_fingerprint: session.target_fingerprint()?.to_owned(),
        aux_layer_ids: aux_layer_ids.to_vec(),
        hidden_size: session.spec().hidden_size,
        tokenizer_blake3: manifest.tokenizer_blake3.clone(),
        template: manifest.template.clone(),
        dataset_blake3: manifest.data_blake3.clone(),
        max_len: manifest.max_len,
        compute_dtype: session.run_file().target.dtype.name().to_owned(),
    })
}

fn capture_one(session: &Session, dataset: &Dataset, ids: &[usize]) -> anyhow::Result<()> {
    let identity = identity(session, dataset.manifest(), ids)?;
    let rows: Vec<TokenRow> = (0..dataset.len()).map(|row| dataset.row(row)).collect();
    let total = dataset.manifest().tokens as u64;
    let progress = Progress::new(session.console(), "capture", Some(total), "tokens");
    let folder = folder(session, ids);
    let job = CaptureJob {
        identity: &identity,
        config: &session.run_file().capture,
        folder: &folder,
        figures: figures(session),
    };
    discard_stale(session, &folder, &identity)?;
    let report = capture(session.target()?, &rows, job, &mut |at| {
        progress.set(at.done_tokens);
        !session.interrupt().is_asked()
    })?;
    progress.finish_as(report.captured_tokens + report.completed_tokens, "tokens");
    if !report.is_complete {
        let typed = session.typed();
        session.interrupt().check(&format!(
            "finished shards stay; `draftsmith capture {typed}` continues"
        ))?;
    }
    if report.zero_positions > 0 {
        session.console().warn(&format!(
            "{} positions have states that are all zero",
            report.zero_positions
        ));
    }
    Ok(())
}

/// Removes states of earlier data or settings; those of another target are left for the user to decide.
fn discard_stale(session: &Session, folder: &Path, identity: &CacheIdentity) -> anyhow::Result<()> {
    if !folder.join(MANIFEST).exists() {
        return Ok(());
    }
    let old = CacheManifest::read(folder)?.identity;
    let is_same_target = old.target_fingerprint == identity.target_fingerprint;
    if is_same_target && identity.difference(&old).is_some() {
        session.console().say(&format!(
            "capture: states in `{}` belong to earlier data or settings and are removed",
            folder.display()
        ));
        discard(folder)?;
    }
    Ok(())
}
