//! [`optimizer`]: which parameter moves by which rule.

use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::Tensor;
use draftsmith_models::drafter::AnyDrafter;

use crate::config::{OptimizerConfig, OptimizerKind};
use crate::muon::Muon;

/// The optimizer that the settings ask for.
///
/// One-dimensional parameters (norm gains) always move by AdamW without decay, matrices over the vocabulary
/// always by AdamW: Muon is for matrices inside the network. Muon's update is scaled to the size of AdamW's, so that
/// both share one learning rate and one decay.
pub fn optimizer(config: &OptimizerConfig, drafter: &AnyDrafter) -> ModuleOptimizer {
    let adamw = AdamWConfig::new()
        .with_beta_1(config.betas[0] as f32)
        .with_beta_2(config.betas[1] as f32)
        .with_epsilon(config.eps as f32)
        .with_weight_decay(config.weight_decay as f32);
    let mut parameters = Parameters {
        vocabulary: drafter.vocabulary_params(),
        gains: Vec::new(),
        matrices: Vec::new(),
    };
    drafter.visit(&mut parameters);
    let optimizer = ModuleOptimizer::from(adamw.build()).with_group(
        ParamGroup::from_ids(parameters.gains),
        adamw.with_weight_decay(0.0).build(),
        None,
    );
    match config.kind {
        OptimizerKind::Adamw => optimizer,
        OptimizerKind::Muon => {
            let muon = Muon::new(config.weight_decay);
            optimizer.with_group(ParamGroup::from_ids(parameters.matrices), muon, None)
        }
    }
}

struct Parameters {
    vocabulary: Vec<ParamId>,
    gains: Vec<ParamId>,
    matrices: Vec<ParamId>,
}

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match D {
            1 => self.gains.push(param.id),
            2 if !self.vocabulary.contains(&param.id) => self.matrices.push(param.id),
            _ => (),
        }
    }
}
