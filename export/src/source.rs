//! [`Source`]: a checkpoint that was checked to be whole and to belong to the given target.

use std::collections::BTreeMap;
use std::path::Path;

use draftsmith_models::checkpoint::{CARD, DrafterCard, WEIGHTS, load_card, load_weights};
use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::fingerprint::target_fingerprint;
use draftsmith_models::target::TargetSpec;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::{NamedTensor, WeightFolder};
use serde_json::Value;

use crate::config::ExportConfig;
use crate::error::ExportError;
use crate::names::{LayerPrefix, TensorName, tensor_names};
use crate::temper::logit_tensors;

/// A checkpoint with its target, ready to be renamed.
#[derive(Debug)]
pub struct Source<'a> {
    /// The description of the drafter.
    pub card: DrafterCard,
    /// Folder of the target it was trained on.
    pub target: &'a Path,
    /// Settings of the export.
    pub config: &'a ExportConfig,
    /// What the logits of the export are divided by.
    pub draft_temperature: Option<f64>,
    weights: WeightFolder,
}

/// What a checkpoint keeps although a layout may leave it out: heads that are the target's rows, and a
/// confidence that was not trained.
const MAY_STAY: &[&str] = &["head", "core.head", "confidence_proj", "confidence_bias"];

impl<'a> Source<'a> {
    /// Opens a checkpoint folder and checks everything an export relies on.
    ///
    /// # Errors
    /// [`ExportError`] when a file is missing or damaged, the description contradicts itself, a tensor
    /// belongs to nothing, or the drafter was trained on another target.
    pub fn open(
        checkpoint: &Path,
        target: &'a Path,
        config: &'a ExportConfig,
    ) -> Result<Self, ExportError> {
        config.validate()?;
        let card = load_card(checkpoint)?;
        check_card(&card, checkpoint)?;
        check_target(&card, checkpoint, target)?;
        let weights = load_weights(checkpoint, &card)?;
        refuse_unknown_tensors(&card, &weights, &checkpoint.join(WEIGHTS))?;
        Ok(Self {
            card,
            target,
            config,
            draft_temperature: None,
            weights,
        })
    }

    /// With logits divided by `draft_temperature`, if its layouts hold what they are linear in.
    #[must_use]
    pub fn tempered(mut self, draft_temperature: Option<f64>) -> Self {
        if logit_tensors(&self.card).is_some() {
            self.draft_temperature = draft_temperature;
        }
        self
    }

    /// The drafter's tensors under foreign names, in the type of the export.
    ///
    /// # Errors
    /// [`ModelError`] when one is missing, misshapen or not finite.
    pub fn tensors(&self, prefix: LayerPrefix) -> Result<Vec<NamedTensor>, ExportError> {
        tensor_names(&self.card, prefix)
            .iter()
            .map(|name| self.tensor(name))
            .collect()
    }

    fn tensor(&self, name: &TensorName) -> Result<NamedTensor, ExportError> {
        Ok(self.named(&name.foreign, &name.shape, &self.values(name)?))
    }

    /// A tensor of the checkpoint in f32, tempered where the logits are linear in it.
    ///
    /// # Errors
    /// [`ModelError`] when it is missing, misshapen or not finite.
    pub(crate) fn values(&self, name: &TensorName) -> Result<Vec<f32>, ExportError> {
        let values = self.weights.float_data(&name.ours, &name.shape)?;
        let mut values = float_values(values);
        let linear = logit_tensors(&self.card).unwrap_or_default();
        let is_linear = linear.contains(&name.ours.as_str());
        if let (true, Some(temperature)) = (is_linear, self.draft_temperature) {
            for value in &mut values {
                *value = (f64::from(*value) / temperature) as f32;
            }
        }
        Ok(values)
    }

    /// The target's embedding `[V, H]` under the foreign name `name`, from the target's own file.
    ///
    /// # Errors
    /// [`ModelError`] when the target has none of this shape.
    pub fn embedding(&self, name: &str) -> Result<NamedTensor, ExportError> {
        let spec = &self.card.target;
        let shape = [spec.vocab_size, spec.hidden_size];
        let values = target_tensor(self.target, TARGET_EMBEDDING, &shape)?;
        Ok(self.named(name, &shape, &values))
    }

    fn named(&self, name: &str, shape: &[usize], values: &[f32]) -> NamedTensor {
        NamedTensor::float(name, shape, values, self.config.dtype.element())
    }

    /// Content of the target's `config.json`.
    ///
    /// # Errors
    /// [`ModelError`] when it cannot be read.
    pub fn target_config(&self) -> Result<Value, ExportError> {
        Ok(file::read_json(&self.target.join("config.json"))?)
    }
}

/// Name of the embedding in a target's files.
pub(crate) const TARGET_EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the head in a target's files; absent when tied.
pub(crate) const TARGET_HEAD: &str = "lm_head.weight";

