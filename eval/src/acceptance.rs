//! [`Acceptance`]: what rounds of decoding say about a drafter, each figure under its own name.
//!
//! - *tau*: tokens committed per target forward, the target's own token included, pooled over all
//!   rounds of all sequences; the prefill and its token are no round.
//! - *acceptance by depth*: accepted / verified at depth `d`, given that all earlier drafts of the round
//!   were accepted (the conditional rate of the EAGLE papers).
//! - *survival by depth*: share of the rounds that proposed depth `d` whose first `d + 1` drafts were all
//!   accepted (what vLLM prints per position).

use draftsmith_models::generate::FinishReason;
use serde::{Deserialize, Serialize};

use crate::decode::{Round, SequenceRecord};

/// Counts over all rounds of a set of sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Acceptance {
    /// Sequences.
    pub sequences: u64,
    /// Sequences that ended with a stop token.
    pub stopped: u64,
    /// Target forwards, prefill excluded.
    pub rounds: u64,
    /// Tokens committed in rounds: all new tokens but the first of each sequence.
    pub tokens: u64,
    /// Rounds with at least one draft.
    pub drafted_rounds: u64,
    /// Rounds that proposed a draft at depth `d`.
    pub proposed_by_depth: Vec<u64>,
    /// Of these, rounds in which all drafts before depth `d` were accepted.
    pub reached_by_depth: Vec<u64>,
    /// Of these, rounds in which the draft at depth `d` was accepted too.
    pub accepted_by_depth: Vec<u64>,
    /// Number of rounds with exactly `n` accepted drafts, `n = 0 ..= gamma`.
    pub accepted_length_histogram: Vec<u64>,
}

impl Acceptance {
    /// Counts the rounds of `records`, decoded with up to `gamma` drafts.
    pub fn new(records: &[SequenceRecord], gamma: usize) -> Self {
        let mut counts = Self {
            proposed_by_depth: vec![0; gamma],
            reached_by_depth: vec![0; gamma],
            accepted_by_depth: vec![0; gamma],
            accepted_length_histogram: vec![0; gamma + 1],
            ..Self::default()
        };
        for record in records {
            counts.sequences += 1;
            counts.stopped += u64::from(record.finish == FinishReason::Stop);
            for round in &record.rounds {
                counts.add(*round);
            }
        }
        counts
    }

    fn add(&mut self, round: Round) {
        self.rounds += 1;
        self.tokens += round.committed as u64;
        self.drafted_rounds += u64::from(round.proposed > 0);
        self.accepted_length_histogram[round.accepted] += 1;
        for depth in 0..round.proposed {
            self.proposed_by_depth[depth] += 1;
            self.reached_by_depth[depth] += u64::from(round.accepted >= depth);
            self.accepted_by_depth[depth] += u64::from(round.accepted > depth);
        }
    }

    /// Tokens per round; 0 without a round.
    pub fn tau(&self) -> f64 {
        ratio(self.tokens, self.rounds).unwrap_or(0.0)
    }

    /// Conditional acceptance per depth; `None` where no round came that far.
    pub fn acceptance_by_depth(&self) -> Vec<Option<f64>> {
        ratios(&self.accepted_by_depth, &self.reached_by_depth)
    }

    /// Survival per depth; `None` where no round proposed that depth.
    pub fn survival_by_depth(&self) -> Vec<Option<f64>> {
        ratios(&self.accepted_by_depth, &self.proposed_by_depth)
    }

    /// The length serving engines print: 1 + accepted drafts / rounds with a draft.
    ///
    /// It differs from tau where rounds have no draft, and in the last round of a sequence, whose own
    /// token may not have been needed. `None` without a drafted round.
    pub fn engine_length(&self) -> Option<f64> {
        let accepted: u64 = self.accepted_by_depth.iter().sum();
        ratio(accepted, self.drafted_rounds).map(|mean| 1.0 + mean)
    }
}

