//! `[drafter.<family>]`: one table a family, with the keys every family shares.
//!
//! The shared keys (`draft_vocab`, `start_from`, and the tables `objective`, `optimizer`, `train` that replace the
//! common ones whole) stand beside the keys of the family. The family's own struct refuses keys it
//! does not know, so the shared ones are taken out while the table is read; reading it into a generic
//! table first would lose the line and column of a mistake.

use std::fmt;

use draftsmith_models::drafter::{DrafterConfig, FAMILIES};
use draftsmith_models::objective::ObjectiveConfig;
use draftsmith_trainer::config::{OptimizerConfig, TrainConfig};
use serde::de::value::MapAccessDeserializer;
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, Visitor,
};
use serde::ser::{Error as _, Serialize, Serializer};

/// Keys of every `[drafter.<family>]` beside the family's own.
pub(crate) const SHARED_KEYS: &[&str] = &[
    "draft_vocab",
    "start_from",
    "objective",
    "optimizer",
    "train",
];

/// All drafters of a run file, in its order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Drafters(pub(crate) Vec<DrafterRun>);

/// One drafter of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DrafterRun {
    /// Family and its settings.
    pub(crate) config: DrafterConfig,
    /// Which target tokens the drafter can propose; default all.
    pub(crate) draft_vocab: DraftVocab,
    /// Where the parameters start from: a drafter's folder in a run, a checkpoint, an export, or `target`
    /// for the head that the target brings along; default fresh ones.
    pub(crate) start_from: Option<String>,
    /// Replaces the common `[objective]`.
    pub(crate) objective: Option<ObjectiveConfig>,
    /// Replaces the common `[optimizer]`.
    pub(crate) optimizer: Option<OptimizerConfig>,
    /// Replaces the common `[train]`.
    pub(crate) train: Option<TrainConfig>,
}

impl DrafterRun {
    /// Name of the family.
    pub(crate) fn family(&self) -> &'static str {
        self.config.family()
    }
}

/// `draft_vocab`: a number of tokens, or `"full"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DraftVocab {
    /// Every token of the target.
    #[default]
    Full,
    /// The most frequent tokens of the training answers.
    Size(usize),
}

impl DraftVocab {
    /// Whether it leaves out some of the target's tokens.
    pub(crate) fn is_reduced(self, target_vocab: usize) -> bool {
        matches!(self, Self::Size(size) if size < target_vocab)
    }
}

impl Serialize for DraftVocab {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Full => serializer.serialize_str("full"),
            Self::Size(size) => serializer.serialize_u64(*size as u64),
        }
    }
}

impl<'de> Deserialize<'de> for DraftVocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeOrFull;
        impl Visitor<'_> for SizeOrFull {
            type Value = DraftVocab;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a number of tokens or \"full\"")
            }

            fn visit_i64<E: Error>(self, size: i64) -> Result<DraftVocab, E> {
                match usize::try_from(size) {
                    Ok(size) if size > 0 => Ok(DraftVocab::Size(size)),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Signed(size), &self)),
                }
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<DraftVocab, E> {
                match text {
                    "full" => Ok(DraftVocab::Full),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }
        }
        deserializer.deserialize_any(SizeOrFull)
    }
}

impl<'de> Deserialize<'de> for Drafters {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Families;
        impl<'de> Visitor<'de> for Families {
            type Value = Drafters;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("one table for each drafter family")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Drafters, A::Error> {
                let mut drafters = Vec::new();
                while let Some(family) = map.next_key_seed(FamilyName)? {
                    drafters.push(map.next_value_seed(FamilyTable(family))?);
                }
                Ok(Drafters(drafters))
            }
        }
        deserializer.deserialize_map(Families)
    }
}

/// Reads a table name that must be a family.
struct FamilyName;

impl<'de> DeserializeSeed<'de> for FamilyName {
    type Value = &'static str;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<&'static str, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = FAMILIES.iter().find(|family| **family == name);
        known
            .copied()
            .ok_or_else(|| D::Error::unknown_variant(&name, FAMILIES))
    }
}

