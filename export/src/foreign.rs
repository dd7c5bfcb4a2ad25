//! [`ForeignConfig`]: what an exported `config.json` says about an EAGLE-3 drafter.

use std::path::Path;

use draftsmith_models::drafter::aux_layers;
use draftsmith_models::drafter::eagle3::{AuxNorm, Eagle3Config};
use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::target::TargetSpec;
use serde_json::{Map, Value, json};

use crate::error::ExportError;
use crate::layer_ids;

/// The settings of a foreign drafter, in our terms.
#[derive(Clone, Debug)]
pub(crate) struct ForeignConfig {
    pub(crate) aux_layer_ids: Vec<usize>,
    pub(crate) draft_vocab_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) aux_norm: AuxNorm,
    pub(crate) norm_before_residual: bool,
    pub(crate) norm_output: bool,
    pub(crate) speculative_tokens: usize,
    pub(crate) warnings: Vec<String>,
}

const LAYER_IDS: &str = "eagle_aux_hidden_state_layer_ids";

/// Keys of the decoder layer; the rest of the file is about drafting.
const DECODER: &[&str] = &[
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
];

/// Keys about drafting that are read below.
const DRAFTING: &[&str] = &[
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "num_aux_hidden_states",
    LAYER_IDS,
    "eagle_config",
    "logit_scale",
    "target_hidden_size",
    "transformer_layer_config",
    "speculators_config",
];

/// Keys that change nothing this build computes.
const IGNORED: &[&str] = &[
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "embed_requires_grad",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "pretraining_tp",
    "speculators_model_type",
    "speculators_version",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

impl ForeignConfig {
    /// Reads either layout and checks it against the target.
    pub(crate) fn read(path: &Path, target: &TargetSpec) -> Result<Self, ExportError> {
        let map: Map<String, Value> = file::read_json(path)?;
        let reader = Reader { map: &map, path };
        reader.refuse_other_families()?;
        let decoder = match map.get("transformer_layer_config") {
            Some(Value::Object(decoder)) => decoder,
            _ => &map,
        };
        let layer = reader.decoder(decoder)?;
        reader.check_shape(&layer, target)?;
        reader.refuse_variants(target)?;
        Ok(Self {
            aux_layer_ids: reader.aux_layer_ids(target.num_layers)?,
            draft_vocab_size: reader
                .number("draft_vocab_size")?
                .unwrap_or(target.vocab_size),
            intermediate_size: layer.intermediate_size,
            aux_norm: reader.aux_norm()?,
            norm_before_residual: reader.norm_before_residual()?,
            norm_output: reader.either_flag("norm_output")?,
            speculative_tokens: reader.speculative_tokens(),
            warnings: reader.unknown_keys(),
        })
    }
}

struct Reader<'a> {
    map: &'a Map<String, Value>,
    path: &'a Path,
}

