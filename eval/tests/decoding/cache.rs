//! The drafter's cache after every round.

use draftsmith_eval::error::EvalError;
use draftsmith_eval::propose::{DraftRule, DraftToken, DrafterProposer, ProposeRow, Proposer};
use draftsmith_models::batch::{StateSpec, padded_ids};
use draftsmith_models::drafter::{AnyDrafter, Committed, DraftState};
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::host_values;

use crate::tiny::{
    Truth, VOCAB, drafter, plain, prompts, reduced_vocab, run, settings, target, texts,
};

/// Lets a drafter draft, then proposes the truth with one wrong token in every third proposal; checks
/// the drafter's memory before each round.
#[derive(Debug)]
struct Forced<'a> {
    inner: DrafterProposer<'a>,
    truth: Truth,
    target: &'a TargetModel,
    drafter: &'a AnyDrafter,
    proposals: usize,
    checks: usize,
}

impl Forced<'_> {
    /// The drafter's state for `tokens`, from nothing.
    fn recomputed(&self, tokens: &[u32]) -> DraftState {
        let device = self.target.device();
        let known = tokens.len() - 1;
        let states = self.target.forward(&[tokens], &self.drafter.state_spec());
        let mut state = self.drafter.open(1, known + 1);
        let committed = Committed {
            aux: states.aux.narrow(1, 0, known),
            final_hidden: states.final_hidden.narrow(1, 0, known),
            next_ids: padded_ids(&[&tokens[1..]], device),
            lens: vec![known],
        };
        self.drafter
            .observe(&mut state, committed, self.target.ends());
        state
    }

    fn check(&mut self, rows: &[ProposeRow<'_>]) {
        let mut state = self.inner.state().unwrap().clone();
        let logits = host_values(
            &self
                .drafter
                .next_logits(&mut state, None, self.target.ends()),
        );
        let width = logits.len() / rows.len();
        for (index, row) in rows.iter().enumerate() {
            let mut fresh = self.recomputed(row.tokens);
            let (keys, values) = state.cache.committed(0, index);
            let (fresh_keys, fresh_values) = fresh.cache.committed(0, 0);
            close(&host_values(&keys), &host_values(&fresh_keys));
            close(&host_values(&values), &host_values(&fresh_values));
            let expected = self
                .drafter
                .next_logits(&mut fresh, None, self.target.ends());
            close(
                &logits[index * width..(index + 1) * width],
                &host_values(&expected),
            );
            self.checks += 1;
        }
    }
}

/// Both sides compute the same sums in f32 over at most 32 terms of size up to 10, in different order.
fn close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() < 2e-4, "{a} {b}");
    }
}

impl Proposer for Forced<'_> {
    fn name(&self) -> &'static str {
        "forced"
    }

    fn state_spec(&self) -> StateSpec {
        self.inner.state_spec()
    }

    fn begin(&mut self, num_rows: usize, capacity: usize) {
        self.inner.begin(num_rows, capacity);
    }

    fn propose(
        &mut self,
        rows: &[ProposeRow<'_>],
        rule: &DraftRule,
    ) -> Result<Vec<Vec<DraftToken>>, EvalError> {
        self.check(rows);
        let _own_drafts = self.inner.propose(rows, rule)?;
        let mut forced = Vec::new();
        for row in rows {
            let mut ids = self.truth.next(row);
            self.proposals += 1;
            let depth = self.proposals / 3 % ids.len().max(1);
            if let (0, Some(id)) = (self.proposals % 3, ids.get_mut(depth)) {
                *id = (*id + 1) % VOCAB as u32;
            }
            forced.push(ids.into_iter().map(DraftToken::certain).collect());
        }
        Ok(forced)
    }

    fn commit(&mut self, committed: &Committed) {
        self.inner.commit(committed);
    }

    fn keep_rows(&mut self, rows: &[usize]) {
        self.inner.keep_rows(rows);
    }
}

/// Pitfall 69: the drafter's cache holds only states of committed tokens after each verification.
/// Red under: `state.observed = state.cache.lens().to_vec();` put in front of `observe` in `commit` of
/// `propose/drafter.rs`, which keeps the drafted entries.
#[test]
fn pitfall_69_the_drafter_state_equals_a_recomputation_before_each_round() {
    let target = target();
    let vocab = reduced_vocab();
    let drafter = drafter(&target, &vocab);
    let sequences = prompts(4);
    let settings = draftsmith_eval::decode::DecodeSettings {
        max_new_tokens: 60,
        ..settings(0.0, 4)
    };
    let expected = plain(&target, &sequences, &settings);
    for batch_rows in [1, 4] {
        let settings = draftsmith_eval::decode::DecodeSettings {
            batch_rows,
            ..settings.clone()
        };
        let mut forced = Forced {
            inner: DrafterProposer::new("drafter", &drafter, target.ends(), &vocab),
            truth: Truth::new(&sequences, &expected),
            target: &target,
            drafter: &drafter,
            proposals: 0,
            checks: 0,
        };
        let found = run(&target, &mut forced, &sequences, &settings);
        assert_eq!(texts(&found.records), texts(&expected));
        assert!(forced.checks > 50);
        let rounds = found.records.iter().flat_map(|record| &record.rounds);
        let wrong = rounds
            .filter(|round| round.accepted < round.proposed)
            .count();
        assert!(wrong > 10, "{wrong}");
    }
}
