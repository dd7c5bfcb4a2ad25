//! `config.json`, `generation_config.json` and `tokenizer_config.json` of an imported target.

use std::path::Path;

use draftsmith_models::file;
use serde_json::{Value, json};

use super::metadata::Metadata;
use super::tokenizer::Tokens;
use crate::error::DataError;

/// Shape of the model as the GGUF file states it.
pub(super) struct Shape {
    pub(super) num_layers: usize,
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    head_dim: usize,
    hidden_size: usize,
    intermediate_size: usize,
    context_len: usize,
    rms_norm_eps: f64,
    rope_theta: f64,
}

/// Keys below `llama.` that are read here; any other changes the forward pass in a way not known.
const KNOWN: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
];

/// Rotary base of a file that states none; the GGUF specification's default.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

impl Shape {
    pub(super) fn read(metadata: &Metadata<'_>) -> Result<Self, DataError> {
        metadata.require("general.architecture", "llama")?;
        metadata.refuse_unknown("llama.", KNOWN)?;
        let hidden_size = metadata.number("llama.embedding_length")?;
        let num_heads = metadata.number("llama.attention.head_count")?;
        if num_heads == 0 {
            return Err(metadata.refuse("llama.attention.head_count", "a positive number", 0));
        }
        let head_dim = metadata
            .optional_number("llama.attention.key_length")?
            .unwrap_or(hidden_size / num_heads);
        for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
            if let Some(found) = metadata.optional_number(key)?.filter(|&n| n != head_dim) {
                return Err(metadata.refuse(key, &format!("the head size, {head_dim}"), found));
            }
        }
        Ok(Self {
            num_layers: metadata.number("llama.block_count")?,
            num_heads,
            num_kv_heads: metadata
                .optional_number("llama.attention.head_count_kv")?
                .unwrap_or(num_heads),
            head_dim,
            hidden_size,
            intermediate_size: metadata.number("llama.feed_forward_length")?,
            context_len: metadata.number("llama.context_length")?,
            rms_norm_eps: metadata.float("llama.attention.layer_norm_rms_epsilon")?,
            rope_theta: metadata
                .optional_float("llama.rope.freq_base")?
                .unwrap_or(DEFAULT_ROPE_THETA),
        })
    }

    fn to_json(&self, tokens: &Tokens<'_>, is_head_tied: bool) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": false,
            "mlp_bias": false,
            "bos_token_id": tokens.bos,
            "eos_token_id": tokens.eos,
            "pad_token_id": tokens.pad,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.context_len,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": null,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": is_head_tied,
            "torch_dtype": "bfloat16",
            "use_cache": true,
            "vocab_size": tokens.texts.len(),
            "initializer_range": 1.0 / (self.hidden_size as f64).sqrt(),
        })
    }
}

/// Writes the three files into `folder`, `config.json` last.
pub(super) fn write(
    folder: &Path,
    shape: &Shape,
    tokens: &Tokens<'_>,
    is_head_tied: bool,
) -> Result<(), DataError> {
    let generation = json!({
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
    });
    write_json(&folder.join("generation_config.json"), &generation)?;
    let tokenizer = tokens.config_json(shape.context_len);
    write_json(&folder.join("tokenizer_config.json"), &tokenizer)?;
    write_json(
        &folder.join("config.json"),
        &shape.to_json(tokens, is_head_tied),
    )
}

/// Two spaces of indentation and no final newline, as `transformers` users know these files.
fn write_json(path: &Path, value: &Value) -> Result<(), DataError> {
    Ok(file::write_atomic(path, format!("{value:#}").as_bytes())?)
}
