//! Reading and writing tensors by name in safetensors files, single or sharded with an index.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use crate::error::ModelError;
use crate::file;

/// The tensors of a Hugging Face folder, found by name across its files.
#[derive(Debug)]
pub struct WeightFolder {
    path: PathBuf,
    files: Vec<(PathBuf, Vec<u8>)>,
    location: BTreeMap<String, usize>,
}

impl WeightFolder {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// [`ModelError`] when neither exists, a named shard is missing, a file is cut off, or the index
    /// promises a tensor that its shard does not hold.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let index = path.join("model.safetensors.index.json");
        if index.exists() {
            Self::open_sharded(path, &index)
        } else {
            Self::open_single(path)
        }
    }

    /// Opens one safetensors file.
    ///
    /// # Errors
    /// [`ModelError`] when the file is missing, cut off or not a safetensors file.
    pub fn open_file(path: &Path) -> Result<Self, ModelError> {
        let mut folder = Self {
            path: path.to_owned(),
            files: Vec::new(),
            location: BTreeMap::new(),
        };
        folder.add_file(path.to_owned())?;
        Ok(folder)
    }

    /// Takes the bytes of one safetensors file; `path` is where they came from, for messages.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] when the bytes are cut off or not a safetensors file.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self, ModelError> {
        let mut folder = Self {
            path: path.to_owned(),
            files: Vec::new(),
            location: BTreeMap::new(),
        };
        folder.add_bytes(path.to_owned(), bytes)?;
        Ok(folder)
    }

    fn open_single(path: &Path) -> Result<Self, ModelError> {
        let mut folder = Self::open_file(&path.join("model.safetensors"))?;
        path.clone_into(&mut folder.path);
        Ok(folder)
    }

    fn open_sharded(path: &Path, index_path: &Path) -> Result<Self, ModelError> {
        let index: ShardIndex = file::read_json(index_path)?;
        let mut folder = Self {
            path: path.to_owned(),
            files: Vec::new(),
            location: BTreeMap::new(),
        };
        let mut shards: Vec<&String> = index.weight_map.values().collect();
        shards.sort();
        shards.dedup();
        for shard in shards {
            folder.add_file(path.join(shard))?;
        }
        for (name, shard) in &index.weight_map {
            if !folder.location.contains_key(name) {
                return Err(ModelError::MissingTensor {
                    name: name.clone(),
                    path: path.join(shard),
                });
            }
        }
        Ok(folder)
    }

    fn add_file(&mut self, path: PathBuf) -> Result<(), ModelError> {
        let bytes = file::read(&path)?;
        self.add_bytes(path, bytes)
    }

    fn add_bytes(&mut self, path: PathBuf, bytes: Vec<u8>) -> Result<(), ModelError> {
        let tensors = parse(&path, &bytes)?;
        for name in tensors.names() {
            self.location.insert(name.to_owned(), self.files.len());
        }
        drop(tensors);
        self.files.push((path, bytes));
        Ok(())
    }

    /// Names of all tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.location.keys().map(String::as_str)
    }

    /// Whether a tensor of this name exists.
    pub fn contains(&self, name: &str) -> bool {
        self.location.contains_key(name)
    }

    /// The folder or file this was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a float tensor (bf16, f16 or f32 in the file) as type `dtype` on `device`.
    ///
    /// # Errors
    /// [`ModelError`] when the tensor is missing, has another shape or holds a non-finite value.
    pub fn float<const D: usize>(
        &self,
        name: &str,
        shape: [usize; D],
        dtype: FloatDType,
        device: &Device,
    ) -> Result<Tensor<D>, ModelError> {
        let data = self.float_data(name, &shape)?;
        Ok(Tensor::<D>::from_data(data, device).cast(dtype))
    }

    /// Reads a float tensor as f32 values in row-major order.
    ///
    /// # Errors
    /// As [`WeightFolder::float`].
    pub fn float_data(&self, name: &str, shape: &[usize]) -> Result<TensorData, ModelError> {
        let (path, bytes) = self.file_of(name)?;
        let tensors = parse(path, bytes)?;
        let view = tensors.tensor(name).map_err(|e| malformed(path, e))?;
        if view.shape() != shape {
            return Err(ModelError::TensorShape {
                name: name.to_owned(),
                path: path.clone(),
                expected: shape.to_vec(),
                found: view.shape().to_vec(),
            });
        }
        let values = to_f32(&view).ok_or_else(|| {
            malformed(
                path,
                format!("tensor `{name}` has type {:?}, not a float", view.dtype()),
            )
        })?;
        if values.iter().any(|value| !value.is_finite()) {
            return Err(ModelError::NotFinite {
                name: name.to_owned(),
                path: path.clone(),
            });
        }
        Ok(TensorData::new(values, shape.to_vec()))
    }

    /// The shape of a tensor, if it exists.
    ///
    /// # Errors
    /// [`ModelError`] when its file cannot be parsed.
    pub fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        let (path, bytes) = self.file_of(name)?;
        let tensors = parse(path, bytes)?;
        let view = tensors.tensor(name).map_err(|e| malformed(path, e))?;
        Ok(view.shape().to_vec())
    }

    /// The raw bytes of all files, in the order they were opened, for fingerprints.
    pub fn file_bytes(&self) -> impl Iterator<Item = &[u8]> {
        self.files.iter().map(|(_, bytes)| bytes.as_slice())
    }

    fn file_of(&self, name: &str) -> Result<&(PathBuf, Vec<u8>), ModelError> {
        let index = self
            .location
            .get(name)
            .ok_or_else(|| ModelError::MissingTensor {
                name: name.to_owned(),
                path: self.path.clone(),
            })?;
        Ok(&self.files[*index])
    }
}

