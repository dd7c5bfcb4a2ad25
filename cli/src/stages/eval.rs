//! `eval`: trained drafters and the baselines, by real decoding.

use std::path::{Path, PathBuf};

use draftsmith_data::tokenizer::ChatTokenizer;
use draftsmith_eval::OneOrMore;
use draftsmith_eval::calibration::{self, Calibration};
use draftsmith_eval::config::EvalConfig;
use draftsmith_eval::error::EvalError;
use draftsmith_eval::exact::ExactReport;
use draftsmith_eval::html;
use draftsmith_eval::parts::Parts;
use draftsmith_eval::picture;
use draftsmith_eval::propose::UNTRAINED;
use draftsmith_eval::report::{
    DrafterRecord, Entry, ExactEntry, FORMAT_VERSION, Report, TargetRecord,
};
use draftsmith_eval::roofline::{Device, Load, Measured, Prediction, predict};
use draftsmith_eval::suite::{NamedDrafter, SuiteRun, run};
use draftsmith_models::checkpoint::{self, DrafterCard};
use draftsmith_models::drafter::{AnyDrafter, DrafterContext};
use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::fingerprint::target_fingerprint;
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;
use draftsmith_trainer::log;
use draftsmith_trainer::log::tensorboard::TensorBoard;

use super::parts::{ExactValidator, MeasuredText};
use super::suites;
use crate::errors::CliError;
use crate::progress::Progress;
use crate::session::Session;
use crate::stage::{Inputs, Stage, hash_section};

/// Bootstrap resamples of the exact evaluation.
const RESAMPLES: usize = 1000;

/// The stage.
#[derive(Debug)]
pub(crate) struct Eval;

impl Stage for Eval {
    fn name(&self) -> &'static str {
        "eval"
    }

    fn needs(&self) -> &'static [&'static dyn Stage] {
        &[&super::train::Train]
    }

    fn inputs(&self, session: &Session) -> anyhow::Result<Inputs> {
        let config = &session.run_file().eval;
        let mut inputs = Inputs::from([("[eval]".to_owned(), hash_section(config)?)]);
        for suite in &config.suites {
            super::hash_file(&suite.file, &mut inputs)?;
        }
        super::insert_target(session, &mut inputs)?;
        if let Some(path) = &config.device_file {
            super::hash_file(path, &mut inputs)?;
        }
        if let Some(folder) = &config.draft_model {
            inputs.insert("eval.draft_model".to_owned(), target_fingerprint(folder)?);
        }
        for drafter in &session.run_file().drafter.0 {
            if super::train::has_checkpoints(session, drafter) {
                let folder = super::train::chosen_checkpoint(session, drafter)?;
                let path = folder.join(calibration::FILE);
                if config.calibrated && path.exists() {
                    super::hash_file(&path, &mut inputs)?;
                }
            }
        }
        // Speeds belong to a device.
        let device = session.run_file().run.device.to_string();
        inputs.insert("run.device".to_owned(), device);
        Ok(inputs)
    }

    fn outputs(&self, session: &Session) -> anyhow::Result<Vec<PathBuf>> {
        Ok(vec![report_path(session), page_path(session)])
    }

    fn execute(&self, session: &Session) -> anyhow::Result<()> {
        let loaded = load_drafters(session)?;
        let drafters: Vec<NamedDrafter<'_>> = loaded.iter().map(Loaded::named).collect();
        let stop_ids = super::stop_ids(session)?;
        let draft_model = draft_model(session)?;
        let suites = suites::all(session, &session.run_file().eval)?;
        let input = SuiteRun {
            target: session.target()?,
            stop_ids: &stop_ids,
            suites: &suites,
            drafters: &drafters,
            draft_model: draft_model.as_ref(),
            config: &session.run_file().eval,
        };
        let parts = parts(self, session, &loaded, &input)?;
        let devices = devices(session)?;
        let entries = measure(session, &input, &parts)?;
        let exact = exact_entries(session, &loaded)?;
        let report = Report {
            format_version: FORMAT_VERSION,
            generator: format!("draftsmith {}", env!("CARGO_PKG_VERSION")),
            device: session.run_file().run.device.to_string(),
            target: target_record(session, &stop_ids)?,
            template: super::template(session)?,
            settings: session.run_file().eval.clone(),
            drafters: loaded.iter().map(Loaded::record).collect(),
            entries,
            predictions: predictions(session, &loaded, &exact, &devices),
            exact,
        };
        report.write(&report_path(session))?;
        file::write_atomic(&page_path(session), html::render(&report).as_bytes())?;
        add_to_tensorboard(session, &loaded, &report.entries);
        parts.remove()?;
        Ok(())
    }
}

