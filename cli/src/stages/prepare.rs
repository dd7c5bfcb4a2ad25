//! `prepare`: input files to token rows, or a first look at the prompts of a run that regenerates.

use std::path::PathBuf;

use draftsmith_data::dataset;
use draftsmith_data::inspect;
use draftsmith_data::prepare::{Texts, prepare};
use draftsmith_models::sample::Sampling;

use crate::session::Session;
use crate::stage::{Inputs, Stage, hash_section};

/// The stage.
#[derive(Debug)]
pub(crate) struct Prepare;

impl Stage for Prepare {
    fn name(&self) -> &'static str {
        "prepare"
    }

    fn needs(&self) -> &'static [&'static dyn Stage] {
        &[]
    }

    fn inputs(&self, session: &Session) -> anyhow::Result<Inputs> {
        let config = &session.run_file().data;
        let mut inputs = super::data_hashes(session)?;
        inputs.insert("[data]".to_owned(), hash_section(config)?);
        let is_answered = hash_section(&session.run_file().regenerate.is_some())?;
        inputs.insert("[regenerate]".to_owned(), is_answered);
        let fingerprint = session.target_fingerprint()?.to_owned();
        inputs.insert("target".to_owned(), fingerprint);
        // Rows of an earlier version of the program are made again.
        let format = hash_section(&dataset::FORMAT_VERSION)?;
        inputs.insert("format of the data set".to_owned(), format);
        Ok(inputs)
    }

    fn outputs(&self, session: &Session) -> anyhow::Result<Vec<PathBuf>> {
        if session.run_file().regenerate.is_some() {
            return Ok(Vec::new());
        }
        Ok(vec![super::dataset_folder(session)])
    }

    fn execute(&self, session: &Session) -> anyhow::Result<()> {
        if let Some(settings) = &session.run_file().regenerate {
            return super::regenerate::check_prompts(session, settings);
        }
        let tokenizer = super::tokenizer(session)?;
        let folder = super::dataset_folder(session);
        let config = &session.run_file().data;
        let texts = Texts {
            training: config.text_temperature.map(Sampling::at),
            ..Texts::default()
        };
        let dataset = prepare(config, &texts, &tokenizer, &folder)?;
        session
            .console()
            .say(inspect::render_counts(&dataset).trim_end());
        Ok(())
    }
}
