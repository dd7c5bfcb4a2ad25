//! Foreign tensor names and shapes of each family.

use draftsmith_models::checkpoint::DrafterCard;
use draftsmith_models::drafter::DrafterConfig;
use draftsmith_models::drafter::dflash::DflashConfig;
use draftsmith_models::drafter::dspark::DsparkConfig;
use draftsmith_models::drafter::eagle3::{AuxNorm, Eagle3Config};
use draftsmith_models::target::TargetSpec;

/// One tensor under both names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorName {
    /// Name in `drafter.safetensors`.
    pub ours: String,
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

/// Prefix of the tensors of an MTP head.
pub const MTP_PREFIX: &str = "model.mtp_layers.0";

/// All tensors of a drafter with their foreign names, in the order they are written; none of a family that no
/// layout holds.
pub fn tensor_names(card: &DrafterCard, prefix: LayerPrefix) -> Vec<TensorName> {
    match &card.drafter {
        DrafterConfig::Eagle3(config) => eagle3(card, config, prefix),
        DrafterConfig::Mtp(_) => mtp(card),
        DrafterConfig::Dflash(config) => dflash(card, config, ""),
        DrafterConfig::Dspark(config) => dspark(card, config),
        _ => Vec::new(),
    }
}

fn named(ours: &str, foreign: &str, shape: &[usize]) -> TensorName {
    TensorName {
        ours: ours.to_owned(),
        foreign: foreign.to_owned(),
        shape: shape.to_vec(),
    }
}

/// One Llama or Qwen3 block; names of transformers.
fn decoder_layer(
    target: &TargetSpec,
    intermediate: usize,
    qk_norm: bool,
    [ours, foreign]: [&str; 2],
) -> Vec<TensorName> {
    let hidden = target.hidden_size;
    let q_width = target.num_heads * target.head_dim;
    let kv_width = target.num_kv_heads * target.head_dim;
    let part = |field: &str, name: &str, shape: &[usize]| {
        named(
            &format!("{ours}.{field}"),
            &format!("{foreign}.{name}.weight"),
            shape,
        )
    };
    let mut names = vec![
        part("input_norm", "input_layernorm", &[hidden]),
        part("mlp_norm", "post_attention_layernorm", &[hidden]),
        part("q_proj", "self_attn.q_proj", &[q_width, hidden]),
        part("k_proj", "self_attn.k_proj", &[kv_width, hidden]),
        part("v_proj", "self_attn.v_proj", &[kv_width, hidden]),
        part("o_proj", "self_attn.o_proj", &[hidden, q_width]),
        part("gate_proj", "mlp.gate_proj", &[intermediate, hidden]),
        part("up_proj", "mlp.up_proj", &[intermediate, hidden]),
        part("down_proj", "mlp.down_proj", &[hidden, intermediate]),
    ];
    if qk_norm {
        names.push(part("q_norm", "self_attn.q_norm", &[target.head_dim]));
        names.push(part("k_norm", "self_attn.k_norm", &[target.head_dim]));
    }
    names
}

/// DFlash as published by z-lab (2602.06036). Engines draft with the target's embedding and head; the
/// rows of a reduced vocabulary are written. `ours` is the prefix of its tensors in the checkpoint.
fn dflash(card: &DrafterCard, config: &DflashConfig, ours: &str) -> Vec<TensorName> {
    let target = &card.target;
    let hidden = target.hidden_size;
    let intermediate = config.intermediate_size.unwrap_or(target.intermediate_size);
    let top = |field: &str, foreign: &str, shape: &[usize]| {
        named(&format!("{ours}{field}"), foreign, shape)
    };
    let mut names = vec![
        top(
            "fc",
            "fc.weight",
            &[hidden, card.aux_layer_ids.len() * hidden],
        ),
        top("context_norm", "hidden_norm.weight", &[hidden]),
        top("norm", "norm.weight", &[hidden]),
    ];
    for index in 0..config.num_layers {
        let foreign = format!("layers.{index}");
        let prefixes = [&format!("{ours}{foreign}"), foreign.as_str()];
        names.extend(decoder_layer(target, intermediate, true, prefixes));
    }
    if !card.vocab.is_full() {
        names.push(top("head", HEAD, &[card.vocab.len(), hidden]));
    }
    names
}

