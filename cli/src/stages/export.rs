//! `export`: the best checkpoint of each drafter in the layouts that engines load.

use std::path::PathBuf;

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
        let section = hash_section(&session.run_file().export)?;
        Ok(Inputs::from([("[export]".to_owned(), section)]))
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
            let reports = export_all(&checkpoint, &run_file.target.path, &out, &run_file.export)?;
            for report in &reports {
                describe(report, session);
            }
        }
        Ok(())
    }
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
