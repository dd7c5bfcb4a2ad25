//! Bias-free linear maps with weights `[out, in]`, and the gated MLP.

use burn::tensor::{Tensor, activation};

use crate::host;
use crate::host::tape::{self, HostValues};

/// `x W^T` for `x` `[B, S, in]` and `W` `[out, in]`: `[B, S, out]`.
pub fn linear(x: Tensor<3>, weight: Tensor<2>) -> Tensor<3> {
    let [batch, len, width] = x.dims();
    let out = weight.dims()[0];
    x.reshape([batch * len, width])
        .matmul(weight.transpose())
        .reshape([batch, len, out])
}

/// SwiGLU (Shazeer 2020, 2002.05202): `down(silu(gate(x)) * up(x))`, `[B, S, H]` to `[B, S, H]`.
pub fn gated_mlp(x: Tensor<3>, gate: Tensor<2>, up: Tensor<2>, down: Tensor<2>) -> Tensor<3> {
    linear(swiglu(linear(x.clone(), gate), linear(x, up)), down)
}

/// `silu(gate) * up`, any shape.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    if tape::is_taped(&gate) && tape::is_taped(&up) {
        return taped_swiglu(gate, up);
    }
    if !host::is_host(&gate) {
        return activation::silu(gate) * up;
    }
    let (shape, device) = (gate.dims(), gate.device());
    let mut values = host::take(gate);
    host::swiglu::swiglu(&mut values, HostValues::of(up).as_slice());
    host::give(values, shape, &device)
}

/// As one operation on the tape of the CPU backend.
fn taped_swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    let ((gate, gate_input), (up, up_input)) = (tape::open(gate), tape::open(up));
    let output = swiglu(gate.clone(), up.clone());
    let (gate, up) = (HostValues::of(gate), HostValues::of(up));
    tape::record([gate_input, up_input], output, move |mut gradient, _| {
        let of_up = host::swiglu::swiglu_gradient(&mut gradient, gate.as_slice(), up.as_slice());
        [gradient, of_up]
    })
}