/// Reads the table of one family.
struct FamilyTable(&'static str);

impl<'de> DeserializeSeed<'de> for FamilyTable {
    type Value = DrafterRun;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<DrafterRun, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FamilyTable {
    type Value = DrafterRun;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "the table `[drafter.{}]`", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DrafterRun, A::Error> {
        let mut shared = SharedKeys::default();
        let keys = FamilyKeys {
            map,
            shared: &mut shared,
        };
        let config = DrafterConfig::deserialize_family(self.0, MapAccessDeserializer::new(keys))?;
        Ok(DrafterRun {
            config,
            draft_vocab: shared.draft_vocab,
            start_from: shared.start_from,
            objective: shared.objective,
            optimizer: shared.optimizer,
            train: shared.train,
        })
    }
}

/// Values of the shared keys that were met so far.
#[derive(Default)]
struct SharedKeys {
    draft_vocab: DraftVocab,
    start_from: Option<String>,
    objective: Option<ObjectiveConfig>,
    optimizer: Option<OptimizerConfig>,
    train: Option<TrainConfig>,
}

/// The family's view of its table: the shared keys are read and left out.
struct FamilyKeys<'a, A> {
    map: A,
    shared: &'a mut SharedKeys,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for FamilyKeys<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        let mut seed = seed;
        loop {
            match self.map.next_key_seed(SharedOrFamily(seed))? {
                None => return Ok(None),
                Some(Key::Family(key)) => return Ok(Some(key)),
                Some(Key::Shared(name, unused)) => {
                    seed = unused;
                    match name {
                        "draft_vocab" => self.shared.draft_vocab = self.map.next_value()?,
                        "start_from" => self.shared.start_from = Some(self.map.next_value()?),
                        "objective" => self.shared.objective = Some(self.map.next_value()?),
                        "optimizer" => self.shared.optimizer = Some(self.map.next_value()?),
                        _ => self.shared.train = Some(self.map.next_value()?),
                    }
                }
            }
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(seed)
    }
}

/// Reads one key inside the map that knows its place, so that an unknown key keeps its caret.
struct SharedOrFamily<K>(K);

enum Key<K, V> {
    Shared(&'static str, K),
    Family(V),
}

impl<'de, K: DeserializeSeed<'de>> DeserializeSeed<'de> for SharedOrFamily<K> {
    type Value = Key<K, K::Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        let name = String::deserialize(deserializer)?;
        match SHARED_KEYS.iter().find(|key| **key == name) {
            Some(shared) => Ok(Key::Shared(shared, self.0)),
            None => self
                .0
                .deserialize(name.into_deserializer())
                .map(Key::Family),
        }
    }
}

impl Serialize for Drafters {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut families = toml::Table::new();
        for drafter in &self.0 {
            let table = table_of(drafter).map_err(S::Error::custom)?;
            families.insert(drafter.family().to_owned(), table);
        }
        families.serialize(serializer)
    }
}

fn table_of(drafter: &DrafterRun) -> Result<toml::Value, toml::ser::Error> {
    let tagged = toml::Table::try_from(&drafter.config)?;
    let own = tagged.into_iter().next().map(|(_, table)| table);
    let mut table = match own {
        Some(toml::Value::Table(table)) => table,
        _ => toml::Table::new(),
    };
    let mut insert = |key: &str, value: Option<toml::Value>| {
        if let Some(value) = value {
            table.insert(key.to_owned(), value);
        }
    };
    insert(
        "draft_vocab",
        Some(toml::Value::try_from(drafter.draft_vocab)?),
    );
    insert("start_from", optional(drafter.start_from.as_ref())?);
    insert("objective", optional(drafter.objective.as_ref())?);
    insert("optimizer", optional(drafter.optimizer.as_ref())?);
    insert("train", optional(drafter.train.as_ref())?);
    Ok(toml::Value::Table(table))
}

fn optional<T: Serialize>(value: Option<&T>) -> Result<Option<toml::Value>, toml::ser::Error> {
    value.map(toml::Value::try_from).transpose()
}
