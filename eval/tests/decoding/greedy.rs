//! Greedy speculative output equals plain greedy output; settings and prompts that do not fit.

use draftsmith_eval::decode::{DecodeProgress, Decoder, Sequence, decode};
use draftsmith_eval::error::EvalError;
use draftsmith_eval::propose::prompt_lookup::LookupConfig;
use draftsmith_eval::propose::{
    DrafterProposer, ModelProposer, NoProposer, PromptLookup, Proposer, SuffixLookup,
};
use draftsmith_eval::verify;
use draftsmith_models::generate::{GenerateSettings, Prompt, generate};
use draftsmith_models::rng::Purpose;
use draftsmith_models::sample::Sampling;
use draftsmith_models::vocab::VocabMap;

use crate::tiny::{
    Oracle, Truth, VOCAB, drafter, drafters, plain, prompts, reduced_vocab, run, settings, target,
    texts,
};

#[test]
fn decoding_without_drafts_equals_plain_generation() {
    let target = target();
    let sequences = prompts(4);
    let records = plain(&target, &sequences, &settings(0.0, 4));
    let list: Vec<Prompt> = sequences
        .iter()
        .map(|sequence| Prompt {
            ids: sequence.prompt.clone(),
            stream: 0,
        })
        .collect();
    let expected = generate(
        &target,
        &list,
        &GenerateSettings {
            sampling: Sampling::greedy(),
            max_new_tokens: 40,
            stop_ids: Vec::new(),
            seed: 0,
            purpose: Purpose::Check,
        },
        |_| true,
    )
    .unwrap();
    for (record, continuation) in records.iter().zip(&expected) {
        assert_eq!(record.ids, continuation.ids);
        // The prefill's token is no round.
        assert_eq!(record.rounds.len(), 39);
        assert_eq!(record.top_two.len(), 40);
    }
}

#[test]
fn greedy_output_does_not_depend_on_the_drafter_or_the_batch() {
    let target = target();
    let sequences = prompts(6);
    let expected = plain(&target, &sequences, &settings(0.0, 1));
    let full = VocabMap::full(VOCAB);
    let reduced = reduced_vocab();
    let drafters = [&full, &reduced].map(|vocab| drafters(&target, vocab));
    for batch_rows in [1, 4] {
        let settings = settings(0.0, batch_rows);
        let decode = |proposer: &mut dyn Proposer| run(&target, proposer, &sequences, &settings);
        let lookup = LookupConfig { min: 2, max: 4 };
        let mut model = ModelProposer::new(&target, VOCAB).unwrap();
        let mut outputs = vec![
            decode(&mut PromptLookup::new(lookup)),
            decode(&mut SuffixLookup::new(1)),
            decode(&mut model),
        ];
        for (drafters, vocab) in drafters.iter().zip([&full, &reduced]) {
            for drafter in drafters {
                let name = drafter.family();
                let mut proposer = DrafterProposer::new(name, drafter, target.ends(), vocab);
                outputs.push(decode(&mut proposer));
            }
        }
        for output in outputs {
            assert_eq!(texts(&output.records), texts(&expected));
            let accepted: usize = output
                .records
                .iter()
                .flat_map(|r| &r.rounds)
                .map(|r| r.accepted)
                .sum();
            assert!(
                accepted > 0,
                "nothing was ever accepted: the test shows too little"
            );
        }
    }
}

#[test]
fn a_perfect_drafter_commits_whole_blocks() {
    let target = target();
    let sequences = prompts(3);
    let settings = settings(0.0, 2);
    let expected = plain(&target, &sequences, &settings);
    let mut oracle = Oracle(Truth::new(&sequences, &expected));
    let output = run(&target, &mut oracle, &sequences, &settings);
    assert_eq!(texts(&output.records), texts(&expected));
    for record in &output.records {
        // 39 tokens after the prefill's in blocks of 5; the last round drafts only what still fits.
        assert_eq!(record.rounds.len(), 8);
        assert_eq!(record.rounds[7].proposed, 3);
    }
}

#[test]
fn sampled_output_does_not_depend_on_the_batch() {
    let target = target();
    let sequences = prompts(7);
    let vocab = reduced_vocab();
    let drafter = drafter(&target, &vocab);
    let mut records = [1, 3, 7].map(|batch_rows| {
        let mut proposer = DrafterProposer::new("drafter", &drafter, target.ends(), &vocab);
        run(
            &target,
            &mut proposer,
            &sequences,
            &settings(1.0, batch_rows),
        )
        .records
    });
    let first = std::mem::take(&mut records[0]);
    // Coins fall within rounding of a threshold about once in a million draws; here none does.
    assert_eq!(first, records[1]);
    assert_eq!(first, records[2]);
    let other_seed = draftsmith_eval::decode::DecodeSettings {
        seed: 18,
        ..settings(1.0, 1)
    };
    let mut proposer = DrafterProposer::new("drafter", &drafter, target.ends(), &vocab);
    let other = run(&target, &mut proposer, &sequences, &other_seed).records;
    assert_ne!(texts(&first), texts(&other));
}

#[test]
fn what_does_not_fit_is_refused_before_decoding() {
    let target = target();
    let refuse = |rule: &str, temperature: f64, prompt: Vec<u32>| {
        let settings = settings(temperature, 1);
        let decoder = Decoder {
            target: &target,
            rule: verify::find(rule).unwrap(),
            settings: &settings,
        };
        let id = "p".to_owned();
        let sequences = [Sequence { id, prompt }];
        decode(&decoder, &mut NoProposer, &sequences, &mut |_| true)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refuse("sampling", 1.0, Vec::new()),
        "prompt `p` has 0 tokens, expected 1 to 212 (the target's context less `max_new_tokens` and \
         `gamma`)"
    );
    assert!(refuse("sampling", 1.0, vec![0; 213]).contains("213 tokens"));
    assert_eq!(
        refuse("sampling", 1.0, vec![16]),
        "prompt `p` holds token 16, but the target has 16 tokens"
    );
    assert_eq!(
        refuse("greedy", 1.0, vec![1]),
        "the verification rule `greedy` is not lossless at temperature 1"
    );
}

#[test]
fn an_interrupted_run_ends_at_the_next_round() {
    let target = target();
    let settings = settings(0.0, 2);
    let decoder = Decoder {
        target: &target,
        rule: verify::find("greedy").unwrap(),
        settings: &settings,
    };
    let mut seen: Vec<DecodeProgress> = Vec::new();
    let result = decode(&decoder, &mut NoProposer, &prompts(3), &mut |progress| {
        seen.push(progress);
        progress.tokens < 10
    });
    assert!(matches!(result, Err(EvalError::Interrupted)));
    assert_eq!(seen.last().unwrap().tokens, 10);
    assert_eq!(seen.last().unwrap().total, 3);
}
