//! [`HiddenStateSource`]: where training takes the states of the frozen target from.

mod cached;
mod online;

use draftsmith_models::batch::{StateSpec, TargetStates, TokenBatch};
use draftsmith_models::target::TargetSpec;

use crate::error::DataError;

pub use cached::CachedSource;
pub use online::OnlineSource;

/// Gives the states of the target for any batch of rows.
pub trait HiddenStateSource: std::fmt::Debug + Send + Sync {
    /// Which states it gives.
    fn spec(&self) -> &StateSpec;

    /// States of the rows of `batch`, f32, padded on the right like the batch itself.
    ///
    /// What stands at padded positions is finite and means nothing.
    ///
    /// # Errors
    /// [`DataError`] naming the row whose states are missing, misshapen, of other tokens or not finite.
    fn states(&self, batch: &TokenBatch) -> Result<TargetStates, DataError>;

    /// Positions given so far whose states were all zero, worth a warning; 0 where nobody counts.
    fn num_zero_positions(&self) -> u64 {
        0
    }
}

/// Refuses layer ids that the target does not have, or that are not strictly increasing.
pub(crate) fn check_spec(spec: &StateSpec, target: &TargetSpec) -> Result<(), DataError> {
    let ids = &spec.aux_layer_ids;
    let is_increasing = ids.windows(2).all(|pair| pair[0] < pair[1]);
    if is_increasing && ids.last().is_none_or(|&last| last < target.num_layers) {
        return Ok(());
    }
    Err(DataError::setting(
        format!(
            "aux layer ids {ids:?} do not fit: expected strictly increasing ids below {}",
            target.num_layers
        ),
        "set `aux_layer_ids` of the drafter to zero-based ids of blocks of the target",
    ))
}

/// Refuses rows whose ids and marks differ in length.
pub(crate) fn check_marks(batch: &TokenBatch) -> Result<(), DataError> {
    match batch
        .rows
        .iter()
        .find(|row| row.turns.len() != row.ids.len())
    {
        None => Ok(()),
        Some(row) => Err(DataError::RowLengths {
            key: row.key.clone(),
            ids: row.ids.len(),
            marks: row.turns.len(),
            states: row.ids.len(),
        }),
    }
}
