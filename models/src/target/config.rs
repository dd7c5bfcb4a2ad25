//! [`TargetSpec`]: a Hugging Face `config.json`, read so that nothing is silently ignored.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::ModelError;
use crate::file;
use crate::layers::attention::HeadShape;
use crate::layers::rope::{RopeScaling, RopeSpec};

/// Shape and constants of a target model; every field comes from its `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetSpec {
    /// `model_type` of the file: `llama`, `qwen2`, `qwen3`, `mimo`.
    pub model_type: String,
    /// Token ids the model knows, V.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Number of blocks, N.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key-value heads.
    pub num_kv_heads: usize,
    /// Size of one head, explicit or H / heads.
    pub head_dim: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Rotary base and scaling.
    pub rope: RopeSpec,
    /// Longest context the model was made for.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether q and k are normalised per head (Qwen3).
    pub qk_norm: bool,
    /// Whether q, k and v have biases (Qwen2, MiMo).
    pub qkv_bias: bool,
    /// Beginning-of-text token.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Padding token.
    pub pad_token_id: Option<u32>,
}

/// Keys that change nothing about the forward pass of a finished model.
const IGNORED: &[&str] = &[
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "dtype",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "max_window_layers",
    "pretraining_tp",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "chunk_size_feed_forward",
];

/// Flags that change the forward pass in a way this build does not compute.
const REFUSED_FLAGS: &[&str] = &[
    "mlp_bias",
    "attn_output_gate",
    "use_sliding_window",
    "rope_interleaved",
    "use_mrope",
    "mtp_use_dedicated_embeddings",
];

/// Numbers of heads for further tokens that a target brings along: no part of its own forward pass, and read
/// apart from it.
const MTP_COUNTS: &[&str] = &["num_nextn_predict_layers", "mtp_num_hidden_layers"];

impl TargetSpec {
    /// Reads `config.json` of a model folder, and the END tokens of `generation_config.json`.
    ///
    /// # Errors
    /// [`ModelError`] naming the key that is missing, has an unknown value or is not understood.
    pub fn from_folder(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join("config.json");
        let mut spec = Self::from_json(&file::read_json::<Value>(&path)?, &path)?;
        let generation = folder.join("generation_config.json");
        if generation.exists() {
            let value: Value = file::read_json(&generation)?;
            if let Some(ids) = value.get("eos_token_id").and_then(token_ids) {
                spec.eos_token_ids = ids;
            }
        }
        Ok(spec)
    }

    /// Reads the content of a `config.json`; `path` is used in messages only.
    ///
    /// # Errors
    /// As [`TargetSpec::from_folder`].
    pub fn from_json(value: &Value, path: &Path) -> Result<Self, ModelError> {
        let Value::Object(map) = value else {
            return Err(ModelError::malformed(
                path,
                "model configuration",
                "not a JSON object",
            ));
        };
        let mut keys = Keys {
            map: map.clone(),
            path,
        };
        let model_type = keys.text("model_type")?;
        keys.check_model_type(&model_type)?;
        keys.require("hidden_act", &["silu"])?;
        keys.refuse_flags(&model_type)?;
        for key in MTP_COUNTS {
            keys.optional_number(key)?;
        }
        if model_type == "llama" {
            keys.refuse_unless_null("sliding_window", "null")?;
        } else {
            keys.map.remove("sliding_window");
        }
        keys.full_attention_layers()?;
        let hidden_size = keys.number("hidden_size")?;
        let num_heads = keys.number("num_attention_heads")?;
        let rope = keys.rope()?;
        let spec = Self {
            vocab_size: keys.number("vocab_size")?,
            intermediate_size: keys.number("intermediate_size")?,
            num_layers: keys.number("num_hidden_layers")?,
            num_kv_heads: keys
                .optional_number("num_key_value_heads")?
                .unwrap_or(num_heads),
            head_dim: keys
                .optional_number("head_dim")?
                .unwrap_or(hidden_size / num_heads.max(1)),
            rms_norm_eps: keys.float("rms_norm_eps")?,
            max_position_embeddings: keys.number("max_position_embeddings")?,
            tie_word_embeddings: keys.flag("tie_word_embeddings", false)?,
            qk_norm: model_type == "qwen3",
            qkv_bias: ["qwen2", "mimo"].contains(&model_type.as_str()),
            bos_token_id: keys.token("bos_token_id")?,
            eos_token_ids: keys.tokens("eos_token_id")?,
            pad_token_id: keys.token("pad_token_id")?,
            rope,
            hidden_size,
            num_heads,
            model_type,
        };
        keys.finish()?;
        spec.validate(path)?;
        Ok(spec)
    }

