//! Every rule leaves the target's distribution unchanged, whatever the drafter does.

use std::collections::BTreeMap;
use std::sync::Mutex;

use draftsmith_eval::decode::{DecodeSettings, Decoder, Sequence, decode};
use draftsmith_eval::enumeration::{
    ChiSquare, Decoding, Drafts, RoundChance, Shape, World, check_drawn, distance,
};
use draftsmith_eval::propose::{DraftChoice, DrafterProposer};
use draftsmith_eval::verify::{
    Chance, Coins, RULES, Realised, RowToVerify, SpeculativeSampling, Verdict, VerifyRule,
};
use draftsmith_models::batch::StateSpec;
use draftsmith_models::sample::{Sampling, draw};
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::host_values;

use crate::tiny::{VOCAB, drafter, prompts, reduced_vocab, run_by, settings, target};

/// Pitfall 68: whatever the drafts were drawn from, the outcome has the target's law, at temperatures 0.5 and 1 and with
/// truncation. Red under: `round: None` in `coins` of `enumeration`, for the block rule.
#[test]
fn pitfall_68_drawn_texts_follow_the_targets_law_under_every_rule() {
    let sampled = RULES.iter().filter(|rule| rule.name() != "greedy");
    for rule in sampled {
        let check = check_drawn(*rule, Shape::Chains);
        assert!(check.holds(), "{check:?}");
    }
}

/// Coins of which those that draw a replacement are those that drew the draft.
#[derive(Debug)]
struct Reused(Coins);

impl Chance for Reused {
    fn accepts(&mut self, position: usize, probability: f64) -> bool {
        self.0.accepts(position, probability)
    }

    fn picks(&mut self, position: usize, weights: &[f64]) -> u32 {
        draw(weights, self.0.draft(position))
    }

    fn noise(&mut self, position: usize, vocab_size: usize) -> Vec<f64> {
        self.0.noise(position, vocab_size)
    }
}

impl RoundChance for Reused {
    fn drafts(&mut self, position: usize, law: &[f64]) -> usize {
        self.0.drafts(position, law)
    }
}

#[test]
fn noise_used_for_a_draft_and_again_for_its_replacement_is_caught() {
    let world = World::new(1, &[0, 1, 2, 3]);
    let decoding = Decoding {
        world: &world,
        rule: &SpeculativeSampling,
        drafts: Drafts::Chain(1),
    };
    let coins = |stream| Coins {
        seed: 4,
        stream,
        round: None,
    };
    let found = distance(&world, |stream| decoding.text(|_| Reused(coins(stream))));
    assert!(found.statistic > 2.0 * found.bound, "{found:?}");
}

/// Law of the second and third new token of the target itself.
fn model_law(target: &TargetModel, prompt: &[u32]) -> Vec<f64> {
    let rows = |prefixes: &[Vec<u32>]| -> Vec<Vec<f64>> {
        let refs: Vec<&[u32]> = prefixes.iter().map(Vec::as_slice).collect();
        let want = StateSpec {
            aux_layer_ids: Vec::new(),
        };
        let hidden = target.forward(&refs, &want).final_hidden;
        let [num, len, _] = hidden.dims();
        let last = hidden.narrow(1, len - 1, 1).reshape([num as i32, -1]);
        let logits = host_values(&target.ends().logits(last));
        let probabilities = |row: &[f32]| Sampling::default().probabilities(row);
        logits.chunks(VOCAB).map(probabilities).collect()
    };
    let extend = |tail: Vec<u32>| [prompt, tail.as_slice()].concat();
    let tokens = || 0..VOCAB as u32;
    let first = &rows(&[prompt.to_vec()])[0];
    let second = rows(&tokens().map(|a| extend(vec![a])).collect::<Vec<_>>());
    let pairs: Vec<Vec<u32>> = tokens()
        .flat_map(|a| tokens().map(move |b| vec![a, b]))
        .collect();
    let third = rows(&pairs.into_iter().map(extend).collect::<Vec<_>>());
    let mut law = vec![0.0; VOCAB * VOCAB];
    for a in 0..VOCAB {
        for b in 0..VOCAB {
            for c in 0..VOCAB {
                law[b * VOCAB + c] += first[a] * second[a][b] * third[a * VOCAB + b][c];
            }
        }
    }
    law
}

