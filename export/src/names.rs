//! Foreign tensor names and shapes of each family.

use draftsmith_models::checkpoint::DrafterCard;
use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::drafter::eagle3::{AuxNorm, Eagle3Config};

/// One tensor under both names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorName {
    /// Name in `drafter.safetensors`.
    pub ours: &'static str,
    /// Name in the exported file.
    pub foreign: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

/// Prefix of the decoder layer's tensors in an exported file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerPrefix {
    /// `midlayer.`, the published name.
    Midlayer,
    /// `layers.0.`, the speculators name.
    Indexed,
}

impl LayerPrefix {
    fn text(self) -> &'static str {
        match self {
            Self::Midlayer => "midlayer.",
            Self::Indexed => "layers.0.",
        }
    }
}

/// Name of the drafter's own copy of the target's embedding, `[V, H]`.
pub const EMBEDDING: &str = "embed_tokens.weight";
/// Name of the draft head, `[V_draft, H]`.
pub const HEAD: &str = "lm_head.weight";

/// All tensors of a drafter with their foreign names, in the order they are written.
pub fn tensor_names(card: &DrafterCard, prefix: LayerPrefix) -> Vec<TensorName> {
    match &card.drafter {
        DrafterConfig::Eagle3(config) => eagle3(card, config, prefix),
    }
}

/// EAGLE-3 as published by SafeAILab (2503.01840); `input_layernorm` norms the embedding.
fn eagle3(card: &DrafterCard, config: &Eagle3Config, prefix: LayerPrefix) -> Vec<TensorName> {
    let target = &card.target;
    let hidden = target.hidden_size;
    let intermediate = config.intermediate_size.unwrap_or(target.intermediate_size);
    let q_width = target.num_heads * target.head_dim;
    let kv_width = target.num_kv_heads * target.head_dim;
    let num_captured = card.aux_layer_ids.len();
    let top = |ours, foreign: &str, shape: &[usize]| TensorName {
        ours,
        foreign: foreign.to_owned(),
        shape: shape.to_vec(),
    };
    let layer =
        |ours, part: &str, shape: &[usize]| top(ours, &format!("{}{part}", prefix.text()), shape);
    let aux_norm = (config.aux_norm == AuxNorm::Concatenated).then(|| {
        let width = num_captured * hidden;
        top("aux_norm", "input_norm.weight", &[width])
    });
    let always = vec![
        top("fc", "fc.weight", &[hidden, num_captured * hidden]),
        layer("hidden_norm", "hidden_norm.weight", &[hidden]),
        layer("embed_norm", "input_layernorm.weight", &[hidden]),
        layer("mlp_norm", "post_attention_layernorm.weight", &[hidden]),
        layer("q_proj", "self_attn.q_proj.weight", &[q_width, 2 * hidden]),
        layer("k_proj", "self_attn.k_proj.weight", &[kv_width, 2 * hidden]),
        layer("v_proj", "self_attn.v_proj.weight", &[kv_width, 2 * hidden]),
        layer("o_proj", "self_attn.o_proj.weight", &[hidden, q_width]),
        layer("gate_proj", "mlp.gate_proj.weight", &[intermediate, hidden]),
        layer("up_proj", "mlp.up_proj.weight", &[intermediate, hidden]),
        layer("down_proj", "mlp.down_proj.weight", &[hidden, intermediate]),
        top("norm", "norm.weight", &[hidden]),
        top("head", HEAD, &[card.vocab.len(), hidden]),
    ];
    aux_norm.into_iter().chain(always).collect()
}