#[derive(serde::Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

fn malformed(path: &Path, reason: impl std::fmt::Display) -> ModelError {
    ModelError::malformed(path, "safetensors file", reason)
}

fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<SafeTensors<'a>, ModelError> {
    SafeTensors::deserialize(bytes).map_err(|e| malformed(path, e))
}

fn to_f32(view: &TensorView<'_>) -> Option<Vec<f32>> {
    let bytes = view.data();
    match view.dtype() {
        Dtype::F32 => Some(
            bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        ),
        Dtype::BF16 => Some(
            bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
        ),
        Dtype::F16 => Some(
            bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
        ),
        _ => None,
    }
}

/// A named tensor to be written.
#[derive(Clone, Debug)]
pub struct NamedTensor {
    /// Name in the file.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Element type in the file.
    pub dtype: Dtype,
    /// Little-endian bytes.
    pub bytes: Vec<u8>,
}

impl NamedTensor {
    /// A float tensor, rounded to `dtype` (f32, bf16 or f16).
    pub fn float(name: impl Into<String>, shape: &[usize], values: &[f32], dtype: Dtype) -> Self {
        let bytes = match dtype {
            Dtype::BF16 => values
                .iter()
                .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
                .collect(),
            Dtype::F16 => values
                .iter()
                .flat_map(|&v| f16::from_f32(v).to_le_bytes())
                .collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        let dtype = if matches!(dtype, Dtype::BF16 | Dtype::F16) {
            dtype
        } else {
            Dtype::F32
        };
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            dtype,
            bytes,
        }
    }

