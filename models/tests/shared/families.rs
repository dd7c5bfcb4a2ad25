//! What the tests of all crates know of each drafter family: `models/tests/golden/<family>/family.toml`.
//!
//! Test programs include this file by its path, so that a new family is known to all of them through its golden
//! folder alone.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    clippy::allow_attributes,
    reason = "each test program compiles this module and uses a part of it"
)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_models::drafter::{DrafterConfig, FAMILIES};
use draftsmith_models::slot::Slot;
use serde::Deserialize;

/// One family.
#[derive(Clone, Debug)]
pub(crate) struct Family {
    /// Name in run files.
    pub(crate) name: &'static str,
    /// Which variant of it, if one.
    variant: Option<String>,
    file: FamilyFile,
}

/// Content of `family.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FamilyFile {
    /// Settings that fit every tiny target of the tests (at least 3 blocks and 16 tokens), but for the number of
    /// drafts.
    settings: toml::Table,
    depths: Depths,
    reads: Reads,
    parameters: Parameters,
    /// Under what the tests over all families see it once more.
    #[serde(default)]
    variants: BTreeMap<String, Variant>,
    /// Golden cases: `<name>.safetensors` beside the file.
    cases: BTreeMap<String, Case>,
}

/// In what a variant differs from the family.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Variant {
    /// Settings beside, or instead of, those of the family.
    settings: toml::Table,
    /// How much larger than the number of drafts the setting for it is, where that is not as in the family.
    extra: Option<i64>,
    /// What its slots read, where that is not as in the family.
    reads: Option<Reads>,
}

/// How the number of drafts is set.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Depths {
    /// The setting.
    key: String,
    /// How much larger than the number of drafts it is.
    #[serde(default)]
    extra: i64,
}

/// Token ids that the outputs of slot (anchor a, depth d) depend on.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Reads {
    /// All from this position to `a + d`.
    history_from: Option<usize>,
    /// That of `a`.
    anchor: bool,
    /// That of `a + d`, the token in front of the predicted one.
    newest: bool,
}

/// Roles of parameters, by name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Parameters {
    /// Side by side the matrix that output rows are multiplied by.
    pub(crate) head: Vec<String>,
    /// Rows of the target's head that are never trained.
    #[serde(default)]
    pub(crate) frozen: Vec<String>,
}

/// One golden case.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    /// Drafts a round.
    depths: usize,
    /// Settings beside, or instead of, those of the family.
    #[serde(default)]
    settings: toml::Table,
    /// In what its target differs from the usual one.
    #[serde(default)]
    pub(crate) target: CaseTarget,
}

/// In what the target of a golden case differs from the usual one.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CaseTarget {
    /// Whether its blocks norm queries and keys.
    pub(crate) qk_norm: bool,
    /// Whether its queries, keys and values have biases.
    pub(crate) qkv_bias: bool,
    /// Whether its rotary frequencies are scaled as those of Llama 3.
    pub(crate) llama3: bool,
}

impl Reads {
    /// Whether the outputs of `slot` depend on the token at `position`.
    pub(crate) fn has(&self, slot: &Slot, position: usize) -> bool {
        let newest = slot.teacher_position();
        let first = self.history_from.unwrap_or(usize::MAX);
        (first..=newest).contains(&position)
            || self.anchor && position == slot.anchor
            || self.newest && position == newest
    }

    /// Whether a drafter is fed the tokens it drafted.
    pub(crate) fn is_fed(&self) -> bool {
        self.newest || self.history_from.is_some()
    }
}

impl Family {
    /// All families there are.
    pub(crate) fn all() -> Vec<Self> {
        FAMILIES.iter().map(|name| Self::open(name)).collect()
    }

    /// All families there are, and every variant of them.
    pub(crate) fn variants() -> Vec<Self> {
        let with_variants = |family: Self| {
            let variants = family.file.variants.clone();
            let changed = variants.into_iter().map(|(name, variant)| {
                let mut family = family.clone();
                family.variant = Some(name);
                family.change(variant);
                family
            });
            let changed: Vec<Self> = changed.collect();
            std::iter::once(family).chain(changed)
        };
        Self::all().into_iter().flat_map(with_variants).collect()
    }

    fn change(&mut self, variant: Variant) {
        self.file.settings.extend(variant.settings);
        self.file.depths.extra = variant.extra.unwrap_or(self.file.depths.extra);
        self.file.reads = variant.reads.unwrap_or(self.file.reads);
    }

    /// Its name, and that of the variant, for messages.
    pub(crate) fn what(&self) -> String {
        let variant = self.variant.iter().map(|variant| format!(" ({variant})"));
        std::iter::once(self.name.to_owned())
            .chain(variant)
            .collect()
    }

    /// The family of that name.
    pub(crate) fn named(name: &str) -> Self {
        let name = FAMILIES.iter().find(|family| **family == name);
        Self::open(name.unwrap())
    }

    fn open(name: &'static str) -> Self {
        let path = folder(name).join("family.toml");
        let text = fs_err::read_to_string(&path).unwrap();
        let file = toml::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self {
            name,
            variant: None,
            file,
        }
    }

    /// Settings for a tiny target with `depths` drafts a round.
    pub(crate) fn config(&self, depths: usize) -> DrafterConfig {
        self.config_with(depths, toml::Table::new())
    }

    /// The same with other settings beside.
    pub(crate) fn config_with(&self, depths: usize, others: toml::Table) -> DrafterConfig {
        let mut settings = self.file.settings.clone();
        let depths = depths as i64 + self.file.depths.extra;
        settings.insert(self.file.depths.key.clone(), depths.into());
        settings.extend(others);
        DrafterConfig::deserialize_family(self.name, toml::Value::Table(settings)).unwrap()
    }

    /// Whether it has a setting of that name in its file.
    pub(crate) fn has_setting(&self, key: &str) -> bool {
        self.file.settings.contains_key(key)
    }

    /// What its slots read.
    pub(crate) fn reads(&self) -> Reads {
        self.file.reads
    }

    /// Roles of its parameters.
    pub(crate) fn parameters(&self) -> &Parameters {
        &self.file.parameters
    }

    /// Names of the golden cases: the files of its folder.
    pub(crate) fn cases(&self) -> Vec<String> {
        let entries = fs_err::read_dir(folder(self.name)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut cases: Vec<String> = names
            .filter_map(|name| Some(name.strip_suffix(".safetensors")?.to_owned()))
            .collect();
        cases.sort();
        assert!(
            self.file.cases.keys().eq(&cases),
            "{}: {cases:?}",
            self.name
        );
        cases
    }

    /// One golden case.
    pub(crate) fn case(&self, name: &str) -> &Case {
        &self.file.cases[name]
    }

    /// Settings of a golden case.
    pub(crate) fn case_config(&self, name: &str) -> DrafterConfig {
        let case = self.case(name);
        self.config_with(case.depths, case.settings.clone())
    }
}

/// The golden folder of a family.
pub(crate) fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../models/tests/golden")
        .join(family)
}
