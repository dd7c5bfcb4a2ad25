//! Calibrated drafts: accepted more often, as the exact evaluator says, under the same law of the text.

use draftsmith_eval::acceptance::Acceptance;
use draftsmith_eval::calibration::{Calibration, calibrate};
use draftsmith_eval::exact::{Candidate, ExactReport, ExactSettings, exact_with};
use draftsmith_eval::propose::DrafterProposer;
use draftsmith_models::batch::TokenRow;
use draftsmith_models::drafter::AnyDrafter;
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;

use crate::exactness::rows;
use crate::tiny::{drafters, plain, prompts, reduced_vocab, run, settings, target, texts};

fn exact_settings() -> ExactSettings {
    ExactSettings {
        sampling: Sampling::at(1.0),
        text: Some(Sampling::at(1.0)),
        batch_rows: 32,
        resamples: 0,
        ..ExactSettings::default()
    }
}

struct World {
    target: TargetModel,
    vocab: VocabMap,
    rows: Vec<TokenRow>,
}

impl World {
    fn new(num_prompts: usize) -> Self {
        let target = target();
        let sequences = prompts(num_prompts);
        let text = plain(&target, &sequences, &settings(1.0, 100));
        Self {
            rows: rows(&sequences, &text),
            vocab: reduced_vocab(),
            target,
        }
    }

    fn candidate<'a>(
        &'a self,
        drafter: &'a AnyDrafter,
        calibration: Option<&'a Calibration>,
    ) -> Candidate<'a> {
        Candidate {
            drafter,
            ends: self.target.ends(),
            vocab: &self.vocab,
            calibration,
        }
    }

    fn calibrate(&self, drafter: &AnyDrafter) -> Calibration {
        let candidate = self.candidate(drafter, None);
        calibrate(candidate, &self.rows, &exact_settings(), |tokens| {
            Ok(self.target.forward(&tokens.ids(), &drafter.state_spec()))
        })
        .unwrap()
    }

    fn exact(&self, drafter: &AnyDrafter, calibration: Option<&Calibration>) -> ExactReport {
        let candidate = self.candidate(drafter, calibration);
        exact_with(candidate, &self.rows, &exact_settings(), |tokens| {
            Ok(self.target.forward(&tokens.ids(), &drafter.state_spec()))
        })
        .unwrap()
    }
}

/// Red under: calibration ignored in `DrafterProposer::rule_at`; or in `Candidate::draft_sampling`; `weight` replaced by 1 and overlap
/// by its negative in `Search::add`.
#[test]
fn calibrated_drafts_are_accepted_more_often_as_the_exact_evaluator_says() {
    let world = World::new(300);
    let sequences = prompts(300);
    let (mut gained, mut gained_shared) = (0, 0);
    for drafter in &drafters(&world.target, &world.vocab) {
        let family = drafter.family();
        let calibration = world.calibrate(drafter);
        assert_eq!(calibration.depths.len(), 4, "{family}");
        assert!(
            calibration
                .depths
                .iter()
                .all(|d| d.overlap >= d.overlap_before)
        );
        let [before, after] = [None, Some(&calibration)].map(|used| world.exact(drafter, used));
        // The first draft is calibrated for its own overlap, which is what one draft a round earns.
        assert!(
            after.by_gamma[0].tau > before.by_gamma[0].tau - 1e-3,
            "{family}"
        );
        gained += usize::from(after.tau() > 1.01 * before.tau());
        // One temperature for all depths is no better than one for each, for this text.
        let shared = world.exact(drafter, Some(&calibration.shared()));
        gained_shared += usize::from(shared.tau() > 1.005 * before.tau());
        assert!(shared.tau() < 1.005 * after.tau(), "{family}");
        let proposer = DrafterProposer::new(family, drafter, world.target.ends(), &world.vocab);
        let mut proposer = proposer.calibrated(Some(&calibration));
        let decoded = run(
            &world.target,
            &mut proposer,
            &sequences,
            &settings(1.0, 100),
        );
        let counts = Acceptance::new(&decoded.records, 4);
        // Two sets of texts of 300 prompts each: tau varies by about one per cent between such sets.
        let off = (counts.tau() / after.tau() - 1.0).abs();
        assert!(off < 0.03, "{family}: {} {}", counts.tau(), after.tau());
        let on_own_text = World {
            rows: rows(&sequences, &decoded.records),
            target: target(),
            vocab: reduced_vocab(),
        };
        let own = on_own_text.exact(drafter, Some(&calibration)).by_gamma[3];
        let z = own.z(counts.rounds as f64).unwrap();
        assert!(z.abs() < 4.0, "{family}: {z}");
    }
    assert!(gained > 0, "calibration changed nothing");
    assert!(gained_shared > 0, "the shared temperature changed nothing");
}

/// Greedy text, and rules whose drafts are not drawn, know no calibration.
#[test]
fn greedy_drafts_stay_as_they_are() {
    let world = World::new(40);
    let sequences = prompts(6);
    for drafter in &drafters(&world.target, &world.vocab) {
        let calibration = world.calibrate(drafter);
        let [usual, calibrated] = [None, Some(&calibration)].map(|used| {
            let ends = world.target.ends();
            let mut proposer =
                DrafterProposer::new("drafter", drafter, ends, &world.vocab).calibrated(used);
            run(&world.target, &mut proposer, &sequences, &settings(0.0, 6)).records
        });
        assert_eq!(texts(&usual), texts(&calibrated));
        let rounds = |records: &[draftsmith_eval::decode::SequenceRecord]| {
            records
                .iter()
                .map(|record| record.rounds.len())
                .sum::<usize>()
        };
        assert_eq!(rounds(&usual), rounds(&calibrated));
    }
}

#[test]
fn a_calibration_survives_the_disk_and_a_broken_one_is_refused() {
    let world = World::new(20);
    let drafter = &drafters(&world.target, &world.vocab)[0];
    let calibration = world.calibrate(drafter);
    let folder = tempfile::tempdir().unwrap();
    assert!(Calibration::read(folder.path()).unwrap().is_none());
    calibration.write(folder.path()).unwrap();
    assert_eq!(Calibration::read(folder.path()).unwrap(), Some(calibration));
    let path = folder.path().join("calibration.json");
    let broken = r#"{"format_version": 2, "sampling": {}, "shared_temperature": 0.8, "depths": [
        {"temperature": 0.0, "cut": 0.0, "overlap_before": 0.0, "overlap": 0.0, "overlap_shared": 0.0}]}"#;
    fs_err::write(&path, broken).unwrap();
    let message = Calibration::read(folder.path()).unwrap_err().to_string();
    assert!(message.contains("calibration.json"), "{message}");
}