    /// Query and key-value heads of every block.
    pub fn heads(&self) -> HeadShape {
        HeadShape {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// Numbers in the matrices and biases of all blocks.
    pub fn num_block_weights(&self) -> usize {
        let heads = self.head_dim * (self.num_heads + 2 * self.num_kv_heads);
        let biases = if self.qkv_bias { heads } else { 0 };
        let attention = self.hidden_size * (heads + self.head_dim * self.num_heads) + biases;
        self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)
    }

    fn validate(&self, path: &Path) -> Result<(), ModelError> {
        let bad = |key: &str, expected: &str, found: usize| ModelError::ConfigKey {
            key: key.to_owned(),
            path: path.to_owned(),
            expected: expected.to_owned(),
            found: found.to_string(),
        };
        for (key, value) in [
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_layers),
            ("vocab_size", self.vocab_size),
        ] {
            if value == 0 {
                return Err(bad(key, "a positive number", value));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(bad(
                "num_key_value_heads",
                "a divisor of num_attention_heads",
                self.num_kv_heads,
            ));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return Err(bad("head_dim", "a positive even number", self.head_dim));
        }
        Ok(())
    }
}

/// The keys of a configuration that nobody has asked for yet.
struct Keys<'a> {
    map: Map<String, Value>,
    path: &'a Path,
}

