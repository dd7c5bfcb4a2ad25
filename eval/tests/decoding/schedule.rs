//! Confidence-scheduled drafting: what is replayed against rounds that really stop where the drafter doubts.

use draftsmith_eval::acceptance::Acceptance;
use draftsmith_eval::error::EvalError;
use draftsmith_eval::exact::THRESHOLDS;
use draftsmith_eval::propose::{
    DraftDistribution, DraftRule, DraftToken, DrafterProposer, ProposeRow, Proposer,
};
use draftsmith_models::batch::StateSpec;
use draftsmith_models::drafter::Committed;
use draftsmith_models::sample::Sampling;

use crate::exactness::{measure_by, rows};
use crate::tiny::{drafters, prompts, reduced_vocab, run, settings, target};

/// Drafts no further than the drafter believes.
#[derive(Debug)]
struct Believing<'a> {
    inner: DrafterProposer<'a>,
    threshold: f64,
    /// A confidence head that says the same of every draft.
    head: Option<f64>,
}

impl Believing<'_> {
    fn confidence(&self, draft: &DraftToken) -> f64 {
        let most_probable = || match &draft.distribution {
            DraftDistribution::Certain => 1.0,
            DraftDistribution::Drawn { probabilities, .. } => {
                probabilities.iter().copied().fold(0.0, f64::max)
            }
        };
        self.head.unwrap_or_else(most_probable)
    }
}

impl Proposer for Believing<'_> {
    fn name(&self) -> &str {
        self.inner.name()
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
        let mut drafts = self.inner.propose(rows, rule)?;
        for drafts in &mut drafts {
            let mut survival = 1.0;
            let doubted = drafts.iter().position(|draft| {
                survival *= self.confidence(draft);
                survival < self.threshold
            });
            drafts.truncate(doubted.unwrap_or(drafts.len()));
        }
        Ok(drafts)
    }

    fn commit(&mut self, committed: &Committed) {
        self.inner.commit(committed);
    }

    fn keep_rows(&mut self, rows: &[usize]) {
        self.inner.keep_rows(rows);
    }
}

/// Red under: `take_while` in `believed` replaced by a count of all confident drafts; the confidence of the token in the text in
/// place of the most probable one's; `gamma` drafts counted in `rounds_by_drafts` however few there are.
#[test]
fn replayed_rounds_are_those_of_decoding_that_stops_where_the_drafter_doubts() {
    let target = target();
    let sequences = prompts(200);
    let vocab = reduced_vocab();
    let settings = settings(1.0, 100);
    let mut distinct = 0;
    for drafter in &drafters(&target, &vocab) {
        let family = drafter.family();
        // A fresh confidence head says one half.
        let head = (family == "dspark").then_some(0.5);
        for (index, threshold) in [(3, 0.1), (5, 0.3)] {
            assert!((THRESHOLDS[index] - threshold).abs() < 1e-9);
            let mut proposer = Believing {
                inner: DrafterProposer::new(family, drafter, target.ends(), &vocab),
                threshold,
                head,
            };
            let records = run(&target, &mut proposer, &sequences, &settings).records;
            let counts = Acceptance::new(&records, settings.gamma);
            let text = rows(&sequences, &records);
            let sampling = Sampling::at(1.0);
            let report = measure_by(
                "sampling",
                sampling,
                None,
                &target,
                (drafter, &vocab),
                &text,
            );
            let (entry, whole) = (&report.by_confidence[index], report.by_gamma[3]);
            let expected = counts.tokens as f64 / entry.tau;
            let (found, error) = (counts.rounds as f64, whole.rounds_variance.sqrt());
            // The coins of more drafts spread more; eight cells.
            assert!(
                (found - expected).abs() < 4.0 * error,
                "{family} {threshold}: {found} rounds, expected {expected} +- {error}"
            );
            distinct += usize::from((expected - whole.rounds).abs() > 10.0 * error);
            let proposed: usize = records
                .iter()
                .flat_map(|r| &r.rounds)
                .map(|r| r.proposed)
                .sum();
            let drafts = proposed as f64 / found;
            // These confidences do not depend on what was drafted before; the last token of a text is never drafted.
            if drafter.max_depths().is_some() {
                let off = (drafts / entry.drafts - 1.0).abs();
                assert!(
                    off < 0.05,
                    "{family} {threshold}: {drafts} {}",
                    entry.drafts
                );
            }
            assert!(entry.drafts < whole.drafts, "{family} {threshold}");
            assert!(entry.drafts < entry.drafted && entry.drafted < entry.drafts + 1.0 + 1e-9);
        }
    }
    assert!(distinct > 0, "no threshold made a difference");
}
