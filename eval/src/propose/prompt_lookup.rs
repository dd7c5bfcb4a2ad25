//! [`PromptLookup`]: drafts copied from an earlier place of the same text.
//!
//! The rule is that of vLLM's n-gram proposer, so that the figures can be compared: among the suffixes
//! of `min ..= max` tokens take the longest that occurs earlier, take its *earliest* occurrence (it may
//! overlap the suffix), and draft the tokens that followed it there.

use draftsmith_models::drafter::Committed;

use super::{DraftRule, DraftToken, ProposeRow, Proposer};
use crate::error::EvalError;

/// Lengths of the suffix that is looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupConfig {
    /// Shortest.
    pub min: usize,
    /// Longest.
    pub max: usize,
}

impl LookupConfig {
    /// Checks `1 <= min <= max`.
    ///
    /// # Errors
    /// [`EvalError::Setting`] with both values.
    pub fn validate(&self) -> Result<(), EvalError> {
        if 1 <= self.min && self.min <= self.max {
            return Ok(());
        }
        Err(EvalError::setting(
            format!(
                "`eval.lookup_min` is {} and `eval.lookup_max` is {}, expected 1 <= min <= max",
                self.min, self.max
            ),
            "2 and 4 are common values",
        ))
    }
}

/// Prompt lookup; keeps no state, because the whole text is given each round.
#[derive(Clone, Copy, Debug)]
pub struct PromptLookup {
    config: LookupConfig,
}

impl PromptLookup {
    /// A proposer for suffixes of `config.min ..= config.max` tokens.
    pub fn new(config: LookupConfig) -> Self {
        Self { config }
    }

    /// The drafts for one text, at most `max_tokens`.
    pub fn lookup<'a>(&self, tokens: &'a [u32], max_tokens: usize) -> &'a [u32] {
        let longest = self.config.max.min(tokens.len().saturating_sub(1));
        for len in (self.config.min..=longest).rev() {
            let suffix = &tokens[tokens.len() - len..];
            let earlier = &tokens[..tokens.len() - 1];
            if let Some(start) = earlier.windows(len).position(|window| window == suffix) {
                let follow = &tokens[start + len..];
                return &follow[..follow.len().min(max_tokens)];
            }
        }
        &[]
    }
}

impl Proposer for PromptLookup {
    fn name(&self) -> &'static str {
        "prompt_lookup"
    }

    fn begin(&mut self, _num_rows: usize, _capacity: usize) {}

    fn propose(
        &mut self,
        rows: &[ProposeRow<'_>],
        _rule: &DraftRule,
    ) -> Result<Vec<Vec<DraftToken>>, EvalError> {
        let drafts = |row: &ProposeRow<'_>| {
            self.lookup(row.tokens, row.max_tokens)
                .iter()
                .map(|&id| DraftToken::certain(id))
                .collect()
        };
        Ok(rows.iter().map(drafts).collect())
    }

    fn commit(&mut self, _committed: &Committed) {}

    fn keep_rows(&mut self, _rows: &[usize]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(tokens: &[u32], max_tokens: usize) -> Vec<u32> {
        let config = LookupConfig { min: 2, max: 4 };
        PromptLookup::new(config)
            .lookup(tokens, max_tokens)
            .to_vec()
    }

    #[test]
    fn the_longest_suffix_wins_over_an_earlier_shorter_one() {
        // "2 3" occurs first at 0, "1 2 3" at 4.
        assert_eq!(lookup(&[2, 3, 9, 9, 1, 2, 3, 7, 8, 1, 2, 3], 2), [7, 8]);
    }

    #[test]
    fn the_earliest_of_equal_matches_wins() {
        assert_eq!(lookup(&[1, 2, 5, 1, 2, 6, 1, 2], 1), [5]);
    }

    #[test]
    fn a_match_may_overlap_the_suffix_and_ends_with_the_text() {
        assert_eq!(lookup(&[4, 4, 4], 5), [4]);
        assert_eq!(lookup(&[7, 8, 7, 8], 5), [7, 8]);
    }

    #[test]
    fn short_or_new_text_drafts_nothing() {
        assert!(lookup(&[], 5).is_empty());
        assert!(lookup(&[1, 1], 5).is_empty());
        assert!(lookup(&[1, 2, 3, 4], 5).is_empty());
        assert!(lookup(&[1, 2, 1, 2], 0).is_empty());
    }

    #[test]
    fn suffix_lengths_are_checked() {
        assert!(LookupConfig { min: 0, max: 2 }.validate().is_err());
        assert!(LookupConfig { min: 3, max: 2 }.validate().is_err());
        assert!(LookupConfig { min: 2, max: 2 }.validate().is_ok());
    }
}
