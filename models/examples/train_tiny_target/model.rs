//! A small Llama whose tensors are parameters; the maths is that of `draftsmith_models::layers`.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData, activation};
use draftsmith_models::batch::index_tensor;
use draftsmith_models::error::ModelError;
use draftsmith_models::layers::attention::{Causal, HeadShape, attend};
use draftsmith_models::layers::linear::{gated_mlp, linear};
use draftsmith_models::layers::norm::rms_norm;
use draftsmith_models::layers::rope::{RopeAngles, RopeTable};
use draftsmith_models::rng::{Purpose, Stream, stable_hash};
use draftsmith_models::target::TargetSpec;
use draftsmith_models::target::forward::positions;
use draftsmith_models::weights::{NamedTensor, WeightFolder, host_values};
use safetensors::tensor::Dtype;

use super::batches::TokenRows;

/// Standard deviation of the initial matrices; those that write to the residual stream get it
/// divided by the square root of their number.
const INIT_SCALE: f64 = 0.02;

/// Where the first values come from.
pub(crate) enum Source<'a> {
    /// Normal numbers, a pure function of (seed, tensor name).
    Seed(u64),
    /// A checkpoint with the same tensor names.
    Weights(&'a WeightFolder),
}

/// The trainable target, with tied embedding and head.
#[derive(Module, Debug)]
pub(crate) struct TinyLlama {
    embedding: Param<Tensor<2>>,
    blocks: Vec<Block>,
    norm: Param<Tensor<1>>,
    #[module(skip)]
    spec: TargetSpec,
    #[module(skip)]
    rope: RopeTable,
}

#[derive(Module, Debug)]
struct Block {
    input_norm: Param<Tensor<1>>,
    q: Param<Tensor<2>>,
    k: Param<Tensor<2>>,
    v: Param<Tensor<2>>,
    o: Param<Tensor<2>>,
    mlp_norm: Param<Tensor<1>>,
    gate: Param<Tensor<2>>,
    up: Param<Tensor<2>>,
    down: Param<Tensor<2>>,
}

impl TinyLlama {
    /// Builds the model of `spec` on `device`.
    pub(crate) fn new(
        spec: TargetSpec,
        source: &Source<'_>,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let make = Maker {
            source,
            residual_scale: INIT_SCALE / (2.0 * spec.num_layers as f64).sqrt(),
            device,
        };
        let blocks = (0..spec.num_layers)
            .map(|index| make.block(&spec, index))
            .collect::<Result<_, _>>()?;
        let plain = device.clone().inner();
        let rope = RopeTable::new(
            &spec.rope,
            spec.head_dim,
            spec.max_position_embeddings,
            &plain,
        );
        Ok(Self {
            embedding: make.matrix(
                "model.embed_tokens.weight",
                [spec.vocab_size, spec.hidden_size],
                INIT_SCALE,
            )?,
            blocks,
            norm: make.gain("model.norm.weight", spec.hidden_size)?,
            rope,
            spec,
        })
    }

    /// Mean cross entropy in nats over the real next tokens of `rows`, `[1]`.
    pub(crate) fn loss(&self, rows: &TokenRows<'_>) -> Tensor<1> {
        let device = self.embedding.val().device();
        let plain = device.clone().inner();
        let (num_rows, len) = (rows.num_rows(), rows.len());
        let ids =
            Tensor::<2, Int>::from_data(TensorData::new(rows.inputs(), [num_rows, len]), &device);
        let hidden = self.hidden(ids, &plain).flatten::<2>(0, 1);
        let places = index_tensor(rows.label_places(), &device);
        let logits = hidden
            .select(0, places)
            .matmul(self.embedding.val().transpose()); // [M, V]
        let labels = index_tensor(rows.labels(), &device).unsqueeze_dim::<2>(1);
        activation::log_softmax(logits, 1)
            .gather(1, labels)
            .mean()
            .neg()
    }

    /// Final hidden states after the last norm, `[B, S, H]`.
    fn hidden(&self, ids: Tensor<2, Int>, plain: &Device) -> Tensor<3> {
        let [num_rows, len] = ids.dims();
        let device = ids.device();
        let angles = self
            .rope
            .at(positions(&vec![0; num_rows], len, plain))
            .follow(&device);
        let causal = Causal::new(&vec![0; num_rows], len, len);
        let embedded = self
            .embedding
            .val()
            .select(0, ids.reshape([num_rows * len]))
            .reshape([num_rows, len, self.spec.hidden_size]);
        let hidden = self.blocks.iter().fold(embedded, |hidden, block| {
            block.forward(&self.spec, hidden, &angles, &causal)
        });
        rms_norm(hidden, self.norm.val(), self.spec.rms_norm_eps)
    }

    /// All tensors under their Hugging Face names.
    pub(crate) fn to_tensors(&self, dtype: Dtype) -> Vec<NamedTensor> {
        let mut tensors = vec![
            to_tensor("model.embed_tokens.weight", &self.embedding, dtype),
            to_tensor("model.norm.weight", &self.norm, dtype),
        ];
        for (index, block) in self.blocks.iter().enumerate() {
            let name = |part: &str| block_name(index, part);
            tensors.extend([
                to_tensor(&name("input_layernorm"), &block.input_norm, dtype),
                to_tensor(&name("self_attn.q_proj"), &block.q, dtype),
                to_tensor(&name("self_attn.k_proj"), &block.k, dtype),
                to_tensor(&name("self_attn.v_proj"), &block.v, dtype),
                to_tensor(&name("self_attn.o_proj"), &block.o, dtype),
                to_tensor(&name("post_attention_layernorm"), &block.mlp_norm, dtype),
                to_tensor(&name("mlp.gate_proj"), &block.gate, dtype),
                to_tensor(&name("mlp.up_proj"), &block.up, dtype),
                to_tensor(&name("mlp.down_proj"), &block.down, dtype),
            ]);
        }
        tensors
    }
}