/// Finished decodes of an evaluation with the same inputs and drafters that did not end.
fn parts(
    stage: &Eval,
    session: &Session,
    loaded: &[Loaded],
    run: &SuiteRun<'_>,
) -> anyhow::Result<Parts> {
    let drafters: Vec<DrafterRecord> = loaded.iter().map(Loaded::record).collect();
    let prompts: Vec<(&str, &[u32])> = run
        .suites
        .iter()
        .flat_map(|suite| &suite.prompts)
        .map(|prompt| (prompt.id.as_str(), prompt.prompt.as_slice()))
        .collect();
    let version = env!("CARGO_PKG_VERSION");
    let inputs = (
        stage.inputs(session)?,
        drafters,
        prompts,
        run.stop_ids,
        version,
    );
    let inputs = serde_json::to_vec(&inputs)?;
    let folder = session.folder().join("eval").join("parts");
    Ok(Parts::open(
        &folder,
        blake3::hash(&inputs).to_hex().as_str(),
    )?)
}

/// Adds tau and acceptance of each trained drafter to its event files, at the step of its checkpoint.
fn add_to_tensorboard(session: &Session, loaded: &[Loaded], entries: &[Entry]) {
    if !session.run_file().log.tensorboard {
        return;
    }
    for one in loaded.iter().filter(|one| one.card.step > 0) {
        let root = session.folder().join(&one.name).join(log::EVENTS);
        let mut events = TensorBoard::open(&root);
        // tau does not depend on the batch.
        let first = session.run_file().eval.batch_rows.iter().next();
        let is_own =
            |entry: &&Entry| entry.proposer == one.name && Some(&entry.batch_rows) == first;
        let own: Vec<&Entry> = entries.iter().filter(is_own).collect();
        let picture = picture::acceptance(&own);
        let (tag, step) = ("eval/acceptance_by_depth", one.card.step);
        events.picture(tag, picture.bytes(), picture::SIDE, step);
        for entry in own {
            let setting = format!(
                "{}/temperature_{}/{}/gamma_{}",
                entry.suite, entry.temperature, entry.rule, entry.gamma
            );
            events.scalar(&format!("eval/tau/{setting}"), entry.tau, one.card.step);
            let known = entry.acceptance_by_depth.iter().enumerate();
            for (depth, share) in known.filter_map(|(depth, share)| Some((depth, (*share)?))) {
                let tag = format!("eval/acceptance/{setting}/depth_{depth}");
                events.scalar(&tag, share, one.card.step);
            }
        }
        events.flush();
        if let Some(warning) = events.take_warning() {
            session.console().warn(&warning);
        }
    }
}

/// The devices of the settings.
fn devices(session: &Session) -> anyhow::Result<Vec<Device>> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct DeviceFile {
        device: Vec<Device>,
    }
    let config = &session.run_file().eval;
    let own = match &config.device_file {
        None => Vec::new(),
        Some(path) => {
            let parsed = toml::from_str::<DeviceFile>(&file::read_text(path)?);
            let parsed = parsed.map_err(|e| ModelError::malformed(path, "device file", e))?;
            parsed.device
        }
    };
    let found = config.devices.iter().map(|name| {
        let device = Device::find(name, &own)?;
        device.validate()?;
        Ok(device)
    });
    found.collect()
}

