//! The layout of the published heads: vLLM, SGLang and the llama.cpp converter read it.
//!
//! It carries no embedding: engines take the target's. Layer ids are written under both keys of
//! [`crate::layer_ids`], also when they are the ones an engine would guess.

use std::path::Path;

use draftsmith_models::checkpoint::DrafterCard;
use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::drafter::eagle3::{AuxNorm, Eagle3Config};
use draftsmith_models::target::TargetSpec;
use serde_json::{Map, Value, json};

use crate::error::ExportError;
use crate::names::LayerPrefix;
use crate::source::Source;
use crate::{ExportReport, Exporter, Layout, d2t, decoder, dflash, dspark, layer_ids, mtp};

/// Layout `native`.
#[derive(Clone, Copy, Debug)]
pub struct Native;

impl Exporter for Native {
    fn name(&self) -> &'static str {
        "native"
    }

    fn write(&self, source: &Source<'_>, out: &Path) -> Result<ExportReport, ExportError> {
        let layout = match &source.card.drafter {
            DrafterConfig::Eagle3(config) => eagle3(source, config),
            DrafterConfig::Mtp(config) => mtp::native(source, config),
            DrafterConfig::Dflash(config) => dflash::native(source, config),
            DrafterConfig::Dspark(config) => dspark::native(source, config),
            other => {
                return Err(ExportError::NoLayout {
                    format: self.name(),
                    family: other.family(),
                });
            }
        };
        layout?.write(self.name(), out, source)
    }

    fn can_hold(&self, drafter: &DrafterConfig) -> bool {
        matches!(
            drafter,
            DrafterConfig::Eagle3(_)
                | DrafterConfig::Mtp(_)
                | DrafterConfig::Dflash(_)
                | DrafterConfig::Dspark(_)
        )
    }

    fn check(
        &self,
        drafter: &DrafterConfig,
        target: &TargetSpec,
        _folder: &Path,
    ) -> Result<(), ExportError> {
        match drafter {
            DrafterConfig::Mtp(config) => mtp::check(config, target),
            _ => Ok(()),
        }
    }
}

fn eagle3(source: &Source<'_>, config: &Eagle3Config) -> Result<Layout, ExportError> {
    let card = &source.card;
    let mut tensors = source.tensors(LayerPrefix::Midlayer)?;
    tensors.extend(d2t::tables(&card.vocab));
    Ok(Layout {
        config: Value::Object(eagle3_config(source, config)),
        tensors,
        warnings: eagle3_warnings(card, config),
    })
}

fn eagle3_config(source: &Source<'_>, config: &Eagle3Config) -> Map<String, Value> {
    let card = &source.card;
    let target = &card.target;
    let mut map = Map::new();
    map.insert(
        "architectures".to_owned(),
        json!(["LlamaForCausalLMEagle3"]),
    );
    let intermediate = config.intermediate_size.unwrap_or(target.intermediate_size);
    map.extend(decoder::keys(target, intermediate));
    let dtype = source.config.dtype.spelled();
    let entries = [
        ("draft_vocab_size", json!(card.vocab.len())),
        ("rope_theta", json!(target.rope.theta)),
        ("rope_scaling", decoder::rope_scaling(&target.rope)),
        ("rope_parameters", decoder::rope_parameters(&target.rope)),
        ("norm_before_residual", json!(config.norm_before_residual)),
        (
            "norm_before_fc",
            json!(config.aux_norm == AuxNorm::Concatenated),
        ),
        ("fc_norm", json!(config.aux_norm == AuxNorm::Each)),
        ("norm_output", json!(config.norm_output)),
        ("torch_dtype", json!(dtype)),
        ("dtype", json!(dtype)),
    ];
    let entries = entries.into_iter().chain(state_keys(card));
    map.extend(entries.map(|(key, value)| (key.to_owned(), value)));
    map
}

/// Which states of the target engines give to the drafter: outputs of blocks, or the final one after its norm.
fn state_keys(card: &DrafterCard) -> Vec<(&'static str, Value)> {
    let ids = &card.aux_layer_ids;
    if ids.is_empty() {
        return vec![("eagle_config", json!({ "use_aux_hidden_state": false }))];
    }
    let nested = json!({
        "use_aux_hidden_state": true,
        "eagle_aux_hidden_state_layer_ids": ids,
    });
    vec![
        ("num_aux_hidden_states", json!(ids.len())),
        (
            "eagle_aux_hidden_state_layer_ids",
            json!(layer_ids::input_ids(ids)),
        ),
        ("eagle_config", nested),
    ]
}

/// What some reader of this layout cannot do, although it loads the file.
fn eagle3_warnings(card: &DrafterCard, config: &Eagle3Config) -> Vec<String> {
    let mut warnings = Vec::new();
    if config.norm_before_residual {
        warnings.push(
            "`norm_before_residual` is true: vLLM applies it, SGLang and llama.cpp ignore it and \
             would draft wrongly"
                .to_owned(),
        );
    }
    if config.aux_norm == AuxNorm::Each {
        warnings.push(
            "`fc_norm` is true: vLLM and SGLang apply it, the llama.cpp converter has no place for it"
                .to_owned(),
        );
    }
    if card.aux_layer_ids.last() == Some(&(card.target.num_layers - 1)) {
        warnings.push(
            "the output of the target's last block is among the captured layers: vLLM captures it, \
             SGLang cannot"
                .to_owned(),
        );
    }
    if card.aux_layer_ids.len() != 3 {
        warnings.push(format!(
            "{} layers are captured: the llama.cpp converter needs exactly 3",
            card.aux_layer_ids.len()
        ));
    }
    warnings
}
