//! Our checkpoints to and from the layouts that serving engines load.
//!
//! [`export`] writes one layout of a checkpoint folder, [`read()`] turns an EAGLE-3 folder of either layout back
//! into a card and tensors under our names. Foreign names, foreign layer ids and the offset form of
//! the vocabulary map exist only in this crate; `docs` of each layout say which engine reads what.
//!
//! | layout | read by |
//! |---|---|
//! | [`native`] | vLLM, SGLang, the llama.cpp converter |
//! | [`speculators`] | vLLM, the speculators package |
//! | [`target`] | what serves the target with the MTP head it brings along, which is replaced |

pub mod config;
pub mod d2t;
pub mod decoder;
mod dflash;
mod dspark;
pub mod error;
pub mod folder;
mod foreign;
pub mod layer_ids;
mod mtp;
pub mod names;
pub mod native;
pub mod read;
pub mod source;
pub mod speculators;
mod stitch;
pub mod target;
mod target_head;
pub mod temper;

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::target::TargetSpec;
use draftsmith_models::weights::{NamedTensor, check_finite};
use serde::Serialize;
use serde_json::Value;

pub use config::{ExportConfig, ExportDtype};
pub use error::ExportError;
pub use read::{Imported, load, read};
pub use source::Source;
pub use target_head::target_head;

/// What a layout puts into its folder.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Content of `config.json`.
    pub config: Value,
    /// Content of `model.safetensors`.
    pub tensors: Vec<NamedTensor>,
    /// What a user should know before serving it, one sentence each.
    pub warnings: Vec<String>,
}

/// One layout that engines load.
pub trait Exporter: Debug + Sync {
    /// Name in run files and of the folder.
    fn name(&self) -> &'static str;

    /// Whether the layout has a place for drafters of this family.
    fn can_hold(&self, drafter: &DrafterConfig) -> bool;

    /// Whether run files that name no layout ask for this one.
    fn is_default(&self) -> bool {
        true
    }

    /// Refuses settings that an engine would read as something else, for the target in `folder`.
    ///
    /// # Errors
    /// [`ExportError::NotExpressible`] naming the setting.
    fn check(
        &self,
        _drafter: &DrafterConfig,
        _target: &TargetSpec,
        _folder: &Path,
    ) -> Result<(), ExportError> {
        Ok(())
    }

    /// Refuses a place that holds anything but an earlier export of this layout.
    ///
    /// # Errors
    /// [`ExportError::OutTaken`] naming what is in the way.
    fn check_out(&self, out: &Path, _target: &Path) -> Result<(), ExportError> {
        folder::check_replaceable(out, &[folder::CONFIG, folder::WEIGHTS])
    }

    /// Renames and converts a checkpoint of a family it can hold, and writes it into `out`.
    ///
    /// # Errors
    /// [`ExportError`] when a tensor is missing or the layout cannot express the drafter.
    fn write(&self, source: &Source<'_>, out: &Path) -> Result<ExportReport, ExportError>;
}

/// All layouts.
pub const EXPORTERS: &[&dyn Exporter] =
    &[&native::Native, &speculators::Speculators, &target::Target];

/// What was written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExportReport {
    /// Name of the layout.
    pub format: String,
    /// The finished folder.
    pub folder: PathBuf,
    /// Tensors in the file, in its order.
    pub tensors: Vec<ExportedTensor>,
    /// The draft temperature that its logits were divided by.
    pub draft_temperature: Option<f64>,
    /// What a user should know before serving it, one sentence each.
    pub warnings: Vec<String>,
}

/// One tensor of an exported file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExportedTensor {
    /// Foreign name.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Element type, such as `BF16`.
    pub dtype: String,
}

