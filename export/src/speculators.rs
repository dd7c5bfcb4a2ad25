//! The layout of the speculators package, which vLLM recognises by itself.
//!
//! It carries a copy of the target's embedding: the package's own loader leaves memory uninitialised
//! without one.

use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::drafter::eagle3::{AuxNorm, Eagle3Config};
use serde_json::{Map, Value, json};

use crate::error::ExportError;
use crate::names::{EMBEDDING, LayerPrefix};
use crate::source::Source;
use crate::{Exporter, Layout, d2t, decoder, layer_ids};

/// Version of the speculators package whose layout is written.
const VERSION: &str = "0.9.0";

/// Layout `speculators`.
#[derive(Clone, Copy, Debug)]
pub struct Speculators;

impl Exporter for Speculators {
    fn name(&self) -> &'static str {
        "speculators"
    }

    fn layout(&self, source: &Source<'_>) -> Result<Layout, ExportError> {
        match &source.card.drafter {
            DrafterConfig::Eagle3(config) => eagle3(source, config),
        }
    }
}

/// How an engine finds the target.
struct TargetName {
    name: String,
    /// Whether the name is a folder of this machine.
    is_local: bool,
}

fn eagle3(source: &Source<'_>, config: &Eagle3Config) -> Result<Layout, ExportError> {
    let mut tensors = source.tensors(LayerPrefix::Indexed)?;
    tensors.push(source.embedding(EMBEDDING)?);
    tensors.extend(d2t::tables(&source.card.vocab));
    let target_config = source.target_config()?;
    let target = target_name(source, &target_config);
    let mut warnings = Vec::new();
    if target.is_local {
        warnings.push(format!(
            "`speculators_config.verifier.name_or_path` is the folder `{}` of this machine: set \
             `export.target_name` to the published name before sharing the export",
            target.name
        ));
    }
    Ok(Layout {
        config: Value::Object(eagle3_config(source, config, &target, &target_config)),
        tensors,
        warnings,
    })
}

fn eagle3_config(
    source: &Source<'_>,
    config: &Eagle3Config,
    target: &TargetName,
    target_config: &Value,
) -> Map<String, Value> {
    let card = &source.card;
    let intermediate = config
        .intermediate_size
        .unwrap_or(card.target.intermediate_size);
    let mut decoder = decoder::keys(&card.target, intermediate);
    decoder.insert(
        "rope_parameters".to_owned(),
        decoder::rope_parameters(&card.target.rope),
    );
    let speculative_tokens = source.config.speculative_tokens.unwrap_or(config.ttt_steps);
    let dtype = source.config.dtype.spelled();
    let entries = [
        ("architectures", json!(["Eagle3Speculator"])),
        ("speculators_model_type", json!("eagle3")),
        ("speculators_version", json!(VERSION)),
        ("draft_vocab_size", json!(card.vocab.len())),
        ("target_hidden_size", Value::Null),
        ("norm_before_residual", json!(config.norm_before_residual)),
        (
            "norm_before_fc",
            json!(config.aux_norm == AuxNorm::Concatenated),
        ),
        ("fc_norm", json!(false)),
        ("norm_output", json!(config.norm_output)),
        ("embed_requires_grad", json!(false)),
        (
            "eagle_aux_hidden_state_layer_ids",
            json!(layer_ids::input_ids(&card.aux_layer_ids)),
        ),
        ("transformer_layer_config", Value::Object(decoder)),
        (
            "speculators_config",
            json!({
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }],
                "verifier": {
                    "name_or_path": target.name,
                    "architectures": architectures(target_config, &card.target.model_type),
                },
            }),
        ),
        ("tie_word_embeddings", json!(false)),
        ("torch_dtype", json!(dtype)),
        ("dtype", json!(dtype)),
    ];
    entries
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
}

/// The name set in the run file, else the one in the target's configuration unless that is a path,
/// else the folder itself.
fn target_name(source: &Source<'_>, target_config: &Value) -> TargetName {
    let recorded = target_config
        .get("_name_or_path")
        .and_then(Value::as_str)
        .filter(|name| is_published_name(name));
    match source.config.target_name.as_deref().or(recorded) {
        Some(name) => TargetName {
            name: name.to_owned(),
            is_local: !is_published_name(name),
        },
        None => TargetName {
            name: source.target.to_string_lossy().into_owned(),
            is_local: true,
        },
    }
}

/// `organisation/model`, as model hubs name things.
fn is_published_name(name: &str) -> bool {
    let is_word = |part: &str| !part.is_empty() && !part.starts_with(['.', '~']);
    name.split_once('/').is_some_and(|(organisation, model)| {
        is_word(organisation) && is_word(model) && !model.contains('/')
    })
}

/// The target's architectures as its own configuration says, else by its type.
fn architectures(target_config: &Value, model_type: &str) -> Value {
    let by_type = match model_type {
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        _ => "LlamaForCausalLM",
    };
    match target_config.get("architectures") {
        Some(list @ Value::Array(_)) => list.clone(),
        _ => json!([by_type]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hub_names_count_as_published() {
        assert!(is_published_name("org/model-1.0"));
        for name in [
            "/data/model",
            "./model",
            "../org/model",
            "model",
            "a/b/c",
            "~/model",
        ] {
            assert!(!is_published_name(name), "{name}");
        }
    }
}
