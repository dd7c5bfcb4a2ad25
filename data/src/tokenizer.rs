//! [`ChatTokenizer`]: the tokenizer and chat template of a model folder.
//!
//! Text is encoded without the special tokens that a post-processor would add: the template prints all
//! that a server sends, so adding more would give two BOS tokens where the server has one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_models::file;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use crate::error::DataError;
use crate::template::ChatTemplate;

const TOKENIZER_FILE: &str = "tokenizer.json";

/// A tokenizer with the template and the special tokens of its model.
#[derive(Debug)]
pub struct ChatTokenizer {
    path: PathBuf,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    hash: String,
    special: BTreeMap<u32, String>,
    end_ids: Vec<u32>,
    max_id: u32,
}

impl ChatTokenizer {
    /// Reads `tokenizer.json`, the chat template and the end-of-turn ids of a model folder.
    ///
    /// # Errors
    /// [`DataError`] naming the file that is missing or malformed.
    pub fn load(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join(TOKENIZER_FILE);
        let bytes = file::read(&path)?;
        let refused = |e: tokenizers::Error| DataError::Tokenizer {
            path: path.clone(),
            reason: e.to_string(),
        };
        let mut tokenizer = Tokenizer::from_bytes(&bytes).map_err(refused)?;
        // Both would change rows in silence; lengths are this crate's business.
        tokenizer.with_truncation(None).map_err(refused)?;
        tokenizer.with_padding(None);
        let special = special_tokens(&tokenizer);
        let max_id = tokenizer.get_vocab(true).into_values().max();
        let end_ids = end_ids(folder, &tokenizer)?;
        Ok(Self {
            template: ChatTemplate::load(folder)?,
            hash: blake3::hash(&bytes).to_hex().to_string(),
            max_id: max_id.unwrap_or(0),
            path,
            tokenizer,
            special,
            end_ids,
        })
    }

    /// The token ids of a text; control tokens spelled out in it become their ids.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] when the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self.tokenizer.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(self.refused(&error)),
        }
    }

    /// The text of token ids, control tokens spelled out.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] when the decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        let text = self.tokenizer.decode(ids, false);
        text.map_err(|error| self.refused(&error))
    }

    /// The text of token ids without control tokens.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] when the decoder fails.
    pub fn decode_plain(&self, ids: &[u32]) -> Result<String, DataError> {
        let text = self.tokenizer.decode(ids, true);
        text.map_err(|error| self.refused(&error))
    }

    /// The id of a token given by its exact spelling in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// The id of a control token given by its spelling.
    pub fn special_id(&self, token: &str) -> Option<u32> {
        let id = self.token_id(token)?;
        self.special.contains_key(&id).then_some(id)
    }

    /// Ids that end a turn, from `generation_config.json`, `config.json` or the tokenizer's `eos_token`.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }

    /// Control tokens with their spellings, ordered by id.
    pub fn special_tokens(&self) -> &BTreeMap<u32, String> {
        &self.special
    }

    /// The chat template.
    ///
    /// # Errors
    /// [`DataError::Template`] when the folder has none.
    pub fn template(&self) -> Result<&ChatTemplate, DataError> {
        self.template.as_ref().ok_or_else(|| DataError::Template {
            name: "chat_template".to_owned(),
            reason: "the model folder holds no chat template".to_owned(),
        })
    }

    /// The chat template, if the folder has one.
    pub fn template_if_any(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// blake3 of `tokenizer.json`, hex.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// The first id that stands for another token in `other`, with its text here and there.
    pub fn first_difference(&self, other: &Self) -> Option<(u32, String, String)> {
        let text = |tokenizer: &Self, id| tokenizer.tokenizer.id_to_token(id).unwrap_or_default();
        (0..=self.max_id.max(other.max_id)).find_map(|id| {
            let texts = (text(self, id), text(other, id));
            (texts.0 != texts.1).then_some((id, texts.0, texts.1))
        })
    }

    /// Smallest vocabulary size that holds every token.
    pub fn vocab_size(&self) -> usize {
        self.max_id as usize + 1
    }

    /// Checks that every token fits the target's embedding of `vocab_size` rows.
    ///
    /// # Errors
    /// [`DataError::TokenOutsideVocabulary`] with both numbers.
    pub fn check_vocab(&self, vocab_size: usize) -> Result<(), DataError> {
        check_ids(&self.path.display().to_string(), &[self.max_id], vocab_size)
    }

    fn refused(&self, error: &tokenizers::Error) -> DataError {
        DataError::Tokenizer {
            path: self.path.clone(),
            reason: error.to_string(),
        }
    }
}

/// Checks that all `ids` are below `vocab_size`.
///
/// # Errors
/// [`DataError::TokenOutsideVocabulary`] with the first id that is not.
pub fn check_ids(place: &str, ids: &[u32], vocab_size: usize) -> Result<(), DataError> {
    match ids.iter().find(|id| **id as usize >= vocab_size) {
        None => Ok(()),
        Some(&id) => Err(DataError::TokenOutsideVocabulary {
            place: place.to_owned(),
            id,
            vocab_size,
        }),
    }
}

fn special_tokens(tokenizer: &Tokenizer) -> BTreeMap<u32, String> {
    let added = tokenizer.get_added_tokens_decoder().into_iter();
    added
        .filter(|(_, token)| token.special)
        .map(|(id, token)| (id, token.content))
        .collect()
}

/// End-of-turn ids of a folder; the first file that names any decides, as for servers.
fn end_ids(folder: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>, DataError> {
    for name in ["generation_config.json", "config.json"] {
        let path = folder.join(name);
        if path.exists() {
            let config: Map<String, Value> = file::read_json(&path)?;
            let ids = match config.get("eos_token_id") {
                None | Some(Value::Null) => continue,
                Some(Value::Array(ids)) => ids.clone(),
                Some(id) => vec![id.clone()],
            };
            let ids = serde_json::from_value(Value::Array(ids));
            let bad =
                |e| DataError::format(&path, "model configuration", format!("`eos_token_id`: {e}"));
            return ids.map_err(bad);
        }
    }
    let path = folder.join("tokenizer_config.json");
    if !path.exists() {
        return Ok(Vec::new());
    }
    let config: Map<String, Value> = file::read_json(&path)?;
    let token = config.get("eos_token");
    let token = token.map(|token| token.get("content").unwrap_or(token));
    let id = token
        .and_then(Value::as_str)
        .and_then(|text| tokenizer.token_to_id(text));
    Ok(id.into_iter().collect())
}
