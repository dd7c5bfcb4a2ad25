//! Operations with a gradient in closed form, on the gradient tape of the CPU backend.
//!
//! A composed operation leaves one node, one pass and some saved tensors for each of its parts on the tape. An
//! operation recorded here is one node: its output is computed outside the tape by a kernel of [`super`],
//! and its gradient by another.

use std::fmt;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Autodiff, BackendTypes, Flex, TensorMetadata};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};

type HostTensor = <Flex as BackendTypes>::FloatTensorPrimitive;

/// Whether `tensor` is plain f32 host memory on a gradient tape.
pub fn is_taped<const D: usize>(tensor: &Tensor<D>) -> bool {
    // Devices compare equal whether they track gradients or not.
    let device = tensor.device();
    tensor.dtype() == DType::F32 && device.is_autodiff() && device == Device::flex()
}

/// The values of a host tensor, shared with everything else that holds it.
#[derive(Clone)]
pub struct HostValues(HostTensor);

impl HostValues {
    /// Shares the values of a host tensor outside any tape; copies them where they do not stand in order.
    #[expect(clippy::expect_used, reason = "callers check the device")]
    pub fn of<const D: usize>(tensor: Tensor<D>) -> Self {
        let primitive = tensor.try_into_primitive::<Flex>();
        Self(primitive.expect("a host tensor").to_contiguous())
    }

    /// The values, in row-major order.
    #[expect(clippy::expect_used, reason = "made contiguous when it was built")]
    pub fn as_slice(&self) -> &[f32] {
        self.0.as_slice::<f32>().expect("contiguous f32 values")
    }
}

impl fmt::Debug for HostValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostValues").field(&self.0.shape()).finish()
    }
}

/// An input of an operation: its place on the tape.
#[derive(Debug)]
pub struct Input {
    node: NodeGuard,
    shape: Shape,
}

/// Takes a taped tensor apart: its values outside the tape, and its place on it.
#[expect(clippy::expect_used, reason = "callers check `is_taped`")]
pub fn open<const D: usize>(tensor: Tensor<D>) -> (Tensor<D>, Input) {
    let shape = tensor.shape();
    let primitive = tensor.try_into_primitive::<Autodiff<Flex>>();
    let (values, node) = primitive.expect("a tensor on the tape").into_parts();
    let values = Tensor::from_primitive::<Flex>(values);
    (values, Input { node, shape })
}

/// Gradients of the inputs, each flat in row-major order, from that of the output and from which inputs want
/// theirs.
type Gradient<const N: usize> = dyn Fn(Vec<f32>, [bool; N]) -> [Vec<f32>; N] + Send + Sync;

/// Puts `output`, a function of `inputs` that was computed outside the tape, on it.
///
/// `gradient` is given the gradient of the output and which inputs want theirs; what it returns for the others is
/// not looked at.
pub fn record<const N: usize, const D: usize>(
    inputs: [Input; N],
    output: Tensor<D>,
    gradient: impl Fn(Vec<f32>, [bool; N]) -> [Vec<f32>; N] + Send + Sync + 'static,
) -> Tensor<D> {
    let output = HostValues::of(output).0;
    let state = State {
        shapes: inputs.each_ref().map(|input| input.shape.clone()),
        gradient: Arc::new(gradient),
    };
    let nodes = inputs.map(|input| input.node);
    let step = ClosedForm.prepare::<NoCheckpointing>(nodes);
    let recorded = match step.compute_bound().stateful() {
        OpsKind::Tracked(step) => step.finish(state, output),
        OpsKind::UnTracked(step) => step.finish(output),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(recorded)
}

/// The values of a host tensor, without a copy when nothing else holds it.
#[expect(clippy::expect_used, reason = "recorded operations are f32")]
fn take(tensor: HostTensor) -> Vec<f32> {
    tensor
        .into_data()
        .try_into_vec::<f32>()
        .expect("the tensor holds f32 values")
}

#[derive(Debug)]
struct ClosedForm;

#[derive(Clone)]
struct State<const N: usize> {
    shapes: [Shape; N],
    gradient: Arc<Gradient<N>>,
}

impl<const N: usize> fmt::Debug for State<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("State").field(&self.shapes).finish()
    }
}

impl<const N: usize> Backward<Flex, N> for ClosedForm {
    type State = State<N>;

    fn backward(self, ops: Ops<State<N>, N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let output = gradients.consume::<Flex>(&ops.node);
        let device = TensorMetadata::device(&output);
        let values = take(output);
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let found = (ops.state.gradient)(values, wanted);
        for ((parent, values), shape) in ops.parents.into_iter().zip(found).zip(ops.state.shapes) {
            if let Some(parent) = parent {
                let data = TensorData::new(values, shape);
                gradients.register::<Flex>(parent.id, Flex::float_from_data(data, &device));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tapes `a * b + a` of `[2]` each; its gradients are `b + 1` and `a`.
    fn product(a: Tensor<1>, b: Tensor<1>) -> Tensor<1> {
        let ((a, a_input), (b, b_input)) = (open(a), open(b));
        let output = a.clone() * b.clone() + a.clone();
        let (a, b) = (HostValues::of(a), HostValues::of(b));
        record([a_input, b_input], output, move |grad, wanted| {
            assert!(wanted[0], "the first input is always tracked here");
            let times = |other: &[f32], plus: f32| {
                let pairs = grad.iter().zip(other);
                pairs.map(|(g, x)| g * (x + plus)).collect()
            };
            [times(b.as_slice(), 1.0), times(a.as_slice(), 0.0)]
        })
    }

    fn vector(values: [f32; 2]) -> Tensor<1> {
        Tensor::from_data(values, &Device::flex().autodiff())
    }

    fn values(tensor: Tensor<1>) -> Vec<f32> {
        tensor.into_data().try_into_vec::<f32>().unwrap()
    }

    #[test]
    fn gradients_flow_through_a_recorded_operation_and_add_up() {
        let (a, b) = (
            vector([2.0, 3.0]).require_grad(),
            vector([5.0, 7.0]).require_grad(),
        );
        assert!(is_taped(&a) && !is_taped(&a.clone().inner()));
        let doubled = a.clone() * vector([2.0, 2.0]);
        // f = 2ab + 2a + ab + a
        let output = product(doubled, b.clone()) + product(a.clone(), b.clone());
        assert_eq!(values(output.clone().inner()), [36.0, 72.0]);
        let gradients = output.sum().backward();
        assert_eq!(values(a.grad(&gradients).unwrap()), [18.0, 24.0]);
        assert_eq!(values(b.grad(&gradients).unwrap()), [6.0, 9.0]);
    }

    #[test]
    fn constants_get_no_gradient_and_stop_nothing() {
        let (a, b) = (vector([2.0, 3.0]).require_grad(), vector([5.0, 7.0]));
        let gradients = product(a.clone(), b.clone()).sum().backward();
        assert_eq!(values(a.grad(&gradients).unwrap()), [6.0, 8.0]);
        assert!(b.grad(&gradients).is_none());
        let constant = product(vector([1.0, 1.0]), vector([1.0, 1.0]));
        assert_eq!(values(constant.inner()), [2.0, 2.0]);
    }
}
