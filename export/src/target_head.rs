//! [`TargetHead`]: the MTP head that a target brings along, in the target's own files.
//!
//! | | MiMo | dense Qwen3.5 |
//! |---|---|---|
//! | names | `model.mtp_layers.0.` | `mtp.`, block `mtp.layers.0.` |
//! | input projection reads | state, embedding | embedding, state |
//! | norm gains in the file | as they are | less 1 |
//! | embedding at position 0 | zeros | as it is |
//!
//! Both read the target's last state after its final norm, and feed back the output after their own last norm.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use draftsmith_models::drafter::mtp::{HalfOrder, MtpConfig};
use draftsmith_models::drafter::{DrafterConfig, Origin};
use draftsmith_models::file;
use draftsmith_models::target::TargetSpec;
use draftsmith_models::weights::{NamedTensor, WeightFolder};
use safetensors::tensor::Dtype;
use serde_json::Value;

use crate::error::ExportError;
use crate::names::{MTP_PREFIX, TensorName, mtp_head};
use crate::read::in_memory;
use crate::source::{float_values, tensor_files};

/// How heads of one kind stand in their target's files.
#[derive(Debug)]
pub(crate) struct HeadLayout {
    /// What the names of all its tensors start with.
    start: &'static str,
    /// Names of the norms of embedding and state, of the input projection and of the last norm.
    tops: [&'static str; 4],
    /// Prefix of the block's tensors.
    block: &'static str,
    /// Keys of `config.json` that may hold the number of heads.
    count_keys: &'static [&'static str],
    half_order: HalfOrder,
    zero_first_embedding: bool,
    /// What is added to a stored gain.
    gain_offset: f32,
}

const LAYOUTS: [HeadLayout; 2] = [
    HeadLayout {
        start: "model.mtp_layers.",
        tops: [
            "model.mtp_layers.0.token_layernorm.weight",
            "model.mtp_layers.0.hidden_layernorm.weight",
            "model.mtp_layers.0.input_proj.weight",
            "model.mtp_layers.0.final_layernorm.weight",
        ],
        block: MTP_PREFIX,
        count_keys: &["num_nextn_predict_layers"],
        half_order: HalfOrder::HiddenFirst,
        zero_first_embedding: true,
        gain_offset: 0.0,
    },
    HeadLayout {
        start: "mtp.",
        tops: [
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.fc.weight",
            "mtp.norm.weight",
        ],
        block: "mtp.layers.0",
        count_keys: &["mtp_num_hidden_layers", "num_nextn_predict_layers"],
        half_order: HalfOrder::EmbeddingFirst,
        zero_first_embedding: false,
        gain_offset: 1.0,
    },
];

/// The head of a target, checked to be one that this build computes.
#[derive(Debug)]
pub(crate) struct TargetHead<'a> {
    folder: &'a Path,
    layout: &'static HeadLayout,
    /// Every tensor with the name of its file.
    pub(crate) tensors: Vec<(TensorName, String)>,
}

impl<'a> TargetHead<'a> {
    /// Finds the head of the target in `folder` by the names of its tensors.
    pub(crate) fn find(folder: &'a Path, spec: &TargetSpec) -> Result<Self, ExportError> {
        let files = tensor_files(folder)?;
        let layout = find_layout(folder, &files)?;
        check_count(folder, layout)?;
        let tops = layout.tops.map(str::to_owned);
        let names = mtp_head(spec, &tops, layout.block);
        let known: BTreeSet<&str> = names.iter().map(|name| name.foreign.as_str()).collect();
        let own = files.keys().filter(|name| name.starts_with(layout.start));
        let mut unknown: Vec<&String> = own.filter(|name| !known.contains(name.as_str())).collect();
        unknown.sort_by_key(|name| reason_against(name, layout).is_none());
        if let Some(name) = unknown.first() {
            let reason = reason_against(name, layout)
                .unwrap_or("has no place in a block of the target's shape");
            return Err(refuse(folder, format!("tensor `{name}` {reason}")));
        }
        let place = |name: TensorName| match files.get(&name.foreign) {
            Some(file) => Ok((name, file.clone())),
            None => Err(refuse(
                folder,
                format!("tensor `{}` is missing", name.foreign),
            )),
        };
        let head = Self {
            folder,
            layout,
            tensors: names.into_iter().map(place).collect::<Result<_, _>>()?,
        };
        Ok(head)
    }

    /// The settings under which our family computes what the target's authors trained.
    pub(crate) fn settings(&self) -> MtpConfig {
        MtpConfig {
            half_order: self.layout.half_order,
            zero_first_embedding: self.layout.zero_first_embedding,
            ..MtpConfig::default()
        }
    }

