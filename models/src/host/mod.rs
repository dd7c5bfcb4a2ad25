//! Fused kernels on host memory for tensors of the CPU backend.
//!
//! The CPU backend computes `exp` one scalar at a time and each element-wise operation in a pass of its
//! own; these kernels make one pass with a vectorised `exp`, and another for the gradient ([`tape`]). Every
//! kernel has a composed counterpart for other devices and types, and a test against its definition.

pub mod exp;
pub mod norm;
pub mod rotate;
pub mod row;
pub mod softmax;
pub mod swiglu;
pub mod tape;

use burn::tensor::{DType, Tensor, TensorData};

/// Whether `tensor` is plain f32 host memory outside a gradient graph.
pub fn is_host<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.dtype() == DType::F32 && tensor.device().is_plain_cpu()
}

/// The values of a host tensor, moved out without a copy when nothing else holds it.
pub fn take<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    #[expect(
        clippy::expect_used,
        reason = "callers check `is_host`, which checks the type"
    )]
    tensor
        .into_data()
        .try_into_vec::<f32>()
        .expect("the tensor holds f32 values")
}

/// A host tensor of the given values, without a copy.
pub fn give<const D: usize>(
    values: Vec<f32>,
    shape: [usize; D],
    device: &burn::tensor::Device,
) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Values that one task of the thread pool works on.
pub(crate) const TASK_LEN: usize = 16 * 1024;

/// Device questions this module asks.
trait PlainCpu {
    fn is_plain_cpu(&self) -> bool;
}

impl PlainCpu for burn::tensor::Device {
    fn is_plain_cpu(&self) -> bool {
        // Devices compare equal whether they track gradients or not.
        !self.is_autodiff() && *self == Self::flex()
    }
}
