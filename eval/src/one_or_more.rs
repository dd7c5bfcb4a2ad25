//! [`OneOrMore`]: a setting that is one value or a list of values.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, Error, IntoDeserializer, SeqAccess, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

/// At least one value, written `x` or `[x, y]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OneOrMore<T>(Vec<T>);

impl<T> OneOrMore<T> {
    /// A single value.
    pub fn one(value: T) -> Self {
        Self(vec![value])
    }

    /// The values in their order; `None` for an empty list.
    pub fn new(values: Vec<T>) -> Option<Self> {
        (!values.is_empty()).then_some(Self(values))
    }

    /// The values in their order.
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }
}

impl<'a, T> IntoIterator for &'a OneOrMore<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: Copy + Ord + Default> OneOrMore<T> {
    /// The largest value.
    pub fn max(&self) -> T {
        self.0.iter().copied().max().unwrap_or_default()
    }
}

impl<T: fmt::Display> fmt::Display for OneOrMore<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join(", "))
    }
}

impl<T: Serialize> Serialize for OneOrMore<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.as_slice() {
            [one] => one.serialize(serializer),
            more => more.serialize(serializer),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMore<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueOrList(PhantomData))
    }
}

struct ValueOrList<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ValueOrList<T> {
    type Value = OneOrMore<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("one value or a list of values")
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
        T::deserialize(value.into_deserializer()).map(OneOrMore::one)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
        T::deserialize(value.into_deserializer()).map(OneOrMore::one)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
        T::deserialize(value.into_deserializer()).map(OneOrMore::one)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, values: A) -> Result<Self::Value, A::Error> {
        let values = Vec::deserialize(SeqAccessDeserializer::new(values))?;
        OneOrMore::new(values).ok_or_else(|| A::Error::invalid_length(0, &"at least one value"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Serialize, Deserialize)]
    struct Table {
        gamma: OneOrMore<usize>,
        rule: OneOrMore<String>,
    }

    #[test]
    fn values_and_lists_are_read_and_written() {
        for text in [
            "gamma = 4\nrule = \"a\"\n",
            "gamma = [1, 3]\nrule = [\"a\", \"b\"]\n",
        ] {
            let table: Table = toml::from_str(text).unwrap();
            assert_eq!(toml::to_string(&table).unwrap(), text);
        }
        let refused = |text| toml::from_str::<Table>(text).unwrap_err().to_string();
        for text in [
            "gamma = []\nrule = \"a\"",
            "gamma = \"x\"\nrule = \"a\"",
            "gamma = 4\nrule = 7",
        ] {
            assert!(
                refused(text).contains("line 1") || refused(text).contains("line 2"),
                "{text}"
            );
        }
    }
}
