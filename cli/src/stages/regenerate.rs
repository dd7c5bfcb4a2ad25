//! `regenerate`: the target answers the prompts, and its answers become the rows to train on.

use std::path::{Path, PathBuf};

use draftsmith_data::inspect;
use draftsmith_data::prepare::{DataConfig, Texts, ValidationFile, prepare};
use draftsmith_data::prompts::{self, Prompt, PromptSettings, Prompts};
use draftsmith_data::regenerate::{Answerer, RegenerateConfig, regenerate};
use draftsmith_data::source::Roles;
use draftsmith_models::sample::Sampling;

use crate::errors::CliError;
use crate::progress::Progress;
use crate::session::Session;
use crate::stage::{Inputs, Stage, hash_section};

/// The stage.
#[derive(Debug)]
pub(crate) struct Regenerate;

impl Stage for Regenerate {
    fn name(&self) -> &'static str {
        "regenerate"
    }

    fn needs(&self) -> &'static [&'static dyn Stage] {
        &[&super::prepare::Prepare]
    }

    fn inputs(&self, session: &Session) -> anyhow::Result<Inputs> {
        let run_file = session.run_file();
        let section = hash_section(&run_file.regenerate)?;
        let mut inputs = Inputs::from([("[regenerate]".to_owned(), section)]);
        if run_file.regenerate.is_some() {
            super::insert_target(session, &mut inputs)?;
        }
        Ok(inputs)
    }

    fn outputs(&self, session: &Session) -> anyhow::Result<Vec<PathBuf>> {
        if session.run_file().regenerate.is_none() {
            return Ok(Vec::new());
        }
        Ok(vec![answers_path(session), super::dataset_folder(session)])
    }

    fn execute(&self, session: &Session) -> anyhow::Result<()> {
        let Some(settings) = &session.run_file().regenerate else {
            session
                .console()
                .detail("regenerate: no `[regenerate]`, the answers of the data are used");
            return Ok(());
        };
        let texts = answer_all(session, settings)?;
        let config = DataConfig {
            files: vec![answers_path(session)],
            ids_files: Vec::new(),
            max_rows: None,
            ..session.run_file().data.clone()
        };
        let tokenizer = super::tokenizer(session)?;
        let folder = super::dataset_folder(session);
        let dataset = prepare(&config, &texts, &tokenizer, &folder)?;
        session
            .console()
            .say(inspect::render_counts(&dataset).trim_end());
        Ok(())
    }
}

fn answers_path(session: &Session) -> PathBuf {
    session.folder().join("data").join("answers.jsonl")
}

/// Answers of a text that only measures.
fn validation_path(session: &Session, sampling: &Sampling) -> PathBuf {
    let name = format!("answers-{}.jsonl", sampling.label());
    session.folder().join("data").join(name)
}

/// Reads the prompts, so that mistakes in them show before anything is written.
///
/// # Errors
/// A damaged line, or no prompt left.
pub(super) fn check_prompts(session: &Session, settings: &RegenerateConfig) -> anyhow::Result<()> {
    let read = read_prompts(session, settings)?;
    session.console().say(&format!(
        "prepare: {} prompts of {} rows{}",
        read.counts.kept,
        read.counts.read,
        if read.counts.kept < read.counts.read {
            format!(", dropped: {}", read.counts.reasons())
        } else {
            String::new()
        }
    ));
    Ok(())
}

fn read_prompts(session: &Session, settings: &RegenerateConfig) -> anyhow::Result<Prompts> {
    let config = &session.run_file().data;
    let roles = Roles::new(&config.roles)?;
    let longest = config.max_len.min(session.spec().max_position_embeddings);
    let prompt_settings = PromptSettings {
        roles: &roles,
        options: &config.template_options,
        limit: config.max_rows,
        max_len: longest.saturating_sub(settings.max_new_tokens),
    };
    let tokenizer = super::tokenizer(session)?;
    let read = prompts::read(&config.files, &tokenizer, &prompt_settings)?;
    if read.prompts.is_empty() {
        return Err(CliError::usage(
            format!(
                "`data.files` holds no usable prompt: {} rows read, none kept{}",
                read.counts.read,
                if read.counts.read > 0 {
                    format!(" ({})", read.counts.reasons())
                } else {
                    String::new()
                }
            ),
            "each line is one JSON object with `conversations` that holds a user turn",
        )
        .into());
    }
    Ok(read)
}

/// Answers all prompts as the training text wants them, then those set aside once more for each validation text.
fn answer_all(session: &Session, settings: &RegenerateConfig) -> anyhow::Result<Texts> {
    let mut prompts = read_prompts(session, settings)?.prompts;
    let training = settings.of_text(settings.sampling);
    answer(
        session,
        "regenerate",
        &prompts,
        &training,
        &answers_path(session),
    )?;
    let mut texts = Texts {
        training: Some(settings.sampling),
        ..Texts::default()
    };
    prompts.retain(|prompt| super::is_set_aside(session, &prompt.key));
    if prompts.is_empty() {
        return Ok(texts);
    }
    for &sampling in &settings.validation_sampling {
        let path = validation_path(session, &sampling);
        let label = format!("regenerate {}", sampling.label());
        answer(
            session,
            &label,
            &prompts,
            &settings.of_text(sampling),
            &path,
        )?;
        texts.validation.push(ValidationFile { sampling, path });
    }
    Ok(texts)
}

fn answer(
    session: &Session,
    label: &str,
    prompts: &[Prompt],
    settings: &RegenerateConfig,
    out: &Path,
) -> anyhow::Result<()> {
    let tokenizer = super::tokenizer(session)?;
    let answerer = Answerer {
        target: session.target()?,
        fingerprint: session.target_fingerprint()?,
        tokenizer: &tokenizer,
    };
    let total = Some(prompts.len() as u64);
    let progress = Progress::new(session.console(), label, total, "prompts");
    let report = regenerate(answerer, prompts, settings, out, &mut |at| {
        let note = format!("{} tokens", at.new_tokens);
        progress.set_with(at.done_rows as u64, &note);
        !session.interrupt().is_asked()
    })?;
    progress.finish_as(report.new_tokens, "tokens");
    if !report.is_complete {
        let typed = session.typed();
        session.interrupt().check(&format!(
            "finished answers stay; `draftsmith regenerate {typed}` continues"
        ))?;
    }
    Ok(())
}
