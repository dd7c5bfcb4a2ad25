//! The vocabulary tables of foreign files: `d2t` offsets and `t2d` flags.
//!
//! Inside the workspace a vocabulary is a list of absolute target ids; only here is it the offset
//! form `target id = draft id + d2t[draft id]`.

use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::NamedTensor;

/// Name of the offset table, `[V_draft]` int64.
pub const D2T: &str = "d2t";
/// Name of the flag table, `[V]` bool.
pub const T2D: &str = "t2d";

/// Both tables, or none for a full vocabulary: vLLM refuses a `d2t` that it did not ask for.
pub fn tables(vocab: &VocabMap) -> Vec<NamedTensor> {
    if vocab.is_full() {
        return Vec::new();
    }
    vec![
        NamedTensor::int64(D2T, &offsets(vocab)),
        NamedTensor::bool(T2D, &flags(vocab)),
    ]
}

/// `d2t`: target id minus draft id, `[V_draft]`.
pub fn offsets(vocab: &VocabMap) -> Vec<i64> {
    vocab
        .target_ids()
        .iter()
        .enumerate()
        .map(|(draft, &target)| i64::from(target) - draft as i64)
        .collect()
}

/// `t2d`: whether a target token is a draft token, `[V]`.
pub fn flags(vocab: &VocabMap) -> Vec<bool> {
    let mut flags = vec![false; vocab.target_vocab()];
    for &target in vocab.target_ids() {
        flags[target as usize] = true;
    }
    flags
}

/// The vocabulary that an offset table describes.
///
/// # Errors
/// A sentence saying which entry leaves the vocabulary or breaks the increasing order, without which
/// the rows of the head would belong to other tokens than the table says.
pub fn from_offsets(offsets: &[i64], target_vocab: usize) -> Result<VocabMap, String> {
    let mut ids = Vec::with_capacity(offsets.len());
    for (draft, &offset) in offsets.iter().enumerate() {
        let target = draft as i64 + offset;
        let inside = u32::try_from(target)
            .ok()
            .filter(|&id| (id as usize) < target_vocab);
        let Some(id) = inside else {
            return Err(format!(
                "entry {draft} is target id {target}, but the target has {target_vocab} tokens"
            ));
        };
        if ids.last().is_some_and(|&last| last >= id) {
            return Err(format!(
                "entry {draft} is target id {id}, which does not follow the entry before it"
            ));
        }
        ids.push(id);
    }
    VocabMap::new(ids, target_vocab).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_come_back_as_the_same_vocabulary() {
        let vocab = VocabMap::new(vec![0, 3, 4, 9], 10).unwrap();
        assert_eq!(offsets(&vocab), [0, 2, 2, 6]);
        assert_eq!(from_offsets(&offsets(&vocab), 10).unwrap(), vocab);
    }

    #[test]
    fn absolute_ids_in_place_of_offsets_are_refused() {
        // 0, 3, 4, 9 read as offsets would be 0, 4, 6, 12.
        let message = from_offsets(&[0, 3, 4, 9], 10).unwrap_err();
        assert_eq!(
            message,
            "entry 3 is target id 12, but the target has 10 tokens"
        );
        let message = from_offsets(&[3, 0], 10).unwrap_err();
        assert_eq!(
            message,
            "entry 1 is target id 1, which does not follow the entry before it"
        );
        assert!(from_offsets(&[-1], 10).is_err());
    }
}
