//! [`SuffixAutomaton`]: all substrings of a growing text, and where each was last seen (Blumer et al. 1985).

use std::collections::BTreeMap;

/// The substrings that end at the same places of the text.
#[derive(Clone, Debug, Default)]
struct State {
    /// Length of the longest of them.
    len: usize,
    /// State of the longest suffix that ends at further places too; none for the empty text.
    link: Option<usize>,
    /// By the token that follows.
    next: BTreeMap<u32, usize>,
    /// Tokens up to and with the last place where they end, among those before the newest one.
    last_end: usize,
}

/// An automaton over the substrings of a text, extended token by token in amortised constant time (times the logarithm of
/// the alphabet), but for the marking of places, which takes a step for each suffix that was seen before.
#[derive(Clone, Debug)]
pub(super) struct SuffixAutomaton {
    states: Vec<State>,
    /// State of the whole text.
    whole: usize,
    len: usize,
}

/// A suffix of the text that was seen before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// Its length.
    pub(super) len: usize,
    /// Tokens of the text up to and with its last earlier occurrence: what followed it begins there.
    pub(super) end: usize,
}

impl SuffixAutomaton {
    /// The automaton of the empty text.
    pub(super) fn new() -> Self {
        Self {
            states: vec![State::default()],
            whole: 0,
            len: 0,
        }
    }

    /// Tokens of the text.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Adds a token to the end of the text.
    pub(super) fn push(&mut self, token: u32) {
        self.mark_suffixes();
        self.len += 1;
        let new = self.states.len();
        self.states.push(State {
            len: self.len,
            ..State::default()
        });
        let mut at = Some(self.whole);
        while let Some(state) = at.filter(|&state| !self.states[state].next.contains_key(&token)) {
            self.states[state].next.insert(token, new);
            at = self.states[state].link;
        }
        self.states[new].link = Some(match at {
            None => 0,
            Some(state) => self.suffix_behind(state, token),
        });
        self.whole = new;
    }

    /// The longest suffix of the text that was seen before.
    pub(super) fn longest_seen(&self) -> Option<Seen> {
        let link = self.states[self.whole].link?;
        let state = &self.states[link];
        (state.len > 0).then_some(Seen {
            len: state.len,
            end: state.last_end,
        })
    }

    /// All suffixes of the text so far have now been seen at its end.
    fn mark_suffixes(&mut self) {
        let mut at = Some(self.whole);
        while let Some(state) = at {
            self.states[state].last_end = self.len;
            at = self.states[state].link;
        }
    }

    /// The state of exactly the longest text of `state` followed by `token`, split off where longer ones share it.
    fn suffix_behind(&mut self, state: usize, token: u32) -> usize {
        let target = self.states[state].next[&token];
        let len = self.states[state].len + 1;
        if self.states[target].len == len {
            return target;
        }
        let split = self.states.len();
        let copy = State {
            len,
            ..self.states[target].clone()
        };
        self.states.push(copy);
        let mut at = Some(state);
        while let Some(from) =
            at.filter(|&from| self.states[from].next.get(&token) == Some(&target))
        {
            self.states[from].next.insert(token, split);
            at = self.states[from].link;
        }
        self.states[target].link = Some(split);
        split
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_models::rng::{Purpose, Stream};

    use super::*;

    /// By trying every length and place.
    fn brute_force(text: &[u32]) -> Option<Seen> {
        (1..text.len()).rev().find_map(|len| {
            let suffix = &text[text.len() - len..];
            let ends = len..text.len();
            let end = ends.rev().find(|&end| &text[end - len..end] == suffix)?;
            Some(Seen { len, end })
        })
    }

    /// Seen red without the copy of `last_end` in `suffix_behind`, and with `mark_suffixes` behind the new token.
    #[test]
    fn the_longest_suffix_and_its_last_place_are_found() {
        let mut stream = Stream::new(0, Purpose::Check, 21);
        for alphabet in [1, 2, 3, 7] {
            for _ in 0..20 {
                let mut automaton = SuffixAutomaton::new();
                let mut text = Vec::new();
                for _ in 0..60 {
                    let token = stream.below(alphabet) as u32;
                    text.push(token);
                    automaton.push(token);
                    assert_eq!(automaton.longest_seen(), brute_force(&text), "{text:?}");
                }
            }
        }
    }
}
