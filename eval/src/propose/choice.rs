//! How a draft is chosen from logits, as the verification rule wants it.

use std::sync::Arc;

use draftsmith_models::gumbel::NoiseAt;
use draftsmith_models::sample::{argmax, draw};
use draftsmith_models::vocab::VocabMap;

use super::{DraftChoice, DraftDistribution, DraftRule, DraftToken, ProposeRow};
use crate::verify::Coins;

/// One token for a row from its logits `[V_draft]`, behind `depth` drafts of this round; `None` when a logit is not a
/// finite number.
pub(super) fn choose(
    logits: &[f32],
    vocab: &Arc<VocabMap>,
    rule: &DraftRule,
    row: &ProposeRow<'_>,
    depth: usize,
) -> Option<DraftToken> {
    if logits.iter().any(|value| !value.is_finite()) {
        return None;
    }
    let first = row.tokens.len();
    let coin = |round| {
        let coins = Coins {
            seed: rule.seed,
            stream: row.stream,
            round,
        };
        coins.draft(first + depth)
    };
    let probabilities = || rule.sampling.probabilities(logits);
    match rule.choice {
        DraftChoice::MostProbable => {
            let draft = argmax(logits)? as u32;
            Some(DraftToken::certain(vocab.to_target(draft)))
        }
        DraftChoice::Drawn => Some(drawn(probabilities(), vocab, coin(None))),
        DraftChoice::DrawnEachRound => Some(drawn(probabilities(), vocab, coin(Some(first)))),
        DraftChoice::SharedNoise => {
            let at = NoiseAt {
                seed: rule.seed,
                stream: row.stream,
                position: first + depth,
            };
            under_noise(&probabilities(), vocab, &at.weights(vocab.target_vocab()))
        }
    }
}

fn drawn(probabilities: Vec<f64>, vocab: &Arc<VocabMap>, coin: f64) -> DraftToken {
    DraftToken {
        id: vocab.to_target(draw(&probabilities, coin)),
        distribution: DraftDistribution::Drawn {
            probabilities,
            vocab: Arc::clone(vocab),
        },
    }
}

/// The draft of the largest score among probabilities `[V_draft]` under the noise of target tokens, `[V]`.
pub(crate) fn under_noise(
    probabilities: &[f64],
    vocab: &VocabMap,
    noise: &[f64],
) -> Option<DraftToken> {
    let ids = vocab.target_ids().iter().copied();
    let scores = ids
        .zip(probabilities)
        .map(|(id, p)| (id, p * noise[id as usize]));
    // Equal scores: the smaller id, as in the target's own choice.
    let best = scores.reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map(|(id, _)| DraftToken::certain(id))
}

#[cfg(test)]
mod tests {
    use draftsmith_models::sample::Sampling;

    use super::*;

    /// Sequences in which a position drafts the same token in two rounds, of forty.
    fn alike(choice: DraftChoice) -> usize {
        let vocab = Arc::new(VocabMap::full(8));
        let rule = DraftRule {
            sampling: Sampling::default(),
            choice,
            seed: 1,
        };
        let drafted = |committed: usize, depth, stream| {
            let row = ProposeRow {
                tokens: &vec![0; committed],
                max_tokens: 4,
                stream,
                stop_ids: &[],
            };
            choose(&[0.0; 8], &vocab, &rule, &row, depth).unwrap().id
        };
        let is_alike = |stream: &u64| drafted(5, 2, *stream) == drafted(6, 1, *stream);
        (0..40).filter(is_alike).count()
    }

    /// Red under: `coin(None)` for `DrawnEachRound`.
    #[test]
    fn a_position_drafts_by_its_own_number_or_anew() {
        assert_eq!(alike(DraftChoice::Drawn), 40);
        assert_eq!(alike(DraftChoice::SharedNoise), 40);
        assert!(alike(DraftChoice::DrawnEachRound) < 15); // one in eight by chance
    }
}
