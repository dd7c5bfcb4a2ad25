//! `start_from`: whose parameters a drafter takes over at step 0.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_models::checkpoint::{CARD, WEIGHTS};
use draftsmith_models::drafter::{AnyDrafter, DrafterContext, Origin, Started};
use draftsmith_models::file;
use draftsmith_models::fingerprint::weight_files;
use draftsmith_models::vocab::VocabMap;
use draftsmith_trainer::checkpoint as run_checkpoint;
use serde::{Deserialize, Serialize};

use crate::errors::CliError;
use crate::run_file::{DraftVocab, DrafterRun};
use crate::session::Session;

/// Version of `start.json`.
const FORMAT_VERSION: u32 = 1;
/// `start_from` for the head that the target brings along.
const TARGET: &str = "target";
/// What a drafter took over, in its folder.
const RECORD: &str = "start.json";

/// `start.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StartRecord {
    /// Version of this format.
    format_version: u32,
    /// `start_from` as written in the run file.
    from: String,
    /// Family of the drafter there.
    family: String,
    /// Optimizer steps it had taken.
    step: u64,
    /// Hash of its files.
    blake3: String,
    /// Names of parameters by where they came from.
    parameters: Started,
}

/// What `start_from` points to.
#[derive(Debug)]
enum Place {
    /// `drafter.json` and `drafter.safetensors`.
    Checkpoint(PathBuf),
    /// A folder in a serving layout.
    Export(PathBuf),
    /// The files of the target.
    Target,
}

impl Place {
    /// The place that `from` names: a checkpoint, the best or else newest one of a drafter's folder, an export;
    /// or the target.
    fn find(family: &str, from: &str) -> anyhow::Result<Self> {
        if from == TARGET {
            return Ok(Self::Target);
        }
        let folder = Path::new(from);
        if folder.join(CARD).exists() {
            return Ok(Self::Checkpoint(folder.to_owned()));
        }
        let root = folder.join(run_checkpoint::FOLDER);
        for pointer in [run_checkpoint::BEST, run_checkpoint::LATEST] {
            if let Some(checkpoint) = run_checkpoint::resolve(&root, pointer)? {
                return Ok(Self::Checkpoint(checkpoint));
            }
        }
        if folder.join("config.json").exists() {
            return Ok(Self::Export(folder.to_owned()));
        }
        Err(CliError::usage(
            format!("`drafter.{family}.start_from` is `{from}`, which holds no drafter"),
            "expected a drafter's folder in a run (`runs/x/<family>`), a checkpoint, an EAGLE-3 export, or `target`",
        )
        .into())
    }

    /// The files that the parameters depend on; those of the target are an input of their own.
    fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        Ok(match self {
            Self::Target => Vec::new(),
            Self::Checkpoint(folder) => vec![folder.join(CARD), folder.join(WEIGHTS)],
            Self::Export(folder) => {
                let names = weight_files(folder)?.into_iter();
                let names = std::iter::once("config.json".to_owned()).chain(names);
                names.map(|name| folder.join(name)).collect()
            }
        })
    }

    fn open(&self, session: &Session, from: &str) -> anyhow::Result<Origin> {
        match self {
            Self::Target => Ok(draftsmith_export::target_head(
                &session.run_file().target.path,
                session.spec(),
                session.target_fingerprint()?,
                from.to_owned(),
            )?),
            Self::Checkpoint(folder) => Ok(Origin::open(folder, from.to_owned())?),
            Self::Export(folder) => {
                let target = &session.run_file().target.path;
                let imported = draftsmith_export::read(folder, target)?;
                for warning in &imported.warnings {
                    session.console().warn(warning);
                }
                Ok(imported.into_origin(from.to_owned())?)
            }
        }
    }
}

/// The key of a drafter with `start_from`, and the hash of the files there.
pub(super) fn input(run: &DrafterRun) -> anyhow::Result<Option<(String, String)>> {
    let Some(from) = &run.start_from else {
        return Ok(None);
    };
    let mut hasher = blake3::Hasher::new();
    for path in Place::find(run.family(), from)?.files()? {
        hasher.update(blake3::hash(&file::read(&path)?).as_bytes());
    }
    let hash = hasher.finalize().to_hex().to_string();
    let key = format!("`drafter.{}.start_from`", run.family());
    Ok(Some((key, hash)))
}

