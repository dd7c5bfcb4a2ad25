//! DFlash in the layouts of z-lab and of the speculators package.
//!
//! Layer ids are outputs of blocks in the first (`dflash_config.target_layer_ids`), inputs in the second
//! (`aux_hidden_state_layer_ids`). Neither carries an embedding; the head's rows only of a reduced
//! vocabulary.

use draftsmith_models::drafter::dflash::{BlockLayout, DflashConfig};
use serde_json::{Map, Value, json};

use crate::error::ExportError;
use crate::names::LayerPrefix;
use crate::source::Source;
use crate::speculators::Frame;
use crate::{Layout, d2t, decoder, layer_ids};

/// Drafts a round that a block yields.
fn trained_tokens(config: &DflashConfig) -> usize {
    match config.layout {
        BlockLayout::AnchorAsBonus => config.block_size - 1,
        BlockLayout::AnchorPredicts => config.block_size,
    }
}

fn samples_from_anchor(config: &DflashConfig) -> bool {
    config.layout == BlockLayout::AnchorPredicts
}

/// Keys of the draft layers: Qwen3 blocks of the target's sizes, all with one kind of attention.
pub(crate) fn decoder_keys(source: &Source<'_>, config: &DflashConfig) -> Map<String, Value> {
    let target = &source.card.target;
    let intermediate = config.intermediate_size.unwrap_or(target.intermediate_size);
    let mut map = decoder::keys(target, intermediate);
    let kind = match config.sliding_window {
        Some(_) => "sliding_attention",
        None => "full_attention",
    };
    let entries = [
        ("model_type", json!("qwen3")),
        ("num_hidden_layers", json!(config.num_layers)),
        ("layer_types", json!(vec![kind; config.num_layers])),
        ("sliding_window", json!(config.sliding_window)),
        ("use_sliding_window", json!(config.sliding_window.is_some())),
        ("max_window_layers", json!(config.num_layers)),
    ];
    map.extend(entries.map(|(key, value)| (key.to_owned(), value)));
    map
}

/// The layout of z-lab: vLLM, SGLang and the llama.cpp converter.
pub(crate) fn native(source: &Source<'_>, config: &DflashConfig) -> Result<Layout, ExportError> {
    let card = &source.card;
    let mut tensors = source.tensors(LayerPrefix::Indexed)?;
    tensors.extend(d2t::tables(&card.vocab));
    let mask_id = config.mask_token.id(card.drafter.family())?;
    let rope = &card.target.rope;
    let dtype = source.config.dtype.spelled();
    let mut map = decoder_keys(source, config);
    let entries = [
        ("architectures", json!(["DFlashDraftModel"])),
        ("block_size", json!(config.block_size)),
        ("num_target_layers", json!(card.target.num_layers)),
        (
            "dflash_config",
            json!({
                "mask_token_id": mask_id,
                "target_layer_ids": card.aux_layer_ids,
                "sample_from_anchor": samples_from_anchor(config),
            }),
        ),
        ("rope_theta", json!(rope.theta)),
        ("rope_scaling", decoder::rope_scaling(rope)),
        ("rope_parameters", decoder::rope_parameters(rope)),
        ("torch_dtype", json!(dtype)),
        ("dtype", json!(dtype)),
    ];
    map.extend(entries.map(|(key, value)| (key.to_owned(), value)));
    if !card.vocab.is_full() {
        map.insert("draft_vocab_size".to_owned(), json!(card.vocab.len()));
    }
    if config.sliding_window.is_some() {
        // Engines take layers with a window for causal ones otherwise.
        map.insert("is_causal".to_owned(), json!(false));
    }
    let mut warnings = last_layer_warning(source);
    if !card.vocab.is_full() {
        warnings.push(
            "the draft vocabulary is reduced: vLLM drafts with it, SGLang ignores it and drafts with the \
             target's whole head"
                .to_owned(),
        );
    }
    if samples_from_anchor(config) {
        warnings.push(
            "the anchor's position predicts: serve it only with a version that reads `sample_from_anchor`"
                .to_owned(),
        );
    }
    Ok(Layout {
        config: Value::Object(map),
        tensors,
        warnings,
    })
}

/// The reference code reads another state of the last block than the engines do.
pub(crate) fn last_layer_warning(source: &Source<'_>) -> Vec<String> {
    let card = &source.card;
    let captures_last = card.aux_layer_ids.last() == Some(&(card.target.num_layers - 1));
    let warning = "the output of the target's last block is among the captured layers: engines take it before \
                   the final norm, the published reference code behind it";
    captures_last
        .then(|| warning.to_owned())
        .into_iter()
        .collect()
}

/// The layout of the speculators package.
pub(crate) fn speculators(
    source: &Source<'_>,
    config: &DflashConfig,
) -> Result<Layout, ExportError> {
    let card = &source.card;
    let entries = [
        ("block_size", json!(config.block_size)),
        (
            "aux_hidden_state_layer_ids",
            json!(layer_ids::input_ids(&card.aux_layer_ids)),
        ),
        (
            "mask_token_id",
            json!(config.mask_token.id(card.drafter.family())?),
        ),
        // False would make vLLM mask the block causally in every layer.
        ("sliding_window_non_causal", json!(true)),
        ("sample_from_anchor", json!(samples_from_anchor(config))),
    ];
    let frame = Frame {
        algorithm: "dflash",
        architecture: "DFlashSpeculator",
        trained_tokens: trained_tokens(config),
        is_block: true,
        decoder: decoder_keys(source, config),
        entries: entries.into(),
    };
    frame.layout(source, source.tensors(LayerPrefix::Indexed)?)
}
