//! `export`: the best checkpoint of each drafter in the layouts that engines load.

use std::path::{Path, PathBuf};

use draftsmith_eval::calibration::Calibration;
use draftsmith_export::{ExportReport, export_all, formats_for};

use crate::run_file::DrafterRun;
use crate::session::Session;
use crate::stage::{Inputs, Stage, hash_section};

/// The stage.
#[derive(Debug)]
pub(crate) struct Export;

impl Stage for Export {
    fn name(&self) -> &'static str {
        "export"
    }

    fn needs(&self) -> &'static [&'static dyn Stage] {
        &[&super::train::Train]
    }

    fn inputs(&self, session: &Session) -> anyhow::Result<Inputs> {
        let run_file = session.run_file();
        let section = hash_section(&run_file.export)?;
        let mut inputs = Inputs::from([("[export]".to_owned(), section)]);
        for drafter in &run_file.drafter.0 {
            if super::train::has_checkpoints(session, drafter) {
                let checkpoint = super::train::chosen_checkpoint(session, drafter)?;
                let temperature = draft_temperature(session, &checkpoint)?;
                let key = format!("temperature of `{}`", drafter.family());
                inputs.insert(key, serde_json::to_string(&temperature)?);
            }
        }
        Ok(inputs)
    }

    fn outputs(&self, session: &Session) -> anyhow::Result<Vec<PathBuf>> {
        Ok(folders(session))
    }

    fn execute(&self, session: &Session) -> anyhow::Result<()> {
        let run_file = session.run_file();
        for drafter in &run_file.drafter.0 {
            let checkpoint = super::train::chosen_checkpoint(session, drafter)?;
            let out = session.drafter_folder(drafter).join("export");
            describe_missing(session, drafter);
            let temperature = draft_temperature(session, &checkpoint)?;
            let reports = export_all(
                &checkpoint,
                &run_file.target.path,
                &out,
                &run_file.export,
                temperature,
            )?;
            for report in &reports {
                describe(report, session);
            }
            let left_out = reports
                .iter()
                .any(|report| report.draft_temperature.is_none());
            if let (true, Some(temperature)) = (left_out, temperature) {
                session.console().warn(&format!(
                    "`{}` drafts best at {temperature} times the target's temperature, but no layout of it can hold that",
                    drafter.family()
                ));
            }
        }
        Ok(())
    }
}

/// What the logits of a checkpoint are divided by: the temperature it was calibrated to, unless the settings leave that out.
fn draft_temperature(session: &Session, checkpoint: &Path) -> anyhow::Result<Option<f64>> {
    if !session.run_file().export.calibrated {
        return Ok(None);
    }
    Ok(Calibration::read(checkpoint)?.and_then(|found| found.shared_temperature))
}

/// Folders of all exports of a run.
pub(crate) fn folders(session: &Session) -> Vec<PathBuf> {
    let run_file = session.run_file();
    let drafters = run_file.drafter.0.iter();
    drafters
        .flat_map(|drafter| {
            let root = session.drafter_folder(drafter).join("export");
            let formats = formats_for(&run_file.export.formats, &drafter.config);
            formats.into_iter().map(move |format| root.join(format))
        })
        .collect()
}

/// Says which of the wanted layouts have no place for a drafter.
fn describe_missing(session: &Session, drafter: &DrafterRun) {
    let wanted = &session.run_file().export.formats;
    let held = formats_for(wanted, &drafter.config);
    for format in wanted
        .iter()
        .filter(|format| !held.contains(&format.as_str()))
    {
        let family = drafter.family();
        session.console().say(&format!(
            "export: the layout `{format}` has no place for `{family}` and is left out"
        ));
    }
}

fn describe(report: &ExportReport, session: &Session) {
    let console = session.console();
    console.say(&format!(
        "export: `{}` holds {} tensors in the layout `{}`",
        report.folder.display(),
        report.tensors.len(),
        report.format
    ));
    if let Some(temperature) = report.draft_temperature {
        console.say(&format!(
            "export: its logits are divided by {temperature}, the draft temperature that `calibrate` found"
        ));
    }
    for tensor in &report.tensors {
        console.detail(&format!(
            "  {} {:?} {}",
            tensor.name, tensor.shape, tensor.dtype
        ));
    }
    for warning in &report.warnings {
        console.warn(warning);
    }
}
