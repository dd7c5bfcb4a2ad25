//! The target itself with a fine-tuned head: its own files, in which only the tensors of its MTP head differ.
//!
//! For targets that bring a head along (see `target_head`). Whatever serves the target serves the folder.

use std::path::Path;

use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::drafter::mtp::MtpConfig;
use draftsmith_models::target::TargetSpec;

use crate::error::ExportError;
use crate::source::Source;
use crate::stitch::{self, plain_files};
use crate::target_head::TargetHead;
use crate::{ExportReport, Exporter, folder};

/// Layout `target`.
#[derive(Clone, Copy, Debug)]
pub struct Target;

const NAME: &str = "target";

impl Exporter for Target {
    fn name(&self) -> &'static str {
        NAME
    }

    fn is_default(&self) -> bool {
        false
    }

    fn can_hold(&self, drafter: &DrafterConfig) -> bool {
        matches!(drafter, DrafterConfig::Mtp(_))
    }

    fn check(
        &self,
        drafter: &DrafterConfig,
        target: &TargetSpec,
        folder: &Path,
    ) -> Result<(), ExportError> {
        match drafter {
            DrafterConfig::Mtp(config) => check(config, &TargetHead::find(folder, target)?),
            _ => Ok(()),
        }
    }

    fn check_out(&self, out: &Path, target: &Path) -> Result<(), ExportError> {
        if let (Ok(out), Ok(target)) = (fs_err::canonicalize(out), fs_err::canonicalize(target))
            && out == target
        {
            return Err(ExportError::OutTaken {
                path: out,
                found: "the target itself".to_owned(),
            });
        }
        folder::check_replaceable(out, &plain_files(target)?)
    }

    fn write(&self, source: &Source<'_>, out: &Path) -> Result<ExportReport, ExportError> {
        let DrafterConfig::Mtp(config) = &source.card.drafter else {
            return Err(ExportError::NoLayout {
                format: NAME,
                family: source.card.drafter.family(),
            });
        };
        let head = TargetHead::find(source.target, &source.card.target)?;
        check(config, &head)?;
        let mut tensors = Vec::new();
        folder::write(out, |staging| {
            tensors = stitch::fill(staging, source, &head)?;
            Ok(())
        })?;
        Ok(ExportReport {
            format: NAME.to_owned(),
            folder: out.to_owned(),
            tensors,
            draft_temperature: source.draft_temperature,
            warnings: warnings(source),
        })
    }
}

/// The head must be read as the target's own one is.
fn check(config: &MtpConfig, head: &TargetHead<'_>) -> Result<(), ExportError> {
    let found = DrafterConfig::Mtp(config.clone()).meaning();
    let expected = DrafterConfig::Mtp(head.settings()).meaning();
    let differing = found
        .iter()
        .zip(&expected)
        .find(|(found, expected)| found != expected);
    match differing {
        None => Ok(()),
        Some((found, expected)) => Err(ExportError::NotExpressible {
            format: NAME,
            reason: format!(
                "`{}` is {}, but the target's head is read with {}",
                found.key, found.value, expected.value
            ),
        }),
    }
}

fn warnings(source: &Source<'_>) -> Vec<String> {
    let vocab = &source.card.vocab;
    let mut warnings = vec![
        "weight files without a tensor of the head are links to those of the target where the disk allows it: \
         do not write into them"
            .to_owned(),
    ];
    if !vocab.is_full() {
        warnings.push(format!(
            "engines draft with the target's whole head, but this one was trained to choose among {} of its {} \
             tokens",
            vocab.len(),
            vocab.target_vocab()
        ));
    }
    warnings
}
