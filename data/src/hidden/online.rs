//! [`OnlineSource`]: the target runs beside the training.

use std::sync::Arc;

use burn::tensor::FloatDType;
use draftsmith_models::batch::{StateSpec, TargetStates, TokenBatch};
use draftsmith_models::target::TargetModel;

use super::{HiddenStateSource, check_marks, check_spec};
use crate::error::DataError;

/// Computes states when they are asked for; nothing is kept between calls.
///
/// Content is not checked here: reading it back would stall the device in every step, and the loss of
/// the same step shows a state that is not finite.
#[derive(Clone, Debug)]
pub struct OnlineSource {
    target: Arc<TargetModel>,
    spec: StateSpec,
}

impl OnlineSource {
    /// A source that runs `target` and captures the blocks of `spec`.
    ///
    /// # Errors
    /// [`DataError::Setting`] when the target has no such blocks.
    pub fn new(target: Arc<TargetModel>, spec: StateSpec) -> Result<Self, DataError> {
        check_spec(&spec, target.spec())?;
        Ok(Self { target, spec })
    }

    /// The target.
    pub fn target(&self) -> &Arc<TargetModel> {
        &self.target
    }
}

impl HiddenStateSource for OnlineSource {
    fn spec(&self) -> &StateSpec {
        &self.spec
    }

    fn states(&self, batch: &TokenBatch) -> Result<TargetStates, DataError> {
        check_marks(batch)?;
        let states = self.target.forward(&batch.ids(), &self.spec);
        Ok(TargetStates {
            aux: states.aux.cast(FloatDType::F32),
            final_hidden: states.final_hidden.cast(FloatDType::F32),
            teacher: None,
        })
    }
}