/// What each drafter is worth on each device, by its first exact evaluation.
fn predictions(
    session: &Session,
    loaded: &[Loaded],
    exact: &[ExactEntry],
    devices: &[Device],
) -> Vec<Prediction> {
    let config = &session.run_file().eval;
    let load = Load {
        batch: config.predicted_batch as f64,
        context: config.predicted_context as f64,
    };
    let mut predictions = Vec::new();
    for one in loaded {
        let Some(entry) = exact.iter().find(|entry| entry.drafter == one.name) else {
            continue;
        };
        let measured = Measured {
            name: &one.name,
            drafter: &one.drafter,
            report: &entry.report,
        };
        let on = |device| predict(measured, session.spec(), device, load);
        predictions.extend(devices.iter().map(on));
    }
    predictions
}

/// The model of the baseline `model`, if it is measured; its tokens must be the target's.
fn draft_model(session: &Session) -> anyhow::Result<Option<TargetModel>> {
    let Some(folder) = &session.run_file().eval.draft_model else {
        return Ok(None);
    };
    refuse_other_tokenizer(session, folder)?;
    Ok(Some(session.load_model(folder)?))
}

fn refuse_other_tokenizer(session: &Session, folder: &Path) -> anyhow::Result<()> {
    let tokenizer = super::tokenizer(session)?;
    let own = ChatTokenizer::load(folder)?;
    if let Some((id, expected, found)) = tokenizer.first_difference(&own) {
        return Err(CliError::usage(
            format!(
                "`eval.draft_model`: token {id} of `{}` is `{found}`, the target's is `{expected}`",
                folder.display()
            ),
            "a draft model must have the target's tokenizer; smaller models of the same series do",
        )
        .into());
    }
    Ok(())
}

/// Decodes the suites under other settings and without a report: with the trained drafters, or with fresh ones where none
/// was trained yet.
pub(crate) fn decode_unreported(
    session: &Session,
    config: &EvalConfig,
) -> anyhow::Result<Vec<Entry>> {
    let vocab = VocabMap::full(session.spec().vocab_size);
    let mut fresh = Vec::new();
    let mut trained = Vec::new();
    for run in &session.run_file().drafter.0 {
        if super::train::has_checkpoints(session, run) {
            let folder = super::train::chosen_checkpoint(session, run)?;
            trained.push(load_calibrated(session, run.family().to_owned(), folder)?);
            continue;
        }
        let context = DrafterContext {
            target: session.spec(),
            ends: session.target()?.ends(),
            vocab: &vocab,
        };
        let drafter = AnyDrafter::init(&run.config, context, 0, session.device())?;
        fresh.push((format!("{} {UNTRAINED}", run.family()), drafter));
    }
    let mut drafters: Vec<NamedDrafter<'_>> = trained.iter().map(Loaded::named).collect();
    drafters.extend(fresh.iter().map(|(name, drafter)| NamedDrafter {
        name: name.clone(),
        drafter,
        vocab: &vocab,
        calibration: None,
    }));
    let input = SuiteRun {
        target: session.target()?,
        stop_ids: &super::stop_ids(session)?,
        suites: &suites::all(session, config)?,
        drafters: &drafters,
        draft_model: None,
        config,
    };
    measure(session, &input, &Parts::none())
}

/// Decodes everything, with progress in sequences.
fn measure(session: &Session, input: &SuiteRun<'_>, parts: &Parts) -> anyhow::Result<Vec<Entry>> {
    let total = input.num_sequences()? as u64;
    let progress = Progress::new(session.console(), "eval", Some(total), "sequences");
    let entries = run(input, parts, &mut |at| {
        let note = format!(
            "{} of {}: {} at T={} on {}",
            at.decodes_done + 1,
            at.decodes,
            at.proposer,
            at.temperature,
            at.suite
        );
        // Decodes that were kept from an earlier start are none of this one's.
        progress.begin(at.sequences_done as u64);
        progress.set_with((at.sequences_done + at.decode.finished) as u64, &note);
        !session.interrupt().is_asked()
    });
    let entries = entries.map_err(|error| interrupted(error, session))?;
    progress.finish(total);
    Ok(entries)
}

