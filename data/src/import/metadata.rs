//! Typed look-ups in the key-value part of a GGUF file; every failure names the key.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use draftsmith_models::error::ModelError;

use crate::error::DataError;

/// The key-value part of one file.
#[derive(Clone, Copy)]
pub(super) struct Metadata<'a> {
    pub(super) path: &'a Path,
    pub(super) values: &'a HashMap<String, Value>,
}

impl<'a> Metadata<'a> {
    /// A key whose value cannot be used.
    pub(super) fn refuse(
        &self,
        key: &str,
        expected: &str,
        found: impl std::fmt::Display,
    ) -> DataError {
        ModelError::ConfigKey {
            key: key.to_owned(),
            path: self.path.to_owned(),
            expected: expected.to_owned(),
            found: found.to_string(),
        }
        .into()
    }

    fn wrong(&self, key: &str, expected: &str) -> DataError {
        let found = match self.values.get(key) {
            None => "missing".to_owned(),
            Some(Value::Array(list)) => format!("a list of {}", list.len()),
            Some(value) => format!("`{value:?}`"),
        };
        self.refuse(key, expected, found)
    }

    pub(super) fn optional_text(&self, key: &str) -> Option<&'a str> {
        match self.values.get(key) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<&'a str, DataError> {
        self.optional_text(key)
            .ok_or_else(|| self.wrong(key, "a text"))
    }

    /// Refuses any text but `expected`.
    pub(super) fn require(&self, key: &str, expected: &str) -> Result<(), DataError> {
        let found = self.text(key)?;
        if found == expected {
            return Ok(());
        }
        Err(self.refuse(key, &format!("`{expected}`"), format!("`{found}`")))
    }

    /// Refuses a flag that is set.
    pub(super) fn require_unset(&self, key: &str) -> Result<(), DataError> {
        match self.values.get(key) {
            None | Some(Value::Bool(false)) => Ok(()),
            Some(_) => Err(self.wrong(key, "false")),
        }
    }

    pub(super) fn optional_number(&self, key: &str) -> Result<Option<usize>, DataError> {
        let Some(value) = self.values.get(key) else {
            return Ok(None);
        };
        match integer(value).and_then(|number| usize::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(key, "a whole number")),
        }
    }

    pub(super) fn number(&self, key: &str) -> Result<usize, DataError> {
        self.optional_number(key)?
            .ok_or_else(|| self.wrong(key, "a whole number"))
    }

    /// A float; an f32 is read as the shortest decimal that denotes it, so that 1e-5 stays 1e-5.
    pub(super) fn optional_float(&self, key: &str) -> Result<Option<f64>, DataError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::F64(value)) => Ok(Some(*value)),
            Some(Value::F32(value)) => match value.to_string().parse() {
                Ok(value) => Ok(Some(value)),
                Err(_unreachable_for_floats) => Err(self.wrong(key, "a number")),
            },
            Some(_) => Err(self.wrong(key, "a number")),
        }
    }

    pub(super) fn float(&self, key: &str) -> Result<f64, DataError> {
        self.optional_float(key)?
            .ok_or_else(|| self.wrong(key, "a number"))
    }

    pub(super) fn texts(&self, key: &str) -> Result<Vec<&'a str>, DataError> {
        let one = |value: &'a Value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        };
        self.list(key, "a list of texts", one)
    }

    pub(super) fn integers(&self, key: &str) -> Result<Vec<i64>, DataError> {
        self.list(key, "a list of whole numbers", integer)
    }

    fn list<T>(
        &self,
        key: &str,
        expected: &str,
        one: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Vec<T>, DataError> {
        let list = match self.values.get(key) {
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            _ => None,
        };
        list.ok_or_else(|| self.wrong(key, expected))
    }

    /// Refuses keys below `prefix` that are not listed in `known`.
    pub(super) fn refuse_unknown(&self, prefix: &str, known: &[&str]) -> Result<(), DataError> {
        let unknown = self
            .values
            .keys()
            .filter(|key| {
                key.strip_prefix(prefix)
                    .is_some_and(|rest| !known.contains(&rest))
            })
            .min();
        match unknown {
            None => Ok(()),
            Some(key) => Err(self.wrong(key, "a key that this build understands")),
        }
    }
}

fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::I8(number) => Some(i64::from(*number)),
        Value::I16(number) => Some(i64::from(*number)),
        Value::I32(number) => Some(i64::from(*number)),
        Value::I64(number) => Some(*number),
        other => other
            .to_u64()
            .ok()
            .and_then(|number| i64::try_from(number).ok()),
    }
}
