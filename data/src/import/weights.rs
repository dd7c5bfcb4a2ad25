//! Tensors of a GGUF file, dequantised, renamed and written as bf16 safetensors one at a time.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, TensorInfo};
use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use half::bf16;
use serde_json::{Map, Value, json};

use super::ImportProgress;
use super::config::Shape;
use super::source::GgufSource;
use crate::error::DataError;

/// What is to be written, in the order of the GGUF file.
pub(super) struct Plan<'a> {
    pub(super) tensors: Vec<PlannedTensor<'a>>,
    /// Whether the file holds no head of its own.
    pub(super) is_head_tied: bool,
    data_offset: u64,
}

/// One tensor under its new name.
pub(super) struct PlannedTensor<'a> {
    name: String,
    gguf_name: &'a str,
    info: &'a TensorInfo,
    /// For q and k: number of heads whose rows llama.cpp has interleaved.
    interleaved_heads: Option<usize>,
}

impl Plan<'_> {
    pub(super) fn num_parameters(&self) -> u64 {
        self.tensors
            .iter()
            .map(|t| t.info.shape.elem_count() as u64)
            .sum()
    }

    pub(super) fn source_types(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for tensor in &self.tensors {
            let name = format!("{:?}", tensor.info.ggml_dtype);
            *counts.entry(name).or_insert(0) += 1;
        }
        counts
    }

    /// The safetensors header: tensors in file order, padded to a multiple of eight bytes.
    fn header(&self) -> Vec<u8> {
        let mut map = Map::new();
        map.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut start = 0;
        for tensor in &self.tensors {
            let end = start + 2 * tensor.info.shape.elem_count();
            let entry = json!({
                "dtype": "BF16",
                "shape": tensor.info.shape.dims(),
                "data_offsets": [start, end],
            });
            map.insert(tensor.name.clone(), entry);
            start = end;
        }
        let mut bytes = Value::Object(map).to_string().into_bytes();
        bytes.resize(bytes.len().next_multiple_of(8), b' ');
        bytes
    }
}

/// Finds the new name of every tensor and checks that none is missing.
pub(super) fn plan<'a>(
    content: &'a Content,
    shape: &Shape,
    path: &Path,
) -> Result<Plan<'a>, DataError> {
    let mut order: Vec<(&String, &TensorInfo)> = content.tensor_infos.iter().collect();
    order.sort_by_key(|(name, info)| (info.offset, *name));
    let tensors = order
        .into_iter()
        .map(|(name, info)| planned(name, info, shape, path))
        .collect::<Result<Vec<_>, _>>()?;
    for name in expected_names(shape.num_layers) {
        if !tensors.iter().any(|tensor| tensor.gguf_name == name) {
            let path = path.to_owned();
            return Err(ModelError::MissingTensor { name, path }.into());
        }
    }
    Ok(Plan {
        is_head_tied: !content.tensor_infos.contains_key(HEAD),
        tensors,
        data_offset: content.tensor_data_offset,
    })
}

const EMBEDDING: &str = "token_embd.weight";
const FINAL_NORM: &str = "output_norm.weight";
const HEAD: &str = "output.weight";

/// Parts of a block: name in the GGUF file, name in a Hugging Face folder.
const PARTS: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

fn expected_names(num_layers: usize) -> impl Iterator<Item = String> {
    let blocks = (0..num_layers).flat_map(|layer| {
        PARTS
            .iter()
            .map(move |(part, _)| format!("blk.{layer}.{part}.weight"))
    });
    [EMBEDDING.to_owned(), FINAL_NORM.to_owned()]
        .into_iter()
        .chain(blocks)
}

fn planned<'a>(
    gguf_name: &'a str,
    info: &'a TensorInfo,
    shape: &Shape,
    path: &Path,
) -> Result<PlannedTensor<'a>, DataError> {
    let refuse = |reason: &str| {
        ModelError::malformed(
            path,
            "llama model",
            format!("tensor `{gguf_name}` {reason}"),
        )
    };
    let name = new_name(gguf_name, shape.num_layers)
        .ok_or_else(|| refuse("is not one that this build understands"))?;
    let heads = match gguf_name.rsplit('.').nth(1) {
        Some("attn_q") => Some(shape.num_heads),
        Some("attn_k") => Some(shape.num_kv_heads),
        _ => None,
    };
    if let Some(heads) = heads {
        let rows = info.shape.dims().first().copied().unwrap_or(0);
        if info.shape.rank() != 2 || heads == 0 || rows % (2 * heads) != 0 {
            return Err(refuse(&format!("does not split into {heads} heads")).into());
        }
    }
    Ok(PlannedTensor {
        name,
        gguf_name,
        info,
        interleaved_heads: heads,
    })
}

