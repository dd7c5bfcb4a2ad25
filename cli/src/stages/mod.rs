//! The stages of a run, in order, and what several of them read.

pub(crate) mod capture;
pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod parts;
pub(crate) mod prepare;
pub(crate) mod regenerate;
pub(crate) mod start;
mod suites;
pub(crate) mod train;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_data::dataset::{self, Dataset, SplitIndices};
use draftsmith_data::tokenizer::ChatTokenizer;
use draftsmith_models::batch::TokenRow;
use draftsmith_models::checkpoint::TemplateRecord;
use draftsmith_models::file;
use draftsmith_models::sample::Sampling;

use crate::errors::CliError;
use crate::run_file::DrafterRun;
use crate::session::Session;
use crate::stage::{Inputs, Stage, hash_section};

/// All stages; each needs only earlier ones.
pub(crate) const STAGES: &[&dyn Stage] = &[
    &prepare::Prepare,
    &regenerate::Regenerate,
    &capture::Capture,
    &train::Train,
    &eval::Eval,
    &export::Export,
];

/// Seed of the choice of validation rows; fixed, so that every run on the same rows splits alike.
const SPLIT_SEED: u64 = 0;

/// Tokenizer and template of the target.
pub(crate) fn tokenizer(session: &Session) -> anyhow::Result<ChatTokenizer> {
    let tokenizer = ChatTokenizer::load(&session.run_file().target.path)?;
    tokenizer.check_vocab(session.spec().vocab_size)?;
    Ok(tokenizer)
}

/// Tokens that end an answer: those of the target's configuration and of its tokenizer.
pub(crate) fn stop_ids(session: &Session) -> anyhow::Result<Vec<u32>> {
    let mut ids = tokenizer(session)?.end_ids().to_vec();
    ids.extend(&session.spec().eos_token_ids);
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// Template and options of the run.
pub(crate) fn template(session: &Session) -> anyhow::Result<TemplateRecord> {
    let tokenizer = tokenizer(session)?;
    let options = &session.run_file().data.template_options;
    Ok(tokenizer
        .template_if_any()
        .map_or_else(TemplateRecord::default, |template| template.record(options)))
}

/// Folder of the rows that drafters train on.
pub(crate) fn dataset_folder(session: &Session) -> PathBuf {
    session.folder().join("data").join("rows")
}

/// The rows that drafters train on.
pub(crate) fn dataset(session: &Session) -> anyhow::Result<Dataset> {
    let folder = dataset_folder(session);
    if !folder.exists() {
        let typed = session.typed();
        let stage = match session.run_file().regenerate {
            Some(_) => "regenerate",
            None => "prepare",
        };
        return Err(CliError::usage(
            format!("there are no rows in `{}` yet", folder.display()),
            format!("`draftsmith {stage} {typed}` makes them"),
        )
        .into());
    }
    Ok(Dataset::open(&folder)?)
}

/// Training and validation rows.
pub(crate) fn split(session: &Session, dataset: &Dataset) -> SplitIndices {
    dataset.split(session.run_file().data.validation_fraction, SPLIT_SEED)
}

/// Whether the answer to a prompt only measures.
pub(crate) fn is_set_aside(session: &Session, key: &str) -> bool {
    dataset::is_set_aside(key, session.run_file().data.validation_fraction, SPLIT_SEED)
}

/// A text that a validation reads.
#[derive(Debug)]
pub(crate) struct ValidationText {
    /// How the target drew it; unset where nobody knows.
    pub(crate) sampling: Option<Sampling>,
    pub(crate) rows: Vec<TokenRow>,
}

/// The texts that a validation of a drafter reads: as many of the rows set aside as its settings allow, evenly spread.
pub(crate) fn validation_texts(
    session: &Session,
    drafter: &DrafterRun,
    dataset: &Dataset,
) -> Vec<ValidationText> {
    let most = session.run_file().train_of(drafter).validation_rows;
    let held_out = split(session, dataset).validation;
    let texts = dataset.manifest().texts.iter().zip(&held_out);
    texts
        .filter(|(_, held_out)| !held_out.is_empty())
        .map(|(text, held_out)| ValidationText {
            sampling: text.sampling,
            rows: spread(held_out.len(), most)
                .map(|index| dataset.row(held_out[index]))
                .collect(),
        })
        .collect()
}

/// At most `most` of `len` places, evenly spread; all for 0.
fn spread(len: usize, most: usize) -> impl Iterator<Item = usize> {
    let count = if most == 0 { len } else { most.min(len) };
    (0..count).map(move |index| index * len / count)
}

/// blake3 of every data file, by path as written in the run file.
pub(crate) fn data_hashes(session: &Session) -> anyhow::Result<BTreeMap<String, String>> {
    let mut hashes = Inputs::new();
    let config = &session.run_file().data;
    for path in config.files.iter().chain(&config.ids_files) {
        hash_file(path, &mut hashes)?;
    }
    Ok(hashes)
}

/// Adds the target and the number type it computes in to the inputs of a stage.
pub(crate) fn insert_target(session: &Session, inputs: &mut Inputs) -> anyhow::Result<()> {
    let fingerprint = session.target_fingerprint()?.to_owned();
    inputs.insert("target".to_owned(), fingerprint);
    let dtype = hash_section(&session.run_file().target.dtype)?;
    inputs.insert("[target]".to_owned(), dtype);
    Ok(())
}

/// Adds the blake3 of a file to the inputs of a stage.
pub(crate) fn hash_file(path: &Path, inputs: &mut Inputs) -> anyhow::Result<()> {
    let hash = blake3::hash(&file::read(path)?).to_hex().to_string();
    inputs.insert(format!("`{}`", path.display()), hash);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_validation_reads_rows_from_all_over_those_set_aside() {
        let chosen = |len, most| spread(len, most).collect::<Vec<_>>();
        assert_eq!(chosen(10, 4), [0, 2, 5, 7]);
        assert_eq!(chosen(3, 4), [0, 1, 2]);
        assert_eq!(chosen(3, 0), [0, 1, 2]);
        assert!(chosen(0, 4).is_empty());
    }
}
