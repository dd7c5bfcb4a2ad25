//! Ends inside a block.

use draftsmith_eval::decode::DecodeSettings;
use draftsmith_models::generate::FinishReason;

use crate::tiny::{Oracle, Truth, VOCAB, plain, prompts, run, settings, target};

/// Pitfall 67: a stop token that was accepted inside a block, came as the bonus token, or is one of
/// several, ends the text at that token.
/// Red under: `ended` in `settle` of `decode/batch.rs` set to `false`.
#[test]
fn pitfall_67_a_stop_token_anywhere_in_a_block_ends_the_text() {
    let target = target();
    let sequences = prompts(5);
    let gamma_5 = DecodeSettings {
        gamma: 5,
        ..settings(0.0, 3)
    };
    let free = plain(&target, &sequences, &gamma_5);
    let mut oracle = Oracle(Truth::new(&sequences, &free));
    // Every token that plain decoding writes among the first seven ends it in turn: inside the first
    // block, as its bonus token (index 6), and as the prefill's own token (index 0).
    for index in 0..7 {
        for extra in [
            None,
            Some(((free[0].ids[index] + 7) as usize % VOCAB) as u32),
        ] {
            let stop_ids: Vec<u32> = [free[0].ids[index]].into_iter().chain(extra).collect();
            let stopping = DecodeSettings {
                stop_ids: stop_ids.clone(),
                ..gamma_5.clone()
            };
            let expected = plain(&target, &sequences, &stopping);
            let found = run(&target, &mut oracle, &sequences, &stopping).records;
            for (expected, found) in expected.iter().zip(&found) {
                assert_eq!(expected.ids, found.ids);
                assert_eq!(expected.finish, found.finish);
                let early = &found.ids[..found.ids.len() - 1];
                assert!(early.iter().all(|id| !stop_ids.contains(id)));
                let committed: usize = found.rounds.iter().map(|round| round.committed).sum();
                assert_eq!(committed + 1, found.ids.len());
            }
            assert_eq!(found[0].finish, FinishReason::Stop);
        }
    }
}

#[test]
fn the_length_limit_counts_the_prefill_token() {
    let target = target();
    for max_new_tokens in 1..8 {
        let limited = DecodeSettings {
            max_new_tokens,
            ..settings(0.0, 2)
        };
        let free = plain(&target, &prompts(3), &settings(0.0, 2));
        let mut oracle = Oracle(Truth::new(&prompts(3), &free));
        for record in run(&target, &mut oracle, &prompts(3), &limited).records {
            assert_eq!(record.ids.len(), max_new_tokens);
            assert_eq!(record.finish, FinishReason::Length);
        }
    }
}