    /// What is added to the stored values of a tensor.
    pub(crate) fn offset(&self, name: &TensorName) -> f32 {
        if name.ours.ends_with("norm") {
            self.layout.gain_offset
        } else {
            0.0
        }
    }

    /// Names of the files that hold the head.
    pub(crate) fn files(&self) -> BTreeSet<&str> {
        self.tensors.iter().map(|(_, file)| file.as_str()).collect()
    }

    /// The tensors under our names, in f32.
    fn read(&self) -> Result<Vec<NamedTensor>, ExportError> {
        let mut read = Vec::new();
        for file in self.files() {
            let weights = WeightFolder::open_file(&self.folder.join(file))?;
            for (name, _) in self.tensors.iter().filter(|(_, place)| place == file) {
                read.push(self.read_one(&weights, name)?);
            }
        }
        Ok(read)
    }

    fn read_one(
        &self,
        weights: &WeightFolder,
        name: &TensorName,
    ) -> Result<NamedTensor, ExportError> {
        let found = weights.shape(&name.foreign)?;
        if name.ours == "layer.q_proj" && found == [2 * name.shape[0], name.shape[1]] {
            return Err(refuse(
                self.folder,
                format!(
                    "tensor `{}` has shape {found:?}, expected {:?}: attention with an output gate \
                     (`attn_output_gate`) is not computed",
                    name.foreign, name.shape
                ),
            ));
        }
        let mut values = float_values(weights.float_data(&name.foreign, &name.shape)?);
        let offset = self.offset(name);
        for value in &mut values {
            *value += offset;
        }
        Ok(NamedTensor::float(
            name.ours.clone(),
            &name.shape,
            &values,
            Dtype::F32,
        ))
    }
}

/// The head that the target in `folder` brings along, to start from; `name` is what the run file calls it.
///
/// # Errors
/// [`ExportError::TargetHead`] naming the key or tensor when there is none or it is not one dense block of
/// the target's shape.
pub fn target_head(
    folder: &Path,
    spec: &TargetSpec,
    fingerprint: &str,
    name: String,
) -> Result<Origin, ExportError> {
    let head = TargetHead::find(folder, spec)?;
    Ok(Origin {
        name,
        drafter: DrafterConfig::Mtp(head.settings()),
        aux_layer_ids: Vec::new(),
        vocab: None,
        target_fingerprint: fingerprint.to_owned(),
        step: 0,
        weights: in_memory(&head.read()?, folder)?,
    })
}

fn refuse(folder: &Path, reason: String) -> ExportError {
    ExportError::TargetHead {
        path: folder.to_owned(),
        reason,
    }
}

fn find_layout(
    folder: &Path,
    files: &BTreeMap<String, String>,
) -> Result<&'static HeadLayout, ExportError> {
    let layout = LAYOUTS
        .iter()
        .find(|layout| files.keys().any(|name| name.starts_with(layout.start)));
    if let Some(layout) = layout {
        return Ok(layout);
    }
    let names = "`model.mtp_layers.` (MiMo) or `mtp.` (Qwen3.5)";
    let reason = match files.keys().find(|name| name.ends_with(".eh_proj.weight")) {
        Some(name) => format!("tensor `{name}` is in the layout of DeepSeek, expected {names}"),
        None => format!("no tensor starts with {names}"),
    };
    Err(refuse(folder, reason))
}

/// Engines read the number of heads from the configuration; without it they would not draft at all.
fn check_count(folder: &Path, layout: &HeadLayout) -> Result<(), ExportError> {
    let config: Value = file::read_json(&folder.join("config.json"))?;
    let found = layout.count_keys.iter().find_map(|key| {
        let value = config.get(key).filter(|value| !value.is_null())?;
        Some((key, value))
    });
    match found {
        Some((_, value)) if value.as_u64() == Some(1) => Ok(()),
        Some((key, value)) => Err(refuse(
            folder,
            format!("`{key}` in `config.json` is {value}, expected 1"),
        )),
        None => Err(refuse(
            folder,
            format!(
                "`{}` in `config.json` is missing, expected 1",
                layout.count_keys[0]
            ),
        )),
    }
}

/// What a tensor is part of that this build does not compute.
fn reason_against(name: &str, layout: &HeadLayout) -> Option<&'static str> {
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let first_block = format!("{}.", layout.block);
    let layers = layout.block.strip_suffix('0').unwrap_or(layout.block);
    if has(&[".experts.", ".mlp.gate.", ".shared_expert"]) {
        Some("is part of a mixture of experts, expected a dense block")
    } else if has(&["kv_a_proj", "kv_b_proj", "q_a_proj", "q_b_proj"]) {
        Some("is part of latent attention (MLA), expected q, k and v of the target's shape")
    } else if name.starts_with(layers) && !name.starts_with(&first_block) {
        Some("belongs to a second layer, expected one")
    } else {
        None
    }
}
