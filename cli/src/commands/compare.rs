//! `draftsmith compare`: two run folders, or two proposers of one, on the same prompts.

use std::path::{Path, PathBuf};

use draftsmith_eval::compare::{Side, compare as compare_sides, differing_settings};
use draftsmith_eval::report::Report;
use draftsmith_eval::table;

use crate::console::Console;

/// Prints tau of both sides with the paired interval of their difference.
pub(crate) fn compare(first: &str, second: &str, console: &Console) -> anyhow::Result<()> {
    let (first, second) = (Named::read(first)?, Named::read(second)?);
    let comparisons = compare_sides(first.side(), second.side())?;
    for difference in differing_settings(&first.report, &second.report) {
        console.warn(&format!(
            "the reports were not measured alike: {difference}"
        ));
    }
    console.value(&comparisons, || table::render_comparisons(&comparisons))
}

/// A report with the proposer that was asked for.
struct Named {
    report: Report,
    proposer: Option<String>,
}

impl Named {
    /// Reads `FOLDER`, `FOLDER:PROPOSER`, or the report file itself in place of the folder.
    fn read(argument: &str) -> anyhow::Result<Self> {
        let (path, proposer) = match argument.rsplit_once(':') {
            Some((path, proposer)) if !Path::new(argument).exists() => {
                (path, Some(proposer.to_owned()))
            }
            _ => (argument, None),
        };
        let mut path = PathBuf::from(path);
        if path.is_dir() {
            path = path.join("eval").join("report.json");
        }
        Ok(Self {
            report: Report::read(&path)?,
            proposer,
        })
    }

    fn side(&self) -> Side<'_> {
        Side {
            report: &self.report,
            proposer: self.proposer.as_deref(),
        }
    }
}
