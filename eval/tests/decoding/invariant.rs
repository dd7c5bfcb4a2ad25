//! Rules under which the target draws for itself: the text is the same whoever drafts, however much, beside whom.

use draftsmith_eval::decode::{DecodeSettings, SequenceRecord};
use draftsmith_eval::lossless::compare_text;
use draftsmith_eval::propose::prompt_lookup::LookupConfig;
use draftsmith_eval::propose::{
    DrafterProposer, ModelProposer, NoProposer, PromptLookup, Proposer, SuffixLookup,
};
use draftsmith_models::sample::Sampling;
use draftsmith_models::vocab::VocabMap;

use crate::tiny::{VOCAB, drafters, prompts, reduced_vocab, run_by, settings, target, texts};

fn accepted(records: &[SequenceRecord]) -> usize {
    let rounds = records.iter().flat_map(|record| &record.rounds);
    rounds.map(|round| round.accepted).sum()
}

/// Red under: noise of a position that does not count the depth, or by draft id in place of target id, in
/// `propose::choice`: the text is the same, but next to nothing is accepted.
#[test]
fn shared_noise_accepts_almost_as_much_as_speculative_sampling() {
    let target = target();
    let sequences = prompts(12);
    let vocab = reduced_vocab();
    let drafters = drafters(&target, &vocab);
    // Accepted drafts: all, and those behind the first of a round.
    let counts = |rule| {
        let mut counts = [0, 0];
        for drafter in &drafters {
            let mut proposer = DrafterProposer::new("drafter", drafter, target.ends(), &vocab);
            let settings = settings(1.0, 12);
            let output = run_by(rule, &target, &mut proposer, &sequences, &settings);
            for round in output.records.iter().flat_map(|record| &record.rounds) {
                counts[0] += round.accepted;
                counts[1] += round.accepted.saturating_sub(1);
            }
        }
        counts
    };
    let (shared, sampled) = (counts("gumbel"), counts("sampling"));
    // Theory: between (1 - TV) / (1 + TV) and 1 - TV a draft. Noise of its own would leave sum(p q), about a third.
    for (shared, sampled) in shared.into_iter().zip(sampled) {
        assert!(
            shared as f64 > 0.7 * f64::from(sampled as u32),
            "{shared} of {sampled}"
        );
    }
}

/// Red under: `row.position + index` in `GumbelCoupling::own_choice` replaced by `row.position + index.min(6)`, which seven drafts
/// alone show.
#[test]
fn the_text_of_shared_noise_does_not_depend_on_the_drafts() {
    let target = target();
    let sequences = prompts(6);
    let vocabs = [VocabMap::full(VOCAB), reduced_vocab()];
    let all = vocabs.each_ref().map(|vocab| drafters(&target, vocab));
    for (temperature, top_p) in [(1.0, 1.0), (0.7, 0.8)] {
        let base = DecodeSettings {
            sampling: Sampling {
                top_p,
                ..Sampling::at(temperature)
            },
            ..settings(temperature, 1)
        };
        let decode = |proposer: &mut dyn Proposer, gamma, batch_rows| {
            let settings = DecodeSettings {
                gamma,
                batch_rows,
                ..base.clone()
            };
            run_by("gumbel", &target, proposer, &sequences, &settings).records
        };
        let expected = decode(&mut NoProposer, 0, 1);
        let check = |found: &[SequenceRecord], what: &str| {
            let check = compare_text(&expected, found, 1e-3);
            // Rounding decides next to a tie only; at six texts of forty tokens there is none.
            assert_eq!(check.identical, 6, "{what}: {check:?}");
        };
        check(&decode(&mut NoProposer, 0, 8), "none");
        for (gamma, batch_rows) in (1..=7).flat_map(|gamma| [(gamma, 1), (gamma, 8)]) {
            let lookup = LookupConfig { min: 1, max: 4 };
            check(
                &decode(&mut PromptLookup::new(lookup), gamma, batch_rows),
                "lookup",
            );
            check(
                &decode(&mut SuffixLookup::new(1), gamma, batch_rows),
                "suffix",
            );
            let mut model = ModelProposer::new(&target, VOCAB).unwrap();
            check(&decode(&mut model, gamma, batch_rows), "model");
            for (drafters, vocab) in all.iter().zip(&vocabs) {
                for drafter in drafters {
                    let name = drafter.family();
                    let mut proposer = DrafterProposer::new(name, drafter, target.ends(), vocab);
                    let found = decode(&mut proposer, gamma, batch_rows);
                    check(&found, name);
                }
            }
        }
    }
}

