//! RMSNorm (Zhang and Sennrich 2019, 1910.07467), computed in f32 whatever the input type.

use burn::tensor::{FloatDType, Tensor};

use crate::host;
use crate::host::tape::{self, HostValues};

/// `x / sqrt(mean(x^2) + eps) * gain` over the last axis; same shape and type as `x`.
pub fn rms_norm<const D: usize>(x: Tensor<D>, gain: Tensor<1>, eps: f64) -> Tensor<D> {
    if host::is_host(&x) && host::is_host(&gain) {
        let (shape, device) = (x.dims(), x.device());
        let mut values = host::take(x);
        host::norm::rms_norm(&mut values, HostValues::of(gain).as_slice(), eps as f32);
        return host::give(values, shape, &device);
    }
    if tape::is_taped(&x) && tape::is_taped(&gain) {
        return taped(x, gain, eps);
    }
    let dtype: FloatDType = x.dtype().into();
    let x = x.cast(FloatDType::F32);
    let mean_square = x.clone().square().mean_dim(D - 1);
    let scale = mean_square.add_scalar(eps).sqrt().recip();
    let gain = gain.cast(FloatDType::F32).unsqueeze::<D>();
    (x * scale * gain).cast(dtype)
}

/// As one operation on the tape of the CPU backend.
fn taped<const D: usize>(x: Tensor<D>, gain: Tensor<1>, eps: f64) -> Tensor<D> {
    let ((x, x_input), (gain, gain_input)) = (tape::open(x), tape::open(gain));
    let output = rms_norm(x.clone(), gain.clone(), eps);
    let (x, gain) = (HostValues::of(x), HostValues::of(gain));
    tape::record([x_input, gain_input], output, move |mut gradient, _| {
        let (x, gain) = (x.as_slice(), gain.as_slice());
        let of_gain = host::norm::rms_norm_gradient(&mut gradient, x, gain, eps as f32);
        [gradient, of_gain]
    })
}
