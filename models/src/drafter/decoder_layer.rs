//! [`DecoderLayer`]: one pre-norm decoder block as a trainable module, without its attention pattern.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor};

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
    /// Whether q, k and v have biases, as in Qwen2.
    pub(super) qkv_bias: bool,
}

/// A Llama, Qwen2 or Qwen3 block. Field names are the names in `drafter.safetensors`.
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
    /// `[heads * D]`.
    pub q_bias: Option<Param<Tensor<1>>>,
    /// `[kv heads * D]`.
    pub k_bias: Option<Param<Tensor<1>>>,
    /// `[kv heads * D]`.
    pub v_bias: Option<Param<Tensor<1>>>,
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
            qkv_bias,
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
        let bias = |field: &str, width: usize| {
            let zeros = Tensor::zeros([width], (device, DType::F32));
            qkv_bias.then(|| params::named(&format!("{name}.{field}"), zeros))
        };
        Self {
            input_norm: gain("input_norm", hidden),
            q_proj: matrix("q_proj", [q_width, hidden]),
            k_proj: matrix("k_proj", [kv_width, hidden]),
            v_proj: matrix("v_proj", [kv_width, hidden]),
            q_bias: bias("q_bias", q_width),
            k_bias: bias("k_bias", kv_width),
            v_bias: bias("v_bias", kv_width),
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
        let bias = |param| gain(param).map(|bias| bias.cast(compute));
        LayerWeights {
            heads,
            eps,
            input_norm: self.input_norm.val(),
            q: cast(&self.q_proj),
            k: cast(&self.k_proj),
            v: cast(&self.v_proj),
            q_bias: bias(&self.q_bias),
            k_bias: bias(&self.k_bias),
            v_bias: bias(&self.v_bias),
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
    q_bias: Option<Tensor<1>>,
    k_bias: Option<Tensor<1>>,
    v_bias: Option<Tensor<1>>,
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
        let q = projected(x, &self.q, self.q_bias.as_ref());
        self.normed_heads(q, self.heads.num_heads, self.q_norm.as_ref())
    }

    /// Keys `[B, kv heads, S, D]` of `[B, S, H]`, not yet rotated.
    pub(super) fn keys(&self, x: Tensor<3>) -> Tensor<4> {
        let k = projected(x, &self.k, self.k_bias.as_ref());
        self.normed_heads(k, self.heads.num_kv_heads, self.k_norm.as_ref())
    }

    /// Values `[B, kv heads, S, D]` of `[B, S, H]`.
    pub(super) fn values(&self, x: Tensor<3>) -> Tensor<4> {
        let v = projected(x, &self.v, self.v_bias.as_ref());
        HeadShape::split(v, self.heads.num_kv_heads)
    }

    fn normed_heads(&self, x: Tensor<3>, num_heads: usize, gain: Option<&Tensor<1>>) -> Tensor<4> {
        let heads = HeadShape::split(x, num_heads);
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

fn projected(x: Tensor<3>, weight: &Tensor<2>, bias: Option<&Tensor<1>>) -> Tensor<3> {
    let y = linear(x, weight.clone());
    match bias {
        Some(bias) => y + bias.clone().unsqueeze::<3>(),
        None => y,
    }
}