fn new_name(gguf_name: &str, num_layers: usize) -> Option<String> {
    match gguf_name {
        EMBEDDING => return Some("model.embed_tokens.weight".to_owned()),
        FINAL_NORM => return Some("model.norm.weight".to_owned()),
        HEAD => return Some("lm_head.weight".to_owned()),
        _ => {}
    }
    let rest = gguf_name.strip_prefix("blk.")?.strip_suffix(".weight")?;
    let (layer, part) = rest.split_once('.')?;
    let layer: usize = layer.parse().ok().filter(|&layer| layer < num_layers)?;
    let (_, new_part) = PARTS.iter().find(|(old, _)| *old == part)?;
    Some(format!("model.layers.{layer}.{new_part}.weight"))
}

/// Writes all tensors of `plan` as one safetensors file.
///
/// The tensors keep the order of the GGUF file and pass through memory one by one; this is why the
/// file is not written by the `safetensors` crate, which sorts them and wants all at once.
pub(super) fn write(
    path: &Path,
    plan: &Plan<'_>,
    gguf: &mut GgufSource,
    progress: &mut dyn FnMut(ImportProgress),
) -> Result<(), DataError> {
    let mut failure = None;
    let result = file::write_atomic_with(path, |out| {
        let header = plan.header();
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (index, tensor) in plan.tensors.iter().enumerate() {
            match tensor.to_bf16(plan.data_offset, gguf) {
                Ok(bytes) => out.write_all(&bytes)?,
                Err(error) => {
                    failure = Some(error);
                    return Err(std::io::Error::other("a tensor could not be converted"));
                }
            }
            progress(ImportProgress {
                done_tensors: index + 1,
                num_tensors: plan.tensors.len(),
            });
        }
        Ok(())
    });
    match failure {
        Some(error) => Err(error),
        None => Ok(result?),
    }
}

impl PlannedTensor<'_> {
    /// Row-major little-endian bf16, rounded to nearest even.
    fn to_bf16(&self, data_offset: u64, gguf: &mut GgufSource) -> Result<Vec<u8>, DataError> {
        let values = self
            .info
            .read(&mut gguf.reader, data_offset, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu))
            .and_then(|tensor| tensor.flatten_all())
            .and_then(|tensor| tensor.to_vec1::<f32>())
            .map_err(|e| {
                let reason = format!("tensor `{}`: {e}", self.gguf_name);
                ModelError::malformed(&gguf.path, "GGUF file", reason)
            })?;
        if values.iter().any(|value| !value.is_finite()) {
            return Err(ModelError::NotFinite {
                name: self.gguf_name.to_owned(),
                path: gguf.path.clone(),
            }
            .into());
        }
        let values = match (self.interleaved_heads, self.info.shape.dims()) {
            (Some(heads), &[rows, width]) => {
                let source = source_rows(heads, rows);
                source
                    .flat_map(|row| &values[row * width..(row + 1) * width])
                    .copied()
                    .collect()
            }
            _ => values,
        };
        Ok(values
            .iter()
            .flat_map(|&value| bf16::from_f32(value).to_le_bytes())
            .collect())
    }
}

/// Row of the GGUF matrix that becomes each row of ours, for q and k.
///
/// llama.cpp stores the two halves of a head interleaved: its row `2 i + half` of a head is row
/// `half * D/2 + i` of the original.
fn source_rows(heads: usize, rows: usize) -> impl Iterator<Item = usize> {
    let head_dim = rows / heads;
    (0..rows).map(move |row| {
        let (head, inside) = (row / head_dim, row % head_dim);
        let (half, place) = (inside / (head_dim / 2), inside % (head_dim / 2));
        head * head_dim + 2 * place + half
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_of_each_head_are_put_apart() {
        let rows: Vec<usize> = source_rows(2, 12).collect();
        assert_eq!(rows, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }

    #[test]
    fn names_beyond_the_last_layer_or_of_other_kinds_are_unknown() {
        assert_eq!(
            new_name("blk.1.ffn_up.weight", 2).as_deref(),
            Some("model.layers.1.mlp.up_proj.weight")
        );
        assert_eq!(new_name("blk.2.ffn_up.weight", 2), None);
        assert_eq!(new_name("blk.0.attn_q.bias", 2), None);
        assert_eq!(new_name("rope_freqs.weight", 2), None);
    }
}
