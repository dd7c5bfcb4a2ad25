//! [`VocabMap`]: which target tokens a drafter can propose.

use serde::{Deserialize, Serialize};

use crate::error::ModelError;

/// The draft vocabulary as a strictly increasing list of absolute target ids.
///
/// Row `j` of the draft head scores target token `target_ids()[j]`. The offset form of `d2t`
/// (`target = draft + d2t[draft]`) exists only in readers and exporters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VocabMap {
    target_vocab: usize,
    target_ids: Vec<u32>,
}

impl VocabMap {
    /// Every target token is a draft token.
    pub fn full(target_vocab: usize) -> Self {
        Self {
            target_vocab,
            target_ids: (0..target_vocab as u32).collect(),
        }
    }

    /// The given target ids, in any order.
    ///
    /// # Errors
    /// [`ModelError::Setting`] when the list is empty, repeats an id or leaves the vocabulary.
    pub fn new(mut target_ids: Vec<u32>, target_vocab: usize) -> Result<Self, ModelError> {
        target_ids.sort_unstable();
        let repeated = target_ids.windows(2).find(|pair| pair[0] == pair[1]);
        if let Some([id, ..]) = repeated {
            return Err(invalid(format!("the draft vocabulary holds id {id} twice")));
        }
        match target_ids.last() {
            None => Err(invalid("the draft vocabulary is empty".to_owned())),
            Some(&last) if last as usize >= target_vocab => Err(invalid(format!(
                "the draft vocabulary holds id {last}, but the target has {target_vocab} tokens"
            ))),
            Some(_) => Ok(Self {
                target_vocab,
                target_ids,
            }),
        }
    }

    /// The `size` most frequent tokens, always with `required` (END, BOS, ...) among them.
    ///
    /// `counts[id]` says how often the target generated token `id` in the training data. Ties go to
    /// the smaller id, so unseen ids fill up a small corpus in ascending order.
    ///
    /// # Errors
    /// [`ModelError::Setting`] when `size` exceeds the vocabulary or cannot hold `required`.
    pub fn most_frequent(
        counts: &[u64],
        size: usize,
        required: &[u32],
    ) -> Result<Self, ModelError> {
        if size > counts.len() {
            return Err(invalid(format!(
                "the draft vocabulary asks for {size} tokens, but the target has {}",
                counts.len()
            )));
        }
        let mut chosen: Vec<u32> = required.to_vec();
        chosen.sort_unstable();
        chosen.dedup();
        if chosen.len() > size {
            return Err(invalid(format!(
                "the draft vocabulary of {size} tokens cannot hold the {} required ones",
                chosen.len()
            )));
        }
        let mut order: Vec<u32> = (0..counts.len() as u32).collect();
        order.sort_by_key(|&id| (std::cmp::Reverse(counts[id as usize]), id));
        let free = size - chosen.len();
        let fixed = chosen.clone();
        let is_free = |id: &u32| fixed.binary_search(id).is_err();
        chosen.extend(order.into_iter().filter(is_free).take(free));
        Self::new(chosen, counts.len())
    }

    /// Number of draft tokens, `V_draft`.
    pub fn len(&self) -> usize {
        self.target_ids.len()
    }

    /// Never true: an empty map cannot be built.
    pub fn is_empty(&self) -> bool {
        self.target_ids.is_empty()
    }

    /// Number of target tokens, `V`.
    pub fn target_vocab(&self) -> usize {
        self.target_vocab
    }

    /// True when every target token is a draft token.
    pub fn is_full(&self) -> bool {
        self.len() == self.target_vocab
    }

    /// Absolute target ids, strictly increasing; index = draft id.
    pub fn target_ids(&self) -> &[u32] {
        &self.target_ids
    }

    /// The target id of a draft id.
    pub fn to_target(&self, draft: u32) -> u32 {
        self.target_ids[draft as usize]
    }

    /// The draft id of a target id, if the drafter can propose it.
    pub fn to_draft(&self, target: u32) -> Option<u32> {
        if self.is_full() {
            return Some(target);
        }
        self.target_ids
            .binary_search(&target)
            .ok()
            .map(|index| index as u32)
    }

    /// Share of `counts` that the draft vocabulary covers, in `[0, 1]`; 1 for an empty corpus.
    pub fn coverage(&self, counts: &[u64]) -> f64 {
        let total: u64 = counts.iter().sum();
        let kept: u64 = self.target_ids.iter().map(|&id| counts[id as usize]).sum();
        if total == 0 {
            1.0
        } else {
            kept as f64 / total as f64
        }
    }
}

fn invalid(message: String) -> ModelError {
    ModelError::setting(
        message,
        "set `draft_vocab` to a size between 1 and the target's vocabulary",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pitfall 41: a corpus with fewer different tokens than the draft vocabulary.
    /// Red under: `take(free)` replaced by `take_while(|id| counts[*id as usize] > 0)`.
    #[test]
    fn pitfall_41_a_small_corpus_fills_up_with_unused_ids() {
        let mut counts = vec![0_u64; 320];
        for id in 0..37 {
            counts[200 + id] = 1 + id as u64;
        }
        let map = VocabMap::most_frequent(&counts, 100, &[319, 0]).unwrap();
        assert_eq!(map.len(), 100);
        assert!(map.target_ids().windows(2).all(|pair| pair[0] < pair[1]));
        assert!((200..237).all(|id| map.to_draft(id).is_some()));
        assert!(map.to_draft(0).is_some() && map.to_draft(319).is_some());
        assert!((map.coverage(&counts) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn both_directions_agree() {
        let map = VocabMap::new(vec![5, 0, 319], 320).unwrap();
        for draft in 0..map.len() as u32 {
            assert_eq!(map.to_draft(map.to_target(draft)), Some(draft));
        }
        assert_eq!(map.to_draft(1), None);
    }

    #[test]
    fn bad_maps_are_refused() {
        assert!(VocabMap::new(vec![], 4).is_err());
        assert!(VocabMap::new(vec![1, 1], 4).is_err());
        assert!(VocabMap::new(vec![4], 4).is_err());
        assert!(VocabMap::most_frequent(&[1, 2], 3, &[]).is_err());
        assert!(VocabMap::most_frequent(&[1, 2, 3], 1, &[0, 1]).is_err());
    }
}
