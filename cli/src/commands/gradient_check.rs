//! Part of `draftsmith doctor`: states, logits, loss and gradients on the chosen device against the
//! processor's.

use std::sync::Arc;

use burn::tensor::{Device, FloatDType};
use draftsmith_data::hidden::OnlineSource;
use draftsmith_models::batch::{TokenBatch, TokenRow};
use draftsmith_models::drafter::{AnyDrafter, DrafterContext};
use draftsmith_models::objective::{Objective, Teacher};
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::host_values;
use draftsmith_trainer::device_check::{
    NamedGradients, TensorDifference, differences, relative_difference,
};
use draftsmith_trainer::optimizer::optimizer;
use draftsmith_trainer::step::Learner;

use crate::run_file::DrafterRun;
use crate::session::Session;

/// Largest difference of states, logits or a gradient, relative to the tensor's largest value: matrix products on tensor
/// cores may round their inputs to 10 bits of mantissa (TF32), 1e-3 a product.
const TOLERANCE: f64 = 1e-2;

/// Outcome of the comparison.
#[derive(Debug)]
pub(crate) struct GradientCheck {
    /// Differences of every trained tensor.
    pub(crate) tensors: Vec<TensorDifference>,
    /// Losses on the processor and on the device.
    pub(crate) losses: [f64; 2],
    /// Differences of the target's states and logits, relative to the largest of each.
    pub(crate) forward: ForwardDifference,
}

/// How far the target's forward pass on the device is from the processor's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardDifference {
    states: f64,
    logits: f64,
}

impl GradientCheck {
    /// Whether every tensor agrees.
    pub(crate) fn passed(&self) -> bool {
        let agrees = |tensor: &TensorDifference| tensor.agrees(TOLERANCE);
        let ForwardDifference { states, logits } = self.forward;
        let forward_agrees = states <= TOLERANCE && logits <= TOLERANCE;
        forward_agrees && !self.tensors.is_empty() && self.tensors.iter().all(agrees)
    }

    /// The losses and the worst tensor in words.
    pub(crate) fn describe(&self) -> String {
        let [reference, found] = self.losses;
        // A value that is not a number may carry a sign; without it, it sorts behind all others.
        let distance = |tensor: &TensorDifference| tensor.max_relative.abs();
        let tensors = self.tensors.iter();
        let worst = tensors.max_by(|a, b| distance(a).total_cmp(&distance(b)));
        let worst = worst.map_or_else(String::new, |tensor| {
            format!(
                "; furthest of {} tensors is `{}`: {:.1e} relative, norm ratio {:.5}",
                self.tensors.len(),
                tensor.name,
                tensor.max_relative,
                tensor.norm_ratio
            )
        });
        let ForwardDifference { states, logits } = self.forward;
        format!(
            "states within {states:.1e}, logits within {logits:.1e} of their largest value; loss {found:.6} \
             against {reference:.6} on `cpu`{worst}"
        )
    }
}

/// Compares one batch of `rows` on the session's device with the processor.
pub(crate) fn compare(
    session: &Session,
    run: &DrafterRun,
    rows: Vec<TokenRow>,
) -> anyhow::Result<GradientCheck> {
    let cpu = Device::flex();
    let folder = &session.run_file().target.path;
    let on_cpu = Arc::new(TargetModel::load(folder, FloatDType::F32, &cpu)?);
    let reference = gradients(session, run, &rows, on_cpu.clone())?;
    let on_device = Arc::new(TargetModel::load(
        folder,
        FloatDType::F32,
        session.device(),
    )?);
    let found = gradients(session, run, &rows, on_device.clone())?;
    Ok(GradientCheck {
        forward: forward_difference(session, run, rows, [&on_cpu, &on_device])?,
        tensors: differences(&reference, &found),
        losses: [reference.loss, found.loss],
    })
}

fn forward_difference(
    session: &Session,
    run: &DrafterRun,
    rows: Vec<TokenRow>,
    targets: [&TargetModel; 2],
) -> anyhow::Result<ForwardDifference> {
    let want = run.config.check(session.spec())?;
    let tokens = TokenBatch { rows };
    let [(states, logits), (other_states, other_logits)] = targets.map(|target| {
        let states = target.forward(&tokens.ids(), &want);
        let rows = states.final_hidden.clone().flatten::<2>(0, 1);
        let logits = host_values(&target.ends().logits(rows));
        let aux = host_values(&states.aux);
        ([aux, host_values(&states.final_hidden)].concat(), logits)
    });
    Ok(ForwardDifference {
        states: relative_difference(&states, &other_states),
        logits: relative_difference(&logits, &other_logits),
    })
}

fn gradients(
    session: &Session,
    run: &DrafterRun,
    rows: &Vec<TokenRow>,
    target: Arc<TargetModel>,
) -> anyhow::Result<NamedGradients> {
    let vocab = VocabMap::full(target.spec().vocab_size);
    let context = DrafterContext {
        target: target.spec(),
        ends: target.ends(),
        vocab: &vocab,
    };
    let tracking = target.device().clone().autodiff();
    let drafter = AnyDrafter::init(&run.config, context, 0, &tracking)?;
    let run_file = session.run_file();
    let source = OnlineSource::new(target.clone(), drafter.state_spec())?;
    let learner = Learner {
        optimizer: optimizer(run_file.optimizer_of(run), &drafter),
        objective: Objective::new(run_file.objective_of(run))?,
        teacher: Teacher::new(target.ends(), &vocab),
        compute: FloatDType::F32,
        clip_norm: 0.0,
        drafter,
    };
    let indices: Vec<usize> = (0..rows.len()).collect();
    Ok(learner.named_gradients(&indices, rows, &source)?)
}
