//! Foreign drafters back into a [`DrafterCard`] and tensors under our names.
//!
//! What this build cannot compute (another rotary base than the target's, extra norms, own
//! embeddings, more layers) is refused by key, never read as something else.

use std::path::Path;

use burn::tensor::Device;
use draftsmith_models::checkpoint::{DrafterCard, FORMAT_VERSION, TemplateRecord};
use draftsmith_models::drafter::eagle3::Eagle3Config;
use draftsmith_models::drafter::{AnyDrafter, DrafterConfig, DrafterContext, HeadMode, Origin};
use draftsmith_models::error::ModelError;
use draftsmith_models::fingerprint::target_fingerprint;
use draftsmith_models::target::{TargetEnds, TargetSpec};
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::{NamedTensor, WeightFolder};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use crate::d2t::{self, D2T, T2D};
use crate::error::ExportError;
use crate::folder::{CONFIG, WEIGHTS};
use crate::foreign::ForeignConfig;
use crate::names::{EMBEDDING, HEAD, LayerPrefix, tensor_names};
use crate::source::{TARGET_EMBEDDING, TARGET_HEAD, float_values, target_tensor};

/// A foreign drafter in our terms.
#[derive(Clone, Debug)]
pub struct Imported {
    /// Its description. The fingerprint is that of the target given, `step` is 0 and the template is
    /// unknown, because the foreign files do not say.
    pub card: DrafterCard,
    /// Its parameters under our names, as f32.
    pub tensors: Vec<NamedTensor>,
    /// Keys that were not understood and change nothing this build computes.
    pub warnings: Vec<String>,
}

impl Imported {
    /// The tensors as a file of ours; `path` is where they came from, for messages.
    ///
    /// # Errors
    /// [`ModelError`] when two of them have one name.
    pub fn weights(&self, path: &Path) -> Result<WeightFolder, ExportError> {
        in_memory(&self.tensors, path)
    }

    /// The drafter as one that another can start from; `name` is what the run file calls it.
    ///
    /// # Errors
    /// As [`Imported::weights`].
    pub fn into_origin(self, name: String) -> Result<Origin, ExportError> {
        Ok(Origin {
            weights: self.weights(Path::new(&name))?,
            name,
            drafter: self.card.drafter,
            aux_layer_ids: self.card.aux_layer_ids,
            vocab: Some(self.card.vocab),
            target_fingerprint: self.card.target_fingerprint,
            step: self.card.step,
        })
    }
}

