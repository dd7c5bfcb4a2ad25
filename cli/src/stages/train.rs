//! `train`: every drafter of the run file, one after the other, on the same rows and states.

use std::path::PathBuf;

use burn::module::Module;
use burn::tensor::Device;
use draftsmith_data::dataset::Dataset;
use draftsmith_models::batch::TokenRow;
use draftsmith_models::checkpoint::{self, DrafterCard};
use draftsmith_models::drafter::{AnyDrafter, DrafterContext, MaskToken};
use draftsmith_models::vocab::VocabMap;
use draftsmith_trainer::checkpoint as run_checkpoint;
use draftsmith_trainer::error::TrainerError;
use draftsmith_trainer::parts::DatasetRows;
use draftsmith_trainer::{Outcome, Parts, Resume, RunSettings, Summary, train};
use serde_json::json;

use super::parts::{BarObserver, ExactValidator};
use super::start;
use crate::errors::CliError;
use crate::run_file::{DraftVocab, DrafterRun};
use crate::session::{Restart, Session};
use crate::stage::{Inputs, Stage, hash_section};

/// The stage.
#[derive(Debug)]
pub(crate) struct Train;

impl Stage for Train {
    fn name(&self) -> &'static str {
        "train"
    }

    fn needs(&self) -> &'static [&'static dyn Stage] {
        &[&super::capture::Capture]
    }

    fn inputs(&self, session: &Session) -> anyhow::Result<Inputs> {
        let run_file = session.run_file();
        let mut inputs = Inputs::from([("[log]".to_owned(), hash_section(&run_file.log)?)]);
        for drafter in &run_file.drafter.0 {
            let hash = hash_section(&resolved(session, drafter))?;
            inputs.insert(format!("[drafter.{}]", drafter.family()), hash);
            inputs.extend(start::input(drafter)?);
        }
        super::insert_target(session, &mut inputs)?;
        Ok(inputs)
    }

    fn outputs(&self, session: &Session) -> anyhow::Result<Vec<PathBuf>> {
        let drafters = session.run_file().drafter.0.iter();
        Ok(drafters
            .flat_map(|drafter| {
                let latest = checkpoints(session, drafter).join(run_checkpoint::LATEST);
                [latest, untrained_folder(session, drafter)]
            })
            .collect())
    }

    fn execute(&self, session: &Session) -> anyhow::Result<()> {
        refuse_nothing_to_resume(session)?;
        let dataset = super::dataset(session)?;
        for drafter in &session.run_file().drafter.0 {
            train_one(session, drafter, &dataset)?;
        }
        session.record()
    }
}

/// The folder of the checkpoints of a drafter.
fn checkpoints(session: &Session, drafter: &DrafterRun) -> PathBuf {
    session.drafter_folder(drafter).join(run_checkpoint::FOLDER)
}

/// The drafter at step 0.
pub(crate) fn untrained_folder(session: &Session, drafter: &DrafterRun) -> PathBuf {
    session.drafter_folder(drafter).join("untrained")
}

/// Whether a training of the drafter has begun.
pub(crate) fn has_checkpoints(session: &Session, drafter: &DrafterRun) -> bool {
    checkpoints(session, drafter).exists()
}

/// The checkpoint with the best validation, or the newest one of a run without validation.
pub(crate) fn chosen_checkpoint(
    session: &Session,
    drafter: &DrafterRun,
) -> anyhow::Result<PathBuf> {
    let root = checkpoints(session, drafter);
    for pointer in [run_checkpoint::BEST, run_checkpoint::LATEST] {
        if let Some(folder) = run_checkpoint::resolve(&root, pointer)? {
            return Ok(folder);
        }
    }
    Err(CliError::usage(
        format!("`{}` holds no checkpoint", root.display()),
        format!("`draftsmith train {}` makes one", session.typed()),
    )
    .into())
}

/// Everything that shapes the training of a drafter, sections as keys.
fn resolved(session: &Session, drafter: &DrafterRun) -> serde_json::Value {
    let run_file = session.run_file();
    json!({
        "drafter": drafter.config,
        "draft_vocab": drafter.draft_vocab,
        "objective": run_file.objective_of(drafter),
        "optimizer": run_file.optimizer_of(drafter),
        "train": run_file.train_of(drafter),
        "data": { "validation_fraction": run_file.data.validation_fraction },
    })
}

/// What a resume compares: a training from other first parameters is another one.
fn with_start(
    mut resolved: serde_json::Value,
    drafter: &DrafterRun,
) -> anyhow::Result<serde_json::Value> {
    if let Some((_, hash)) = start::input(drafter)? {
        resolved["start_from"] = json!(hash);
    }
    Ok(resolved)
}

