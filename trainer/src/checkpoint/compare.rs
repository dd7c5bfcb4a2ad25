//! Which settings of a run differ from those of a checkpoint, key by key.

use std::collections::BTreeSet;
use std::fmt;

use draftsmith_models::checkpoint::DrafterCard;
use draftsmith_models::error::ModelError;
use serde_json::Value;

use super::{Identity, RunState};
use crate::error::TrainerError;

/// Settings that change what is written and when, never what is trained.
const HARMLESS: &[&str] = &[
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.log_every",
    "log",
];

/// One setting with two values.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Dotted key.
    pub key: String,
    /// Value in the checkpoint; absent when it has no such key.
    pub checkpoint: Option<Value>,
    /// Value of this run; absent when it has no such key.
    pub run: Option<Value>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<Value>| match value {
            None => "absent".to_owned(),
            Some(value) => shortened(value.to_string()),
        };
        write!(
            f,
            "`{}` is {}, expected {}",
            self.key,
            shown(&self.run),
            shown(&self.checkpoint)
        )
    }
}

fn shortened(text: String) -> String {
    const LIMIT: usize = 60;
    if text.chars().count() <= LIMIT {
        return text;
    }
    let head: String = text.chars().take(LIMIT).collect();
    format!("{head}...")
}

/// The keys, dotted below `prefix`, at which two values differ; lists count as one value.
pub fn differences(prefix: &str, checkpoint: &Value, run: &Value) -> Vec<Difference> {
    let (Value::Object(old), Value::Object(new)) = (checkpoint, run) else {
        return differing(prefix, Some(checkpoint), Some(run))
            .into_iter()
            .collect();
    };
    let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let mut found = Vec::new();
    for key in keys {
        let path = if prefix.is_empty() {
            key.clone()
        } else {
            format!("{prefix}.{key}")
        };
        match (old.get(key), new.get(key)) {
            (Some(old), Some(new)) => found.extend(differences(&path, old, new)),
            (old, new) => found.extend(differing(&path, old, new)),
        }
    }
    found
}

fn differing(key: &str, checkpoint: Option<&Value>, run: Option<&Value>) -> Option<Difference> {
    (checkpoint != run).then(|| Difference {
        key: key.to_owned(),
        checkpoint: checkpoint.cloned(),
        run: run.cloned(),
    })
}

/// Everything in which a checkpoint and a run must agree, and do not.
pub(super) fn all(
    state: &RunState,
    card: &DrafterCard,
    identity: &Identity,
) -> Result<Vec<Difference>, TrainerError> {
    let mut found = differences("", &state.config, &identity.config);
    found.retain(|difference| !is_harmless(&difference.key));
    let cards = [comparable(card)?, comparable(&identity.card)?];
    found.extend(differences("drafter.json", &cards[0], &cards[1]));
    found.extend(differing(
        "rows of the training data (blake3)",
        Some(&Value::from(state.rows_blake3.as_str())),
        Some(&Value::from(identity.rows_blake3.as_str())),
    ));
    Ok(found)
}

fn is_harmless(key: &str) -> bool {
    HARMLESS
        .iter()
        .any(|harmless| key == *harmless || key.starts_with(&format!("{harmless}.")))
}

fn comparable(card: &DrafterCard) -> Result<Value, TrainerError> {
    let card = DrafterCard {
        weights_blake3: String::new(),
        step: 0,
        ..card.clone()
    };
    let value = serde_json::to_value(card);
    Ok(value.map_err(|e| ModelError::malformed("drafter.json", "drafter description", e))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn differences_are_listed_by_dotted_key() {
        let old = json!({"train": {"epochs": 1, "seed": 0}, "optimizer": {"betas": [0.9, 0.95]}});
        let new =
            json!({"train": {"epochs": 2, "seed": 0}, "optimizer": {"betas": [0.9, 0.99]}, "x": 1});
        let lines: Vec<String> = differences("", &old, &new)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            lines,
            [
                "`optimizer.betas` is [0.9,0.99], expected [0.9,0.95]",
                "`train.epochs` is 2, expected 1",
                "`x` is 1, expected absent",
            ]
        );
    }

    #[test]
    fn settings_of_the_log_may_change() {
        assert!(is_harmless("log.tensorboard") && is_harmless("train.log_every"));
        assert!(!is_harmless("train.epochs") && !is_harmless("logarithm"));
    }
}