/// DSpark as published by DeepSpec (2607.05147): DFlash with the factors of the Markov bias and the
/// confidence head.
fn dspark(card: &DrafterCard, config: &DsparkConfig) -> Vec<TensorName> {
    let (rank, hidden) = (config.markov_rank, card.target.hidden_size);
    let mut names = dflash(card, &config.core(), "core.");
    names.extend([
        named(
            "markov_in",
            "markov_head.markov_w1.weight",
            &[card.target.vocab_size, rank],
        ),
        named(
            "markov_out",
            "markov_head.markov_w2.weight",
            &[card.vocab.len(), rank],
        ),
    ]);
    if config.has_confidence() {
        let width = hidden + rank;
        names.push(named(
            "confidence_proj",
            "confidence_head.proj.weight",
            &[1, width],
        ));
        names.push(named("confidence_bias", "confidence_head.proj.bias", &[1]));
    }
    names
}

/// The layout of MiMo's own heads; engines draft with the target's embedding and head.
fn mtp(card: &DrafterCard) -> Vec<TensorName> {
    let top = |name: &str| format!("{MTP_PREFIX}.{name}.weight");
    let tops = [
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
    ]
    .map(top);
    mtp_head(&card.target, &tops, MTP_PREFIX)
}

/// A recursive head with one block of the target's shape. `tops` are the foreign names of the norms of
/// embedding and state, of the input projection and of the last norm, `block` the prefix of the block's.
pub(crate) fn mtp_head(target: &TargetSpec, tops: &[String; 4], block: &str) -> Vec<TensorName> {
    let hidden = target.hidden_size;
    let [embed_norm, hidden_norm, input_proj, norm] = tops;
    let mut names = vec![
        named("embed_norm", embed_norm, &[hidden]),
        named("hidden_norm", hidden_norm, &[hidden]),
        named("input_proj", input_proj, &[hidden, 2 * hidden]),
        named("norm", norm, &[hidden]),
    ];
    let (width, qk_norm) = (target.intermediate_size, target.qk_norm);
    names.extend(decoder_layer(target, width, qk_norm, ["layer", block]));
    if target.qkv_bias {
        names.extend(qkv_biases(target).map(|(letter, width)| {
            let foreign = format!("{block}.self_attn.{letter}_proj.bias");
            named(&format!("layer.{letter}_bias"), &foreign, &[width])
        }));
    }
    names
}

/// Letter and width of the biases of q, k and v.
pub(crate) fn qkv_biases(target: &TargetSpec) -> [(&'static str, usize); 3] {
    let q_width = target.num_heads * target.head_dim;
    let kv_width = target.num_kv_heads * target.head_dim;
    [("q", q_width), ("k", kv_width), ("v", kv_width)]
}

/// EAGLE-3 as published by SafeAILab (2503.01840); `input_layernorm` norms the embedding.
fn eagle3(card: &DrafterCard, config: &Eagle3Config, prefix: LayerPrefix) -> Vec<TensorName> {
    let target = &card.target;
    let hidden = target.hidden_size;
    let intermediate = config.intermediate_size.unwrap_or(target.intermediate_size);
    let q_width = target.num_heads * target.head_dim;
    let kv_width = target.num_kv_heads * target.head_dim;
    let num_captured = card.aux_layer_ids.len();
    let top = named;
    let layer = |ours: &str, part: &str, shape: &[usize]| {
        named(ours, &format!("{}{part}", prefix.text()), shape)
    };
    let fc = (num_captured > 0).then(|| {
        let shape = [hidden, num_captured * hidden];
        top("fc", "fc.weight", &shape)
    });
    let always = vec![
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
    let norms = aux_norms(config.aux_norm, num_captured, hidden);
    norms.into_iter().chain(fc).chain(always).collect()
}

/// Norms in front of EAGLE-3's fusion, as vLLM and the speculators package name them.
fn aux_norms(norm: AuxNorm, num_captured: usize, hidden: usize) -> Vec<TensorName> {
    match norm {
        AuxNorm::None => Vec::new(),
        AuxNorm::Concatenated => {
            vec![named(
                "aux_norm",
                "input_norm.weight",
                &[num_captured * hidden],
            )]
        }
        AuxNorm::Each => {
            let names = (0..num_captured).map(|index| {
                let foreign = format!("fc_norm.{index}.weight");
                named(&format!("aux_norms.{index}"), &foreign, &[hidden])
            });
            names.collect()
        }
    }
}
