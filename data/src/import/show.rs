//! [`TargetSummary`]: what a target folder holds, for `draftsmith target show`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::fingerprint::{target_fingerprint, weight_files};
use draftsmith_models::target::TargetSpec;
use safetensors::SafeTensors;
use serde::Serialize;
use serde_json::Value;
use tokenizers::Tokenizer;

use super::mmap;
use crate::error::DataError;

/// A target folder at a glance.
#[derive(Clone, Debug, Serialize)]
pub struct TargetSummary {
    /// The folder.
    pub folder: PathBuf,
    /// Shape and constants.
    pub spec: TargetSpec,
    /// Numbers in all stored tensors; a tied head counts once.
    pub num_parameters: u64,
    /// Stored tensors.
    pub num_tensors: usize,
    /// Number of tensors by element type, such as `BF16`.
    pub dtypes: BTreeMap<String, usize>,
    /// Bytes of all weight files.
    pub weight_bytes: u64,
    /// Identity of the target: hash over weights, configuration, tokenizer and template.
    pub fingerprint: String,
    /// The tokenizer; absent when the folder has none.
    pub tokenizer: Option<TokenizerFacts>,
}

/// What matters of a tokenizer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenizerFacts {
    /// Token ids it can produce, added tokens included.
    pub vocab_size: usize,
    /// Added tokens, special or not.
    pub num_added_tokens: usize,
    /// Beginning-of-text token.
    pub bos_token: Option<String>,
    /// End-of-turn token.
    pub eos_token: Option<String>,
    /// Padding token.
    pub pad_token: Option<String>,
    /// Whether the folder carries a chat template.
    pub has_chat_template: bool,
}

impl TargetSummary {
    /// Reads a target folder; every weight file is read once for the fingerprint.
    ///
    /// # Errors
    /// [`DataError`] naming the file that is missing or damaged, or the key that is not understood.
    pub fn of_folder(folder: &Path) -> Result<Self, DataError> {
        let mut summary = Self {
            folder: folder.to_owned(),
            spec: TargetSpec::from_folder(folder)?,
            num_parameters: 0,
            num_tensors: 0,
            dtypes: BTreeMap::new(),
            weight_bytes: 0,
            fingerprint: String::new(),
            tokenizer: TokenizerFacts::of_folder(folder)?,
        };
        let names = weight_files(folder)?;
        if names.is_empty() {
            let path = folder.join("model.safetensors");
            let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
            return Err(DataError::io(path, missing));
        }
        for name in names {
            summary.count_weights(&folder.join(name))?;
        }
        summary.fingerprint = target_fingerprint(folder)?;
        Ok(summary)
    }

    fn count_weights(&mut self, path: &Path) -> Result<(), DataError> {
        let bytes = mmap::map(path)?;
        let (_, metadata) = SafeTensors::read_metadata(&bytes)
            .map_err(|e| ModelError::malformed(path, "safetensors file", e))?;
        let names = metadata.offset_keys();
        for info in names.iter().filter_map(|name| metadata.info(name)) {
            self.num_tensors += 1;
            self.num_parameters += info.shape.iter().product::<usize>() as u64;
            *self.dtypes.entry(format!("{:?}", info.dtype)).or_insert(0) += 1;
        }
        self.weight_bytes += bytes.len() as u64;
        Ok(())
    }
}

impl TokenizerFacts {
    fn of_folder(folder: &Path) -> Result<Option<Self>, DataError> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            return Ok(None);
        }
        let tokenizer = Tokenizer::from_file(&path).map_err(|e| DataError::Tokenizer {
            path,
            reason: e.to_string(),
        })?;
        let config_path = folder.join("tokenizer_config.json");
        let config: Value = if config_path.exists() {
            file::read_json(&config_path)?
        } else {
            Value::Null
        };
        // Either a text or an object whose `content` is the text.
        let named = |key: &str| {
            let value = &config[key];
            let text = value.as_str().or_else(|| value["content"].as_str());
            text.map(str::to_owned)
        };
        Ok(Some(Self {
            vocab_size: tokenizer.get_vocab_size(true),
            num_added_tokens: tokenizer.get_added_tokens_decoder().len(),
            bos_token: named("bos_token"),
            eos_token: named("eos_token"),
            pad_token: named("pad_token"),
            has_chat_template: !config["chat_template"].is_null()
                || folder.join("chat_template.jinja").exists(),
        }))
    }
}