/// Writes the layout `format` of the checkpoint folder `checkpoint` into `out`.
///
/// `target` is the folder of the target the drafter was trained on; another one is refused. `out` is
/// complete afterwards, or untouched; an earlier export in its place is replaced.
///
/// # Errors
/// [`ExportError`] for an unknown layout, an incomplete checkpoint, another target, or a folder at
/// `out` that holds anything else than an export.
pub fn export(
    format: &str,
    checkpoint: &Path,
    target: &Path,
    out: &Path,
    config: &ExportConfig,
) -> Result<ExportReport, ExportError> {
    let exporter = find(format)?;
    exporter.check_out(out, target)?;
    let source = Source::open(checkpoint, target, config)?;
    if !exporter.can_hold(&source.card.drafter) {
        return Err(ExportError::NoLayout {
            format: exporter.name(),
            family: source.card.drafter.family(),
        });
    }
    exporter.write(&source, out)
}

/// Those of `formats` that have a place for drafters of a family, in the same order.
pub fn formats_for<'a>(formats: &'a [String], drafter: &DrafterConfig) -> Vec<&'a str> {
    let names = formats.iter().map(String::as_str);
    names
        .filter(|name| find(name).is_ok_and(|exporter| exporter.can_hold(drafter)))
        .collect()
}

/// Checks that every layout of `config.formats` with a place for the drafter can express it, before it is
/// trained; `folder` holds the target.
///
/// # Errors
/// [`ExportError::NotExpressible`] naming the setting, or [`ExportError::NoLayout`] when no layout is left.
pub fn check(
    config: &ExportConfig,
    drafter: &DrafterConfig,
    target: &TargetSpec,
    folder: &Path,
) -> Result<(), ExportError> {
    let formats = formats_for(&config.formats, drafter);
    if let (true, Some(format)) = (formats.is_empty(), config.formats.first()) {
        return Err(ExportError::NoLayout {
            format: find(format)?.name(),
            family: drafter.family(),
        });
    }
    for format in formats {
        find(format)?.check(drafter, target, folder)?;
    }
    Ok(())
}

/// Writes every layout of `config.formats` that can hold the drafter into its own folder below `out_root`, with logits
/// divided by `draft_temperature` where they can be ([`temper`]).
///
/// # Errors
/// As [`export`]; layouts finished before a failure stay valid.
pub fn export_all(
    checkpoint: &Path,
    target: &Path,
    out_root: &Path,
    config: &ExportConfig,
    draft_temperature: Option<f64>,
) -> Result<Vec<ExportReport>, ExportError> {
    config.validate()?;
    for format in &config.formats {
        find(format)?.check_out(&out_root.join(format), target)?;
    }
    let source = Source::open(checkpoint, target, config)?.tempered(draft_temperature);
    formats_for(&config.formats, &source.card.drafter)
        .into_iter()
        .map(|format| find(format)?.write(&source, &out_root.join(format)))
        .collect()
}

/// Names of all layouts.
pub fn format_names() -> Vec<&'static str> {
    EXPORTERS.iter().map(|exporter| exporter.name()).collect()
}

fn find(format: &str) -> Result<&'static dyn Exporter, ExportError> {
    EXPORTERS
        .iter()
        .copied()
        .find(|exporter| exporter.name() == format)
        .ok_or_else(|| ExportError::UnknownFormat {
            found: format.to_owned(),
            known: format_names(),
        })
}

impl Layout {
    /// Writes the layout `format` into `out`.
    pub(crate) fn write(
        self,
        format: &str,
        out: &Path,
        source: &Source<'_>,
    ) -> Result<ExportReport, ExportError> {
        check_finite(&self.tensors, &out.join(folder::WEIGHTS))?;
        folder::write(out, |staging| folder::fill(staging, &self))?;
        let tensors = self.tensors.iter().map(|tensor| ExportedTensor {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: format!("{:?}", tensor.dtype),
        });
        Ok(ExportReport {
            format: format.to_owned(),
            folder: out.to_owned(),
            tensors: tensors.collect(),
            draft_temperature: source.draft_temperature,
            warnings: self.warnings,
        })
    }
}