/// Tensors as an opened file; `path` is where they came from, for messages.
pub(crate) fn in_memory(tensors: &[NamedTensor], path: &Path) -> Result<WeightFolder, ExportError> {
    let views = tensors
        .iter()
        .map(|t| {
            Ok((
                &t.name,
                TensorView::new(t.dtype, t.shape.clone(), &t.bytes)?,
            ))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>();
    let bytes = views
        .and_then(|views| safetensors::serialize(views, None))
        .map_err(|e| ModelError::malformed(path, "safetensors file", e))?;
    Ok(WeightFolder::from_bytes(path, bytes)?)
}

/// Reads a folder of either layout; `target` is the folder of the target it drafts for.
///
/// # Errors
/// [`ExportError`] naming the file, key or tensor that is missing, damaged, contradicts the target or
/// asks for something this build does not compute.
pub fn read(folder: &Path, target: &Path) -> Result<Imported, ExportError> {
    let spec = TargetSpec::from_folder(target)?;
    let config = ForeignConfig::read(&folder.join(CONFIG), &spec)?;
    let weights = WeightFolder::open(folder)?;
    let vocab = read_vocab(folder, &weights, config.draft_vocab_size, spec.vocab_size)?;
    let has_head = weights.contains(HEAD);
    let drafter = DrafterConfig::Eagle3(Eagle3Config {
        aux_layer_ids: Some(config.aux_layer_ids.clone()),
        ttt_steps: config.speculative_tokens,
        aux_norm: config.aux_norm,
        norm_before_residual: config.norm_before_residual,
        norm_output: config.norm_output,
        head: if has_head {
            HeadMode::Trained
        } else {
            HeadMode::Frozen
        },
        intermediate_size: Some(config.intermediate_size),
    });
    let card = DrafterCard {
        format_version: FORMAT_VERSION,
        drafter,
        aux_layer_ids: config.aux_layer_ids,
        vocab,
        target: spec,
        target_fingerprint: target_fingerprint(target)?,
        template: TemplateRecord::default(),
        weights_blake3: String::new(),
        step: 0,
    };
    let tensors = read_tensors(folder, &weights, &card, target)?;
    Ok(Imported {
        card,
        tensors,
        warnings: config.warnings,
    })
}

/// Reads a folder of either layout and builds its drafter on `device`.
///
/// # Errors
/// As [`read()`], and [`ModelError`] when the tensors do not fit the description.
pub fn load(
    folder: &Path,
    target: &Path,
    ends: &TargetEnds,
    device: &Device,
) -> Result<(AnyDrafter, DrafterCard), ExportError> {
    let imported = read(folder, target)?;
    let weights = imported.weights(&folder.join(WEIGHTS))?;
    let card = imported.card;
    let context = DrafterContext {
        target: &card.target,
        ends,
        vocab: &card.vocab,
    };
    let drafter = AnyDrafter::init(&card.drafter, context, 0, device)?;
    Ok((drafter.load_tensors(&weights)?, card))
}

fn read_vocab(
    folder: &Path,
    weights: &WeightFolder,
    draft_vocab: usize,
    target_vocab: usize,
) -> Result<VocabMap, ExportError> {
    let invalid = |name, reason: String| ExportError::VocabTable {
        name,
        path: folder.to_owned(),
        reason,
    };
    let offsets = match integers(weights)? {
        Some(offsets) => offsets,
        None if draft_vocab == target_vocab => vec![0; draft_vocab],
        None => return Err(invalid(D2T, "it is missing".to_owned())),
    };
    if offsets.len() != draft_vocab {
        return Err(invalid(
            D2T,
            format!(
                "it has {} entries, but `draft_vocab_size` is {draft_vocab}",
                offsets.len()
            ),
        ));
    }
    let vocab = d2t::from_offsets(&offsets, target_vocab).map_err(|reason| invalid(D2T, reason))?;
    match booleans(weights)? {
        Some(flags) if flags != d2t::flags(&vocab) => {
            Err(invalid(T2D, "it contradicts `d2t`".to_owned()))
        }
        _ => Ok(vocab),
    }
}

fn read_tensors(
    folder: &Path,
    weights: &WeightFolder,
    card: &DrafterCard,
    target: &Path,
) -> Result<Vec<NamedTensor>, ExportError> {
    let prefix = if weights.names().any(|name| name.starts_with("midlayer.")) {
        LayerPrefix::Midlayer
    } else {
        LayerPrefix::Indexed
    };
    let names = tensor_names(card, prefix);
    let known = |name: &str| {
        [D2T, T2D, EMBEDDING].contains(&name) || names.iter().any(|tensor| tensor.foreign == name)
    };
    if let Some(name) = weights.names().find(|name| !known(name)) {
        return Err(ExportError::UnexpectedTensor {
            name: name.to_owned(),
            path: folder.join(WEIGHTS),
            family: card.drafter.family(),
        });
    }
    refuse_own_embedding(folder, weights, &card.target, target)?;
    names
        .iter()
        .map(|name| {
            let values = if name.foreign == HEAD && !weights.contains(HEAD) {
                target_head(&card.target, target)?
            } else {
                float_values(weights.float_data(&name.foreign, &name.shape)?)
            };
            Ok(NamedTensor::float(
                name.ours.clone(),
                &name.shape,
                &values,
                Dtype::F32,
            ))
        })
        .collect()
}

/// The target's head, which an engine shares with a drafter that has none and a full vocabulary.
fn target_head(spec: &TargetSpec, target: &Path) -> Result<Vec<f32>, ExportError> {
    let name = if spec.tie_word_embeddings {
        TARGET_EMBEDDING
    } else {
        TARGET_HEAD
    };
    target_tensor(target, name, &[spec.vocab_size, spec.hidden_size])
}

/// A copy of the target's embedding may be there; a trained one would be another model.
fn refuse_own_embedding(
    folder: &Path,
    weights: &WeightFolder,
    spec: &TargetSpec,
    target: &Path,
) -> Result<(), ExportError> {
    if !weights.contains(EMBEDDING) {
        return Ok(());
    }
    let shape = [spec.vocab_size, spec.hidden_size];
    let own = float_values(weights.float_data(EMBEDDING, &shape)?);
    let theirs = target_tensor(target, TARGET_EMBEDDING, &shape)?;
    let rounded = |value: f32| half::bf16::from_f32(value).to_f32();
    let is_copy = own == theirs
        || own
            .iter()
            .zip(&theirs)
            .all(|(a, b)| a.to_bits() == rounded(*b).to_bits());
    if is_copy {
        return Ok(());
    }
    Err(ExportError::Unsupported {
        key: EMBEDDING.to_owned(),
        path: folder.join(WEIGHTS),
        expected: "the target's embedding".to_owned(),
        found: "another tensor than the target's".to_owned(),
    })
}

fn integers(weights: &WeightFolder) -> Result<Option<Vec<i64>>, ExportError> {
    table(weights, D2T, |view| match view.dtype() {
        Dtype::I64 => Some(
            view.data()
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
                .collect(),
        ),
        _ => None,
    })
}

fn booleans(weights: &WeightFolder) -> Result<Option<Vec<bool>>, ExportError> {
    table(weights, T2D, |view| match view.dtype() {
        Dtype::BOOL => Some(view.data().iter().map(|&byte| byte != 0).collect()),
        _ => None,
    })
}

/// A table that is not a float tensor, from whichever file of the folder holds it.
fn table<T>(
    weights: &WeightFolder,
    name: &'static str,
    decode: impl Fn(&TensorView<'_>) -> Option<Vec<T>>,
) -> Result<Option<Vec<T>>, ExportError> {
    for bytes in weights.file_bytes() {
        let tensors = SafeTensors::deserialize(bytes)
            .map_err(|e| ModelError::malformed(weights.path(), "safetensors file", e))?;
        if let Ok(view) = tensors.tensor(name) {
            return decode(&view)
                .map(Some)
                .ok_or_else(|| ExportError::VocabTable {
                    name,
                    path: weights.path().to_owned(),
                    reason: format!("its type is {:?}", view.dtype()),
                });
        }
    }
    Ok(None)
}