/// The trained drafters on the validation rows, by the exact evaluator.
fn exact_entries(session: &Session, loaded: &[Loaded]) -> anyhow::Result<Vec<ExactEntry>> {
    let dataset = super::dataset(session)?;
    let rules = &session.run_file().eval.rule;
    let mut entries = Vec::new();
    for drafter in &session.run_file().drafter.0 {
        let trained = loaded.iter().find(|one| one.name == drafter.family());
        let texts = super::validation_texts(session, drafter, &dataset);
        let Some(trained) = trained.filter(|_| !texts.is_empty()) else {
            continue;
        };
        let Some(validator) = ExactValidator::new(session, drafter, texts, &trained.card)? else {
            continue;
        };
        for text in validator.texts() {
            let reports = exact_reports(&validator, text, rules, trained)?;
            entries.extend(reports.into_iter().map(|report| ExactEntry {
                drafter: trained.name.clone(),
                text: "validation".to_owned(),
                report,
            }));
        }
    }
    Ok(entries)
}

/// One report for each rule that measures a text by itself: greedy text has one, and `block` is bounded by `sampling`.
fn exact_reports(
    validator: &ExactValidator<'_>,
    text: &MeasuredText,
    rules: &OneOrMore<String>,
    trained: &Loaded,
) -> anyhow::Result<Vec<ExactReport>> {
    let mut reports: Vec<ExactReport> = Vec::new();
    for rule in rules {
        let calibration = trained.calibration.as_ref();
        let report = validator.report_of(text, rule, &trained.drafter, calibration, RESAMPLES)?;
        if reports.iter().all(|earlier| earlier.rule != report.rule) {
            reports.push(report);
        }
    }
    Ok(reports)
}

/// `eval/report.json` of the run folder.
pub(crate) fn report_path(session: &Session) -> PathBuf {
    session.folder().join("eval").join("report.json")
}

/// `eval/report.html` of the run folder: the same as plots.
pub(crate) fn page_path(session: &Session) -> PathBuf {
    session.folder().join("eval").join("report.html")
}

fn interrupted(error: EvalError, session: &Session) -> anyhow::Error {
    if session.interrupt().is_asked() {
        let typed = session.typed();
        return CliError::Interrupted(format!(
            "finished decodes are kept; `draftsmith eval {typed}` goes on behind them"
        ))
        .into();
    }
    error.into()
}

/// A drafter with its name in the report.
pub(crate) struct Loaded {
    name: String,
    pub(crate) drafter: AnyDrafter,
    pub(crate) card: DrafterCard,
    /// As it was last calibrated, unless the settings leave that out.
    calibration: Option<Calibration>,
}

impl Loaded {
    fn named(&self) -> NamedDrafter<'_> {
        NamedDrafter {
            name: self.name.clone(),
            drafter: &self.drafter,
            vocab: &self.card.vocab,
            calibration: self.calibration.as_ref(),
        }
    }

    fn record(&self) -> DrafterRecord {
        DrafterRecord {
            name: self.name.clone(),
            family: self.drafter.family().to_owned(),
            step: self.card.step,
            draft_vocab: self.card.vocab.len(),
            weights_blake3: self.card.weights_blake3.clone(),
            calibration: self.calibration.clone(),
        }
    }
}

