//! `tokenizer.json` rebuilt from the token list and merges that a GGUF file carries.
//!
//! A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not contain it. The one for
//! `smollm` is: digits apart, then the byte-level split. The result equals, as JSON, the tokenizer that
//! the model's authors publish.

use std::io::Write;
use std::path::Path;

use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use serde::Serialize;
use serde_json::ser::Formatter;
use serde_json::{Map, Value, json};

use super::metadata::Metadata;
use crate::error::DataError;

const NORMAL: i64 = 1;
const CONTROL: i64 = 3;

/// The tokenizer part of a GGUF file.
pub(super) struct Tokens<'a> {
    /// Text of each token, by id.
    pub(super) texts: Vec<&'a str>,
    kinds: Vec<i64>,
    merges: Vec<[&'a str; 2]>,
    pub(super) bos: Option<usize>,
    pub(super) eos: usize,
    pub(super) pad: Option<usize>,
    unknown: Option<usize>,
    chat_template: Option<&'a str>,
}

impl<'a> Tokens<'a> {
    pub(super) fn read(metadata: &Metadata<'a>) -> Result<Self, DataError> {
        metadata.require("tokenizer.ggml.model", "gpt2")?;
        metadata.require("tokenizer.ggml.pre", "smollm")?;
        metadata.require_unset("tokenizer.ggml.add_bos_token")?;
        metadata.require_unset("tokenizer.ggml.add_eos_token")?;
        metadata.require_unset("tokenizer.ggml.add_space_prefix")?;
        let texts = metadata.texts("tokenizer.ggml.tokens")?;
        let token = |name: &str| -> Result<Option<usize>, DataError> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            match metadata.optional_number(&key)? {
                Some(id) if id >= texts.len() => {
                    Err(metadata.refuse(&key, &format!("below {}", texts.len()), id))
                }
                id => Ok(id),
            }
        };
        let (bos, eos, pad) = (token("bos")?, token("eos")?, token("padding")?);
        let Some(eos) = eos else {
            return Err(metadata.refuse("tokenizer.ggml.eos_token_id", "a token id", "missing"));
        };
        Ok(Self {
            kinds: read_kinds(metadata, texts.len())?,
            merges: read_merges(metadata)?,
            bos,
            eos,
            pad,
            unknown: token("unknown")?,
            chat_template: metadata.optional_text("tokenizer.chat_template"),
            texts,
        })
    }

    fn special_tokens(&self) -> Vec<Value> {
        let special = |(id, text): (usize, &&str)| {
            (self.kinds[id] == CONTROL).then(|| {
                json!({
                    "id": id, "content": text, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": true,
                })
            })
        };
        self.texts.iter().enumerate().filter_map(special).collect()
    }

    fn to_json(&self) -> Value {
        let vocab: Map<String, Value> = self
            .texts
            .iter()
            .enumerate()
            .map(|(id, text)| ((*text).to_owned(), json!(id)))
            .collect();
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.special_tokens(),
            "normalizer": null,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": true},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                    "use_regex": true},
            ]},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                "use_regex": true},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false, "ignore_merges": false, "vocab": vocab,
                "merges": self.merges,
            },
        })
    }

    /// The content of `tokenizer_config.json`.
    ///
    /// The class is the plain fast one: with `GPT2Tokenizer`, transformers puts its own
    /// pre-tokenizer in place of the one in `tokenizer.json`.
    pub(super) fn config_json(&self, context_len: usize) -> Value {
        let mut map = Map::new();
        map.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
        let named = [
            ("bos_token", self.bos),
            ("eos_token", Some(self.eos)),
            ("pad_token", self.pad),
            ("unk_token", self.unknown),
        ];
        for (name, id) in named {
            if let Some(id) = id {
                map.insert(name.into(), json!(self.texts[id]));
            }
        }
        map.insert("clean_up_tokenization_spaces".into(), json!(false));
        map.insert("model_max_length".into(), json!(context_len));
        if let Some(template) = self.chat_template {
            map.insert("chat_template".into(), json!(template));
        }
        Value::Object(map)
    }
}

fn read_kinds(metadata: &Metadata<'_>, num_tokens: usize) -> Result<Vec<i64>, DataError> {
    let key = "tokenizer.ggml.token_type";
    let kinds = metadata.integers(key)?;
    if kinds.len() != num_tokens {
        return Err(metadata.refuse(key, &format!("a list of {num_tokens}"), kinds.len()));
    }
    match kinds
        .iter()
        .find(|&&kind| kind != NORMAL && kind != CONTROL)
    {
        None => Ok(kinds),
        Some(kind) => Err(metadata.refuse(key, "only 1 (normal) and 3 (control)", kind)),
    }
}

fn read_merges<'a>(metadata: &Metadata<'a>) -> Result<Vec<[&'a str; 2]>, DataError> {
    let key = "tokenizer.ggml.merges";
    let pair = |text: &'a str| match text.split_once(' ') {
        Some((left, right)) if !right.contains(' ') => Ok([left, right]),
        _ => Err(metadata.refuse(key, "pairs apart by one space", format!("`{text}`"))),
    };
    metadata.texts(key)?.into_iter().map(pair).collect()
}

/// Writes `tokenizer.json` in one line.
pub(super) fn write(path: &Path, tokens: &Tokens<'_>) -> Result<(), DataError> {
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, SpacedFormatter);
    tokens
        .to_json()
        .serialize(&mut serializer)
        .map_err(|e| ModelError::malformed(path, "JSON value", e))?;
    Ok(file::write_atomic(path, &bytes)?)
}

/// One line with a space after each comma and colon: the spelling of Python's `json.dump`, so that the
/// file is the same, byte for byte, as one written by a Python converter.
struct SpacedFormatter;

impl Formatter for SpacedFormatter {
    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
