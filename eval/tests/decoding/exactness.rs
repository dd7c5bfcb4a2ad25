//! The exact evaluator against real decoding.

use std::sync::Arc;

use draftsmith_data::hidden::OnlineSource;
use draftsmith_eval::acceptance::Acceptance;
use draftsmith_eval::decode::{DecodeSettings, Sequence, SequenceRecord};
use draftsmith_eval::error::EvalError;
use draftsmith_eval::exact::{Candidate, ExactReport, ExactSettings, exact, exact_with};
use draftsmith_eval::propose::DrafterProposer;
use draftsmith_eval::verify;
use draftsmith_models::batch::{StateSpec, TokenRow};
use draftsmith_models::drafter::{AnchorDraw, AnyDrafter};
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;

use crate::tiny::{
    VOCAB, drafter, drafters, plain, prompts, reduced_vocab, run, run_by, settings, target,
};

pub(crate) fn rows(sequences: &[Sequence], records: &[SequenceRecord]) -> Vec<TokenRow> {
    let row = |(sequence, record): (&Sequence, &SequenceRecord)| {
        let ids: Vec<u32> = [sequence.prompt.as_slice(), &record.ids].concat();
        let mut turns = vec![0; sequence.prompt.len()];
        turns.resize(ids.len(), 1);
        TokenRow {
            key: sequence.id.clone(),
            ids,
            turns,
        }
    };
    sequences.iter().zip(records).map(row).collect()
}

fn measure(
    target: &TargetModel,
    candidate: (&AnyDrafter, &VocabMap),
    rows: &[TokenRow],
    temperature: f64,
) -> ExactReport {
    measure_by(
        "sampling",
        Sampling::at(temperature),
        None,
        target,
        candidate,
        rows,
    )
}

pub(crate) fn measure_by(
    rule: &str,
    sampling: Sampling,
    depths: Option<usize>,
    target: &TargetModel,
    (drafter, vocab): (&AnyDrafter, &VocabMap),
    rows: &[TokenRow],
) -> ExactReport {
    let candidate = Candidate {
        drafter,
        ends: target.ends(),
        vocab,
        calibration: None,
    };
    let settings = ExactSettings {
        rule: verify::for_sampling(rule, &sampling).unwrap(),
        sampling,
        depths,
        text: Some(sampling),
        batch_rows: 3,
        chunk_positions: 7,
        ..ExactSettings::default()
    };
    exact_with(candidate, rows, &settings, |tokens| {
        Ok(target.forward(&tokens.ids(), &drafter.state_spec()))
    })
    .unwrap()
}

#[test]
fn greedy_rounds_equal_those_of_real_decoding_for_every_gamma() {
    let target = target();
    let sequences = prompts(12);
    let text = plain(&target, &sequences, &settings(0.0, 4));
    for vocab in [VocabMap::full(VOCAB), reduced_vocab()] {
        for drafter in drafters(&target, &vocab) {
            let report = measure(&target, (&drafter, &vocab), &rows(&sequences, &text), 0.0);
            assert!(report.text_matches_rule);
            assert_eq!(report.by_gamma.len(), 4);
            assert_eq!(report.num_tokens, 12 * 39);
            for entry in &report.by_gamma {
                let settings = DecodeSettings {
                    gamma: entry.gamma,
                    ..settings(0.0, 4)
                };
                let mut proposer = DrafterProposer::new("drafter", &drafter, target.ends(), &vocab);
                let decoded = run(&target, &mut proposer, &sequences, &settings).records;
                let counts = Acceptance::new(&decoded, entry.gamma);
                // Every term of the sweep is a whole number here.
                assert!((entry.rounds - counts.rounds as f64).abs() < 1e-9);
                assert!((entry.tau - counts.tau()).abs() < 1e-9);
                assert!(counts.tau() > 1.02, "{} {}", drafter.family(), counts.tau());
            }
        }
    }
}

#[test]
fn sampled_tau_is_the_mean_of_real_decoding() {
    let target = target();
    let vocab = reduced_vocab();
    let sequences = prompts(300);
    // Two independent sets of texts: plain sampling for the sweep, speculative sampling for decoding.
    let text = plain(&target, &sequences, &settings(1.0, 100));
    for drafter in drafters(&target, &vocab) {
        let report = measure(&target, (&drafter, &vocab), &rows(&sequences, &text), 1.0);
        decoding_agrees(&target, (&drafter, &vocab), &sequences, &report);
    }
}