impl Reader<'_> {
    /// Keys that other families are known by.
    fn refuse_other_families(&self) -> Result<(), ExportError> {
        let is_eagle3 = |found: &Value| found == "eagle3";
        let kind = "speculators_model_type";
        let named = self.map.get(kind).filter(|found| !is_eagle3(found));
        let named = named.map(|found| (kind, found));
        let keys = ["dflash_config", "num_nextn_predict_layers"];
        let mut others = keys
            .into_iter()
            .filter_map(|key| Some((key, self.map.get(key)?)));
        match named.or_else(|| others.next()) {
            None => Ok(()),
            Some((key, found)) => Err(ExportError::OtherFamily {
                key,
                path: self.path.to_owned(),
                found: found.to_string(),
            }),
        }
    }

    /// The decoder layer, parsed as strictly as a target of one block.
    fn decoder(&self, decoder: &Map<String, Value>) -> Result<TargetSpec, ExportError> {
        let mut map: Map<String, Value> = decoder
            .iter()
            .filter(|(key, _)| DECODER.contains(&key.as_str()))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        if !map.contains_key("rope_theta") && !map.contains_key("rope_parameters") {
            // The default of the reference configuration class, which published files rely on.
            map.insert("rope_theta".to_owned(), json!(10000.0));
        }
        Ok(TargetSpec::from_json(&Value::Object(map), self.path)?)
    }

    fn unsupported(&self, key: &str, expected: &str, found: &dyn std::fmt::Debug) -> ExportError {
        ExportError::Unsupported {
            key: key.to_owned(),
            path: self.path.to_owned(),
            expected: expected.to_owned(),
            found: format!("{found:?}"),
        }
    }

    /// A drafter of this build has the target's heads, width, epsilon and rotary frequencies.
    fn check_shape(&self, layer: &TargetSpec, target: &TargetSpec) -> Result<(), ExportError> {
        if layer.model_type != "llama" {
            return Err(self.unsupported("model_type", "`llama`", &layer.model_type));
        }
        if layer.num_layers != 1 {
            return Err(self.unsupported("num_hidden_layers", "1 layer", &layer.num_layers));
        }
        for (key, found, expected) in [
            ("vocab_size", layer.vocab_size, target.vocab_size),
            ("hidden_size", layer.hidden_size, target.hidden_size),
            ("num_attention_heads", layer.num_heads, target.num_heads),
            (
                "num_key_value_heads",
                layer.num_kv_heads,
                target.num_kv_heads,
            ),
            ("head_dim", layer.head_dim, target.head_dim),
        ] {
            if found != expected {
                return Err(self.unsupported(key, &format!("the target's {expected}"), &found));
            }
        }
        if layer.rms_norm_eps.to_bits() != target.rms_norm_eps.to_bits() {
            let expected = format!("the target's {}", target.rms_norm_eps);
            return Err(self.unsupported("rms_norm_eps", &expected, &layer.rms_norm_eps));
        }
        if layer.rope != target.rope {
            let expected = format!("the target's {:?}", target.rope);
            return Err(self.unsupported("rope_parameters", &expected, &layer.rope));
        }
        Ok(())
    }

    fn refuse_variants(&self, target: &TargetSpec) -> Result<(), ExportError> {
        let scale = self.map.get("logit_scale").and_then(Value::as_f64);
        if scale.is_some_and(|scale| (scale - 1.0).abs() > 0.0) {
            return Err(self.unsupported("logit_scale", "1.0", &scale));
        }
        match self.number("target_hidden_size")? {
            Some(found) if found != target.hidden_size => {
                Err(self.unsupported("target_hidden_size", "the target's width", &found))
            }
            _ => Ok(()),
        }
    }

    /// The top-level list names inputs, the nested one outputs; without either, what engines guess.
    fn aux_layer_ids(&self, num_layers: usize) -> Result<Vec<usize>, ExportError> {
        if self.nested("use_aux_hidden_state") == Some(&Value::Bool(false)) {
            return Ok(Vec::new()); // engines give it the final state, whatever else is written
        }
        let top = self.ids(LAYER_IDS, self.map.get(LAYER_IDS))?;
        let nested_key = format!("eagle_config.{LAYER_IDS}");
        let nested = self.ids(&nested_key, self.nested(LAYER_IDS))?;
        let from_top = match &top {
            None => None,
            Some(ids) => Some(
                layer_ids::from_input_ids(ids)
                    .ok_or_else(|| self.unsupported(LAYER_IDS, "the outputs of blocks", ids))?,
            ),
        };
        let ids = match (from_top, nested) {
            (Some(top), Some(nested)) if top != nested => {
                let expected = format!("{top:?}, the outputs that the top-level list names");
                return Err(self.unsupported(&nested_key, &expected, &nested));
            }
            (Some(ids), _) | (None, Some(ids)) => ids,
            (None, None) => layer_ids::engine_default(num_layers).ok_or_else(|| {
                self.unsupported(LAYER_IDS, "a list of captured layers", &"missing")
            })?,
        };
        aux_layers::check("eagle3", &ids, num_layers)?;
        match self.number("num_aux_hidden_states")? {
            Some(count) if count != ids.len() => {
                let expected = format!("{} captured layers", ids.len());
                Err(self.unsupported("num_aux_hidden_states", &expected, &count))
            }
            _ => Ok(ids),
        }
    }

    /// One norm over the concatenated states or one for each; the speculators package refuses both at once, too.
    fn aux_norm(&self) -> Result<AuxNorm, ExportError> {
        let key = "fc_norm";
        match (self.either_flag("norm_before_fc")?, self.either_flag(key)?) {
            (false, false) => Ok(AuxNorm::None),
            (true, false) => Ok(AuxNorm::Concatenated),
            (false, true) => Ok(AuxNorm::Each),
            (true, true) => Err(self.unsupported(key, "false beside `norm_before_fc`", &true)),
        }
    }

    /// Missing means false in the native layout, but opposite things to the two readers of the other.
    fn norm_before_residual(&self) -> Result<bool, ExportError> {
        let key = "norm_before_residual";
        if self.map.contains_key("speculators_config") && !self.map.contains_key(key) {
            return Err(self.unsupported(key, "true or false written out", &"missing"));
        }
        self.flag(key)
    }

    /// Tokens a round of the first proposal method; the published number of steps without one.
    fn speculative_tokens(&self) -> usize {
        self.map
            .get("speculators_config")
            .and_then(|value| value.pointer("/proposal_methods/0/speculative_tokens"))
            .and_then(Value::as_u64)
            .filter(|&tokens| tokens > 0)
            .map_or(Eagle3Config::default().ttt_steps, |tokens| tokens as usize)
    }

    fn unknown_keys(&self) -> Vec<String> {
        let known =
            |key: &str| DECODER.contains(&key) || DRAFTING.contains(&key) || IGNORED.contains(&key);
        self.map
            .iter()
            .filter(|(key, value)| !known(key) && !value.is_null())
            .map(|(key, _)| format!("`{key}` in `{}` is not understood", self.path.display()))
            .collect()
    }

    fn nested(&self, key: &str) -> Option<&Value> {
        self.map
            .get("eagle_config")
            .and_then(|value| value.get(key))
    }

    fn wrong_type(&self, key: &str, expected: &str, found: &Value) -> ExportError {
        ModelError::ConfigKey {
            key: key.to_owned(),
            path: self.path.to_owned(),
            expected: expected.to_owned(),
            found: format!("`{found}`"),
        }
        .into()
    }

    fn number(&self, key: &str) -> Result<Option<usize>, ExportError> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) => Ok(Some(number as usize)),
                None => Err(self.wrong_type(key, "a whole number", value)),
            },
        }
    }

    fn flag(&self, key: &str) -> Result<bool, ExportError> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong_type(key, "true or false", other)),
        }
    }

    /// A flag at the top or in `eagle_config`.
    fn either_flag(&self, key: &str) -> Result<bool, ExportError> {
        Ok(self.flag(key)? || self.nested(key).and_then(Value::as_bool) == Some(true))
    }

    fn ids(&self, key: &str, value: Option<&Value>) -> Result<Option<Vec<usize>>, ExportError> {
        let Some(value) = value.filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let list = value.as_array().and_then(|list| {
            list.iter()
                .map(|id| id.as_u64().map(|id| id as usize))
                .collect::<Option<Vec<_>>>()
        });
        list.map(Some)
            .ok_or_else(|| self.wrong_type(key, "a list of layer ids", value))
    }
}
