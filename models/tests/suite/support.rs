//! Goldens, random tensors and comparisons shared by the tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use draftsmith_models::batch::{StateSpec, TargetStates, TokenBatch, TokenRow};
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::{NamedTensor, host_values};
use safetensors::tensor::Dtype;

/// A folder or file below `tests/golden`.
pub(crate) fn golden_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

/// The tensors of a safetensors file, all in memory.
#[derive(Debug)]
pub(crate) struct Golden(BTreeMap<String, (Vec<usize>, Dtype, Vec<u8>)>);

impl Golden {
    pub(crate) fn open(path: &Path) -> Self {
        let bytes = fs_err::read(path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        Self(
            tensors
                .iter()
                .map(|(name, view)| {
                    let content = (view.shape().to_vec(), view.dtype(), view.data().to_vec());
                    (name.to_owned(), content)
                })
                .collect(),
        )
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(crate) fn shape(&self, name: &str) -> Vec<usize> {
        self.0[name].0.clone()
    }

    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        let (_, dtype, bytes) = &self.0[name];
        assert_eq!(*dtype, Dtype::F32, "{name}");
        bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    }

    pub(crate) fn integers(&self, name: &str) -> Vec<usize> {
        let (_, dtype, bytes) = &self.0[name];
        assert_eq!(*dtype, Dtype::I64, "{name}");
        bytes
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as usize)
            .collect()
    }

    pub(crate) fn tensor<const D: usize>(&self, name: &str, device: &Device) -> Tensor<D> {
        Tensor::from_data(TensorData::new(self.floats(name), self.shape(name)), device)
    }

    /// Tensors whose name starts with `prefix`, without it.
    pub(crate) fn named(&self, prefix: &str) -> Vec<NamedTensor> {
        self.0
            .iter()
            .filter_map(|(name, (shape, dtype, bytes))| {
                Some(NamedTensor {
                    name: name.strip_prefix(prefix)?.to_owned(),
                    shape: shape.clone(),
                    dtype: *dtype,
                    bytes: bytes.clone(),
                })
            })
            .collect()
    }
}

/// Asserts that no two values differ by more than `tolerance`.
#[track_caller]
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}: number of values");
    for (index, (x, y)) in found.iter().zip(expected).enumerate() {
        let difference = (x - y).abs();
        assert!(
            difference <= tolerance,
            "{what}: value {index} is {x}, expected {y} within {tolerance}"
        );
    }
}

/// The largest magnitude.
pub(crate) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, x| x.abs().max(max))
}

/// Normal random values of scale `scale`, a function of `stream`.
pub(crate) fn normal(stream: u64, len: usize, scale: f64) -> Vec<f32> {
    let mut stream = Stream::new(1, Purpose::Check, stream);
    (0..len).map(|_| (stream.normal() * scale) as f32).collect()
}

pub(crate) fn tensor<const D: usize>(values: &[f32], shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Device::flex())
}

pub(crate) fn row(ids: &[u32], turns: &[u32]) -> TokenRow {
    TokenRow {
        key: "row".to_owned(),
        ids: ids.to_vec(),
        turns: turns.to_vec(),
    }
}

/// The tiny target of a golden case, in f32 on the CPU.
pub(crate) fn tiny_target(case: &str) -> TargetModel {
    let folder = golden_path("tiny_llama").join(case);
    TargetModel::load(&folder, FloatDType::F32, &Device::flex()).unwrap()
}

/// Outputs of the given blocks for a padded batch.
pub(crate) fn states_of(
    target: &TargetModel,
    batch: &TokenBatch,
    aux_layer_ids: &[usize],
) -> TargetStates {
    let want = StateSpec {
        aux_layer_ids: aux_layer_ids.to_vec(),
    };
    target.forward(&batch.ids(), &want)
}

/// The values of row `row` and position `position` of `[B, S, W]`.
pub(crate) fn at(states: &Tensor<3>, row: usize, position: usize) -> Vec<f32> {
    host_values(
        &states
            .clone()
            .narrow(0, row, 1)
            .narrow(1, position, 1)
            .flatten::<1>(0, 2),
    )
}
