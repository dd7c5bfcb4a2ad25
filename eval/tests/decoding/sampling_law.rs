//! Speculative sampling leaves the target's distribution unchanged, whatever the drafter does.

use std::sync::Arc;

use draftsmith_eval::decode::{DecodeSettings, Sequence};
use draftsmith_eval::propose::{DraftDistribution, DraftToken, DrafterProposer};
use draftsmith_eval::verify::sampling::{accept_probability, residual};
use draftsmith_eval::verify::{Coins, RowToVerify, SpeculativeSampling, VerifyRule};
use draftsmith_models::batch::StateSpec;
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::sample::{Sampling, draw};
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::host_values;

use crate::tiny::{VOCAB, drafter, reduced_vocab, run, settings, target};

const TOKENS: usize = 4;
const DEPTH: usize = 3;
type Table = Vec<Vec<f32>>;

/// A distribution for every previous token, in multiples of 1/64: exact in f32. Some entries are 0.
fn table(seed: u64, width: usize) -> Table {
    let mut stream = Stream::new(seed, Purpose::Check, 2);
    let row = |_| {
        let mut counts = vec![0_u32; width];
        for _ in 0..64 {
            // The square prefers small tokens, so that the rows are uneven.
            let x = stream.uniform();
            counts[((x * x) * width as f64) as usize] += 1;
        }
        counts.iter().map(|&count| count as f32 / 64.0).collect()
    };
    (0..TOKENS).map(row).collect()
}

fn drafted(id: u32, row: &[f32], vocab: &Arc<VocabMap>) -> DraftToken {
    DraftToken {
        id,
        distribution: DraftDistribution::Drawn {
            probabilities: row.to_vec(),
            vocab: Arc::clone(vocab),
        },
    }
}

fn target_law(p: &Table, text: [usize; DEPTH]) -> f64 {
    let mut previous = 0;
    let mut law = 1.0;
    for token in text {
        law *= f64::from(p[previous][token]);
        previous = token;
    }
    law
}

/// Law of the first three tokens of decoding with up to `gamma` drafts a round, by enumeration of drafts
/// and coins; `text` is what was committed so far and `law` its probability.
fn enumerate(
    tables: (&Table, &Table, &Arc<VocabMap>),
    gamma: usize,
    text: &[usize],
    law: f64,
    out: &mut [f64],
) {
    if text.len() >= DEPTH {
        out[code(&text[..DEPTH])] += law;
        return;
    }
    // Prefixes of the round that were accepted so far, with their probability.
    let (p, q, vocab) = tables;
    let mut open = vec![(text.to_vec(), law)];
    for _ in 0..gamma {
        let mut next = Vec::new();
        for (prefix, law) in open {
            let previous = prefix.last().copied().unwrap_or(0);
            for (index, &mass) in q[previous]
                .iter()
                .enumerate()
                .filter(|(_, mass)| **mass > 0.0)
            {
                let id = vocab.to_target(index as u32);
                let draft = drafted(id, &q[previous], vocab);
                let here = law * f64::from(mass);
                let p_here = f64::from(p[previous][id as usize]);
                let accept = accept_probability(p_here, draft.probability_of(id));
                next.push(([prefix.as_slice(), &[id as usize]].concat(), here * accept));
                let weights = residual(&p[previous], &draft);
                let total: f64 = weights.iter().sum();
                for (token, weight) in weights.iter().enumerate() {
                    let law = here * (1.0 - accept) * weight / total;
                    if law > 0.0 {
                        let text = [prefix.as_slice(), &[token]].concat();
                        enumerate(tables, gamma, &text, law, out);
                    }
                }
            }
        }
        open = next;
    }
    for (prefix, law) in open {
        let previous = prefix.last().copied().unwrap_or(0);
        for (token, &share) in p[previous].iter().enumerate() {
            let bonus = law * f64::from(share);
            if bonus > 0.0 {
                let text = [prefix.as_slice(), &[token]].concat();
                enumerate(tables, gamma, &text, bonus, out);
            }
        }
    }
}

fn code(text: &[usize]) -> usize {
    text.iter().fold(0, |code, token| code * TOKENS + token)
}

fn all_texts() -> impl Iterator<Item = [usize; DEPTH]> {
    (0..TOKENS.pow(DEPTH as u32)).map(|code| {
        [
            code / (TOKENS * TOKENS),
            code / TOKENS % TOKENS,
            code % TOKENS,
        ]
    })
}

/// Red under: `residual` returning `p`, and under `accept_probability` returning `p / (p + q)`.
#[test]
fn the_joint_law_equals_the_targets_by_enumeration() {
    for seed in 0..6 {
        let p = table(seed, TOKENS);
        for ids in [vec![0, 1, 2, 3], vec![0, 2, 3], vec![1]] {
            let vocab = Arc::new(VocabMap::new(ids, TOKENS).unwrap());
            let q = table(seed + 100, vocab.len());
            for gamma in 1..=3 {
                let mut law = vec![0.0; TOKENS.pow(DEPTH as u32)];
                enumerate((&p, &q, &vocab), gamma, &[], 1.0, &mut law);
                for text in all_texts() {
                    let expected = target_law(&p, text);
                    // Sums of a few thousand f64 products of numbers exact in f32.
                    assert!((law[code(&text)] - expected).abs() < 1e-9);
                }
            }
        }
    }
}