impl Keys<'_> {
    fn unexpected(&self, key: &str, expected: &str, found: &str) -> ModelError {
        ModelError::ConfigKey {
            key: key.to_owned(),
            path: self.path.to_owned(),
            expected: expected.to_owned(),
            found: found.to_owned(),
        }
    }

    fn check_model_type(&self, found: &str) -> Result<(), ModelError> {
        const KNOWN: &str = "`llama`, `qwen2`, `qwen3` or `mimo`";
        match found {
            "llama" | "qwen2" | "qwen3" | "mimo" => Ok(()),
            hybrid if hybrid.starts_with("qwen3_5") || hybrid.starts_with("qwen3_next") => {
                let expected =
                    format!("{KNOWN} (the linear-attention layers of this type are not computed)");
                Err(self.unexpected("model_type", &expected, found))
            }
            _ => Err(self.unexpected("model_type", KNOWN, found)),
        }
    }

    fn refuse_flags(&mut self, model_type: &str) -> Result<(), ModelError> {
        for key in REFUSED_FLAGS {
            if self.flag(key, false)? {
                return Err(self.unexpected(key, "false", "true"));
            }
        }
        // The blocks of MiMo are those of Qwen2, whose own files do not have the key.
        let expected = model_type == "mimo";
        let found = self.flag("attention_bias", expected)?;
        if found == expected {
            return Ok(());
        }
        Err(self.unexpected("attention_bias", &expected.to_string(), &found.to_string()))
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key).filter(|value| !value.is_null())
    }

    fn text(&mut self, key: &str) -> Result<String, ModelError> {
        match self.take(key) {
            Some(Value::String(text)) => Ok(text),
            other => Err(self.wrong_type(key, "a text", other)),
        }
    }

    fn wrong_type(&self, key: &str, expected: &str, found: Option<Value>) -> ModelError {
        let found = found.map_or("missing".to_owned(), |value| format!("`{value}`"));
        self.unexpected(key, expected, &found)
    }

    fn require(&mut self, key: &str, accepted: &[&str]) -> Result<(), ModelError> {
        let found = self.text(key)?;
        if accepted.contains(&found.as_str()) {
            return Ok(());
        }
        Err(self.unexpected(key, &format!("one of {accepted:?}"), &format!("`{found}`")))
    }

    fn number(&mut self, key: &str) -> Result<usize, ModelError> {
        match self.optional_number(key)? {
            Some(number) => Ok(number),
            None => Err(self.unexpected(key, "a whole number", "missing")),
        }
    }

    fn optional_number(&mut self, key: &str) -> Result<Option<usize>, ModelError> {
        match self.take(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) => Ok(Some(number as usize)),
                None => Err(self.wrong_type(key, "a whole number", Some(value))),
            },
        }
    }

    fn float(&mut self, key: &str) -> Result<f64, ModelError> {
        let value = self.take(key);
        value
            .as_ref()
            .and_then(Value::as_f64)
            .ok_or_else(|| self.wrong_type(key, "a number", value.clone()))
    }

    fn flag(&mut self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.take(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(flag),
            other => Err(self.wrong_type(key, "true or false", other)),
        }
    }

    fn refuse_unless_null(&mut self, key: &str, expected: &str) -> Result<(), ModelError> {
        match self.take(key) {
            None => Ok(()),
            other => Err(self.wrong_type(key, expected, other)),
        }
    }

    fn full_attention_layers(&mut self) -> Result<(), ModelError> {
        let value = self.take("layer_types");
        let all_full = value.as_ref().is_none_or(|value| {
            value
                .as_array()
                .is_some_and(|list| list.iter().all(|kind| kind == "full_attention"))
        });
        if all_full {
            return Ok(());
        }
        Err(self.wrong_type("layer_types", "`full_attention` for every layer", value))
    }

    fn token(&mut self, key: &str) -> Result<Option<u32>, ModelError> {
        Ok(self.tokens(key)?.first().copied())
    }

    fn tokens(&mut self, key: &str) -> Result<Vec<u32>, ModelError> {
        match self.take(key) {
            None => Ok(Vec::new()),
            Some(value) => token_ids(&value)
                .ok_or_else(|| self.wrong_type(key, "a token id or a list of them", Some(value))),
        }
    }

    /// Rotary settings in the old spelling (`rope_theta`, `rope_scaling`) or the new one
    /// (`rope_parameters`); when both are present they must agree.
    fn rope(&mut self) -> Result<RopeSpec, ModelError> {
        let old_theta = self.take("rope_theta");
        let old_scaling = self.take("rope_scaling");
        let new = self.take("rope_parameters");
        let (theta, scaling) = match (&new, &old_theta) {
            (Some(parameters), _) => (
                parameters.get("rope_theta").cloned().or(old_theta.clone()),
                Some(parameters.clone()),
            ),
            (None, Some(theta)) => (Some(theta.clone()), old_scaling.clone()),
            (None, None) => return Err(self.unexpected("rope_theta", "a number", "missing")),
        };
        let theta_value = theta.as_ref().and_then(Value::as_f64);
        let Some(theta_value) = theta_value else {
            return Err(self.wrong_type("rope_theta", "a number", theta));
        };
        if old_theta.is_some() && old_theta.as_ref().and_then(Value::as_f64) != Some(theta_value) {
            let expected = "the same as `rope_parameters.rope_theta`";
            return Err(self.wrong_type("rope_theta", expected, old_theta));
        }
        let scaling = self.rope_scaling(scaling)?;
        if new.is_some()
            && old_scaling.is_some()
            && self.rope_scaling(old_scaling.clone())? != scaling
        {
            return Err(self.wrong_type(
                "rope_scaling",
                "the same as `rope_parameters`",
                old_scaling,
            ));
        }
        Ok(RopeSpec {
            theta: theta_value,
            scaling,
        })
    }

    fn rope_scaling(&self, value: Option<Value>) -> Result<RopeScaling, ModelError> {
        let Some(value) = value else {
            return Ok(RopeScaling::Default);
        };
        let kind = value
            .get("rope_type")
            .or_else(|| value.get("type"))
            .and_then(Value::as_str);
        let number = |key: &str| {
            value.get(key).and_then(Value::as_f64).ok_or_else(|| {
                self.unexpected(&format!("rope_scaling.{key}"), "a number", "missing")
            })
        };
        let known: &[&str] = match kind {
            Some("default") => &[],
            Some("linear") => &["factor"],
            Some("llama3") => &[
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            ],
            _ => {
                return Err(self.unexpected(
                    "rope_scaling.rope_type",
                    "`default`, `linear` or `llama3`",
                    &kind.map_or("missing".to_owned(), |kind| format!("`{kind}`")),
                ));
            }
        };
        self.refuse_unknown_rope_keys(&value, known)?;
        match kind {
            Some("linear") => Ok(RopeScaling::Linear {
                factor: number("factor")?,
            }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: number("original_max_position_embeddings")?
                    as usize,
            }),
            _ => Ok(RopeScaling::Default),
        }
    }

    fn refuse_unknown_rope_keys(&self, value: &Value, known: &[&str]) -> Result<(), ModelError> {
        let common = ["rope_type", "type", "rope_theta"];
        let keys = value.as_object().into_iter().flat_map(Map::keys);
        for key in keys {
            if !known.contains(&key.as_str()) && !common.contains(&key.as_str()) {
                return Err(self.unexpected(
                    &format!("rope_scaling.{key}"),
                    "no such key for this rope type",
                    "present",
                ));
            }
        }
        Ok(())
    }

    /// Refuses every key that was neither read nor known to be harmless.
    fn finish(self) -> Result<(), ModelError> {
        let unread = self
            .map
            .iter()
            .find(|(key, value)| !value.is_null() && !IGNORED.contains(&key.as_str()));
        match unread {
            None => Ok(()),
            Some((key, value)) => Err(self.unexpected(
                key,
                "a key that this build understands",
                &format!("`{value}`"),
            )),
        }
    }
}

fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(list) => list.iter().map(one).collect(),
        other => one(other).map(|id| vec![id]),
    }
}
