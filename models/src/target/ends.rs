//! [`TargetEnds`]: the embedding, final norm and head of a target, all that training needs of it when
//! its hidden states come from elsewhere.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};

use crate::error::ModelError;
use crate::layers::norm::rms_norm;
use crate::target::config::TargetSpec;
use crate::weights::WeightFolder;

/// Embedding, final norm and head; frozen.
#[derive(Clone, Debug)]
pub struct TargetEnds {
    /// Token embedding `[V, H]`.
    pub embedding: Tensor<2>,
    /// Gain of the final norm `[H]`.
    pub final_norm: Tensor<1>,
    /// Head `[V, H]`; the embedding itself for tied targets.
    pub head: Tensor<2>,
    /// Epsilon of the final norm.
    pub rms_norm_eps: f64,
}

impl TargetEnds {
    /// Loads the three tensors from a model folder.
    ///
    /// A tied target takes its head from the embedding; a tied configuration beside a differing head
    /// tensor is refused, because it is unclear which one the server would use.
    ///
    /// # Errors
    /// [`ModelError`] when a tensor is missing, misshapen or contradicts the configuration.
    pub fn load(
        weights: &WeightFolder,
        spec: &TargetSpec,
        dtype: FloatDType,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let shape = [spec.vocab_size, spec.hidden_size];
        let embedding = weights.float(EMBEDDING, shape, dtype, device)?;
        let final_norm = weights.float(FINAL_NORM, [spec.hidden_size], FloatDType::F32, device)?;
        let head = if spec.tie_word_embeddings {
            refuse_differing_head(weights, &shape)?;
            embedding.clone()
        } else {
            weights.float(HEAD, shape, dtype, device)?
        };
        Ok(Self {
            embedding,
            final_norm,
            head,
            rms_norm_eps: spec.rms_norm_eps,
        })
    }

    /// Embeds token ids `[B, S]`: `[B, S, H]`.
    pub fn embed(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [batch, len] = ids.dims();
        let width = self.embedding.dims()[1];
        self.embedding
            .clone()
            .select(0, ids.reshape([batch * len]))
            .reshape([batch, len, width])
    }

    /// The final norm of hidden rows `[N, H]`, in f32.
    pub fn normed(&self, final_hidden: Tensor<2>) -> Tensor<2> {
        rms_norm(
            final_hidden.cast(FloatDType::F32),
            self.final_norm.clone(),
            self.rms_norm_eps,
        )
    }

    /// Logits in f32 of final hidden rows `[N, H]` (before the final norm): `[N, V]`.
    pub fn logits(&self, final_hidden: Tensor<2>) -> Tensor<2> {
        self.scaled_logits(final_hidden, 1.0)
    }

    /// Logits divided by `temperature`, `[N, H]` to `[N, V]` in f32, as [`TargetEnds::logits`].
    ///
    /// A head in another type is widened a piece at a time: rounding the product to bf16 would move
    /// logits near 20 by 0.06, and the teacher with them.
    pub fn scaled_logits(&self, final_hidden: Tensor<2>, temperature: f64) -> Tensor<2> {
        project(
            self.normed(final_hidden).div_scalar(temperature),
            &self.head,
        )
    }

    /// Logits in f32 of the tokens whose head rows `[n, H]` are given, as [`TargetEnds::logits`]: `[N, n]`.
    pub fn logits_of(&self, head_rows: &Tensor<2>, final_hidden: Tensor<2>) -> Tensor<2> {
        project(self.normed(final_hidden), head_rows)
    }
}

/// Normed rows `[N, H]` times the rows of a head `[n, H]`, in f32: `[N, n]`.
fn project(rows: Tensor<2>, head: &Tensor<2>) -> Tensor<2> {
    if head.dtype() == DType::F32 {
        return rows.matmul(head.clone().transpose());
    }
    let num_tokens = head.dims()[0];
    let piece = |start: usize| {
        let len = HEAD_PIECE.min(num_tokens - start);
        let head = head.clone().narrow(0, start, len);
        rows.clone().matmul(head.cast(FloatDType::F32).transpose())
    };
    Tensor::cat((0..num_tokens).step_by(HEAD_PIECE).map(piece).collect(), 1)
}

/// Rows of a head that are widened to f32 at one time.
const HEAD_PIECE: usize = 16_384;
const EMBEDDING: &str = "model.embed_tokens.weight";
const FINAL_NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";

fn refuse_differing_head(weights: &WeightFolder, shape: &[usize]) -> Result<(), ModelError> {
    if !weights.contains(HEAD) {
        return Ok(());
    }
    if weights.float_data(HEAD, shape)? == weights.float_data(EMBEDDING, shape)? {
        return Ok(());
    }
    Err(ModelError::setting(
        format!(
            "`tie_word_embeddings` is true in `{}`, but `{HEAD}` differs from `{EMBEDDING}`",
            weights.path().display()
        ),
        "remove the head tensor or set `tie_word_embeddings` to false",
    ))
}