fn train_one(session: &Session, drafter: &DrafterRun, dataset: &Dataset) -> anyhow::Result<()> {
    let outcome = attempt(session, drafter, dataset, resume(session, drafter)?);
    match outcome {
        Err(error) if session.restart() == Restart::Continue && is_other_training(&error) => {
            set_aside(session, drafter)?;
            attempt(session, drafter, dataset, Resume::Fresh)
        }
        outcome => outcome,
    }
}

fn is_other_training(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<TrainerError>(),
        Some(TrainerError::SettingsChanged { .. })
    )
}

/// Moves a training with other settings to `superseded/<family>-<n>` of the run folder.
fn set_aside(session: &Session, drafter: &DrafterRun) -> anyhow::Result<()> {
    let family = drafter.family();
    let root = session.folder().join("superseded");
    fs_err::create_dir_all(&root)?;
    let mut number = 1;
    while root.join(format!("{family}-{number}")).exists() {
        number += 1;
    }
    let kept = root.join(format!("{family}-{number}"));
    fs_err::rename(session.drafter_folder(drafter), &kept)?;
    session.console().say(&format!(
        "train {family}: its settings or rows changed; the earlier training is kept in `{}`",
        kept.display()
    ));
    Ok(())
}

fn attempt(
    session: &Session,
    drafter: &DrafterRun,
    dataset: &Dataset,
    resume: Resume,
) -> anyhow::Result<()> {
    let run_file = session.run_file();
    let split = super::split(session, dataset);
    let tracking = session.device().clone().autodiff();
    let mut fresh = build(session, drafter, dataset, &tracking)?;
    let folder = session.drafter_folder(drafter);
    let settings = RunSettings {
        optimizer: run_file.optimizer_of(drafter),
        train: run_file.train_of(drafter),
        objective: run_file.objective_of(drafter),
        log: &run_file.log,
        resolved: with_start(resolved(session, drafter), drafter)?,
        folder: &folder,
        resume,
    };
    let rows = DatasetRows {
        dataset,
        indices: &split.train,
    };
    let held_out = super::validation_texts(session, drafter, dataset);
    let source = super::capture::source(session, &fresh.card.aux_layer_ids)?;
    let mut validator = ExactValidator::new(session, drafter, held_out, &fresh.card)?;
    if settings.resume == Resume::Fresh {
        refuse_existing(session, drafter)?;
        fresh.drafter = start::apply(session, drafter, fresh.drafter, &fresh.card.vocab)?;
        let (plain, card) = (fresh.drafter.valid(), fresh.card.clone());
        checkpoint::save(&untrained_folder(session, drafter), &plain, card)?;
    }
    let mut observer = BarObserver::new(session.console(), drafter.family());
    let parts = Parts {
        drafter: fresh.drafter,
        card: &fresh.card,
        ends: session.target()?.ends(),
        device: &tracking,
        rows: &rows,
        source: source.as_ref(),
        validator: validator.as_mut().map(|validator| validator as _),
        observer: &mut observer,
        interrupter: session.interrupt().interrupter().clone(),
    };
    match train(settings, parts)? {
        Outcome::Finished(summary) => {
            observer.finish(&summary);
            Ok(())
        }
        Outcome::Interrupted(summary) => Err(stopped(session, &summary).into()),
    }
}

fn stopped(session: &Session, summary: &Summary) -> CliError {
    let typed = session.typed();
    CliError::Interrupted(format!(
        "step {} of {} is saved; `draftsmith train {typed} --resume` continues",
        summary.step, summary.total
    ))
}

/// Where the training of a drafter starts.
fn resume(session: &Session, drafter: &DrafterRun) -> anyhow::Result<Resume> {
    if session.restart() == Restart::Fresh {
        return Ok(Resume::Fresh);
    }
    Ok(if has_begun(session, drafter)? {
        Resume::Latest
    } else {
        Resume::Fresh
    })
}

/// Whether there is a checkpoint, complete or not.
fn has_begun(session: &Session, drafter: &DrafterRun) -> anyhow::Result<bool> {
    let found = run_checkpoint::find(&checkpoints(session, drafter))?;
    Ok(found.newest.is_some() || !found.ignored.is_empty())
}