/// Decodes three tokens with the rule and its random numbers, from tables instead of models.
fn decode_tables(
    p: &Table,
    q: &Table,
    vocab: &Arc<VocabMap>,
    sampling: &Sampling,
    stream: u64,
) -> usize {
    let seed = 4;
    let logits = |row: &[f32]| -> Vec<f32> { row.iter().map(|x| (x + 1e-3).ln()).collect() };
    let mut text: Vec<usize> = Vec::new();
    while text.len() < DEPTH {
        let position = text.len();
        let mut previous = text.last().copied().unwrap_or(0);
        let mut drafts = Vec::new();
        let mut scores = logits(&p[previous]);
        for depth in 0..2 {
            let own = sampling.probabilities(&logits(&q[previous]));
            let index = (position + depth) as u64;
            let coin = Stream::at(seed, Purpose::Draft, stream, index).uniform();
            let id = vocab.to_target(draw(&own, coin));
            drafts.push(drafted(id, &own, vocab));
            previous = id as usize;
            scores.extend(logits(&p[previous]));
        }
        let row = RowToVerify {
            drafts: &drafts,
            logits: &scores,
            vocab_size: TOKENS,
            sampling,
            coins: Coins { seed, stream },
            position,
        };
        let verdict = SpeculativeSampling.verify(&row);
        text.extend(
            drafts[..verdict.accepted]
                .iter()
                .map(|draft| draft.id as usize),
        );
        text.push(verdict.next as usize);
    }
    code(&text[..DEPTH])
}

/// Upper 1 % point of chi-square (Wilson and Hilferty 1931).
fn chi_square_limit(freedom: f64) -> f64 {
    let spread = 2.0 / (9.0 * freedom);
    freedom * (1.0 - spread + 2.326 * spread.sqrt()).powi(3)
}

/// Chi-square statistic over cells of at least five expected counts, the rest pooled.
fn chi_square(counts: &[f64], law: &[f64]) -> (f64, f64) {
    let total: f64 = counts.iter().sum();
    let (mut statistic, mut cells) = (0.0, 0.0);
    let (mut pooled_count, mut pooled_expected) = (0.0, 0.0);
    for (&count, &share) in counts.iter().zip(law) {
        let expected = share * total;
        if share == 0.0 {
            assert!(count < 0.5, "an impossible text was drawn");
        }
        if expected < 5.0 {
            pooled_count += count;
            pooled_expected += expected;
        } else {
            statistic += (count - expected).powi(2) / expected;
            cells += 1.0;
        }
    }
    if pooled_expected > 1.0 {
        statistic += (pooled_count - pooled_expected).powi(2) / pooled_expected;
        cells += 1.0;
    }
    (statistic, chi_square_limit(cells - 1.0))
}

#[test]
fn drawn_texts_follow_the_targets_law_at_all_temperatures_and_truncations() {
    let vocabs = [vec![0, 1, 2, 3], vec![0, 2, 3]];
    for (ids, temperature, top_p) in [
        (&vocabs[0], 1.0, 1.0),
        (&vocabs[0], 0.5, 0.9),
        (&vocabs[1], 1.0, 0.8),
        (&vocabs[1], 0.5, 1.0),
    ] {
        let vocab = Arc::new(VocabMap::new(ids.clone(), TOKENS).unwrap());
        let (p, q) = (table(1, TOKENS), table(2, vocab.len()));
        let sampling = Sampling {
            temperature,
            top_p,
            ..Sampling::default()
        };
        let runs = 50_000;
        let mut counts = vec![0.0; TOKENS.pow(DEPTH as u32)];
        for stream in 0..runs {
            counts[decode_tables(&p, &q, &vocab, &sampling, stream)] += 1.0;
        }
        let truncated: Table = p
            .iter()
            .map(|row| {
                let logits: Vec<f32> = row.iter().map(|x| (x + 1e-3).ln()).collect();
                sampling.probabilities(&logits)
            })
            .collect();
        let law: Vec<f64> = all_texts()
            .map(|text| target_law(&truncated, text))
            .collect();
        let (statistic, limit) = chi_square(&counts, &law);
        assert!(statistic < limit, "{statistic} {limit}");
    }
}

/// Law of the second and third new token of the target itself.
fn model_law(target: &TargetModel, prompt: &[u32]) -> Vec<f64> {
    let rows = |prefixes: &[Vec<u32>]| -> Vec<Vec<f64>> {
        let refs: Vec<&[u32]> = prefixes.iter().map(Vec::as_slice).collect();
        let want = StateSpec {
            aux_layer_ids: Vec::new(),
        };
        let ids = draftsmith_models::batch::padded_ids(&refs, target.device());
        let [num, len] = ids.dims();
        let hidden = target.forward(ids, &want).final_hidden;
        let last = hidden.narrow(1, len - 1, 1).reshape([num as i32, -1]);
        let logits = host_values(&target.ends().logits(last));
        let probabilities = |row: &[f32]| Sampling::default().probabilities(row);
        logits
            .chunks(VOCAB)
            .map(|row| probabilities(row).into_iter().map(f64::from).collect())
            .collect()
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
fn decoded_texts_follow_the_targets_law() {
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
    let mut proposer = DrafterProposer::new("drafter", &drafter, target.ends(), &vocab);
    let records = run(&target, &mut proposer, &sequences, &settings).records;
    let mut counts = vec![0.0; VOCAB * VOCAB];
    for record in &records {
        counts[record.ids[1] as usize * VOCAB + record.ids[2] as usize] += 1.0;
    }
    let (statistic, limit) = chi_square(&counts, &model_law(&target, &prompt));
    assert!(statistic < limit, "{statistic} {limit}");
}
