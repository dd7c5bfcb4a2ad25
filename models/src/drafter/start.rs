//! Starting from the parameters of another drafter: what is taken over, and what would make them mean
//! something else.

use std::collections::BTreeSet;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{FloatDType, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{AnyDrafter, DrafterConfig};
use crate::checkpoint::{load_card, load_weights};
use crate::error::ModelError;
use crate::target::TargetSpec;
use crate::vocab::VocabMap;
use crate::weights::WeightFolder;

/// A setting under another value of which the same parameters would compute something else.
#[derive(Clone, Debug, PartialEq)]
pub struct Meaning {
    /// Its key in the table of the family.
    pub key: &'static str,
    /// Its value.
    pub value: Value,
    /// What it decides, as a sentence for a hint.
    pub why: &'static str,
}

impl Meaning {
    pub(super) fn new(key: &'static str, value: &impl Serialize, why: &'static str) -> Self {
        Self {
            key,
            value: serde_json::to_value(value).unwrap_or_default(),
            why,
        }
    }
}

/// A drafter that another one starts from.
#[derive(Debug)]
pub struct Origin {
    /// What the run file calls it, for messages.
    pub name: String,
    /// Family and settings.
    pub drafter: DrafterConfig,
    /// Zero-based ids of the captured blocks.
    pub aux_layer_ids: Vec<usize>,
    /// Draft vocabulary; `None` for a head of the target itself, which serves any.
    pub vocab: Option<VocabMap>,
    /// Fingerprint of the target it drafts for.
    pub target_fingerprint: String,
    /// Optimizer steps taken.
    pub step: u64,
    /// Parameters under the names of its family.
    pub weights: WeightFolder,
}

/// Where the parameters of a drafter at step 0 come from, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Started {
    /// Those of the other drafter.
    pub taken: Vec<String>,
    /// Those the other drafter lacks.
    pub fresh: Vec<String>,
    /// Frozen ones, which are the target's rows.
    pub from_target: Vec<String>,
}

impl Origin {
    /// Opens the folder of a checkpoint; `name` is what the run file calls it.
    ///
    /// # Errors
    /// [`ModelError`] when a file is missing, cut off or does not fit the description.
    pub fn open(folder: &Path, name: String) -> Result<Self, ModelError> {
        let card = load_card(folder)?;
        Ok(Self {
            weights: load_weights(folder, &card)?,
            name,
            drafter: card.drafter,
            aux_layer_ids: card.aux_layer_ids,
            vocab: Some(card.vocab),
            target_fingerprint: card.target_fingerprint,
            step: card.step,
        })
    }

    /// Checks that a drafter with the settings `config` for the given target reads these parameters as they
    /// were trained; vocabulary and shapes are checked by [`AnyDrafter::start_from`].
    ///
    /// # Errors
    /// [`ModelError::Setting`] for another family, target, layers or meaning.
    pub fn check(
        &self,
        config: &DrafterConfig,
        target: &TargetSpec,
        fingerprint: &str,
    ) -> Result<(), ModelError> {
        let family = config.family();
        self.place_in(config)?;
        if self.target_fingerprint != fingerprint {
            return Err(self.refuse(
                family,
                &format!(
                    "its target has the fingerprint {}, expected {fingerprint}",
                    self.target_fingerprint
                ),
                "a drafter reads the states of one target only: set `target.path` to that target"
                    .to_owned(),
            ));
        }
        let layers = config.check(target)?.aux_layer_ids;
        if self.aux_layer_ids != layers {
            let found = &self.aux_layer_ids;
            return Err(self.refuse(
                family,
                &format!("it reads the layers {found:?}, expected {layers:?}"),
                format!("set `drafter.{family}.aux_layer_ids = {found:?}`"),
            ));
        }
        self.check_meaning(config)
    }

    fn check_meaning(&self, config: &DrafterConfig) -> Result<(), ModelError> {
        let theirs = self.drafter.meaning();
        for expected in config.meaning() {
            let key = expected.key;
            let found = theirs.iter().find(|meaning| meaning.key == key);
            let found = found.map_or(&Value::Null, |meaning| &meaning.value);
            if *found != expected.value {
                return Err(self.refuse(
                    config.family(),
                    &format!("its `{key}` is {found}, expected {}", expected.value),
                    format!("`{key}` must be the same in both: {}", expected.why),
                ));
            }
        }
        Ok(())
    }