fn load_drafters(session: &Session) -> anyhow::Result<Vec<Loaded>> {
    let mut loaded = Vec::new();
    for drafter in &session.run_file().drafter.0 {
        let family = drafter.family().to_owned();
        let trained = super::train::chosen_checkpoint(session, drafter)?;
        loaded.push(load_calibrated(session, family.clone(), trained)?);
        if session.run_file().eval.has_baseline(UNTRAINED) {
            let untrained = super::train::untrained_folder(session, drafter);
            loaded.push(load(session, format!("{family} {UNTRAINED}"), untrained)?);
        }
    }
    Ok(loaded)
}

/// The checkpoint in `folder`, which must belong to the target of the run file.
pub(crate) fn load(session: &Session, name: String, folder: PathBuf) -> anyhow::Result<Loaded> {
    let ends = session.target()?.ends();
    let (drafter, card) = checkpoint::load(&folder, ends, session.device())?;
    let expected = session.target_fingerprint()?;
    if card.target_fingerprint != expected {
        return Err(CliError::usage(
            format!(
                "`{}` was trained on another target: fingerprint {}, expected {expected}",
                folder.display(),
                card.target_fingerprint
            ),
            "set `target.path` to the target it belongs to, or train again with `--out`",
        )
        .into());
    }
    Ok(Loaded {
        name,
        drafter,
        card,
        calibration: None,
    })
}

/// [`load`], with the calibration that lies beside the weights, unless the settings leave that out.
fn load_calibrated(session: &Session, name: String, folder: PathBuf) -> anyhow::Result<Loaded> {
    let mut loaded = load(session, name, folder.clone())?;
    if session.run_file().eval.calibrated {
        loaded.calibration = Calibration::read(&folder)?;
    }
    if let Some(calibration) = &loaded.calibration {
        warn_of_other_sampling(session, &loaded.name, calibration);
    }
    Ok(loaded)
}

/// Says where drafts are drawn as was best under other conditions.
fn warn_of_other_sampling(session: &Session, name: &str, calibration: &Calibration) {
    let config = &session.run_file().eval;
    let sampled = config.temperatures.iter().filter(|t| **t > 0.0);
    let others: Vec<String> = sampled
        .filter(|t| config.sampling(**t) != calibration.sampling)
        .map(ToString::to_string)
        .collect();
    if !others.is_empty() {
        session.console().warn(&format!(
            "`{name}` was calibrated on text at temperature {}, its drafts are drawn so at {} too; \
             `eval.calibrated = false` draws them as the target's tokens are",
            calibration.sampling.temperature,
            others.join(", ")
        ));
    }
}

/// Refuses what would stop the evaluation: unknown devices, a draft model of another tokenizer, missing prompt files, no
/// prompt at all.
pub(crate) fn refuse_unusable(session: &Session) -> anyhow::Result<()> {
    devices(session)?;
    if let Some(folder) = &session.run_file().eval.draft_model {
        refuse_other_tokenizer(session, folder)?;
    }
    let suites = &session.run_file().eval.suites;
    if suites.is_empty() && session.run_file().data.validation_fraction == 0.0 {
        return Err(suites::nothing_to_decode(
            "no row is set aside for validation",
        ));
    }
    match suites.iter().find(|suite| !suite.file.is_file()) {
        None => Ok(()),
        Some(suite) => Err(CliError::usage(
            format!(
                "suite `{}`: there is no file `{}`",
                suite.name,
                suite.file.display()
            ),
            "paths are relative to the folder the program is started in; see `[eval] suites`",
        )
        .into()),
    }
}

fn target_record(session: &Session, stop_ids: &[u32]) -> anyhow::Result<TargetRecord> {
    let spec = session.spec();
    Ok(TargetRecord {
        fingerprint: session.target_fingerprint()?.to_owned(),
        model_type: spec.model_type.clone(),
        dtype: session.run_file().target.dtype.name().to_owned(),
        num_layers: spec.num_layers,
        hidden_size: spec.hidden_size,
        vocab_size: spec.vocab_size,
        stop_ids: stop_ids.to_vec(),
    })
}
