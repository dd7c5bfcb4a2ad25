//! Rotary position embedding (Su et al. 2021, 2104.09864) in the half-rotation (NeoX) layout.

use std::sync::{Arc, OnceLock};

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::host;
use crate::host::rotate::HostAngles;
use crate::host::tape;

/// How the rotary frequencies are derived; everything an export must carry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    /// Base of the geometric sequence of frequencies.
    pub theta: f64,
    /// Change of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// Frequency scaling, named as in Hugging Face configurations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// Unchanged frequencies.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth ramp between
    /// (transformers, `modeling_rope_utils.py`, `_compute_llama3_parameters`).
    Llama3 {
        /// The divisor for long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the original training.
        original_max_position_embeddings: usize,
    },
}

impl RopeSpec {
    /// The `head_dim / 2` inverse frequencies.
    ///
    /// They are rounded to f32 once, as the reference implementation does.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|i| {
                let exponent = (2 * i) as f32 / head_dim as f32;
                1.0 / (self.theta as f32).powf(exponent)
            })
            .map(|frequency| self.scale(frequency))
            .collect()
    }

    fn scale(&self, frequency: f32) -> f32 {
        match self.scaling {
            RopeScaling::Default => frequency,
            RopeScaling::Linear { factor } => frequency / factor as f32,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let original = original_max_position_embeddings as f64;
                let wavelength = std::f64::consts::TAU / f64::from(frequency);
                if wavelength > original / low_freq_factor {
                    frequency / factor as f32
                } else if wavelength < original / high_freq_factor {
                    frequency
                } else {
                    let smooth = (original / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    let frequency = f64::from(frequency);
                    ((1.0 - smooth) * frequency / factor + smooth * frequency) as f32
                }
            }
        }
    }
}

/// Cosine and sine tables for all positions up to a limit.
#[derive(Clone, Debug)]
pub struct RopeTable {
    cos: Tensor<2>, // [P, D/2]
    sin: Tensor<2>, // [P, D/2]
}

impl RopeTable {
    /// Tables for positions `0 .. num_positions` and heads of size `head_dim`.
    pub fn new(spec: &RopeSpec, head_dim: usize, num_positions: usize, device: &Device) -> Self {
        let frequencies = spec.inverse_frequencies(head_dim);
        let angles = |f: fn(f32) -> f32| {
            let values: Vec<f32> = (0..num_positions)
                .flat_map(|position| frequencies.iter().map(move |w| f(position as f32 * w)))
                .collect();
            Tensor::from_data(
                TensorData::new(values, [num_positions, head_dim / 2]),
                device,
            )
        };
        Self {
            cos: angles(f32::cos),
            sin: angles(f32::sin),
        }
    }

    /// Number of positions the tables cover.
    pub fn num_positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// Looks up the angles of `positions` `[B, S]` once for all heads and layers.
    pub fn at(&self, positions: Tensor<2, Int>) -> RopeAngles {
        let [batch, len] = positions.dims();
        let half = self.cos.dims()[1];
        let flat = positions.reshape([batch * len]);
        let look_up = |table: &Tensor<2>| {
            table
                .clone()
                .select(0, flat.clone())
                .reshape([batch, 1, len, half])
        };
        RopeAngles {
            cos: look_up(&self.cos),
            sin: look_up(&self.sin),
            host: OnceLock::new(),
        }
    }
}

/// Angles of the positions of one call, `[B, 1, S, D/2]` each.
#[derive(Clone, Debug)]
pub struct RopeAngles {
    cos: Tensor<4>,
    sin: Tensor<4>,
    /// The same in host memory, read once for all layers.
    host: OnceLock<Arc<HostAngles>>,
}

impl RopeAngles {
    /// Brings the angles onto the gradient graph when `device` tracks gradients.
    #[must_use]
    pub fn follow(self, device: &Device) -> Self {
        Self {
            cos: super::follow(device, self.cos),
            sin: super::follow(device, self.sin),
            host: self.host,
        }
    }

    /// Rotates `x` `[B, heads, S, D]`: halves `(x1, x2)` become `(x1 c - x2 s, x2 c + x1 s)`.
    pub fn rotate(&self, x: Tensor<4>) -> Tensor<4> {
        if tape::is_taped(&x) {
            return self.rotate_taped(x);
        }
        if host::is_host(&x) {
            return rotate_on_host(x, self.on_host());
        }
        let half = x.dims()[3] / 2;
        let first = x.clone().narrow(3, 0, half);
        let second = x.narrow(3, half, half);
        let cos = self.cos.clone().cast(first.dtype());
        let sin = self.sin.clone().cast(first.dtype());
        Tensor::cat(
            vec![
                first.clone() * cos.clone() - second.clone() * sin.clone(),
                second * cos + first * sin,
            ],
            3,
        )
    }

    /// The angles in host memory.
    fn on_host(&self) -> &Arc<HostAngles> {
        let values = |angles: &Tensor<4>| {
            let is_taped = angles.device().is_autodiff();
            host::take(if is_taped {
                angles.clone().inner()
            } else {
                angles.clone()
            })
        };
        self.host.get_or_init(|| {
            Arc::new(HostAngles {
                cos: values(&self.cos),
                sin: values(&self.sin),
            })
        })
    }

    /// As one operation on the tape of the CPU backend; the gradient turns back.
    fn rotate_taped(&self, x: Tensor<4>) -> Tensor<4> {
        let angles = Arc::clone(self.on_host());
        let shape = x.dims();
        let (x, input) = tape::open(x);
        tape::record(
            [input],
            rotate_on_host(x, &angles),
            move |mut gradient, _| {
                host::rotate::rotate_back(&mut gradient, shape, &angles);
                [gradient]
            },
        )
    }
}

fn rotate_on_host(x: Tensor<4>, angles: &HostAngles) -> Tensor<4> {
    let (shape, device) = (x.dims(), x.device());
    let mut values = host::take(x);
    host::rotate::rotate(&mut values, shape, angles);
    host::give(values, shape, &device)
}
