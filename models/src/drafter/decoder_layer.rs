//! [`DecoderLayer`]: one pre-norm decoder block as a trainable module, without its attention pattern.

use burn::module::{Module, Param};
use burn::tensor::{Device, FloatDType, Tensor};

use super::params;
use crate::layers::attention::HeadShape;
use crate::layers::linear::{gated_mlp, linear};
use crate::layers::norm::rms_norm;

/// Sizes of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerShape {
    pub(super) heads: HeadShape,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    /// Whether queries and keys are normed head by head, as in Qwen3.
    pub(super) qk_norm: bool,
}

/// A Llama or Qwen3 block. Field names are the names in `drafter.safetensors`.
#[derive(Module, Debug)]
pub struct DecoderLayer {
    /// Norm in front of the attention, `[H]`.
    pub input_norm: Param<Tensor<1>>,
    /// `[heads * D, H]`.
    pub q_proj: Param<Tensor<2>>,
    /// `[kv heads * D, H]`.
    pub k_proj: Param<Tensor<2>>,
    /// `[kv heads * D, H]`.
    pub v_proj: Param<Tensor<2>>,
    /// Norm of each query head, `[D]`.
    pub q_norm: Option<Param<Tensor<1>>>,
    /// Norm of each key head, `[D]`.
    pub k_norm: Option<Param<Tensor<1>>>,
    /// `[H, heads * D]`.
    pub o_proj: Param<Tensor<2>>,
    /// Norm in front of the MLP, `[H]`.
    pub mlp_norm: Param<Tensor<1>>,
    /// `[I, H]`.
    pub gate_proj: Param<Tensor<2>>,
    /// `[I, H]`.
    pub up_proj: Param<Tensor<2>>,
    /// `[H, I]`.
    pub down_proj: Param<Tensor<2>>,
}

impl DecoderLayer {
    /// A fresh block; `name` is the path of the block in its drafter, for example `layers.0`.
    pub(super) fn init(name: &str, shape: LayerShape, seed: u64, device: &Device) -> Self {
        let LayerShape {
            heads,
            hidden_size: hidden,
            intermediate_size: intermediate,
            qk_norm,
        } = shape;
        let (q_width, kv_width) = (
            heads.num_heads * heads.head_dim,
            heads.num_kv_heads * heads.head_dim,
        );
        let matrix = |field: &str, size: [usize; 2]| {
            params::random_matrix(&format!("{name}.{field}"), size, seed, device)
        };
        let gain =
            |field: &str, width| params::unit_gain(&format!("{name}.{field}"), width, device);
        Self {
            input_norm: gain("input_norm", hidden),
            q_proj: matrix("q_proj", [q_width, hidden]),
            k_proj: matrix("k_proj", [kv_width, hidden]),
            v_proj: matrix("v_proj", [kv_width, hidden]),
            q_norm: qk_norm.then(|| gain("q_norm", heads.head_dim)),
            k_norm: qk_norm.then(|| gain("k_norm", heads.head_dim)),
            o_proj: matrix("o_proj", [hidden, q_width]),
            mlp_norm: gain("mlp_norm", hidden),
            gate_proj: matrix("gate_proj", [intermediate, hidden]),
            up_proj: matrix("up_proj", [intermediate, hidden]),
            down_proj: matrix("down_proj", [hidden, intermediate]),
        }
    }

    /// The weights in the compute type, for one pass.
    pub(super) fn weights(&self, heads: HeadShape, eps: f64, compute: FloatDType) -> LayerWeights {
        let cast = |param: &Param<Tensor<2>>| param.val().cast(compute);
        let gain = |param: &Option<Param<Tensor<1>>>| param.as_ref().map(Param::val);
        LayerWeights {
            heads,
            eps,
            input_norm: self.input_norm.val(),
            q: cast(&self.q_proj),
            k: cast(&self.k_proj),
            v: cast(&self.v_proj),
            q_norm: gain(&self.q_norm),
            k_norm: gain(&self.k_norm),
            o: cast(&self.o_proj),
            mlp_norm: self.mlp_norm.val(),
            gate: cast(&self.gate_proj),
            up: cast(&self.up_proj),
            down: cast(&self.down_proj),
        }
    }
}

/// The weights of a block in the compute type.
pub(super) struct LayerWeights {
    heads: HeadShape,
    eps: f64,
    input_norm: Tensor<1>,
    q: Tensor<2>,
    k: Tensor<2>,
    v: Tensor<2>,
    q_norm: Option<Tensor<1>>,
    k_norm: Option<Tensor<1>>,
    o: Tensor<2>,
    mlp_norm: Tensor<1>,
    gate: Tensor<2>,
    up: Tensor<2>,
    down: Tensor<2>,
}

impl LayerWeights {
    /// The attention's input `[B, S, H]`.
    pub(super) fn normed(&self, hidden: Tensor<3>) -> Tensor<3> {
        rms_norm(hidden, self.input_norm.clone(), self.eps)
    }

    /// Queries `[B, heads, S, D]` of `[B, S, H]`, not yet rotated.
    pub(super) fn queries(&self, x: Tensor<3>) -> Tensor<4> {
        self.heads_of(x, &self.q, self.heads.num_heads, self.q_norm.as_ref())
    }

    /// Keys `[B, kv heads, S, D]` of `[B, S, H]`, not yet rotated.
    pub(super) fn keys(&self, x: Tensor<3>) -> Tensor<4> {
        self.heads_of(x, &self.k, self.heads.num_kv_heads, self.k_norm.as_ref())
    }

    /// Values `[B, kv heads, S, D]` of `[B, S, H]`.
    pub(super) fn values(&self, x: Tensor<3>) -> Tensor<4> {
        self.heads_of(x, &self.v, self.heads.num_kv_heads, None)
    }

    fn heads_of(
        &self,
        x: Tensor<3>,
        weight: &Tensor<2>,
        num_heads: usize,
        gain: Option<&Tensor<1>>,
    ) -> Tensor<4> {
        let heads = HeadShape::split(linear(x, weight.clone()), num_heads);
        match gain {
            Some(gain) => rms_norm(heads, gain.clone(), self.eps),
            None => heads,
        }
    }

    /// Output projection, residual and MLP after attention, whose heads are merged: `[B, S, H]` and
    /// `[B, S, heads * D]` to `[B, S, H]`.
    pub(super) fn finish(&self, residual: Tensor<3>, mixed: Tensor<3>) -> Tensor<3> {
        let hidden = residual + linear(mixed, self.o.clone());
        let x = rms_norm(hidden.clone(), self.mlp_norm.clone(), self.eps);
        hidden + gated_mlp(x, self.gate.clone(), self.up.clone(), self.down.clone())
    }
}
