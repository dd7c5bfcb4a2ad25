//! Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum made orthogonal by Newton-Schulz.
//!
//! The iteration `X <- (a I + b G + c G^2) X` with `G = X X^T` multiplies a matrix of `[m, n]`, `m <= n`, twice a step over
//! its long side. All factors are polynomials of the first `G` and commute, so for long matrices they are gathered in
//! one `[m, m]` matrix that multiplies `X` once at the end, and `G` itself is carried on as `P G P`: `4 n + 34 m` instead of
//! `20 n + 10 m` operations an entry of `G`. `burn::optim::Muon` computes the same update the plain way and is what the
//! tests compare with.

use burn::optim::momentum::{Momentum, MomentumConfig};
use burn::optim::{MuonState, Optimizer};
use burn::tensor::{Device, Tensor};

/// Coefficients `a, b, c` of the quintic (Jordan et al. 2024).
const QUINTIC: [f32; 3] = [3.4445, -4.775, 2.0315];
/// Iterations.
const STEPS: usize = 5;
/// Least norm a gradient is divided by.
const LEAST_NORM: f32 = 1e-7;

/// Muon for matrices, scaled to the size of AdamW's update (Liu et al. 2025, 2502.16982).
#[derive(Clone)]
pub(crate) struct Muon {
    momentum: Momentum,
    weight_decay: f64,
}

impl Muon {
    /// Nesterov momentum of 0.95 and the given decoupled decay.
    pub(crate) fn new(weight_decay: f64) -> Self {
        let momentum = MomentumConfig {
            momentum: 0.95,
            dampening: 0.0,
            nesterov: true,
        };
        Self {
            momentum: Momentum::new(&momentum),
            weight_decay,
        }
    }
}

impl Optimizer for Muon {
    type State<const D: usize> = MuonState<D>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let shape = tensor.dims();
        let (momentum, state) = self.momentum.transform(grad, state.map(|s| s.momentum));
        let [rows, columns] = [shape[0], shape[1]];
        let update = orthogonal(momentum.reshape([rows, columns])).reshape(shape);
        let scale = 0.2 * lr * (rows.max(columns) as f64).sqrt();
        let tensor = tensor.mul_scalar(1.0 - lr * self.weight_decay) - update.mul_scalar(scale);
        (tensor, Some(MuonState::new(state)))
    }

    fn to_device<const D: usize>(mut state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.momentum = state.momentum.to_device(device);
        state
    }
}

/// `matrix` with its singular values near 1.
fn orthogonal(matrix: Tensor<2>) -> Tensor<2> {
    let norm = matrix.clone().square().sum().sqrt();
    let matrix = matrix / norm.clamp_min(LEAST_NORM).unsqueeze();
    let [rows, columns] = matrix.dims();
    if rows > columns {
        orthogonal_wide(matrix.transpose()).transpose()
    } else {
        orthogonal_wide(matrix)
    }
}

/// The same for a matrix of `[m, n]`, `m <= n`, of norm 1.
fn orthogonal_wide(matrix: Tensor<2>) -> Tensor<2> {
    let gram = |x: &Tensor<2>| x.clone().matmul(x.clone().transpose());
    let [rows, columns] = matrix.dims();
    if 2 * columns > 3 * rows {
        polynomial(gram(&matrix)).matmul(matrix)
    } else {
        (0..STEPS).fold(matrix, |x, _| quintic(gram(&x)).matmul(x))
    }
}

/// The `[m, m]` factor that all iterations together apply to a matrix of this Gram matrix.
fn polynomial(mut gram: Tensor<2>) -> Tensor<2> {
    let mut factors: Option<Tensor<2>> = None;
    for step in 1..=STEPS {
        let factor = quintic(gram.clone());
        if step < STEPS {
            gram = factor.clone().matmul(gram).matmul(factor.clone());
        }
        factors = Some(match factors {
            Some(factors) => factor.matmul(factors),
            None => factor,
        });
    }
    factors.unwrap_or(gram)
}

/// `a I + b G + c G^2`.
fn quintic(gram: Tensor<2>) -> Tensor<2> {
    let [a, b, c] = QUINTIC;
    let square = gram.clone().matmul(gram.clone());
    let identity = Tensor::eye(gram.dims()[0], &gram.device());
    square.mul_scalar(c) + gram.mul_scalar(b) + identity.mul_scalar(a)
}

#[cfg(test)]
mod tests {
    use burn::optim::decay::WeightDecayConfig;
    use burn::optim::{AdjustLrFn, MuonConfig};
    use burn::tensor::Distribution;

    use super::*;

    fn most(tensor: Tensor<2>) -> f32 {
        tensor.abs().max().into_scalar::<f32>()
    }

    /// Moves a matrix by ours and by Burn's for some steps; their largest difference over the largest move.
    fn difference(start: Tensor<2>, gradients: &[Tensor<2>]) -> f32 {
        let ours = Muon::new(0.1);
        let burns = MuonConfig::new()
            .with_weight_decay(Some(WeightDecayConfig::new(0.1)))
            .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW)
            .build();
        let (mut a, mut b) = (start.clone(), start.clone());
        let (mut state_a, mut state_b) = (None, None);
        for gradient in gradients {
            (a, state_a) = ours.step(1e-2, a, gradient.clone(), state_a);
            (b, state_b) = burns.step(1e-2, b, gradient.clone(), state_b);
        }
        most(a - b.clone()) / most(b - start)
    }

    fn random(shape: [usize; 2]) -> Tensor<2> {
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex())
    }

    // Red when `polynomial` carries `G` on as `P G` (`.matmul(factor.clone())` left out).
    #[test]
    fn moves_matrices_of_every_shape_as_the_plain_iteration_does() {
        Device::flex().seed(7);
        for shape in [[96, 96], [96, 130], [48, 160], [160, 48], [1, 64], [64, 1]] {
            let gradients: Vec<Tensor<2>> = (0..4).map(|_| random(shape)).collect();
            // f32 sums of 160 terms through five iterations: about 1e-5.
            let found = difference(random(shape) * 0.1, &gradients);
            assert!(found < 1e-4, "{shape:?}: {found}");
        }
    }

    // Singular values far apart are where rounding of `G` could show: its eigenvalues are their squares.
    #[test]
    fn moves_a_matrix_of_low_rank_as_the_plain_iteration_does() {
        Device::flex().seed(8);
        for noise in [0.0, 1e-4, 1e-2] {
            let low = random([96, 4]).matmul(random([4, 200]));
            let gradient = low + random([96, 200]) * noise;
            let found = difference(random([96, 200]) * 0.1, &[gradient]);
            println!("{noise}: {found}");
            assert!(found < 1e-2, "noise {noise}: {found}");
        }
    }

    #[test]
    fn a_gradient_of_zeros_moves_by_the_decay_alone() {
        let start = random([8, 16]);
        let (moved, _) = Muon::new(0.1).step(1e-2, start.clone(), start.zeros_like(), None);
        assert!(most(moved - start.mul_scalar(0.999)) < 1e-6);
    }
}
