//! RMSNorm (Zhang and Sennrich 2019, 1910.07467), computed in f32 whatever the input type.

use burn::tensor::{FloatDType, Tensor};

use crate::host;

/// `x / sqrt(mean(x^2) + eps) * gain` over the last axis; same shape and type as `x`.
pub fn rms_norm<const D: usize>(x: Tensor<D>, gain: Tensor<1>, eps: f64) -> Tensor<D> {
    if host::is_host(&x) && host::is_host(&gain) {
        let (shape, device) = (x.dims(), x.device());
        let mut values = host::take(x);
        host::norm::rms_norm(&mut values, &host::take(gain), eps as f32);
        return host::give(values, shape, &device);
    }
    let dtype: FloatDType = x.dtype().into();
    let x = x.cast(FloatDType::F32);
    let mean_square = x.clone().square().mean_dim(D - 1);
    let scale = mean_square.add_scalar(eps).sqrt().recip();
    let gain = gain.cast(FloatDType::F32).unsqueeze::<D>();
    (x * scale * gain).cast(dtype)
}
