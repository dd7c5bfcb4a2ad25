//! `draftsmith run`: every stage in order, then the figures.

use std::time::Instant;

use draftsmith_eval::report::Report;
use draftsmith_eval::table;

use crate::session::Session;
use crate::stage::{self, Freshness};
use crate::stages::{self, STAGES};

/// Runs every stage that is missing or stale and prints the report.
pub(crate) fn run(session: &Session) -> anyhow::Result<()> {
    let started = Instant::now();
    refuse_unusable(session)?;
    for stage in STAGES {
        stage::run_if_stale(*stage, session)?;
        session.interrupt().check("finished stages stay valid")?;
    }
    print_report(session)?;
    if !session.console().is_json() {
        print_ends(session, started);
    }
    Ok(())
}

/// Finds what would stop a later stage before the first one writes anything, unless nothing is left
/// to do.
fn refuse_unusable(session: &Session) -> anyhow::Result<()> {
    for stage in STAGES {
        if stage::freshness(*stage, session)? != Freshness::Fresh {
            stages::tokenizer(session)?;
            session.target()?;
            stages::train::refuse_unfit_drafters(session)?;
            stages::capture::refuse_states_of_another_target(session)?;
            return stages::eval::refuse_unusable(session);
        }
    }
    Ok(())
}

/// Prints the report of the run folder as a table or as JSON.
pub(crate) fn print_report(session: &Session) -> anyhow::Result<()> {
    let report = Report::read(&stages::eval::report_path(session))?;
    session
        .console()
        .value(&report, || table::render(&report).trim_end().to_owned())
}

fn print_ends(session: &Session, started: Instant) {
    let console = session.console();
    for folder in stages::export::folders(session) {
        console.result(&format!("export: {}", folder.display()));
    }
    console.result(&format!(
        "report: {} (plots: {})",
        stages::eval::report_path(session).display(),
        stages::eval::page_path(session).display()
    ));
    console.result(&format!(
        "wall time: {:.1} s",
        started.elapsed().as_secs_f64()
    ));
}
