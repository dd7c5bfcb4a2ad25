//! Writes logits and captured states of token rows, for comparison with another implementation.
//!
//! Usage: `target_states FOLDER REQUEST.json OUT.safetensors`, where the request is
//! `{ "rows": [[id, ..], ..], "layers": [index, ..] }`. All rows run as one padded batch in f32. The
//! output holds `logits.<row>` `[S, V]` and `states.<row>` `[S, K*H]`, the last K being the final hidden.

use std::path::PathBuf;

use burn::tensor::{Device, FloatDType, Tensor};
use draftsmith_models::batch::StateSpec;
use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::{NamedTensor, host_values, write_safetensors};
use safetensors::tensor::Dtype;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    rows: Vec<Vec<u32>>,
    layers: Vec<usize>,
}

fn main() -> Result<(), ModelError> {
    let paths: Vec<PathBuf> = std::env::args().skip(1).map(PathBuf::from).collect();
    let [folder, request, out] = paths.as_slice() else {
        return Err(ModelError::setting(
            "expected three arguments",
            "target_states FOLDER REQUEST.json OUT.safetensors",
        ));
    };
    let request: Request = file::read_json(request)?;
    let device = Device::flex();
    let target = TargetModel::load(folder, FloatDType::F32, &device)?;
    let rows: Vec<&[u32]> = request.rows.iter().map(Vec::as_slice).collect();
    let want = StateSpec {
        aux_layer_ids: request.layers,
    };
    let states = target.forward(&rows, &want);
    let both = Tensor::cat(vec![states.aux, states.final_hidden.clone()], 2);
    let mut tensors = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let take = |x: &Tensor<3>| {
            let x = x.clone().narrow(0, index, 1).narrow(1, 0, row.len());
            x.flatten::<2>(0, 1)
        };
        let logits = target.ends().logits(take(&states.final_hidden));
        for (name, tensor) in [("logits", logits), ("states", take(&both))] {
            let name = format!("{name}.{index}");
            let (shape, values) = (tensor.dims(), host_values(&tensor));
            tensors.push(NamedTensor::float(name, &shape, &values, Dtype::F32));
        }
    }
    write_safetensors(out, &tensors, &[])
}
