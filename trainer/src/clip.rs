//! Clipping by the norm of the whole gradient (Pascanu et al. 2013, 1211.5063).
//!
//! The gradient stays on the device; one number a parameter travels to the host, so that a gradient
//! that is not finite can be traced to its parameter.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{FloatDType, Tensor};
use draftsmith_models::weights::host_values;

/// Norm of a gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientNorm {
    /// Euclidean norm over all parameters.
    pub norm: f64,
    /// First parameter whose gradient is not finite.
    pub not_finite: Option<String>,
}

/// The norm of all gradients of `module`; it waits for the device.
pub fn gradient_norm<M: Module>(module: &M, gradients: &GradientsParams) -> GradientNorm {
    let mut squares = Squares {
        gradients,
        path: Vec::new(),
        names: Vec::new(),
        sums: Vec::new(),
    };
    module.visit(&mut squares);
    if squares.sums.is_empty() {
        return GradientNorm {
            norm: 0.0,
            not_finite: None,
        };
    }
    let sums = host_values(&Tensor::cat(squares.sums, 0));
    let culprit = sums.iter().position(|sum| !sum.is_finite());
    GradientNorm {
        norm: sums.iter().copied().map(f64::from).sum::<f64>().sqrt(),
        not_finite: culprit.map(|index| squares.names[index].clone()),
    }
}

/// Scales all gradients so that their norm is at most `limit`; 0 switches clipping off.
pub fn clip<M: Module>(
    module: &M,
    mut gradients: GradientsParams,
    norm: f64,
    limit: f64,
) -> GradientsParams {
    if limit > 0.0 && norm > limit {
        module.visit(&mut Scale {
            gradients: &mut gradients,
            factor: limit / norm,
        });
    }
    gradients
}

struct Squares<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    names: Vec<String>,
    sums: Vec<Tensor<1>>,
}

impl ModuleVisitor for Squares<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.names.push(self.path.join("."));
            self.sums
                .push(gradient.cast(FloatDType::F32).square().sum());
        }
    }
}

struct Scale<'a> {
    gradients: &'a mut GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.gradients
                .register(param.id, gradient.mul_scalar(self.factor));
        }
    }
}