/// The drafter that `run` starts from, if it fits as far as its settings tell.
fn origin(session: &Session, run: &DrafterRun) -> anyhow::Result<Option<Origin>> {
    let Some(from) = &run.start_from else {
        return Ok(None);
    };
    let place = Place::find(run.family(), from)?;
    if !matches!(place, Place::Target) {
        refuse_itself(session, run, from)?;
    }
    let origin = place.open(session, from)?;
    origin.check(&run.config, session.spec(), session.target_fingerprint()?)?;
    Ok(Some(origin))
}

/// A training that is repeated is moved away first, and with it what it would start from.
fn refuse_itself(session: &Session, run: &DrafterRun, from: &str) -> anyhow::Result<()> {
    let real = |path: &Path| fs_err::canonicalize(path).ok();
    let from_folder = real(Path::new(from));
    let is_inside = |other: &DrafterRun| {
        let own = real(&session.drafter_folder(other));
        matches!((&from_folder, &own), (Some(from), Some(own)) if from.starts_with(own))
    };
    if !session.run_file().drafter.0.iter().any(is_inside) {
        return Ok(());
    }
    Err(CliError::usage(
        format!(
            "`drafter.{}.start_from` is `{from}`, which this run trains itself",
            run.family()
        ),
        "choose another run folder with `--out`",
    )
    .into())
}

/// Refuses what cannot be started from, before any work: all but the tokens of a reduced vocabulary, which
/// are known once there are rows.
pub(super) fn refuse_unusable(session: &Session, run: &DrafterRun) -> anyhow::Result<()> {
    let Some(origin) = origin(session, run)? else {
        return Ok(());
    };
    let vocab_size = session.spec().vocab_size;
    let vocab = match (run.draft_vocab, &origin.vocab) {
        (DraftVocab::Full, _) => VocabMap::full(vocab_size),
        (DraftVocab::Size(size), Some(theirs)) if size == theirs.len() => theirs.clone(),
        (DraftVocab::Size(size), _) => VocabMap::new((0..size as u32).collect(), vocab_size)?,
    };
    let context = DrafterContext {
        target: session.spec(),
        ends: session.target()?.ends(),
        vocab: &vocab,
    };
    let tracking = session.device().clone().autodiff();
    let drafter = AnyDrafter::init(&run.config, context, 0, &tracking)?;
    drafter.start_from(&origin, &run.config, &vocab)?;
    Ok(())
}

/// The drafter at step 0: `fresh`, or with the parameters that `start_from` names; says and records which.
pub(super) fn apply(
    session: &Session,
    run: &DrafterRun,
    fresh: AnyDrafter,
    vocab: &VocabMap,
) -> anyhow::Result<AnyDrafter> {
    let path = session.drafter_folder(run).join(RECORD);
    let (Some(origin), Some(from)) = (origin(session, run)?, &run.start_from) else {
        // Left by a training that was stopped before its first checkpoint.
        if path.exists() {
            fs_err::remove_file(&path)?;
        }
        return Ok(fresh);
    };
    let (drafter, parameters) = fresh.start_from(&origin, &run.config, vocab)?;
    let record = StartRecord {
        format_version: FORMAT_VERSION,
        from: from.clone(),
        family: origin.drafter.family().to_owned(),
        step: origin.step,
        blake3: input(run)?.map(|(_, hash)| hash).unwrap_or_default(),
        parameters,
    };
    describe(session, run, &record);
    file::write_json(&path, &record)?;
    Ok(drafter)
}

fn describe(session: &Session, run: &DrafterRun, record: &StartRecord) {
    let StartRecord {
        from,
        family,
        step,
        parameters,
        ..
    } = record;
    let listed = |names: &[String]| match names {
        [] => String::new(),
        names => format!(" (`{}`)", names.join("`, `")),
    };
    session.console().say(&format!(
        "train {}: starts from `{from}`, a `{family}` drafter of step {step}: {} tensors taken, {} fresh{}, {} the \
         target's{}",
        run.family(),
        parameters.taken.len(),
        parameters.fresh.len(),
        listed(&parameters.fresh),
        parameters.from_target.len(),
        listed(&parameters.from_target),
    ));
    for name in &parameters.taken {
        session.console().detail(&format!("  taken {name}"));
    }
}

/// What the drafters of a run folder took over, by family.
pub(crate) fn recorded(session: &Session) -> anyhow::Result<BTreeMap<String, StartRecord>> {
    let mut records = BTreeMap::new();
    for run in &session.run_file().drafter.0 {
        let path = session.drafter_folder(run).join(RECORD);
        if path.exists() {
            records.insert(run.family().to_owned(), file::read_json(&path)?);
        }
    }
    Ok(records)
}
