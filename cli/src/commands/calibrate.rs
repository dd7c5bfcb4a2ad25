//! `draftsmith calibrate`: at which temperature and cut drafts are drawn, chosen on validation text.

use std::fmt::Write as _;
use std::path::Path;

use draftsmith_data::dataset::Dataset;
use draftsmith_eval::calibration::Calibration;
use draftsmith_eval::error::EvalError;
use draftsmith_models::drafter::AnyDrafter;
use serde::Serialize;

use crate::errors::CliError;
use crate::run_file::DrafterRun;
use crate::session::Session;
use crate::stage::refuse_stale;
use crate::stages::parts::ExactValidator;
use crate::stages::train::{self, Train};
use crate::stages::{dataset, eval, validation_texts};

/// What was found for one drafter.
#[derive(Debug, Serialize)]
struct Calibrated {
    drafter: String,
    checkpoint: String,
    /// Exact tau on the same text, with drafts drawn as the target's tokens are.
    tau_before: f64,
    /// The same with drafts drawn as calibrated.
    tau: f64,
    /// The same with the shared temperature alone, as exported drafters draw.
    tau_shared: f64,
    calibration: Calibration,
}

/// Calibrates the chosen checkpoint of every drafter and writes the result beside its weights, where it is one.
pub(super) fn calibrate(session: &Session) -> anyhow::Result<()> {
    refuse_stale(&Train, "calibrate", session)?;
    let dataset = dataset(session)?;
    let runs = session.run_file().drafter.0.iter();
    let found = runs.map(|run| calibrate_drafter(session, run, &dataset));
    let found = found.collect::<anyhow::Result<Vec<Calibrated>>>()?;
    let lines = || found.iter().map(render).collect::<Vec<String>>().join("\n");
    session.console().value(&found, lines)
}

fn calibrate_drafter(
    session: &Session,
    run: &DrafterRun,
    dataset: &Dataset,
) -> anyhow::Result<Calibrated> {
    let folder = train::chosen_checkpoint(session, run)?;
    let name = run.family().to_owned();
    let loaded = eval::load(session, name.clone(), folder.clone())?;
    let texts = validation_texts(session, run, dataset);
    let validator = ExactValidator::new(session, run, texts, &loaded.card)?;
    let validator = validator.ok_or_else(|| {
        CliError::usage(
            "no validation row was set aside, and there is no other text to calibrate on",
            "set `data.validation_fraction`",
        )
    })?;
    session.console().say(&format!(
        "calibrate {name}: {} rows",
        validator.drawn_text().num_rows()
    ));
    let found = search(session, &validator, &loaded.drafter, name, &folder)?;
    if found.tau > found.tau_before {
        found.calibration.write(&folder)?;
    } else {
        Calibration::remove(&folder)?;
    }
    Ok(found)
}

fn search(
    session: &Session,
    validator: &ExactValidator<'_>,
    drafter: &AnyDrafter,
    name: String,
    folder: &Path,
) -> anyhow::Result<Calibrated> {
    let goes_on = || !session.interrupt().is_asked();
    let text = validator.drawn_text();
    let mut calibration = match validator.calibrate(text, drafter, goes_on) {
        Err(EvalError::Interrupted) => {
            let kept = format!("nothing is written for `{name}`");
            return Err(CliError::Interrupted(kept).into());
        }
        found => found?,
    };
    let tau = |calibration: Option<&Calibration>| {
        let report = validator.report_of(text, "sampling", drafter, calibration, 0);
        report.map(|report| report.tau())
    };
    let tau_before = tau(None)?;
    let mut tau_shared = tau(Some(&calibration.shared()))?;
    if tau_shared <= tau_before {
        (calibration.shared_temperature, tau_shared) = (None, tau_before);
    }
    // Depths are chosen one by one, for the rounds of uncalibrated drafts: together they might gain less.
    let mut tau_by_depth = tau(Some(&calibration))?;
    if tau_by_depth < tau_shared {
        (calibration, tau_by_depth) = (calibration.shared(), tau_shared);
    }
    Ok(Calibrated {
        drafter: name,
        checkpoint: folder.display().to_string(),
        tau_before,
        tau: tau_by_depth,
        tau_shared,
        calibration,
    })
}

fn render(found: &Calibrated) -> String {
    let verdict = if found.tau > found.tau_before {
        ""
    } else {
        "; no gain: its drafts are drawn as the target's tokens are, whatever was found before"
    };
    let mut text = format!(
        "{}: exact tau {:.3}, before {:.3} (the same text, at temperature {}){verdict}\n",
        found.drafter, found.tau, found.tau_before, found.calibration.sampling.temperature
    );
    text.push_str("  depth  temperature  cut   overlap  before\n");
    for (depth, entry) in found.calibration.depths.iter().enumerate() {
        let _ = writeln!(
            text,
            "  {depth:>5}  {:>11}  {:<4}  {:>7.4}  {:.4}",
            entry.temperature, entry.cut, entry.overlap, entry.overlap_before
        );
    }
    if let Some(temperature) = found.calibration.shared_temperature {
        let _ = writeln!(
            text,
            "  one temperature for all depths, as `export` writes it: {temperature} (exact tau {:.3})",
            found.tau_shared
        );
    }
    text
}