/// Greedy text by another way than the scores of training, and text with nothing cut off likewise.
#[test]
fn ratios_from_whole_distributions_equal_those_from_scores() {
    let target = target();
    let vocab = reduced_vocab();
    let sequences = prompts(12);
    let text = plain(&target, &sequences, &settings(1.0, 12));
    let rows = rows(&sequences, &text);
    for drafter in &drafters(&target, &vocab) {
        let by =
            |rule, sampling| measure_by(rule, sampling, None, &target, (drafter, &vocab), &rows);
        let all_kept = Sampling {
            top_k: VOCAB,
            ..Sampling::at(0.8)
        };
        let [scores, laws] = [Sampling::at(0.8), all_kept].map(|sampling| by("sampling", sampling));
        for (scores, laws) in scores.by_gamma.iter().zip(&laws.by_gamma) {
            // Scores are f32, sums of a few hundred of them.
            assert!(
                (scores.rounds - laws.rounds).abs() < 1e-4,
                "{scores:?} {laws:?}"
            );
        }
    }
}

/// Rounds of decoding against what is expected for the very text that it produced, for every rule with coins of its
/// own, family and gamma, deeper than trained included.
/// Red under: `realised` of `gumbel` replaced by that of `sampling`; text of another temperature than measured;
/// `variance_of_rounds` without `variance[next]`.
#[test]
fn the_rounds_of_produced_text_are_those_expected() {
    let target = target();
    let vocab = reduced_vocab();
    let sequences = prompts(60);
    let truncated = Sampling {
        top_p: 0.9,
        ..Sampling::at(0.8)
    };
    let cases = [
        ("sampling", Sampling::at(1.0)),
        ("gumbel", Sampling::at(1.0)),
        ("target_only", Sampling::at(1.0)),
        ("sampling", truncated),
        ("gumbel", truncated),
    ];
    let mut squares = Vec::new();
    for (rule, sampling) in cases {
        for drafter in &drafters(&target, &vocab) {
            for gamma in [1, 3, 5, 7] {
                let settings = DecodeSettings {
                    sampling,
                    gamma,
                    ..settings(1.0, 50)
                };
                let mut proposer = DrafterProposer::new("drafter", drafter, target.ends(), &vocab);
                let decoded = run_by(rule, &target, &mut proposer, &sequences, &settings).records;
                let rows = rows(&sequences, &decoded);
                let depths = Some(gamma);
                let candidate = (drafter, &vocab);
                let report = measure_by(rule, sampling, depths, &target, candidate, &rows);
                let expected = report.by_gamma.last().unwrap();
                let rounds: usize = decoded.iter().map(|record| record.rounds.len()).sum();
                let what = format!(
                    "{rule} {} gamma {gamma}: {rounds} {expected:?}",
                    drafter.family()
                );
                if expected.rounds_variance < 1e-9 {
                    assert!((expected.rounds - rounds as f64).abs() < 1e-6, "{what}");
                }
                // Two-sided 0.001 over all 80 cells together.
                if let Some(z) = expected.z(rounds as f64) {
                    assert!(z.abs() < 4.4, "{what} {z}");
                    squares.push(z * z);
                }
            }
        }
    }
    // Their mean square is 1; five standard errors of it.
    let count = squares.len() as f64;
    let mean = squares.iter().sum::<f64>() / count;
    assert!(
        count > 40.0 && (mean - 1.0).abs() < 5.0 * (2.0 / count).sqrt(),
        "{count} {mean}"
    );
}

