//! Bias-free linear maps with weights `[out, in]`, and the gated MLP.

use burn::tensor::{Tensor, activation};

use crate::host;

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
    if !host::is_host(&gate) {
        return activation::silu(gate) * up;
    }
    let (shape, device) = (gate.dims(), gate.device());
    let mut values = host::take(gate);
    host::swiglu::swiglu(&mut values, &host::take(up));
    host::give(values, shape, &device)
}
