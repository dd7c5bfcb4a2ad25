//! [`Provenance`]: what produced a run folder.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::stages::start::StartRecord;

/// Version of `provenance.json`.
const FORMAT_VERSION: u32 = 1;

/// `provenance.json`: written once the first stage has accepted the data, and again by each later stage.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Provenance {
    /// Version of this format.
    pub(crate) format_version: u32,
    /// Version of the program.
    pub(crate) draftsmith: String,
    /// Version of Burn it was built with.
    pub(crate) burn: String,
    /// Commit of the source, if known.
    pub(crate) git_commit: Option<String>,
    /// Device asked for.
    pub(crate) device: String,
    /// Folder of the target as written in the run file.
    pub(crate) target: String,
    /// blake3 over configuration, tokenizer, template and weights of the target.
    pub(crate) target_fingerprint: String,
    /// blake3 of the chat template; empty when the target has none.
    pub(crate) template_blake3: String,
    /// blake3 of each data file, by path as written in the run file.
    pub(crate) data: BTreeMap<String, String>,
    /// Seeds by what they are for.
    pub(crate) seeds: BTreeMap<String, u64>,
    /// What drafters with `start_from` took over, by family; known once their training has begun.
    pub(crate) starts: BTreeMap<String, StartRecord>,
}

impl Provenance {
    /// A record with the facts about the program filled in.
    pub(crate) fn new(device: String) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            draftsmith: env!("CARGO_PKG_VERSION").to_owned(),
            burn: BURN_VERSION.to_owned(),
            git_commit: git_commit(),
            device,
            target: String::new(),
            target_fingerprint: String::new(),
            template_blake3: String::new(),
            data: BTreeMap::new(),
            seeds: BTreeMap::new(),
            starts: BTreeMap::new(),
        }
    }
}

/// The exact version the workspace pins; a test compares it with the lock file.
pub(crate) const BURN_VERSION: &str = "0.22.1";

/// Commit given at build time in `DRAFTSMITH_GIT_COMMIT`, else that of the repository around the
/// current folder when it is this project's; nothing without git.
fn git_commit() -> Option<String> {
    if let Some(commit) = option_env!("DRAFTSMITH_GIT_COMMIT") {
        return Some(commit.to_owned());
    }
    let root = env!("CARGO_MANIFEST_DIR");
    let output = std::process::Command::new("git")
        .args(["-C", root, "rev-parse", "HEAD"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let commit = text.trim();
    let is_commit = output.status.success() && commit.len() >= 40;
    is_commit.then(|| commit.to_owned())
}
