//! MTP heads in the layout of MiMo, the only one that an engine reads beside a plain target.
//!
//! vLLM builds the block from the *target's* configuration: start the target with
//! `--hf-overrides '{"num_nextn_predict_layers": 1}'`, and `"qk_norm": true` where it has such norms.

use draftsmith_models::drafter::mtp::{HalfOrder, MtpConfig};
use draftsmith_models::target::TargetSpec;
use draftsmith_models::weights::NamedTensor;
use serde_json::{Value, json};

use crate::error::ExportError;
use crate::names::{LayerPrefix, MTP_PREFIX, qkv_biases};
use crate::source::Source;
use crate::{Layout, decoder};

pub(crate) fn native(source: &Source<'_>, config: &MtpConfig) -> Result<Layout, ExportError> {
    let card = &source.card;
    check(config, &card.target)?;
    let target = &card.target;
    let mut tensors = source.tensors(LayerPrefix::Indexed)?;
    tensors.extend(zero_biases(source));
    let mut map = decoder::keys(target, target.intermediate_size);
    let rope = &target.rope;
    let dtype = source.config.dtype.spelled();
    let entries = [
        ("architectures", json!(["MiMoForCausalLM"])),
        ("model_type", json!("qwen2")),
        ("num_hidden_layers", json!(target.num_layers)),
        ("num_nextn_predict_layers", json!(1)),
        ("attention_bias", json!(true)),
        ("rope_theta", json!(rope.theta)),
        ("rope_scaling", decoder::rope_scaling(rope)),
        ("rope_parameters", decoder::rope_parameters(rope)),
        ("torch_dtype", json!(dtype)),
        ("dtype", json!(dtype)),
    ];
    map.extend(entries.map(|(key, value)| (key.to_owned(), value)));
    let overrides = if target.qk_norm {
        r#"{"num_nextn_predict_layers": 1, "qk_norm": true}"#
    } else {
        r#"{"num_nextn_predict_layers": 1}"#
    };
    let mut warnings = vec![format!(
        "vLLM builds this head from the target's configuration: start the target with `--hf-overrides \
         '{overrides}'`"
    )];
    if !card.vocab.is_full() {
        warnings.push(format!(
            "engines draft with the target's whole head, but this one was trained to choose among {} of its {} \
             tokens",
            card.vocab.len(),
            target.vocab_size
        ));
    }
    Ok(Layout {
        config: Value::Object(map),
        tensors,
        warnings,
    })
}

/// What engines compute with this layout cannot be set in the file.
pub(crate) fn check(config: &MtpConfig, target: &TargetSpec) -> Result<(), ExportError> {
    let reason = if config.half_order != HalfOrder::HiddenFirst {
        "engines read the state's half first, but `half_order` is \"embedding_first\""
    } else if !config.zero_first_embedding {
        "engines replace the embedding at position 0 by zeros, but `zero_first_embedding` is false"
    } else if target.num_heads * target.head_dim != target.hidden_size {
        "vLLM takes the head size to be the width over the number of heads, and this target's differs"
    } else {
        return Ok(());
    };
    Err(ExportError::NotExpressible {
        format: "native",
        reason: reason.to_owned(),
    })
}

/// The biases of q, k and v that the layout asks for, where the block has none.
fn zero_biases(source: &Source<'_>) -> Vec<NamedTensor> {
    let target = &source.card.target;
    if target.qkv_bias {
        return Vec::new();
    }
    let zeros = |(letter, width): (&str, usize)| {
        NamedTensor::float(
            format!("{MTP_PREFIX}.self_attn.{letter}_proj.bias"),
            &[width],
            &vec![0.0; width],
            source.config.dtype.element(),
        )
    };
    qkv_biases(target).map(zeros).into()
}
