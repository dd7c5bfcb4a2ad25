//! Keys of a drafter's decoder layer as Hugging Face configurations spell them.

use draftsmith_models::layers::rope::{RopeScaling, RopeSpec};
use draftsmith_models::target::TargetSpec;
use serde_json::{Map, Value, json};

/// Sizes, norm epsilon and special tokens, shared by all layouts; every key is written out, because
/// some engines know no defaults.
///
/// `intermediate_size` is the drafter's own MLP width; everything else is the target's.
pub fn keys(target: &TargetSpec, intermediate_size: usize) -> Map<String, Value> {
    let mut map = Map::new();
    let entries = [
        ("model_type", json!("llama")),
        ("vocab_size", json!(target.vocab_size)),
        ("hidden_size", json!(target.hidden_size)),
        ("intermediate_size", json!(intermediate_size)),
        ("num_hidden_layers", json!(1)),
        ("num_attention_heads", json!(target.num_heads)),
        ("num_key_value_heads", json!(target.num_kv_heads)),
        ("head_dim", json!(target.head_dim)),
        ("hidden_act", json!("silu")),
        ("rms_norm_eps", json!(target.rms_norm_eps)),
        (
            "max_position_embeddings",
            json!(target.max_position_embeddings),
        ),
        ("attention_bias", json!(false)),
        ("attention_dropout", json!(0.0)),
        ("mlp_bias", json!(false)),
        ("initializer_range", json!(0.02)),
        ("use_cache", json!(true)),
        ("tie_word_embeddings", json!(false)),
        ("pad_token_id", json!(target.pad_token_id)),
        ("bos_token_id", json!(target.bos_token_id)),
        ("eos_token_id", end_tokens(&target.eos_token_ids)),
    ];
    for (key, value) in entries {
        map.insert(key.to_owned(), value);
    }
    map
}

/// `rope_parameters`: type, base and all scaling parameters (Transformers 5).
pub fn rope_parameters(rope: &RopeSpec) -> Value {
    let mut map = scaling_parameters(&rope.scaling);
    map.insert("rope_theta".to_owned(), json!(rope.theta));
    Value::Object(map)
}

/// `rope_scaling`: null for unchanged frequencies, else type and all parameters (older stacks, which
/// read the base from `rope_theta`).
pub fn rope_scaling(rope: &RopeSpec) -> Value {
    match rope.scaling {
        RopeScaling::Default => Value::Null,
        _ => Value::Object(scaling_parameters(&rope.scaling)),
    }
}

fn scaling_parameters(scaling: &RopeScaling) -> Map<String, Value> {
    let value = match scaling {
        RopeScaling::Default => json!({"rope_type": "default"}),
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        }),
    };
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn end_tokens(ids: &[u32]) -> Value {
    match ids {
        [] => Value::Null,
        [id] => json!(id),
        ids => json!(ids),
    }
}
