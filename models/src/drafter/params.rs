//! Named parameters: deterministic identity, initial values, reading and writing by name.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use safetensors::tensor::Dtype;

use crate::error::ModelError;
use crate::rng::{Purpose, Stream, stable_hash};
use crate::weights::{NamedTensor, WeightFolder, host_values};

/// A parameter whose identity is a hash of its name, so that optimizer states written by one process
/// find their parameter in the next. It asks for a gradient where the device tracks gradients.
pub(super) fn named<const D: usize>(name: &str, value: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::from(stable_hash(name)), value).set_require_grad(true)
}

/// A matrix `[out, in]` drawn from `N(0, 1/(3 in))`, the variance of a new PyTorch `Linear`; a pure
/// function of (seed, name, shape).
pub(super) fn random_matrix(
    name: &str,
    [out, width]: [usize; 2],
    seed: u64,
    device: &Device,
) -> Param<Tensor<2>> {
    let scale = 1.0 / (3.0 * width as f64).sqrt();
    normal(name, [out, width], scale, seed, device)
}

fn normal(
    name: &str,
    shape: [usize; 2],
    scale: f64,
    seed: u64,
    device: &Device,
) -> Param<Tensor<2>> {
    let mut stream = Stream::new(seed, Purpose::Init, stable_hash(name));
    let values: Vec<f32> = (0..shape[0] * shape[1])
        .map(|_| (stream.normal() * scale) as f32)
        .collect();
    named(
        name,
        Tensor::from_data(TensorData::new(values, shape), device),
    )
}

/// A table `[rows, width]` of embeddings drawn from `N(0, 0.01^2)`; a pure function of (seed, name, shape).
pub(super) fn random_table(
    name: &str,
    shape: [usize; 2],
    seed: u64,
    device: &Device,
) -> Param<Tensor<2>> {
    normal(name, shape, 0.01, seed, device)
}

/// A matrix of zeros.
pub(super) fn zero_matrix(name: &str, shape: [usize; 2], device: &Device) -> Param<Tensor<2>> {
    named(name, Tensor::zeros(shape, (device, DType::F32)))
}

/// A norm gain of ones `[width]`.
pub(super) fn unit_gain(name: &str, width: usize, device: &Device) -> Param<Tensor<1>> {
    even_gain(name, width, 1.0, device)
}

/// A norm gain `[width]` of one value everywhere.
pub(super) fn even_gain(name: &str, width: usize, value: f32, device: &Device) -> Param<Tensor<1>> {
    named(name, Tensor::full([width], value, (device, DType::F32)))
}

/// All parameters of a module by field path, as f32.
pub(super) fn to_tensors<M: Module>(module: &M) -> Vec<NamedTensor> {
    let mut collector = Collector {
        path: Vec::new(),
        tensors: Vec::new(),
    };
    module.visit(&mut collector);
    collector.tensors
}

/// Replaces the values of all parameters by those of a file, keeping identity and gradient flag.
pub(super) fn load_tensors<M: Module>(module: M, weights: &WeightFolder) -> Result<M, ModelError> {
    let mut loader = Loader {
        path: Vec::new(),
        weights,
        error: None,
    };
    let module = module.map(&mut loader);
    match loader.error {
        None => Ok(module),
        Some(error) => Err(error),
    }
}

struct Collector {
    path: Vec<String>,
    tensors: Vec<NamedTensor>,
}

impl ModuleVisitor for Collector {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let tensor = NamedTensor::float(
            self.path.join("."),
            &value.dims(),
            &host_values(&value.detach().inner()),
            Dtype::F32,
        );
        self.tensors.push(tensor);
    }
}

struct Loader<'a> {
    path: Vec<String>,
    weights: &'a WeightFolder,
    error: Option<ModelError>,
}

impl ModuleMapper for Loader<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, old, mapper) = param.consume();
        let device = old.device();
        let loaded = self
            .weights
            .float(&self.path.join("."), old.dims(), FloatDType::F32, &device);
        let value = match loaded {
            Ok(value) => value.set_require_grad(old.is_require_grad()),
            Err(error) => {
                self.error.get_or_insert(error);
                old
            }
        };
        Param::from_mapped_value(id, value, mapper)
    }
}