fn decoding_agrees(
    target: &TargetModel,
    (drafter, vocab): (&AnyDrafter, &VocabMap),
    sequences: &[Sequence],
    report: &ExactReport,
) {
    let wide = settings(1.0, 100);
    let other = DecodeSettings { seed: 99, ..wide };
    let mut proposer = DrafterProposer::new("drafter", drafter, target.ends(), vocab);
    let decoded = run(target, &mut proposer, sequences, &other).records;
    let expected = report.by_gamma.last().unwrap().rounds / 300.0;
    let rounds: Vec<f64> = decoded.iter().map(|r| r.rounds.len() as f64).collect();
    let mean = rounds.iter().sum::<f64>() / 300.0;
    let variance = rounds.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 300.0;
    // Four standard errors of the simulated mean, and half of that again for the sweep's own texts.
    let tolerance = 6.0 * (variance / 300.0).sqrt();
    assert!(
        (mean - expected).abs() < tolerance,
        "{mean} {expected} {tolerance}"
    );
    let counts = Acceptance::new(&decoded, 4);
    let found = counts.acceptance_by_depth();
    for (depth, exact) in report.acceptance_by_depth.iter().enumerate() {
        let reached = counts.reached_by_depth[depth] as f64;
        // Four binomial standard errors at the worst rate, one half, and the sweep's own noise.
        let tolerance = 6.0 * 0.5 / reached.sqrt();
        let (exact, found) = (exact.unwrap(), found[depth].unwrap());
        assert!(
            (exact - found).abs() < tolerance,
            "{depth}: {exact} {found} {tolerance}"
        );
    }
    let last = report.by_gamma.last().unwrap();
    let interval = last.interval.unwrap();
    assert!(interval.low < last.tau && last.tau < interval.high);
    assert!(last.uniform_anchor_tau > 1.0);
}

#[test]
fn rows_without_a_round_are_skipped_and_none_left_is_an_error() {
    let target = target();
    let vocab = VocabMap::full(VOCAB);
    let drafter = drafter(&target, &vocab);
    let sequences = prompts(3);
    let text = plain(&target, &sequences, &settings(0.0, 4));
    let full = rows(&sequences, &text);
    let mut mixed = full.clone();
    mixed.insert(
        1,
        TokenRow {
            key: "one token".to_owned(),
            ids: vec![1, 2, 3],
            turns: vec![0, 0, 1],
        },
    );
    let with = |rows: &[TokenRow]| measure(&target, (&drafter, &vocab), rows, 1.0);
    assert_eq!(with(&mixed).num_rows, 3);
    assert!((with(&mixed).tau() - with(&full).tau()).abs() < 1e-12);
    let candidate = Candidate {
        drafter: &drafter,
        ends: target.ends(),
        vocab: &vocab,
        calibration: None,
    };
    let result = exact_with(candidate, &mixed[1..2], &ExactSettings::default(), |_| {
        Err(EvalError::Interrupted)
    });
    assert!(matches!(
        result,
        Err(EvalError::NothingToMeasure { num_rows: 1 })
    ));
}

#[test]
fn the_largest_gamma_is_the_drafters_number_of_depths() {
    let target = target();
    let vocab = VocabMap::full(VOCAB);
    let drafter = drafter(&target, &vocab);
    let batch = draftsmith_models::batch::TokenBatch {
        rows: rows(&prompts(1), &plain(&target, &prompts(1), &settings(0.0, 1))),
    };
    let states = target.forward(&batch.ids(), &drafter.state_spec());
    let batch = draftsmith_models::batch::DraftBatch {
        tokens: batch,
        states,
    };
    let draw = AnchorDraw { seed: 0, step: 0 };
    let slots = drafter.training_slots(&batch.tokens, draw);
    let deepest = slots.iter().map(|slot| slot.depth).max().unwrap();
    assert_eq!(deepest + 1, drafter.num_depths());
}

#[test]
fn states_of_other_layers_are_refused() {
    let target = Arc::new(target());
    let vocab = VocabMap::full(VOCAB);
    let drafter = drafter(&target, &vocab);
    let text = plain(&target, &prompts(3), &settings(0.0, 4));
    let rows = rows(&prompts(3), &text);
    let candidate = Candidate {
        drafter: &drafter,
        ends: target.ends(),
        vocab: &vocab,
        calibration: None,
    };
    let settings = ExactSettings {
        batch_rows: 3,
        chunk_positions: 7,
        ..ExactSettings::default()
    };
    let source = |aux_layer_ids: Vec<usize>| {
        OnlineSource::new(Arc::clone(&target), StateSpec { aux_layer_ids }).unwrap()
    };
    let found = exact(candidate, &source(vec![0, 1, 2]), &rows, &settings).unwrap();
    assert_eq!(found, measure(&target, (&drafter, &vocab), &rows, 1.0));
    let refused = exact(candidate, &source(vec![0, 2]), &rows, &settings);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "the states hold layers [0, 2], but the drafter reads [0, 1, 2]"
    );
}
