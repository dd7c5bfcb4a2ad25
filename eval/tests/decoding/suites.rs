//! Whole reports.

use draftsmith_eval::config::EvalConfig;
use draftsmith_eval::error::EvalError;
use draftsmith_eval::lossless::LosslessCheck;
use draftsmith_eval::report::{DrafterRecord, FORMAT_VERSION, Report, TargetRecord};
use draftsmith_eval::suite::{NamedDrafter, Suite, SuiteRun, run};
use draftsmith_eval::table::render;
use draftsmith_models::checkpoint::TemplateRecord;
use draftsmith_models::file::write_atomic;

use crate::tiny::{VOCAB, drafter, prompts, reduced_vocab, target};

fn config() -> EvalConfig {
    EvalConfig {
        max_new_tokens: 24,
        gamma: 3,
        ..EvalConfig::default()
    }
}

fn suites() -> Vec<Suite> {
    let prompts = prompts(6);
    let suite = |name: &str, prompts: &[_]| Suite {
        name: name.to_owned(),
        prompts: prompts.to_vec(),
    };
    vec![
        suite("first", &prompts[..4]),
        suite("second", &prompts[4..]),
    ]
}

fn report(entries: Vec<draftsmith_eval::report::Entry>) -> Report {
    Report {
        format_version: FORMAT_VERSION,
        generator: "test".to_owned(),
        device: "cpu".to_owned(),
        target: TargetRecord {
            fingerprint: "f".to_owned(),
            model_type: "llama".to_owned(),
            dtype: "f32".to_owned(),
            num_layers: 3,
            hidden_size: 16,
            vocab_size: VOCAB,
            stop_ids: vec![15],
        },
        template: TemplateRecord::default(),
        settings: config(),
        drafters: vec![DrafterRecord {
            name: "untrained".to_owned(),
            family: "eagle3".to_owned(),
            step: 0,
            draft_vocab: 12,
            weights_blake3: String::new(),
        }],
        entries,
        exact: Vec::new(),
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one run, looked at from all sides")]
fn a_run_covers_suites_temperatures_and_proposers_and_survives_the_disk() {
    let target = target();
    let vocab = reduced_vocab();
    let drafter = drafter(&target, &vocab);
    let drafters = [NamedDrafter {
        name: "untrained".to_owned(),
        drafter: &drafter,
        vocab: &vocab,
    }];
    let (config, suites) = (config(), suites());
    let input = SuiteRun {
        target: &target,
        stop_ids: &[15],
        suites: &suites,
        drafters: &drafters,
        config: &config,
    };
    let mut last = (0, 0);
    let entries = run(&input, &mut |progress| {
        last = (progress.decodes_done, progress.decodes);
        true
    })
    .unwrap();
    assert_eq!(last, (11, 12));
    assert_eq!(entries.len(), 2 * 2 * 3);
    for entry in &entries {
        assert_eq!(
            entry.lossless.is_some(),
            entry.temperature == 0.0 && entry.proposer != "none"
        );
        assert!(
            entry
                .lossless
                .as_ref()
                .is_none_or(LosslessCheck::is_lossless)
        );
        assert!(entry.speed_up.is_some() && entry.tau >= 1.0);
        assert_eq!(entry.exact.is_some(), entry.proposer == "untrained");
        if let (Some(exact), 0.0) = (entry.exact, entry.temperature) {
            // No coin is thrown: what is expected is what happened.
            assert!((exact.tau - entry.tau).abs() < 1e-9 && entry.rounds_z.is_none());
        }
        let is_plain = entry.proposer == "none";
        assert_eq!(
            entry.acceptance_by_depth.len(),
            if is_plain { 0 } else { 3 }
        );
        assert_eq!(
            entry.rule,
            if entry.temperature == 0.0 {
                "greedy"
            } else {
                "sampling"
            }
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let report = report(entries);
    report.write(&path).unwrap();
    assert_eq!(Report::read(&path).unwrap(), report);
    let table = render(&report);
    assert_eq!(table.lines().count(), 1 + 12 + 1);
    assert!(
        table.ends_with("greedy output identical: yes (12 of 12 outputs)\n"),
        "{table}"
    );
}

#[test]
fn plain_decoding_is_the_reference_even_when_not_reported() {
    let target = target();
    let suites = suites();
    let config = EvalConfig {
        temperatures: vec![0.0],
        baselines: vec!["prompt_lookup".to_owned()],
        ..config()
    };
    let input = SuiteRun {
        target: &target,
        stop_ids: &[],
        suites: &suites,
        drafters: &[],
        config: &config,
    };
    let entries = run(&input, &mut |_| true).unwrap();
    assert_eq!(entries.len(), 2);
    assert!(entries.iter().all(|entry| entry.lossless.is_some()));
    assert!(matches!(
        run(&input, &mut |_| false),
        Err(EvalError::Interrupted)
    ));
}

#[test]
fn another_report_version_is_refused_with_both_versions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    write_atomic(&path, br#"{"format_version": 1, "other": true}"#).unwrap();
    let message = Report::read(&path).unwrap_err().to_string();
    assert!(
        message.ends_with("format version 1, expected 2"),
        "{message}"
    );
}