    /// The field of a drafter with the settings `config` that these parameters belong into.
    fn place_in(&self, config: &DrafterConfig) -> Result<&'static str, ModelError> {
        let origins = config.origins();
        let own = self.drafter.family();
        if let Some((_, place)) = origins.iter().find(|(family, _)| *family == own) {
            return Ok(place);
        }
        let names: Vec<String> = origins
            .iter()
            .map(|(family, _)| format!("`{family}`"))
            .collect();
        let family = config.family();
        Err(self.refuse(
            family,
            &format!(
                "it holds a `{own}` drafter, expected {}",
                names.join(" or ")
            ),
            format!("leave `drafter.{family}.start_from` out to start from fresh parameters"),
        ))
    }

    fn check_vocab(&self, family: &str, vocab: &VocabMap) -> Result<(), ModelError> {
        let Some(found) = self.vocab.as_ref().filter(|found| *found != vocab) else {
            return Ok(());
        };
        let (found, expected) = (found.len(), vocab.len());
        let reason = if found == expected {
            format!("its draft vocabulary holds other tokens than the {expected} of this run")
        } else {
            format!("its draft vocabulary has {found} tokens, expected {expected}")
        };
        let hint = "a reduced vocabulary is chosen from the answers of the rows: use the same rows and \
                    `draft_vocab`, or `draft_vocab = \"full\"` in both";
        Err(self.refuse(family, &reason, hint.to_owned()))
    }

    fn refuse(&self, family: &str, reason: &str, hint: String) -> ModelError {
        let message = format!(
            "`drafter.{family}` cannot start from `{}`: {reason}",
            self.name
        );
        ModelError::setting(message, hint)
    }
}

impl AnyDrafter {
    /// Takes over the parameters of `origin`, which must fit the settings `config` of this drafter (see
    /// [`Origin::check`]), and its draft vocabulary; the device must track gradients.
    ///
    /// # Errors
    /// [`ModelError::Setting`] for another vocabulary, another shape, or a parameter without a place.
    pub fn start_from(
        self,
        origin: &Origin,
        config: &DrafterConfig,
        vocab: &VocabMap,
    ) -> Result<(Self, Started), ModelError> {
        let place = origin.place_in(config)?;
        let family = config.family();
        origin.check_vocab(family, vocab)?;
        self.take_tensors(&origin.weights, place)
            .map_err(|error| match error {
                ModelError::Setting { message, hint } => origin.refuse(family, &message, hint),
                other => other,
            })
    }
}

/// See [`super::Drafter::take_tensors`].
pub(super) fn take_tensors<M: Module>(
    module: M,
    weights: &WeightFolder,
    place: &str,
) -> Result<(M, Started), ModelError> {
    let prefix = if place.is_empty() {
        String::new()
    } else {
        format!("{place}.")
    };
    let mut taker = Taker {
        path: Vec::new(),
        prefix,
        weights,
        started: Started::default(),
        used: BTreeSet::new(),
        error: None,
    };
    let module = module.map(&mut taker);
    if let Some(error) = taker.error {
        return Err(error);
    }
    match weights.names().find(|name| !taker.used.contains(*name)) {
        None => Ok((module, taker.started)),
        Some(name) => Err(ModelError::setting(
            format!("its tensor `{name}` has no place in this drafter"),
            HINT,
        )),
    }
}

/// The way out where parameters do not fit.
const HINT: &str =
    "parameters are taken over whole: set the drafter's sizes to those it starts from";

struct Taker<'a> {
    path: Vec<String>,
    prefix: String,
    weights: &'a WeightFolder,
    started: Started,
    used: BTreeSet<String>,
    error: Option<ModelError>,
}

impl Taker<'_> {
    /// The tensor of the file for a parameter, if there is one.
    fn source(&self, name: &str) -> Option<String> {
        let source = name.strip_prefix(&self.prefix)?;
        self.weights.contains(source).then(|| source.to_owned())
    }

    fn read<const D: usize>(&self, source: &str, old: &Tensor<D>) -> Result<Tensor<D>, ModelError> {
        let (found, expected) = (self.weights.shape(source)?, old.dims());
        if found != expected {
            return Err(ModelError::setting(
                format!("its tensor `{source}` has shape {found:?}, expected {expected:?}"),
                HINT,
            ));
        }
        self.weights
            .float(source, expected, FloatDType::F32, &old.device())
    }
}

impl ModuleMapper for Taker<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = self.path.join(".");
        let source = self.source(&name);
        self.used.extend(source.clone());
        let (id, old, mapper) = param.consume();
        assert!(
            old.device().is_autodiff(),
            "frozen parameters are told from trained ones by their gradients"
        );
        let value = match source {
            _ if !old.is_require_grad() => {
                self.started.from_target.push(name);
                old
            }
            None => {
                self.started.fresh.push(name);
                old
            }
            Some(source) => match self.read(&source, &old) {
                Ok(value) => {
                    self.started.taken.push(name);
                    value.set_require_grad(true)
                }
                Err(error) => {
                    self.error.get_or_insert(error);
                    old
                }
            },
        };
        Param::from_mapped_value(id, value, mapper)
    }
}
