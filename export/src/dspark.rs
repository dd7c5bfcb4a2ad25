//! DSpark in the layouts of DeepSpec and of the speculators package: DFlash and two more heads.
//!
//! vLLM drafts with these files on a card only (its second runner), llama.cpp after conversion. Ids and sizes
//! stand at the top level, where the heads are built from; SGLang reads the rest from `dflash_config`.

use draftsmith_models::drafter::dspark::DsparkConfig;
use serde_json::{Value, json};

use crate::error::ExportError;
use crate::names::LayerPrefix;
use crate::source::Source;
use crate::speculators::Frame;
use crate::{Layout, dflash, layer_ids};

/// Keys of the heads, the same in both layouts.
fn head_keys(config: &DsparkConfig) -> [(&'static str, Value); 5] {
    [
        ("markov_rank", json!(config.markov_rank)),
        ("markov_head_type", json!("vanilla")),
        ("enable_confidence_head", json!(config.has_confidence())),
        (
            "confidence_head_with_markov",
            json!(config.has_confidence()),
        ),
        ("sample_from_anchor", json!(true)),
    ]
}

/// The layout of DeepSpec.
pub(crate) fn native(source: &Source<'_>, config: &DsparkConfig) -> Result<Layout, ExportError> {
    let card = &source.card;
    let mut layout = dflash::native(source, &config.core())?;
    let entries = [
        ("architectures", json!(["Qwen3DSparkModel"])),
        (
            "mask_token_id",
            json!(config.mask_token.id(card.drafter.family())?),
        ),
        ("target_layer_ids", json!(card.aux_layer_ids)),
        ("num_anchors", json!(config.anchors_per_row)),
    ];
    if let Value::Object(map) = &mut layout.config {
        let entries = entries.into_iter().chain(head_keys(config));
        map.extend(entries.map(|(key, value)| (key.to_owned(), value)));
    }
    layout.warnings = dflash::last_layer_warning(source);
    if !card.vocab.is_full() {
        layout.warnings.push(
            "the Markov factors are those of a reduced vocabulary: SGLang needs the full one"
                .to_owned(),
        );
    }
    Ok(layout)
}

/// The layout of the speculators package.
pub(crate) fn speculators(
    source: &Source<'_>,
    config: &DsparkConfig,
) -> Result<Layout, ExportError> {
    let card = &source.card;
    let mut entries = vec![
        ("block_size", json!(config.block_size)),
        (
            "aux_hidden_state_layer_ids",
            json!(layer_ids::input_ids(&card.aux_layer_ids)),
        ),
        (
            "mask_token_id",
            json!(config.mask_token.id(card.drafter.family())?),
        ),
        ("sliding_window_non_causal", json!(true)),
    ];
    entries.extend(head_keys(config));
    let frame = Frame {
        algorithm: "dspark",
        architecture: "DSparkSpeculator",
        trained_tokens: config.block_size,
        is_block: true,
        decoder: dflash::decoder_keys(source, &config.core()),
        entries,
    };
    frame.layout(source, source.tensors(LayerPrefix::Indexed)?)
}
