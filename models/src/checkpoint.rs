//! A drafter on disk: `drafter.safetensors` and `drafter.json`, which describes itself completely.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use crate::drafter::{AnyDrafter, DrafterConfig, DrafterContext};
use crate::error::ModelError;
use crate::file;
use crate::target::{TargetEnds, TargetSpec};
use crate::vocab::VocabMap;
use crate::weights::{WeightFolder, check_finite, write_safetensors};

/// Version of `drafter.json`; readers refuse others.
pub const FORMAT_VERSION: u32 = 1;

/// Everything needed to rebuild a drafter and to know what it belongs to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrafterCard {
    /// Version of this format.
    pub format_version: u32,
    /// Family and settings, resolved.
    pub drafter: DrafterConfig,
    /// Zero-based ids of the captured blocks, written out even when they are the default.
    pub aux_layer_ids: Vec<usize>,
    /// Draft vocabulary, absolute ids.
    pub vocab: VocabMap,
    /// Shape of the target.
    pub target: TargetSpec,
    /// Fingerprint of the target whose states it was trained on.
    pub target_fingerprint: String,
    /// Hash of the chat template and its options used for the training data.
    pub template: TemplateRecord,
    /// blake3 of `drafter.safetensors`, hex.
    pub weights_blake3: String,
    /// Optimizer steps taken.
    pub step: u64,
}

/// How the training text was rendered; serving must do the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateRecord {
    /// blake3 of the template text, hex; empty when the data were token ids.
    pub blake3: String,
    /// Options passed to the template, for example `enable_thinking`.
    pub options: serde_json::Map<String, serde_json::Value>,
}

/// The description in the folder of a drafter.
pub const CARD: &str = "drafter.json";
/// The parameters in the folder of a drafter.
pub const WEIGHTS: &str = "drafter.safetensors";

/// Writes a drafter into `folder`; `card.weights_blake3` is filled in.
///
/// # Errors
/// [`ModelError::NotWritten`] for a parameter that is not finite, before anything is written;
/// [`ModelError::Io`] otherwise.
pub fn save(folder: &Path, drafter: &AnyDrafter, mut card: DrafterCard) -> Result<(), ModelError> {
    let tensors = drafter.to_tensors();
    let weights = folder.join(WEIGHTS);
    check_finite(&tensors, &weights)?;
    write_safetensors(&weights, &tensors, &[("draftsmith", "drafter")])?;
    card.weights_blake3 = blake3::hash(&file::read(&weights)?).to_hex().to_string();
    file::write_json(&folder.join(CARD), &card)
}

/// Reads only the description.
///
/// # Errors
/// [`ModelError`] when the file is missing, malformed or of another version.
pub fn load_card(folder: &Path) -> Result<DrafterCard, ModelError> {
    let path = folder.join(CARD);
    let card: DrafterCard = file::read_json(&path)?;
    if card.format_version != FORMAT_VERSION {
        return Err(ModelError::malformed(
            path,
            "drafter description",
            format!(
                "format version {}, expected {FORMAT_VERSION}",
                card.format_version
            ),
        ));
    }
    Ok(card)
}

/// Rebuilds a drafter on `device`, checking the checksum of its weights.
///
/// # Errors
/// [`ModelError`] when a file is missing, cut off or does not fit the description.
pub fn load(
    folder: &Path,
    ends: &TargetEnds,
    device: &Device,
) -> Result<(AnyDrafter, DrafterCard), ModelError> {
    let card = load_card(folder)?;
    let weights = load_weights(folder, &card)?;
    let context = DrafterContext {
        target: &card.target,
        ends,
        vocab: &card.vocab,
    };
    let drafter = AnyDrafter::init(&card.drafter, context, 0, device)?;
    let drafter = drafter.load_tensors(&weights)?;
    Ok((drafter, card))
}

/// Opens the parameters that `card` describes, checking their checksum.
///
/// # Errors
/// [`ModelError`] when the file is missing, cut off or another one.
pub fn load_weights(folder: &Path, card: &DrafterCard) -> Result<WeightFolder, ModelError> {
    let path: PathBuf = folder.join(WEIGHTS);
    let bytes = file::read(&path)?;
    if blake3::hash(&bytes).to_hex().as_str() != card.weights_blake3 {
        return Err(ModelError::malformed(
            path,
            "drafter checkpoint",
            "its checksum differs from the one in `drafter.json`",
        ));
    }
    WeightFolder::from_bytes(&path, bytes)
}
