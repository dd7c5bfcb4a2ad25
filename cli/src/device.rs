//! Which device computes: asked for by name, looked for before use.

use std::fmt;
use std::str::FromStr;

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use crate::errors::CliError;

/// A device as written by the user: `cpu` or `cuda:N`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The processor.
    #[default]
    Cpu,
    /// The NVIDIA card with this index.
    Cuda(usize),
}

impl DeviceChoice {
    /// Finds the device.
    ///
    /// A missing card is noticed here: the backend itself would only fail in its first operation.
    ///
    /// # Errors
    /// [`CliError::Device`] when this build or this machine has no such device.
    pub(crate) fn find(self) -> Result<Device, CliError> {
        match self {
            Self::Cpu => Ok(Device::flex()),
            Self::Cuda(index) => find_cuda(index),
        }
    }
}

#[cfg(feature = "cuda")]
fn find_cuda(index: usize) -> Result<Device, CliError> {
    use burn::tensor::DeviceType;

    let found = Device::enumerate(DeviceType::Cuda).len();
    if index < found {
        return Ok(Device::cuda(index));
    }
    Err(CliError::Device {
        message: format!("device `cuda:{index}` does not exist: {found} CUDA devices found"),
        hint: "list the cards with `nvidia-smi`, or use `--device cpu`",
    })
}

#[cfg(not(feature = "cuda"))]
fn find_cuda(index: usize) -> Result<Device, CliError> {
    Err(CliError::Device {
        message: format!("device `cuda:{index}` is asked for, but this build has no CUDA support"),
        hint: "build with `cargo build --release --features cuda -p draftsmith`, or use `--device cpu`",
    })
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|index| index.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| format!("unknown device `{text}`, expected `cpu` or `cuda:N`")),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => formatter.write_str("cpu"),
            Self::Cuda(index) => write!(formatter, "cuda:{index}"),
        }
    }
}

impl Serialize for DeviceChoice {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DeviceChoice {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for name in ["cpu", "cuda:0", "cuda:3"] {
            assert_eq!(name.parse::<DeviceChoice>().unwrap().to_string(), name);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert!("gpu".parse::<DeviceChoice>().is_err());
        assert!("cuda:x".parse::<DeviceChoice>().is_err());
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_without_cuda_says_so() {
        let error = DeviceChoice::Cuda(0).find().unwrap_err();
        assert_eq!(
            error.to_string(),
            "device `cuda:0` is asked for, but this build has no CUDA support"
        );
    }
}
