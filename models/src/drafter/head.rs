//! The draft head: the target's head rows of the draft vocabulary, trained or kept.

use burn::tensor::{Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

use super::DrafterContext;
use crate::batch::index_tensor;

/// What happens to the draft head, which starts as the target's head rows of the draft vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadMode {
    /// Trained with the rest.
    Trained,
    /// Kept as it is.
    Frozen,
}

impl DrafterContext<'_> {
    /// The target's head rows of the draft vocabulary in f32, `[V_draft, H]`.
    pub(super) fn head_rows(&self, device: &Device) -> Tensor<2> {
        let head = self.ends.head.clone().cast(FloatDType::F32);
        let rows = if self.vocab.is_full() {
            head
        } else {
            let ids = self.vocab.target_ids().iter().map(|&id| id as usize);
            head.select(0, index_tensor(ids, &self.ends.head.device()))
        };
        Tensor::from_data(rows.into_data(), device)
    }
}
