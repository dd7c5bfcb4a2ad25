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

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::target::TargetSpec;
use draftsmith_models::weights::NamedTensor;
use serde::Serialize;
use serde_json::Value;

pub use config::{ExportConfig, ExportDtype};
pub use error::ExportError;
pub use read::{Imported, load, read};
pub use source::Source;

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

    /// Refuses settings that an engine would read as something else.
    ///
    /// # Errors
    /// [`ExportError::NotExpressible`] naming the setting.
    fn check(&self, _drafter: &DrafterConfig, _target: &TargetSpec) -> Result<(), ExportError> {
        Ok(())
    }

    /// Renames and converts a checkpoint of a family it can hold.
    ///
    /// # Errors
    /// [`ExportError`] when a tensor is missing or the layout cannot express the drafter.
    fn layout(&self, source: &Source<'_>) -> Result<Layout, ExportError>;
}

/// All layouts.
pub const EXPORTERS: &[&dyn Exporter] = &[&native::Native, &speculators::Speculators];

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExportReport {
    /// Name of the layout.
    pub format: String,
    /// The finished folder.
    pub folder: PathBuf,
    /// Tensors in the file, in its order.
    pub tensors: Vec<ExportedTensor>,
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
    folder::check_replaceable(out)?;
    let source = Source::open(checkpoint, target, config)?;
    if !exporter.can_hold(&source.card.drafter) {
        return Err(ExportError::NoLayout {
            format: exporter.name(),
            family: source.card.drafter.family(),
        });
    }
    write(exporter, &source, out)
}

/// Those of `formats` that have a place for drafters of a family, in the same order.
pub fn formats_for<'a>(formats: &'a [String], drafter: &DrafterConfig) -> Vec<&'a str> {
    let names = formats.iter().map(String::as_str);
    names
        .filter(|name| find(name).is_ok_and(|exporter| exporter.can_hold(drafter)))
        .collect()
}

/// Checks that every layout of `config.formats` with a place for the drafter can express it, before it is
/// trained.
///
/// # Errors
/// [`ExportError::NotExpressible`] naming the setting, or [`ExportError::NoLayout`] when no layout is left.
pub fn check(
    config: &ExportConfig,
    drafter: &DrafterConfig,
    target: &TargetSpec,
) -> Result<(), ExportError> {
    let formats = formats_for(&config.formats, drafter);
    if let (true, Some(format)) = (formats.is_empty(), config.formats.first()) {
        return Err(ExportError::NoLayout {
            format: find(format)?.name(),
            family: drafter.family(),
        });
    }
    for format in formats {
        find(format)?.check(drafter, target)?;
    }
    Ok(())
}

/// Writes every layout of `config.formats` that can hold the drafter into its own folder below `out_root`.
///
/// # Errors
/// As [`export`]; layouts finished before a failure stay valid.
pub fn export_all(
    checkpoint: &Path,
    target: &Path,
    out_root: &Path,
    config: &ExportConfig,
) -> Result<Vec<ExportReport>, ExportError> {
    config.validate()?;
    for format in &config.formats {
        folder::check_replaceable(&out_root.join(format))?;
    }
    let source = Source::open(checkpoint, target, config)?;
    formats_for(&config.formats, &source.card.drafter)
        .into_iter()
        .map(|format| write(find(format)?, &source, &out_root.join(format)))
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

fn write(
    exporter: &dyn Exporter,
    source: &Source<'_>,
    out: &Path,
) -> Result<ExportReport, ExportError> {
    let layout = exporter.layout(source)?;
    folder::write(out, &layout)?;
    let tensors = layout
        .tensors
        .iter()
        .map(|tensor| ExportedTensor {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: format!("{:?}", tensor.dtype),
        })
        .collect();
    Ok(ExportReport {
        format: exporter.name().to_owned(),
        folder: out.to_owned(),
        tensors,
        warnings: layout.warnings,
    })
}
