//! [`MaskToken`]: the reserved token that stands for positions not yet drafted.

use std::fmt;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::ModelError;
use crate::target::TargetSpec;

/// A token given by its text in a run file and by its id everywhere else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum MaskToken {
    /// Id in the target's vocabulary.
    Id(u32),
    /// Text of one special token of the target's tokenizer; must be looked up before use.
    Text(String),
}

impl<'de> Deserialize<'de> for MaskToken {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IdOrText;
        impl Visitor<'_> for IdOrText {
            type Value = MaskToken;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a token id or the text of a special token")
            }

            fn visit_i64<E: Error>(self, id: i64) -> Result<MaskToken, E> {
                match u32::try_from(id) {
                    Ok(id) => Ok(MaskToken::Id(id)),
                    Err(_) => Err(E::invalid_value(Unexpected::Signed(id), &self)),
                }
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<MaskToken, E> {
                match u32::try_from(id) {
                    Ok(id) => Ok(MaskToken::Id(id)),
                    Err(_) => Err(E::invalid_value(Unexpected::Unsigned(id), &self)),
                }
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<MaskToken, E> {
                Ok(MaskToken::Text(text.to_owned()))
            }
        }
        deserializer.deserialize_any(IdOrText)
    }
}

impl MaskToken {
    /// The id.
    ///
    /// # Errors
    /// [`ModelError::Setting`] for a text that was not looked up.
    pub fn id(&self, family: &str) -> Result<u32, ModelError> {
        match self {
            Self::Id(id) => Ok(*id),
            Self::Text(text) => Err(ModelError::setting(
                format!("`drafter.{family}.mask_token` is the text {text:?}, expected an id"),
                "only a run file may name the token by its text",
            )),
        }
    }
}

/// Checks that the mask is a token of the target and none with a meaning of its own.
///
/// # Errors
/// [`ModelError::Setting`] naming `drafter.<family>.mask_token`.
pub(super) fn check_mask_token(
    family: &str,
    token: &MaskToken,
    target: &TargetSpec,
) -> Result<(), ModelError> {
    let MaskToken::Id(id) = *token else {
        return Ok(()); // a text that is no token is refused where it is looked up
    };
    let refuse = |reason: String| {
        Err(ModelError::setting(
            format!("`drafter.{family}.mask_token` is {id}, {reason}"),
            "choose a reserved token that the chat template never writes",
        ))
    };
    if id as usize >= target.vocab_size {
        return refuse(format!("but the target has {} tokens", target.vocab_size));
    }
    let meanings = [
        ("pads", target.pad_token_id),
        ("begins a text", target.bos_token_id),
    ];
    let ends = target
        .eos_token_ids
        .iter()
        .map(|&id| ("ends a text", Some(id)));
    match meanings
        .into_iter()
        .chain(ends)
        .find(|(_, other)| *other == Some(id))
    {
        Some((meaning, _)) => refuse(format!("the token that {meaning}")),
        None => Ok(()),
    }
}