/// `--resume` on a run without any checkpoint is a mistake in its folder, not a wish to start.
fn refuse_nothing_to_resume(session: &Session) -> anyhow::Result<()> {
    if session.restart() != Restart::Resume {
        return Ok(());
    }
    for drafter in &session.run_file().drafter.0 {
        if has_begun(session, drafter)? {
            return Ok(());
        }
    }
    let folder = session.folder().display();
    Err(CliError::usage(
        format!("nothing to resume: `{folder}` holds no checkpoint"),
        "check `run.out` and `--out`, or leave `--resume` out to start",
    )
    .into())
}

/// The trainer refuses to start over existing checkpoints; so must the untrained drafter beside them.
fn refuse_existing(session: &Session, drafter: &DrafterRun) -> anyhow::Result<()> {
    let root = checkpoints(session, drafter);
    if run_checkpoint::find(&root)?.newest.is_none() {
        return Ok(());
    }
    Err(CliError::usage(
        format!("`{}` already holds checkpoints", root.display()),
        "continue with `--resume`, or choose another folder with `--out`",
    )
    .into())
}

/// A drafter at step 0.
struct Fresh {
    drafter: AnyDrafter,
    card: DrafterCard,
}

fn build(
    session: &Session,
    run: &DrafterRun,
    dataset: &Dataset,
    device: &Device,
) -> anyhow::Result<Fresh> {
    let target = session.target()?;
    refuse_masked_text(run, dataset)?;
    let vocab = draft_vocab(session, run.draft_vocab, dataset)?;
    let context = DrafterContext {
        target: session.spec(),
        ends: target.ends(),
        vocab: &vocab,
    };
    let seed = session.run_file().train_of(run).seed;
    let drafter = AnyDrafter::init(&run.config, context, seed, device)?;
    let card = DrafterCard {
        format_version: checkpoint::FORMAT_VERSION,
        drafter: run.config.clone(),
        aux_layer_ids: drafter.state_spec().aux_layer_ids,
        vocab,
        target: session.spec().clone(),
        target_fingerprint: session.target_fingerprint()?.to_owned(),
        template: dataset.manifest().template.clone(),
        weights_blake3: String::new(),
        step: 0,
    };
    Ok(Fresh { drafter, card })
}

/// Refuses a mask token that the text itself holds: there the drafter could not tell it from a gap.
pub(super) fn refuse_masked_text(run: &DrafterRun, dataset: &Dataset) -> anyhow::Result<()> {
    let family = run.family();
    let mut config = run.config.clone();
    let Some(MaskToken::Id(mask)) = config.mask_token() else {
        return Ok(());
    };
    let holds_mask = |row: &TokenRow| row.ids.contains(mask);
    match (0..dataset.len())
        .map(|row| dataset.row(row))
        .find(holds_mask)
    {
        None => Ok(()),
        Some(row) => Err(CliError::usage(
            format!(
                "`drafter.{family}.mask_token` is {mask}, but row `{}` of the data holds it",
                row.key
            ),
            "choose a reserved token that neither the chat template nor the text writes",
        )
        .into()),
    }
}

/// Refuses drafters whose settings do not fit the target.
pub(crate) fn refuse_unfit_drafters(session: &Session) -> anyhow::Result<()> {
    let vocab_size = session.spec().vocab_size;
    for run in &session.run_file().drafter.0 {
        run.config.check(session.spec())?;
        let (formats, target) = (&session.run_file().export, &session.run_file().target.path);
        draftsmith_export::check(formats, &run.config, session.spec(), target)?;
        if let DraftVocab::Size(size) = run.draft_vocab
            && size > vocab_size
        {
            let family = run.family();
            return Err(CliError::usage(
                format!("`drafter.{family}.draft_vocab` is {size}, but the target has {vocab_size} tokens"),
                "`draft_vocab = \"full\"` drafts with all of them",
            )
            .into());
        }
        start::refuse_unusable(session, run)?;
    }
    Ok(())
}

/// The draft vocabulary: tokens by how often the target wrote them in the training rows.
fn draft_vocab(session: &Session, size: DraftVocab, dataset: &Dataset) -> anyhow::Result<VocabMap> {
    let vocab_size = session.spec().vocab_size;
    let DraftVocab::Size(size) = size else {
        return Ok(VocabMap::full(vocab_size));
    };
    let counts = dataset.token_counts(vocab_size)?;
    let map = VocabMap::most_frequent(&counts, size, &super::stop_ids(session)?)?;
    session.console().detail(&format!(
        "draft vocabulary: {size} of {vocab_size} tokens cover {:.1} % of the answers",
        100.0 * map.coverage(&counts)
    ));
    Ok(map)
}
