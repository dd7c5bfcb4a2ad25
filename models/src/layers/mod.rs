//! Functions shared by targets and drafters: norms, rotary positions, attention, gated MLP.
//!
//! Shape letters of the workspace: B batch, S sequence, H hidden, K aux layers, N slots, V target
//! vocabulary, D head size, C cache capacity. Linear weights are `[out, in]` as in the files.

pub mod attention;
pub mod blocks;
pub mod linear;
pub mod norm;
pub mod ragged;
pub mod rope;
pub mod unrolled;

use burn::tensor::{Device, Tensor};

/// Brings a constant onto the gradient graph when `device` tracks gradients; itself otherwise.
pub fn follow<const D: usize>(device: &Device, constant: Tensor<D>) -> Tensor<D> {
    if device.is_autodiff() {
        constant.autodiff()
    } else {
        constant
    }
}