impl Block {
    fn forward(
        &self,
        spec: &TargetSpec,
        hidden: Tensor<3>,
        angles: &RopeAngles,
        causal: &Causal,
    ) -> Tensor<3> {
        let heads = spec.heads();
        let x = rms_norm(hidden.clone(), self.input_norm.val(), spec.rms_norm_eps);
        let q = HeadShape::split(linear(x.clone(), self.q.val()), heads.num_heads);
        let k = HeadShape::split(linear(x.clone(), self.k.val()), heads.num_kv_heads);
        let v = HeadShape::split(linear(x, self.v.val()), heads.num_kv_heads);
        let mixed = attend(heads, angles.rotate(q), angles.rotate(k), v, causal);
        let hidden = hidden + linear(HeadShape::merge(mixed), self.o.val());
        let x = rms_norm(hidden.clone(), self.mlp_norm.val(), spec.rms_norm_eps);
        hidden + gated_mlp(x, self.gate.val(), self.up.val(), self.down.val())
    }
}

/// Makes parameters from a [`Source`].
struct Maker<'a> {
    source: &'a Source<'a>,
    residual_scale: f64,
    device: &'a Device,
}

impl Maker<'_> {
    fn block(&self, spec: &TargetSpec, index: usize) -> Result<Block, ModelError> {
        let (hidden, width) = (spec.hidden_size, spec.intermediate_size);
        let q_width = spec.num_heads * spec.head_dim;
        let kv_width = spec.num_kv_heads * spec.head_dim;
        let matrix = |part: &str, shape: [usize; 2], scale: f64| {
            self.matrix(&block_name(index, part), shape, scale)
        };
        let gain = |part: &str| self.gain(&block_name(index, part), hidden);
        Ok(Block {
            input_norm: gain("input_layernorm")?,
            q: matrix("self_attn.q_proj", [q_width, hidden], INIT_SCALE)?,
            k: matrix("self_attn.k_proj", [kv_width, hidden], INIT_SCALE)?,
            v: matrix("self_attn.v_proj", [kv_width, hidden], INIT_SCALE)?,
            o: matrix("self_attn.o_proj", [hidden, q_width], self.residual_scale)?,
            mlp_norm: gain("post_attention_layernorm")?,
            gate: matrix("mlp.gate_proj", [width, hidden], INIT_SCALE)?,
            up: matrix("mlp.up_proj", [width, hidden], INIT_SCALE)?,
            down: matrix("mlp.down_proj", [hidden, width], self.residual_scale)?,
        })
    }

    fn matrix(
        &self,
        name: &str,
        shape: [usize; 2],
        scale: f64,
    ) -> Result<Param<Tensor<2>>, ModelError> {
        let value = match self.source {
            Source::Weights(weights) => weights.float(name, shape, FloatDType::F32, self.device)?,
            Source::Seed(seed) => {
                let mut stream = Stream::new(*seed, Purpose::Init, stable_hash(name));
                let values: Vec<f32> = (0..shape[0] * shape[1])
                    .map(|_| (stream.normal() * scale) as f32)
                    .collect();
                Tensor::from_data(TensorData::new(values, shape), self.device)
            }
        };
        Ok(named(name, value))
    }

    fn gain(&self, name: &str, width: usize) -> Result<Param<Tensor<1>>, ModelError> {
        let value = match self.source {
            Source::Weights(weights) => {
                weights.float(name, [width], FloatDType::F32, self.device)?
            }
            Source::Seed(_) => Tensor::ones([width], (self.device, DType::F32)),
        };
        Ok(named(name, value))
    }
}

/// A parameter whose identity is its name, so that a saved optimizer state finds it again.
fn named<const D: usize>(name: &str, value: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::from(stable_hash(name)), value.require_grad())
}

fn block_name(index: usize, part: &str) -> String {
    format!("model.layers.{index}.{part}.weight")
}

fn to_tensor<const D: usize>(name: &str, param: &Param<Tensor<D>>, dtype: Dtype) -> NamedTensor {
    let value = param.val();
    let shape = value.dims();
    NamedTensor::float(name, &shape, &host_values(&value), dtype)
}
