//! The key names of a configuration struct, taken from its own deserializer.

use serde::de::value::Error;
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};

/// Names of the keys that the table of `T` may hold.
pub(crate) fn fields_of<T: DeserializeOwned>() -> &'static [&'static str] {
    fields_by(|probe| T::deserialize(probe).map(drop))
}

/// Names of the keys that whatever `read` deserializes may hold.
pub(crate) fn fields_by(
    read: impl FnOnce(FieldProbe<'_>) -> Result<(), Error>,
) -> &'static [&'static str] {
    let mut fields: &'static [&'static str] = &[];
    // The probe ends every reading with an error; only the names matter.
    drop(read(FieldProbe(&mut fields)));
    fields
}

/// A deserializer that notes which fields a struct asks for and then stops.
#[derive(Debug)]
pub(crate) struct FieldProbe<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for FieldProbe<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Error> {
        Err(Error::custom("not a struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, Error> {
        *self.0 = fields;
        Err(Error::custom("only the names are wanted"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
        option unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier
        ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_keys_are_among_the_names() {
        let names = fields_of::<draftsmith_models::drafter::eagle3::Eagle3Config>();
        assert!(names.contains(&"aux_layer_ids") && names.contains(&"ttt_steps"));
        assert!(fields_of::<String>().is_empty());
    }
}