#[test]
fn decoded_texts_follow_the_targets_law_under_every_rule() {
    let target = target();
    let vocab = reduced_vocab();
    let drafter = drafter(&target, &vocab);
    let prompt = vec![3, 9, 4];
    let sequences: Vec<Sequence> = (0..12_000)
        .map(|index| Sequence {
            id: format!("run {index}"),
            prompt: prompt.clone(),
        })
        .collect();
    let settings = DecodeSettings {
        gamma: 3,
        max_new_tokens: 5,
        ..settings(1.0, 200)
    };
    let law = model_law(&target, &prompt);
    for rule in ["sampling", "gumbel", "target_only", "block"] {
        let mut proposer = DrafterProposer::new("drafter", &drafter, target.ends(), &vocab);
        let records = run_by(rule, &target, &mut proposer, &sequences, &settings).records;
        let mut counts = vec![0.0; VOCAB * VOCAB];
        for record in &records {
            counts[record.ids[1] as usize * VOCAB + record.ids[2] as usize] += 1.0;
        }
        let found = ChiSquare::new(&counts, &law);
        assert!(found.holds(), "{rule}: {found:?}");
    }
}

/// Asks for the coin of every draft and writes down the answers; accepts nothing.
#[derive(Debug)]
struct Spy {
    choice: DraftChoice,
    /// Position and answer.
    seen: Mutex<Vec<(usize, bool)>>,
}

impl VerifyRule for Spy {
    fn name(&self) -> &'static str {
        "spy"
    }

    fn is_lossless(&self, _sampling: &Sampling) -> bool {
        true
    }

    fn draft_choice(&self) -> DraftChoice {
        self.choice
    }

    fn realised(&self) -> Option<Realised> {
        None
    }

    fn verify(&self, row: &RowToVerify<'_>, chance: &mut dyn Chance) -> Verdict {
        let mut seen = self.seen.lock().unwrap();
        for position in row.position..row.position + row.drafts.len() {
            seen.push((position, chance.accepts(position, 0.5)));
        }
        let next = chance.picks(row.position, &row.probabilities(0));
        Verdict { accepted: 0, next }
    }
}

/// Share of positions, drafted in several rounds, whose coin was not always the same.
fn share_of_new_coins(choice: DraftChoice) -> f64 {
    let target = target();
    let vocab = reduced_vocab();
    let drafter = drafter(&target, &vocab);
    let spy: &'static Spy = Box::leak(Box::new(Spy {
        choice,
        seen: Mutex::default(),
    }));
    let settings = settings(1.0, 1);
    let decoder = Decoder {
        target: &target,
        rule: spy,
        settings: &settings,
    };
    let mut proposer = DrafterProposer::new("drafter", &drafter, target.ends(), &vocab);
    decode(&decoder, &mut proposer, &prompts(1), &mut |_| true).unwrap();
    let mut answers: BTreeMap<usize, Vec<bool>> = BTreeMap::new();
    for (position, answer) in spy.seen.lock().unwrap().iter() {
        answers.entry(*position).or_default().push(*answer);
    }
    let several = answers.values().filter(|answers| answers.len() == 4);
    let is_new = |answers: &&Vec<bool>| answers.iter().any(|answer| *answer != answers[0]);
    several.clone().filter(is_new).count() as f64 / several.count() as f64
}

/// The block rule looks ahead, so a position must have a new coin in each round: four of them are alike once in eight. The
/// others look at a coin once, and it is that of the position.
/// Red under: `round: None` in `Batch::settle`.
#[test]
fn rules_that_look_ahead_have_new_coins_in_each_round() {
    assert!(share_of_new_coins(DraftChoice::DrawnEachRound) > 0.6);
    assert!(share_of_new_coins(DraftChoice::Drawn) < 1e-9);
}
