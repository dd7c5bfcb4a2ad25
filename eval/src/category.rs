//! Figures of prompts that belong together: turns of one conversation, prompts of one category.

use crate::bootstrap::ratio_interval;
use crate::report::{CategoryFigures, PromptFigures};

/// Tokens and rounds of each conversation, in order of first appearance: turns of one conversation are no independent draws,
/// so that intervals resample whole conversations.
pub(crate) fn by_conversation(prompts: &[PromptFigures]) -> Vec<(f64, f64)> {
    let groups = grouped(prompts, |prompt| Some(&prompt.conversation));
    let sums = groups.into_iter().map(|(_, group)| sum(&group));
    sums.map(|(tokens, rounds)| (tokens as f64, rounds as f64))
        .collect()
}

/// tau of each category, in order of first appearance; prompts without a category are in none.
pub(crate) fn by_category(
    prompts: &[PromptFigures],
    resamples: usize,
    seed: u64,
) -> Vec<CategoryFigures> {
    let groups = grouped(prompts, |prompt| prompt.category.as_ref());
    let figures = groups.into_iter().map(|(category, group)| {
        let (tokens, rounds) = sum(&group);
        let own: Vec<PromptFigures> = group.into_iter().cloned().collect();
        CategoryFigures {
            category: category.clone(),
            prompts: own.len(),
            tokens,
            rounds,
            tau: if rounds > 0 {
                tokens as f64 / rounds as f64
            } else {
                0.0
            },
            tau_interval: ratio_interval(&by_conversation(&own), resamples, seed),
        }
    });
    figures.collect()
}

/// Prompts by a name, in order of first appearance; those without one are left out.
fn grouped<'a>(
    prompts: &'a [PromptFigures],
    name: impl Fn(&'a PromptFigures) -> Option<&'a String>,
) -> Vec<(&'a String, Vec<&'a PromptFigures>)> {
    let mut groups: Vec<(&String, Vec<&PromptFigures>)> = Vec::new();
    for prompt in prompts {
        let Some(name) = name(prompt) else { continue };
        match groups.iter_mut().find(|(known, _)| *known == name) {
            Some((_, group)) => group.push(prompt),
            None => groups.push((name, vec![prompt])),
        }
    }
    groups
}

fn sum(group: &[&PromptFigures]) -> (u64, u64) {
    let tokens = group.iter().map(|prompt| prompt.tokens).sum();
    (tokens, group.iter().map(|prompt| prompt.rounds).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(
        conversation: &str,
        category: Option<&str>,
        tokens: u64,
        rounds: u64,
    ) -> PromptFigures {
        PromptFigures {
            id: format!("{conversation}, {tokens}"),
            conversation: conversation.to_owned(),
            category: category.map(str::to_owned),
            prompt: String::new(),
            tokens,
            rounds,
        }
    }

    #[test]
    fn turns_of_a_conversation_are_resampled_together() {
        let prompts = [
            prompt("a", None, 4, 2),
            prompt("b", None, 3, 3),
            prompt("a", None, 5, 1),
        ];
        assert_eq!(by_conversation(&prompts), [(9.0, 3.0), (3.0, 3.0)]);
        assert!(by_category(&prompts, 10, 0).is_empty());
    }

    #[test]
    fn categories_are_pooled_in_their_order() {
        let prompts = [
            prompt("a", Some("maths"), 4, 2),
            prompt("b", Some("code"), 3, 3),
            prompt("c", None, 100, 1),
            prompt("d", Some("maths"), 5, 1),
            prompt("e", Some("short"), 0, 0),
        ];
        let found = by_category(&prompts, 50, 0);
        let short: Vec<(&str, usize, f64)> = found
            .iter()
            .map(|one| (one.category.as_str(), one.prompts, one.tau))
            .collect();
        assert_eq!(
            short,
            [("maths", 2, 3.0), ("code", 1, 1.0), ("short", 1, 0.0)]
        );
        assert!(found[0].tau_interval.is_some() && found[2].tau_interval.is_none());
    }
}
