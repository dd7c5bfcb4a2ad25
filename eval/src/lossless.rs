//! [`compare_text`]: speculative output against plain decoding, token by token, under rules whose text does not depend on
//! the drafts.
//!
//! Outputs may differ legitimately where the two best scores of the target are closer than the
//! rounding of two batch shapes. Such near ties are listed, each with its gap, and counted apart; any
//! other difference is a fault.

use serde::{Deserialize, Serialize};

use crate::decode::SequenceRecord;

/// Outcome of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LosslessCheck {
    /// Sequences compared.
    pub compared: usize,
    /// Sequences equal in every token and in their end.
    pub identical: usize,
    /// Sequences that first differ at a near tie.
    pub near_ties: usize,
    /// Largest gap of the two best scores that counts as a near tie.
    pub near_tie_tolerance: f64,
    /// The first difference of every sequence that is not identical.
    pub divergences: Vec<Divergence>,
}

impl LosslessCheck {
    /// Whether every difference is a near tie.
    pub fn is_lossless(&self) -> bool {
        self.identical + self.near_ties == self.compared
    }
}

/// First difference of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Divergence {
    /// Identity of the sequence.
    pub id: String,
    /// Index among the new tokens.
    pub position: usize,
    /// Token of plain decoding; `None` when it had ended.
    pub expected: Option<u32>,
    /// Token of speculative decoding; `None` when it had ended.
    pub found: Option<u32>,
    /// Gap between the target's two best scores there, in plain decoding.
    pub gap: Option<f64>,
    /// Whether the token is the runner-up of a near tie.
    pub is_near_tie: bool,
}

/// Compares records of a rule whose text does not depend on the drafts; both lists hold the same sequences in the same
/// order.
pub fn compare_text(
    plain: &[SequenceRecord],
    speculative: &[SequenceRecord],
    near_tie_tolerance: f64,
) -> LosslessCheck {
    let divergences: Vec<Divergence> = plain
        .iter()
        .zip(speculative)
        .filter_map(|(plain, found)| first_divergence(plain, found, near_tie_tolerance))
        .collect();
    let compared = plain.len().max(speculative.len());
    LosslessCheck {
        compared,
        identical: plain.len().min(speculative.len()) - divergences.len(),
        near_ties: divergences.iter().filter(|d| d.is_near_tie).count(),
        near_tie_tolerance,
        divergences,
    }
}

fn first_divergence(
    plain: &SequenceRecord,
    found: &SequenceRecord,
    tolerance: f64,
) -> Option<Divergence> {
    let len = plain.ids.len().max(found.ids.len());
    let position = (0..len).find(|&at| plain.ids.get(at) != found.ids.get(at))?;
    let best = plain.top_two.get(position);
    let gap = best.map(|best| f64::from(best.gap));
    let is_near_tie = match (best, found.ids.get(position)) {
        (Some(best), Some(&token)) => token == best.second && f64::from(best.gap) <= tolerance,
        _ => false,
    };
    Some(Divergence {
        id: plain.id.clone(),
        position,
        expected: plain.ids.get(position).copied(),
        found: found.ids.get(position).copied(),
        gap,
        is_near_tie,
    })
}

#[cfg(test)]
mod tests {
    use draftsmith_models::generate::FinishReason;

    use super::*;
    use crate::verify::TopTwo;

    fn record(ids: &[u32], gap: f32) -> SequenceRecord {
        let top_two = ids.iter().map(|&first| TopTwo {
            first,
            second: first + 1,
            gap,
        });
        SequenceRecord {
            id: "a".to_owned(),
            ids: ids.to_vec(),
            rounds: Vec::new(),
            top_two: top_two.collect(),
            finish: FinishReason::Length,
        }
    }

    #[test]
    fn equal_outputs_are_identical() {
        let check = compare_text(&[record(&[1, 2], 1.0)], &[record(&[1, 2], 1.0)], 1e-3);
        assert_eq!((check.compared, check.identical), (1, 1));
        assert!(check.is_lossless() && check.divergences.is_empty());
    }

    #[test]
    fn only_the_runner_up_within_the_tolerance_is_a_near_tie() {
        let near = |gap: f32, token: u32| {
            compare_text(
                &[record(&[1, 5, 9], gap)],
                &[record(&[1, token, 7], gap)],
                1e-3,
            )
        };
        assert!(near(1e-4, 6).is_lossless());
        assert!(!near(1e-2, 6).is_lossless());
        assert!(!near(1e-4, 8).is_lossless());
        assert_eq!(near(1e-4, 6).divergences[0].position, 1);
    }

    #[test]
    fn a_missing_end_is_a_fault() {
        let check = compare_text(&[record(&[1, 2], 1e-9)], &[record(&[1, 2, 3], 1e-9)], 1e-3);
        assert!(!check.is_lossless());
        assert_eq!(check.divergences[0].expected, None);
    }
}
