//! [`Stage`]: a piece of work with declared inputs and outputs, skipped while nothing changed.
//!
//! When a stage is done it leaves a stamp, `<run>/<stage>.stamp.json`, with the hash of everything it
//! read. It runs again when the stamp is missing, when a hash differs, or when an output is gone.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use draftsmith_models::file;
use serde::{Deserialize, Serialize};

use crate::errors::CliError;
use crate::session::Session;

/// Version of the stamp files.
const FORMAT_VERSION: u32 = 1;

/// What a stage reads: a name for people, and a hash.
pub(crate) type Inputs = BTreeMap<String, String>;

/// One piece of work.
pub(crate) trait Stage: Sync {
    /// Its verb on the command line and the name of its stamp.
    fn name(&self) -> &'static str;

    /// Hashes of everything it reads beside earlier stages.
    fn inputs(&self, session: &Session) -> anyhow::Result<Inputs>;

    /// Files it leaves behind.
    fn outputs(&self, session: &Session) -> anyhow::Result<Vec<PathBuf>>;

    /// Stages whose outputs it reads.
    fn needs(&self) -> &'static [&'static dyn Stage];

    /// What its outputs, whole as they are, could still be given by running it again; looked at only when the stage is
    /// asked for by name.
    fn lacking(&self, _session: &Session) -> anyhow::Result<Option<String>> {
        Ok(None)
    }

    /// Does the work.
    fn execute(&self, session: &Session) -> anyhow::Result<()>;
}

/// `<stage>.stamp.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stamp {
    format_version: u32,
    stage: String,
    inputs: Inputs,
    seconds: f64,
}

/// Whether a stage has to run, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// Everything is there and unchanged.
    Fresh,
    /// It has to run, for this reason.
    Stale(String),
}

/// Runs one stage unless it is fresh; the outputs of the stages it needs must be fresh.
///
/// A stage that the run file leaves nothing to do is passed on the way, not asked for.
pub(crate) fn run_one(stage: &dyn Stage, session: &Session) -> anyhow::Result<()> {
    for earlier in stage.needs() {
        if earlier.outputs(session)?.is_empty() {
            run_one(*earlier, session)?;
        }
        refuse_stale(*earlier, stage.name(), session)?;
    }
    let freshness = match freshness(stage, session)? {
        Freshness::Fresh => {
            let lacking = stage.lacking(session)?;
            lacking.map_or(Freshness::Fresh, Freshness::Stale)
        }
        stale @ Freshness::Stale(_) => stale,
    };
    run_unless_fresh(stage, session, freshness)
}

/// Refuses to do `what` unless the stage that it needs is fresh.
pub(crate) fn refuse_stale(
    needed: &dyn Stage,
    what: &str,
    session: &Session,
) -> anyhow::Result<()> {
    let Freshness::Stale(reason) = freshness(needed, session)? else {
        return Ok(());
    };
    let (typed, needed) = (session.typed(), needed.name());
    Err(CliError::usage(
        format!("`{what}` needs the stage `{needed}`: {reason}"),
        format!("`draftsmith {needed} {typed}`, or `draftsmith run {typed}` for everything"),
    )
    .into())
}

/// Runs a stage unless it is fresh.
pub(crate) fn run_if_stale(stage: &dyn Stage, session: &Session) -> anyhow::Result<()> {
    run_unless_fresh(stage, session, freshness(stage, session)?)
}

fn run_unless_fresh(
    stage: &dyn Stage,
    session: &Session,
    freshness: Freshness,
) -> anyhow::Result<()> {
    let console = session.console();
    match freshness {
        Freshness::Fresh => {
            console.say(&format!("{}: up to date", stage.name()));
            Ok(())
        }
        Freshness::Stale(reason) => {
            console.say(&format!("{}: {reason}", stage.name()));
            let started = Instant::now();
            // Before the work: what changes meanwhile was not used.
            let inputs = all_inputs(stage, session)?;
            // The first stage reads the user's data; nothing is written before it has accepted them.
            let is_first = stage.needs().is_empty();
            if !is_first {
                session.record()?;
            }
            stage.execute(session)?;
            if is_first {
                session.record()?;
            }
            let stamp = Stamp {
                format_version: FORMAT_VERSION,
                stage: stage.name().to_owned(),
                inputs,
                seconds: started.elapsed().as_secs_f64(),
            };
            file::write_json(&stamp_path(stage, session), &stamp)?;
            console.detail(&format!("{}: done in {:.1} s", stage.name(), stamp.seconds));
            Ok(())
        }
    }
}