/// Mean over the sequences of each one's own tokens per round (the macro average of other reports).
///
/// Sequences without a round are left out; `None` when all are.
pub fn mean_tau_of_sequences(records: &[SequenceRecord]) -> Option<f64> {
    let own = |record: &SequenceRecord| {
        let tokens: usize = record.rounds.iter().map(|round| round.committed).sum();
        ratio(tokens as u64, record.rounds.len() as u64)
    };
    let taus: Vec<f64> = records.iter().filter_map(own).collect();
    (!taus.is_empty()).then(|| taus.iter().sum::<f64>() / taus.len() as f64)
}

fn ratios(numerators: &[u64], denominators: &[u64]) -> Vec<Option<f64>> {
    numerators
        .iter()
        .zip(denominators)
        .map(|(&n, &d)| ratio(n, d))
        .collect()
}

fn ratio(numerator: u64, denominator: u64) -> Option<f64> {
    (denominator > 0).then(|| numerator as f64 / denominator as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(accepted: &[usize], proposed: usize) -> SequenceRecord {
        SequenceRecord {
            id: String::new(),
            ids: Vec::new(),
            rounds: accepted
                .iter()
                .map(|&accepted| Round {
                    proposed,
                    accepted,
                    committed: accepted + 1,
                })
                .collect(),
            top_two: Vec::new(),
            finish: FinishReason::Length,
        }
    }

    /// Pitfall 66: a drafter whose second draft is right exactly when its first is wrong, over two turns
    /// of different length. Marginal accuracy is 0.5 at both depths; what decoding sees is 0.5, then 0.
    /// Red under: `reached_by_depth` counted with `round.accepted + 1 >= depth`.
    #[test]
    fn pitfall_66_conditional_acceptance_and_survival_have_their_own_names() {
        let records = [record(&[1, 0, 1, 0, 0, 1], 2), record(&[0, 1], 2)];
        let counts = Acceptance::new(&records, 2);
        assert_eq!(counts.acceptance_by_depth(), [Some(0.5), Some(0.0)]);
        assert_eq!(counts.survival_by_depth(), [Some(0.5), Some(0.0)]);
        assert_eq!(counts.reached_by_depth, [8, 4]);
        assert_eq!(counts.proposed_by_depth, [8, 8]);
        // Rounds commit 2 or 1 tokens, half each; all rounds of all turns count once.
        assert!((counts.tau() - 1.5).abs() < 1e-12);
        assert_eq!(counts.accepted_length_histogram, [4, 4, 0]);
    }

    #[test]
    fn survival_multiplies_conditional_acceptance() {
        let counts = Acceptance::new(&[record(&[0, 1, 2, 3, 3, 3, 1, 2], 3)], 3);
        let survival = counts.survival_by_depth();
        let mut product = 1.0;
        for (conditional, survived) in counts.acceptance_by_depth().iter().zip(survival) {
            product *= conditional.unwrap();
            assert!((product - survived.unwrap()).abs() < 1e-12);
        }
        // With every depth proposed in every round, tau is 1 plus the sum of survivals.
        let sum: f64 = counts.survival_by_depth().iter().flatten().sum();
        assert!((counts.tau() - 1.0 - sum).abs() < 1e-12);
    }

    #[test]
    fn rounds_without_drafts_count_for_tau_but_not_for_the_engine() {
        let mut mixed = record(&[2, 2], 2);
        mixed.rounds.push(Round {
            proposed: 0,
            accepted: 0,
            committed: 1,
        });
        let counts = Acceptance::new(&[mixed], 2);
        assert!((counts.tau() - 7.0 / 3.0).abs() < 1e-12);
        assert_eq!(counts.engine_length(), Some(3.0));
        assert_eq!(Acceptance::new(&[], 2).engine_length(), None);
    }

    #[test]
    fn pooled_and_per_sequence_means_differ() {
        let records = [record(&[2], 2), record(&[0, 0, 0], 2)];
        assert!((Acceptance::new(&records, 2).tau() - 1.5).abs() < 1e-12);
        assert_eq!(mean_tau_of_sequences(&records), Some(2.0));
        assert_eq!(mean_tau_of_sequences(&[record(&[], 2)]), None);
    }
}