/// Scores as well as text: the gaps of the two best are equal to the last bit, which they are not otherwise.
///
/// Red under: `pass_len` always `row.len()` in `forward_alone`;
/// `settings.batch_invariant` ignored in `Batch::logits`.
#[test]
fn nothing_depends_on_drafts_and_neighbours_in_the_batch_invariant_mode() {
    let target = target();
    let sequences = prompts(4);
    let vocab = reduced_vocab();
    let gaps = |records: &[SequenceRecord]| -> Vec<u32> {
        let own = records.iter().flat_map(|record| &record.top_two);
        own.map(|two| two.gap.to_bits()).collect()
    };
    let mut moved_otherwise = 0;
    for (rule, temperature) in [("greedy", 0.0), ("gumbel", 1.0)] {
        let decode = |proposer: &mut dyn Proposer, gamma, batch_rows, batch_invariant| {
            let settings = DecodeSettings {
                gamma,
                batch_invariant,
                ..settings(temperature, batch_rows)
            };
            run_by(rule, &target, proposer, &sequences, &settings).records
        };
        let expected = decode(&mut NoProposer, 0, 1, true);
        for drafter in &drafters(&target, &vocab) {
            let name = drafter.family();
            for (gamma, batch_rows) in [(1, 4), (4, 1), (7, 4)] {
                let mut proposer = DrafterProposer::new(name, drafter, target.ends(), &vocab);
                let found = decode(&mut proposer, gamma, batch_rows, true);
                assert_eq!(texts(&found), texts(&expected), "{rule} {name} {gamma}");
                assert_eq!(gaps(&found), gaps(&expected), "{rule} {name} {gamma}");
                let usual = decode(&mut proposer, gamma, batch_rows, false);
                moved_otherwise += usize::from(gaps(&usual) != gaps(&expected));
            }
        }
    }
    assert!(moved_otherwise > 0, "the mode would be needless");
}

#[test]
fn the_text_of_the_targets_own_draws_does_not_depend_on_the_drafts() {
    let target = target();
    let sequences = prompts(6);
    let vocab = reduced_vocab();
    let expected = run_by(
        "target_only",
        &target,
        &mut NoProposer,
        &sequences,
        &settings(1.0, 1),
    );
    for drafter in &drafters(&target, &vocab) {
        let mut proposer = DrafterProposer::new(drafter.family(), drafter, target.ends(), &vocab);
        let found = run_by(
            "target_only",
            &target,
            &mut proposer,
            &sequences,
            &settings(1.0, 8),
        );
        assert_eq!(
            texts(&found.records),
            texts(&expected.records),
            "{}",
            drafter.family()
        );
        assert!(accepted(&found.records) > 0, "{}", drafter.family());
    }
}

/// The block rule draws anew in each round, and must not depend on its neighbours all the same.
#[test]
fn the_text_of_the_block_rule_does_not_depend_on_the_batch() {
    let target = target();
    let sequences = prompts(6);
    let vocab = reduced_vocab();
    for drafter in &drafters(&target, &vocab) {
        let [alone, together] = [1, 8].map(|batch_rows| {
            let mut proposer = DrafterProposer::new("drafter", drafter, target.ends(), &vocab);
            run_by(
                "block",
                &target,
                &mut proposer,
                &sequences,
                &settings(1.0, batch_rows),
            )
            .records
        });
        assert_eq!(alone, together, "{}", drafter.family());
    }
}

/// The target as its own draft model knows what it will draw: all drafts become text, in caches that are rolled back
/// after every round and rows that leave the batch at different times.
#[test]
fn the_target_drafts_for_itself_without_a_miss() {
    let target = target();
    let sequences = prompts(9);
    for (rule, temperature) in [
        ("gumbel", 1.0),
        ("sampling", 1.0),
        ("block", 1.0),
        ("greedy", 0.0),
    ] {
        let settings = DecodeSettings {
            stop_ids: vec![3],
            ..settings(temperature, 4)
        };
        let mut model = ModelProposer::new(&target, VOCAB).unwrap();
        let records = run_by(rule, &target, &mut model, &sequences, &settings).records;
        let mut proposed = 0;
        for round in records.iter().flat_map(|record| &record.rounds) {
            assert_eq!(round.accepted, round.proposed, "{rule}");
            proposed += round.proposed;
        }
        let new: usize = records.iter().map(|record| record.ids.len()).sum();
        // Four drafts and one token of the target's own a round, but for the ends of nine texts.
        assert!(
            5 * proposed > 4 * (new - 6 * 9),
            "{rule}: {proposed} drafts of {new} tokens"
        );
    }
}
