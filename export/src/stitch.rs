//! Replacing some tensors in the files of a model: same names, shapes, types and places, other values.

use std::path::Path;

use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorInfo};

use crate::ExportedTensor;
use crate::error::ExportError;
use crate::source::Source;
use crate::target_head::TargetHead;

/// Names of the regular files of a folder, sorted; folders and hidden files are none of a model's.
pub(crate) fn plain_files(folder: &Path) -> Result<Vec<String>, ExportError> {
    let io = |source| ModelError::io(folder, source);
    let mut names = Vec::new();
    for entry in fs_err::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_file() && !name.starts_with('.') {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Writes the target's files into `staging`, with the drafter's values in place of the head's.
pub(crate) fn fill(
    staging: &Path,
    source: &Source<'_>,
    head: &TargetHead<'_>,
) -> Result<Vec<ExportedTensor>, ExportError> {
    fs_err::create_dir_all(staging).map_err(|e| ModelError::io(staging, e))?;
    let changed = head.files();
    let mut tensors = Vec::new();
    for name in plain_files(source.target)? {
        let (from, to) = (source.target.join(&name), staging.join(&name));
        if changed.contains(name.as_str()) {
            tensors.extend(patch_file(&name, [&from, &to], source, head)?);
        } else {
            take_file(&from, &to).map_err(|e| ModelError::io(&to, e))?;
        }
    }
    Ok(tensors)
}

/// Weights are linked, because they may be as large as the disk; everything else is copied.
fn take_file(from: &Path, to: &Path) -> std::io::Result<()> {
    // A link to a link would name a place relative to the wrong folder.
    let from = fs_err::canonicalize(from)?;
    let is_weights = to
        .extension()
        .is_some_and(|extension| extension == "safetensors");
    if is_weights && fs_err::hard_link(&from, to).is_ok() {
        return Ok(());
    }
    fs_err::copy(&from, to)?;
    fs_err::File::open(to)?.sync_all()
}

fn patch_file(
    name: &str,
    [from, to]: [&Path; 2],
    source: &Source<'_>,
    head: &TargetHead<'_>,
) -> Result<Vec<ExportedTensor>, ExportError> {
    let malformed =
        |reason: &dyn std::fmt::Display| ModelError::malformed(from, "safetensors file", reason);
    let mut bytes = file::read(from)?;
    let (header, metadata) =
        SafeTensors::read_metadata(&bytes).map_err(|error| malformed(&error))?;
    // Eight bytes hold the length of the header.
    let data = 8 + header;
    let mut tensors = Vec::new();
    for (tensor, _) in head.tensors.iter().filter(|(_, file)| file == name) {
        let info = metadata
            .info(&tensor.foreign)
            .filter(|info| info.shape == tensor.shape)
            .ok_or_else(|| malformed(&format!("tensor `{}` has another shape", tensor.foreign)))?;
        let (start, end) = info.data_offsets;
        let stored = bytes
            .get_mut(data + start..data + end)
            .ok_or_else(|| malformed(&"it is cut off"))?;
        let values = source.values(tensor)?;
        let is_finite = patch(stored, info, &values, head.offset(tensor))
            .ok_or_else(|| malformed(&format!("tensor `{}` is no float", tensor.foreign)))?;
        if !is_finite {
            return Err(ModelError::NotWritten {
                name: tensor.foreign.clone(),
                path: to.to_owned(),
                dtype: format!("{:?}", info.dtype),
            }
            .into());
        }
        tensors.push(ExportedTensor {
            name: tensor.foreign.clone(),
            shape: tensor.shape.clone(),
            dtype: format!("{:?}", info.dtype),
        });
    }
    file::write_atomic(to, &bytes)?;
    Ok(tensors)
}

/// Replaces stored values by `values` less `offset`, in the stored type; returns whether it holds them all, `None` for
/// a type that is no float.
fn patch(stored: &mut [u8], info: &TensorInfo, values: &[f32], offset: f32) -> Option<bool> {
    Some(match info.dtype {
        Dtype::F32 => {
            let decode = f32::from_le_bytes;
            patch_as(stored, values, offset, decode, f32::to_le_bytes)
        }
        Dtype::BF16 => {
            let decode = |b| bf16::from_le_bytes(b).to_f32();
            patch_as(stored, values, offset, decode, |v| {
                bf16::from_f32(v).to_le_bytes()
            })
        }
        Dtype::F16 => {
            let decode = |b| f16::from_le_bytes(b).to_f32();
            patch_as(stored, values, offset, decode, |v| {
                f16::from_f32(v).to_le_bytes()
            })
        }
        _ => return None,
    })
}

/// A value that was not trained keeps its bits: `(w + 1) - 1` is not `w` for a small `w`. Returns whether all others
/// are finite in the stored type.
fn patch_as<const N: usize>(
    stored: &mut [u8],
    values: &[f32],
    offset: f32,
    decode: impl Fn([u8; N]) -> f32,
    encode: impl Fn(f32) -> [u8; N],
) -> bool {
    let (words, _) = stored.as_chunks_mut::<N>();
    let mut is_finite = true;
    for (word, &value) in words.iter_mut().zip(values) {
        if (decode(*word) + offset).to_bits() != value.to_bits() {
            *word = encode(value - offset);
            is_finite &= decode(*word).is_finite();
        }
    }
    is_finite
}
