//! The layout of the speculators package, which vLLM recognises by itself.
//!
//! It carries a copy of the target's embedding: the package's own loader leaves memory uninitialised
//! without one.

use std::path::Path;

use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::drafter::eagle3::{AuxNorm, Eagle3Config};
use draftsmith_models::weights::NamedTensor;
use serde_json::{Map, Value, json};

use crate::error::ExportError;
use crate::names::{EMBEDDING, LayerPrefix};
use crate::source::Source;
use crate::{ExportReport, Exporter, Layout, d2t, decoder, dflash, dspark, layer_ids};

/// Version of the speculators package whose layout is written.
const VERSION: &str = "0.9.0";

/// Layout `speculators`.
#[derive(Clone, Copy, Debug)]
pub struct Speculators;

impl Exporter for Speculators {
    fn name(&self) -> &'static str {
        "speculators"
    }

    fn write(&self, source: &Source<'_>, out: &Path) -> Result<ExportReport, ExportError> {
        let layout = match &source.card.drafter {
            DrafterConfig::Eagle3(config) => eagle3(source, config),
            DrafterConfig::Dflash(config) => dflash::speculators(source, config),
            DrafterConfig::Dspark(config) => dspark::speculators(source, config),
            other => Err(ExportError::NoLayout {
                format: self.name(),
                family: other.family(),
            }),
        };
        layout?.write(self.name(), out, source)
    }

    /// Not MTP: the package has a layout for it, but no engine reads that. Not EAGLE-3 without captured states:
    /// the package has no key for it.
    fn can_hold(&self, drafter: &DrafterConfig) -> bool {
        match drafter {
            DrafterConfig::Eagle3(config) => !config.reads_final_state(),
            DrafterConfig::Dflash(_) | DrafterConfig::Dspark(_) => true,
            _ => false,
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
    let card = &source.card;
    let mut tensors = source.tensors(LayerPrefix::Indexed)?;
    tensors.push(source.embedding(EMBEDDING)?);
    let entries = [
        ("norm_before_residual", json!(config.norm_before_residual)),
        (
            "norm_before_fc",
            json!(config.aux_norm == AuxNorm::Concatenated),
        ),
        ("fc_norm", json!(config.aux_norm == AuxNorm::Each)),
        ("norm_output", json!(config.norm_output)),
        ("embed_requires_grad", json!(false)),
        (
            "eagle_aux_hidden_state_layer_ids",
            json!(layer_ids::input_ids(&card.aux_layer_ids)),
        ),
    ];
    let intermediate = config.intermediate_size;
    let intermediate = intermediate.unwrap_or(card.target.intermediate_size);
    let frame = Frame {
        algorithm: "eagle3",
        architecture: "Eagle3Speculator",
        trained_tokens: config.ttt_steps,
        is_block: false,
        decoder: decoder::keys(&card.target, intermediate),
        entries: entries.into(),
    };
    frame.layout(source, tensors)
}

/// What one family adds to the common configuration of this layout.
pub(crate) struct Frame {
    pub(crate) algorithm: &'static str,
    pub(crate) architecture: &'static str,
    /// Drafts a round, where the run file does not say.
    pub(crate) trained_tokens: usize,
    /// Whether that number is the size of a block: engines build blocks of the number they are given.
    pub(crate) is_block: bool,
    /// Keys of the decoder layers.
    pub(crate) decoder: Map<String, Value>,
    /// Top-level keys of the family.
    pub(crate) entries: Vec<(&'static str, Value)>,
}

impl Frame {
    /// The layout of `tensors`; the vocabulary tables are added.
    pub(crate) fn layout(
        self,
        source: &Source<'_>,
        mut tensors: Vec<NamedTensor>,
    ) -> Result<Layout, ExportError> {
        let other_block = self.check_block(source)?;
        tensors.extend(d2t::tables(&source.card.vocab));
        let target_config = source.target_config()?;
        let target = target_name(source, &target_config);
        let warning = format!(
            "`speculators_config.verifier.name_or_path` is the folder `{}` of this machine: set \
             `export.target_name` to the published name before sharing the export",
            target.name
        );
        Ok(Layout {
            warnings: target
                .is_local
                .then_some(warning)
                .into_iter()
                .chain(other_block)
                .collect(),
            config: Value::Object(self.config(source, &target, &target_config)),
            tensors,
        })
    }

    /// Refuses more drafts than a block yields; warns about fewer, for which engines build a smaller block.
    fn check_block(&self, source: &Source<'_>) -> Result<Option<String>, ExportError> {
        let trained = self.trained_tokens;
        match source.config.speculative_tokens {
            Some(asked) if self.is_block && asked > trained => Err(ExportError::NotExpressible {
                format: "speculators",
                reason: format!(
                    "`export.speculative_tokens` is {asked}, but a block yields {trained} drafts"
                ),
            }),
            Some(asked) if self.is_block && asked < trained => Ok(Some(format!(
                "engines build blocks for {asked} drafts, but this drafter was trained and measured with \
                 blocks for {trained}: leave `export.speculative_tokens` out"
            ))),
            _ => Ok(None),
        }
    }

    fn config(
        self,
        source: &Source<'_>,
        target: &TargetName,
        target_config: &Value,
    ) -> Map<String, Value> {
        let card = &source.card;
        let mut decoder = self.decoder;
        decoder.insert(
            "rope_parameters".to_owned(),
            decoder::rope_parameters(&card.target.rope),
        );
        let asked = source.config.speculative_tokens;
        let dtype = source.config.dtype.spelled();
        let common = [
            ("architectures", json!([self.architecture])),
            ("speculators_model_type", json!(self.algorithm)),
            ("speculators_version", json!(VERSION)),
            ("draft_vocab_size", json!(card.vocab.len())),
            ("target_hidden_size", Value::Null),
            ("transformer_layer_config", Value::Object(decoder)),
            (
                "speculators_config",
                json!({
                    "algorithm": self.algorithm,
                    "default_proposal_method": "greedy",
                    "proposal_methods": [{
                        "proposal_type": "greedy",
                        "speculative_tokens": asked.unwrap_or(self.trained_tokens),
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
        let entries = common.into_iter().chain(self.entries);
        entries
            .map(|(key, value)| (key.to_owned(), value))
            .collect()
    }
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
        "mimo" => "MiMoForCausalLM",
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
