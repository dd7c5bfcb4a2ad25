//! [`SuffixLookup`]: drafts copied from behind the last occurrence of the longest suffix that was seen before.
//!
//! Unlike prompt lookup it has no longest length, takes the most recent place, and finds it by a suffix automaton that
//! grows with the text (the retrieval of SAM Decoding, 2411.10666, over the sequence's own text).

use draftsmith_models::drafter::Committed;

use super::suffix_automaton::SuffixAutomaton;
use super::{DraftRule, DraftToken, ProposeRow, Proposer};
use crate::error::EvalError;

/// Drafts by the sequence's own suffix automaton.
#[derive(Debug)]
pub struct SuffixLookup {
    /// Shortest suffix that is worth a draft.
    min: usize,
    rows: Vec<SuffixAutomaton>,
}

impl SuffixLookup {
    /// A proposer that drafts behind suffixes of at least `min` tokens.
    pub fn new(min: usize) -> Self {
        Self {
            min,
            rows: Vec::new(),
        }
    }
}

impl Proposer for SuffixLookup {
    fn name(&self) -> &'static str {
        "suffix"
    }

    fn begin(&mut self, num_rows: usize, _capacity: usize) {
        self.rows = vec![SuffixAutomaton::new(); num_rows];
    }

    fn propose(
        &mut self,
        rows: &[ProposeRow<'_>],
        _rule: &DraftRule,
    ) -> Result<Vec<Vec<DraftToken>>, EvalError> {
        let drafts = |(automaton, row): (&mut SuffixAutomaton, &ProposeRow<'_>)| {
            for &token in &row.tokens[automaton.len()..] {
                automaton.push(token);
            }
            let seen = automaton.longest_seen();
            let start = seen
                .filter(|seen| seen.len >= self.min)
                .map(|seen| seen.end);
            let follow = start.map_or(&[][..], |start| &row.tokens[start..]);
            let follow = follow.iter().take(row.max_tokens);
            follow.map(|&id| DraftToken::certain(id)).collect()
        };
        Ok(self.rows.iter_mut().zip(rows).map(drafts).collect())
    }

    fn commit(&mut self, _committed: &Committed) {}

    fn keep_rows(&mut self, rows: &[usize]) {
        self.rows = rows.iter().map(|&row| self.rows[row].clone()).collect();
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_models::sample::Sampling;

    use super::*;
    use crate::propose::DraftChoice;

    #[test]
    fn drafts_are_what_followed_the_last_occurrence() {
        let rule = DraftRule {
            sampling: Sampling::greedy(),
            choice: DraftChoice::MostProbable,
            seed: 0,
        };
        let mut lookup = SuffixLookup::new(2);
        lookup.begin(2, 20);
        let mut drafts = |rows: [&[u32]; 2], max_tokens| {
            let rows = rows.map(|tokens| ProposeRow {
                tokens,
                max_tokens,
                stream: 0,
                stop_ids: &[],
            });
            let drafts = lookup.propose(&rows, &rule).unwrap();
            let ids = |drafts: &Vec<DraftToken>| drafts.iter().map(|draft| draft.id).collect();
            drafts.iter().map(ids).collect::<Vec<Vec<u32>>>()
        };
        // "1 2" was followed by 5, then by 6; "4" alone is shorter than two tokens.
        let first: &[u32] = &[1, 2, 5, 1, 2, 6, 1, 2];
        assert_eq!(drafts([first, &[3, 4, 9, 4]], 3), [vec![6, 1, 2], vec![]]);
        let longer: &[u32] = &[1, 2, 5, 1, 2, 6, 1, 2, 6];
        assert_eq!(
            drafts([longer, &[3, 4, 9, 4, 3, 4]], 2),
            [vec![1, 2], vec![9, 4]]
        );
    }
}