    /// A vector of 64-bit integers.
    pub fn int64(name: impl Into<String>, values: &[i64]) -> Self {
        Self {
            name: name.into(),
            shape: vec![values.len()],
            dtype: Dtype::I64,
            bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    /// A vector of booleans.
    pub fn bool(name: impl Into<String>, values: &[bool]) -> Self {
        Self {
            name: name.into(),
            shape: vec![values.len()],
            dtype: Dtype::BOOL,
            bytes: values.iter().map(|&v| u8::from(v)).collect(),
        }
    }
}

/// Refuses to write `tensors` to `path` when a float tensor (f32, bf16, f16) has a value that is not finite.
///
/// # Errors
/// [`ModelError::NotWritten`] naming the first.
pub fn check_finite(tensors: &[NamedTensor], path: &Path) -> Result<(), ModelError> {
    for tensor in tensors {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes)
            .map_err(|e| malformed(path, e))?;
        let values = to_f32(&view).unwrap_or_default(); // whole numbers are always finite
        if values.iter().any(|value| !value.is_finite()) {
            return Err(ModelError::NotWritten {
                name: tensor.name.clone(),
                path: path.to_owned(),
                dtype: format!("{:?}", tensor.dtype),
            });
        }
    }
    Ok(())
}

/// Writes one safetensors file atomically, with metadata `{"format": "pt"}` and `metadata`; equal input gives equal bytes.
///
/// # Errors
/// [`ModelError::Io`] naming the path.
pub fn write_safetensors(
    path: &Path,
    tensors: &[NamedTensor],
    metadata: &[(&str, &str)],
) -> Result<(), ModelError> {
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .map(|t| {
            TensorView::new(t.dtype, t.shape.clone(), &t.bytes)
                .map(|view| (t.name.as_str(), view))
                .map_err(|e| malformed(path, e))
        })
        .collect::<Result<_, _>>()?;
    let bytes = safetensors::serialize(views, None).map_err(|e| malformed(path, e))?;
    let bytes = with_metadata(&bytes, metadata).map_err(|e| malformed(path, e))?;
    file::write_atomic(path, &bytes)
}

/// A safetensors file with metadata in front of its header's tensors, sorted by key: the library writes them in the random
/// order of a hash map, and a checksum of the file would change from one writing to the next.
fn with_metadata(file: &[u8], metadata: &[(&str, &str)]) -> Result<Vec<u8>, serde_json::Error> {
    let (len, rest) = file.split_at(8);
    let len = u64::from_le_bytes(len.try_into().unwrap_or_default()) as usize;
    let (header, data) = rest.split_at(len);
    let mut info: BTreeMap<&str, &str> = metadata.iter().copied().collect();
    info.insert("format", "pt");
    let mut ordered = format!("{{\"__metadata__\":{}", serde_json::to_string(&info)?).into_bytes();
    let tensors = header.get(1..).unwrap_or_default(); // behind the opening brace
    if !tensors.starts_with(b"}") {
        ordered.push(b',');
    }
    ordered.extend(tensors);
    // Readers may map the data, which the format aligns to eight bytes.
    ordered.resize(ordered.len().next_multiple_of(8), b' ');
    let mut bytes = (ordered.len() as u64).to_le_bytes().to_vec();
    bytes.extend(ordered);
    bytes.extend(data);
    Ok(bytes)
}

/// The f32 values of a float tensor of any type, in row-major order.
///
/// Reading blocks until the device is done; meant for files, checks and host-side decisions.
pub fn host_values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    #[expect(
        clippy::expect_used,
        reason = "a float tensor always converts to f32 values"
    )]
    tensor
        .to_data()
        .convert_dtype(DType::F32)
        .try_into_vec::<f32>()
        .expect("the data was converted to f32 just before")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red with a `HashMap` in `with_metadata`.
    #[test]
    fn equal_tensors_and_metadata_give_equal_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let tensor = NamedTensor::float("x", &[3], &[1.0, 2.0, 3.0], Dtype::F32);
        let metadata: Vec<(String, String)> = (0..9)
            .map(|i| (format!("k{i}"), format!("\"{i}\"")))
            .collect();
        let metadata: Vec<(&str, &str)> = metadata.iter().map(|(k, v)| (&**k, &**v)).collect();
        for tensors in [&[][..], &[tensor]] {
            let write = || {
                write_safetensors(&path, tensors, &metadata).unwrap();
                fs_err::read(&path).unwrap()
            };
            let bytes = write();
            assert!((0..20).all(|_| write() == bytes));
            let (len, info) = SafeTensors::read_metadata(&bytes).unwrap();
            assert_eq!(len % 8, 0);
            let read = info.metadata().as_ref().unwrap();
            assert_eq!(
                (read["format"].as_str(), read["k4"].as_str()),
                ("pt", "\"4\"")
            );
            assert_eq!(info.tensors().len(), tensors.len());
        }
    }

    /// Bit patterns of IEEE 754-2008 binary16 and of bfloat16, written by hand.
    ///
    /// Seen red with `f16` read as `bf16`.
    #[test]
    fn every_float_type_of_a_file_is_read_exactly() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let tensor = |name: &str, dtype, bits: &[u16]| NamedTensor {
            name: name.to_owned(),
            shape: vec![bits.len()],
            dtype,
            bytes: bits.iter().flat_map(|b| b.to_le_bytes()).collect(),
        };
        let half = tensor("half", Dtype::F16, &[0x3C00, 0xC000, 0x0001, 0x7BFF]);
        let brain = tensor("brain", Dtype::BF16, &[0x3F80, 0xC000, 0x4049, 0x0080]);
        write_safetensors(&path, &[half, brain], &[]).unwrap();
        let weights = WeightFolder::open_file(&path).unwrap();
        let read = |name: &str| {
            let device = Device::flex();
            let tensor: Tensor<1> = weights.float(name, [4], FloatDType::F32, &device).unwrap();
            host_values(&tensor)
        };
        let smallest_half = 2.0_f32.powi(-24);
        assert_eq!(read("half"), [1.0, -2.0, smallest_half, 65504.0]);
        assert_eq!(read("brain"), [1.0, -2.0, 3.140_625, f32::MIN_POSITIVE]);
    }
}