/// Compares a stage with its stamp.
pub(crate) fn freshness(stage: &dyn Stage, session: &Session) -> anyhow::Result<Freshness> {
    let path = stamp_path(stage, session);
    if !path.exists() {
        return Ok(Freshness::Stale("not done yet".to_owned()));
    }
    let Ok(stamp) = file::read_json::<Stamp>(&path) else {
        return Ok(Freshness::Stale("its stamp is not readable".to_owned()));
    };
    if stamp.format_version != FORMAT_VERSION {
        return Ok(Freshness::Stale(
            "its stamp is of another version".to_owned(),
        ));
    }
    if let Some(reason) = difference(&stamp.inputs, &all_inputs(stage, session)?) {
        return Ok(Freshness::Stale(reason));
    }
    let gone = stage
        .outputs(session)?
        .into_iter()
        .find(|path| !path.exists());
    Ok(gone.map_or(Freshness::Fresh, |path| {
        Freshness::Stale(format!("`{}` is gone", path.display()))
    }))
}

/// Inputs of a stage and of all stages before it, so that a change travels down the chain.
fn all_inputs(stage: &dyn Stage, session: &Session) -> anyhow::Result<Inputs> {
    let mut inputs = stage.inputs(session)?;
    for earlier in stage.needs() {
        let hash = hash_inputs(&all_inputs(*earlier, session)?);
        inputs.insert(format!("stage {}", earlier.name()), hash);
    }
    Ok(inputs)
}

fn hash_inputs(inputs: &Inputs) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, hash) in inputs {
        hasher.update(name.as_bytes());
        hasher.update(&[0]);
        hasher.update(hash.as_bytes());
        hasher.update(&[0]);
    }
    hasher.finalize().to_hex().to_string()
}

/// The first input that is not as it was.
fn difference(old: &Inputs, new: &Inputs) -> Option<String> {
    let changed = new.iter().find(|(name, hash)| old.get(*name) != Some(hash));
    let dropped = old.keys().find(|name| !new.contains_key(*name));
    changed
        .map(|(name, _)| format!("{name} changed"))
        .or_else(|| dropped.map(|name| format!("{name} is no longer used")))
}

fn stamp_path(stage: &dyn Stage, session: &Session) -> PathBuf {
    session
        .folder()
        .join(format!("{}.stamp.json", stage.name()))
}

/// The hash of a section of the resolved run file.
pub(crate) fn hash_section<T: Serialize>(section: &T) -> anyhow::Result<String> {
    let json = serde_json::to_vec(section)?;
    Ok(blake3::hash(&json).to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(pairs: &[(&str, &str)]) -> Inputs {
        pairs
            .iter()
            .map(|(name, hash)| ((*name).to_owned(), (*hash).to_owned()))
            .collect()
    }

    #[test]
    fn a_changed_new_or_dropped_input_is_named() {
        let old = inputs(&[("[data]", "1"), ("target", "2")]);
        assert_eq!(difference(&old, &old), None);
        let changed = inputs(&[("[data]", "1"), ("target", "3")]);
        assert_eq!(
            difference(&old, &changed).as_deref(),
            Some("target changed")
        );
        let dropped = inputs(&[("[data]", "1")]);
        assert_eq!(
            difference(&old, &dropped).as_deref(),
            Some("target is no longer used")
        );
    }

    #[test]
    fn the_hash_of_inputs_keeps_names_and_values_apart() {
        assert_ne!(
            hash_inputs(&inputs(&[("ab", "c")])),
            hash_inputs(&inputs(&[("a", "bc")]))
        );
    }
}