/// One tensor of a target folder as f32, reading only the file that holds it.
pub(crate) fn target_tensor(
    folder: &Path,
    name: &str,
    shape: &[usize],
) -> Result<Vec<f32>, ExportError> {
    let files = tensor_files(folder)?;
    let path = files.get(name).ok_or_else(|| ModelError::MissingTensor {
        name: name.to_owned(),
        path: folder.to_owned(),
    })?;
    let data = WeightFolder::open_file(&folder.join(path))?.float_data(name, shape)?;
    Ok(float_values(data))
}

/// The file name of every tensor of a model folder: what its index says, or all in one file.
pub(crate) fn tensor_files(folder: &Path) -> Result<BTreeMap<String, String>, ExportError> {
    #[derive(serde::Deserialize)]
    struct ShardIndex {
        weight_map: BTreeMap<String, String>,
    }
    const SINGLE: &str = "model.safetensors";
    let index = folder.join("model.safetensors.index.json");
    if index.exists() {
        return Ok(file::read_json::<ShardIndex>(&index)?.weight_map);
    }
    let weights = WeightFolder::open_file(&folder.join(SINGLE))?;
    let names = weights
        .names()
        .map(|name| (name.to_owned(), SINGLE.to_owned()));
    Ok(names.collect())
}

pub(crate) fn float_values(data: burn::tensor::TensorData) -> Vec<f32> {
    #[expect(
        clippy::expect_used,
        reason = "`float_data` returns f32 values by contract"
    )]
    data.try_into_vec::<f32>()
        .expect("`float_data` returns f32 values")
}

fn check_card(card: &DrafterCard, checkpoint: &Path) -> Result<(), ExportError> {
    let path = checkpoint.join(CARD);
    let refuse = |reason: String| -> Result<(), ExportError> {
        Err(ModelError::malformed(&path, "drafter description", reason).into())
    };
    let expected = card.drafter.check(&card.target)?.aux_layer_ids;
    if expected != card.aux_layer_ids {
        let found = &card.aux_layer_ids;
        return refuse(format!(
            "`aux_layer_ids` is {found:?}, expected {expected:?}"
        ));
    }
    let rebuilt = VocabMap::new(card.vocab.target_ids().to_vec(), card.vocab.target_vocab())?;
    if rebuilt != card.vocab {
        return refuse("the ids of `vocab` are not strictly increasing".to_owned());
    }
    if card.vocab.target_vocab() != card.target.vocab_size {
        return refuse(format!(
            "`vocab` is a part of {} tokens, but the target has {}",
            card.vocab.target_vocab(),
            card.target.vocab_size
        ));
    }
    Ok(())
}

fn check_target(card: &DrafterCard, checkpoint: &Path, target: &Path) -> Result<(), ExportError> {
    let other = |what, expected: String, found: String| ExportError::OtherTarget {
        checkpoint: checkpoint.to_owned(),
        target: target.to_owned(),
        what,
        expected,
        found,
    };
    let spec = TargetSpec::from_folder(target)?;
    if spec != card.target {
        let (expected, found) = first_difference(&card.target, &spec);
        return Err(other("configuration", expected, found));
    }
    let found = target_fingerprint(target)?;
    if found != card.target_fingerprint {
        let expected = card.target_fingerprint.clone();
        return Err(other("fingerprint", expected, found));
    }
    Ok(())
}

/// The first field in which two specifications differ, as `key value` on both sides.
fn first_difference(expected: &TargetSpec, found: &TargetSpec) -> (String, String) {
    let fields = |spec: &TargetSpec| serde_json::to_value(spec).unwrap_or_default();
    let (expected, found) = (fields(expected), fields(found));
    let keys = expected.as_object().into_iter().flat_map(|map| map.keys());
    keys.filter(|key| expected[key.as_str()] != found[key.as_str()])
        .map(|key| {
            (
                format!("`{key}` {}", expected[key.as_str()]),
                format!("`{key}` {}", found[key.as_str()]),
            )
        })
        .next()
        .unwrap_or_default()
}

fn refuse_unknown_tensors(
    card: &DrafterCard,
    weights: &WeightFolder,
    path: &Path,
) -> Result<(), ExportError> {
    let known = tensor_names(card, LayerPrefix::Midlayer);
    if known.is_empty() {
        return Ok(()); // a family that no layout holds is refused by its name
    }
    let unknown = weights
        .names()
        .find(|name| !MAY_STAY.contains(name) && known.iter().all(|tensor| tensor.ours != *name));
    match unknown {
        None => Ok(()),
        Some(name) => Err(ExportError::UnexpectedTensor {
            name: name.to_owned(),
            path: path.to_owned(),
            family: card.drafter.family(),
        }),
    }
}
