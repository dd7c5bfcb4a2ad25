//! Shared by the examples: opening a drafter of either kind, and writing results for Python.

#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each example compiles this module and uses a part of it"
)]

use std::path::Path;

use burn::tensor::{Device, FloatDType, Tensor};
use draftsmith_models::checkpoint::{self, DrafterCard};
use draftsmith_models::drafter::AnyDrafter;
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::{NamedTensor, host_values};
use safetensors::tensor::Dtype;

/// What every example returns.
pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A target in f32 with a drafter from a checkpoint folder or an exported one.
pub(crate) fn open(
    target: &Path,
    drafter: &Path,
) -> Outcome<(TargetModel, AnyDrafter, DrafterCard)> {
    let device = Device::flex();
    let model = TargetModel::load(target, FloatDType::F32, &device)?;
    let (drafter, card) = if drafter.join("drafter.json").exists() {
        checkpoint::load(drafter, model.ends(), &device)?
    } else {
        draftsmith_export::load(drafter, target, model.ends(), &device)?
    };
    Ok((model, drafter, card))
}

/// `1,2,3` as numbers.
pub(crate) fn list<T: std::str::FromStr>(text: &str) -> Outcome<Vec<T>>
where
    T::Err: std::error::Error + 'static,
{
    Ok(text
        .split(',')
        .map(|part| part.trim().parse())
        .collect::<Result<_, _>>()?)
}

/// A float tensor for the result file.
pub(crate) fn float<const D: usize>(name: &str, tensor: &Tensor<D>) -> NamedTensor {
    NamedTensor::float(name, &tensor.dims(), &host_values(tensor), Dtype::F32)
}

/// A list of ids for the result file.
pub(crate) fn ids(name: &str, ids: &[u32]) -> NamedTensor {
    let wide: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
    NamedTensor::int64(name, &wide)
}

/// Position of the largest value of each row; the first one on a tie.
pub(crate) fn argmax(values: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = index;
        }
    }
    best as u32
}
