//! The exact law of the text under every rule, from the rule's own code and every answer of chance; and rules that are
//! almost right.

use draftsmith_eval::propose::tree::DraftTree;
use draftsmith_eval::propose::{DraftChoice, DraftDistribution, DraftToken};
use draftsmith_eval::verify::sampling::{accept_probability, residual};
use draftsmith_eval::verify::{
    BlockVerification, Chance, Realised, RowToVerify, SpeculativeSampling, TargetOnly,
    TreeToVerify, Verdict, VerifyRule, walk_tree,
};
use draftsmith_models::gumbel::NoiseAt;
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::sample::{Sampling, argmax};
use half::bf16;

use crate::tables::{Branches, LENGTH, TOKENS, World, code};

const NOWHERE: NoiseAt = NoiseAt {
    seed: 0,
    stream: 0,
    position: 0,
};

/// What decoding does in one world under one rule.
struct Decoding<'a> {
    world: &'a World,
    rule: &'a dyn VerifyRule,
    /// Drafts a round.
    gamma: usize,
}

impl Decoding<'_> {
    /// Every outcome of a round behind `text` with its probability: the tokens that it adds.
    fn round(&self, text: &[usize], visit: &mut dyn FnMut(Vec<usize>, f64)) {
        let run = |branches: &mut Branches| {
            let mut drafts: Vec<DraftToken> = Vec::new();
            let mut last = text.last().copied().unwrap_or(0);
            for _ in 0..self.gamma {
                let choice = self.rule.draft_choice();
                let draw = |law: &[f64]| branches.choose(law);
                let draft = self.world.draft(last, choice, NOWHERE, draw);
                last = draft.id as usize;
                drafts.push(draft);
            }
            self.world.verified(self.rule, text, &drafts, branches)
        };
        Branches::every(run, visit);
    }

    /// Law of the first tokens, by code.
    fn law(&self) -> Vec<f64> {
        let mut law = vec![0.0; TOKENS.pow(LENGTH as u32)];
        self.add_law(&[], 1.0, &mut law);
        law
    }

    fn add_law(&self, text: &[usize], probability: f64, law: &mut [f64]) {
        if text.len() >= LENGTH {
            law[code(text)] += probability;
            return;
        }
        self.round(text, &mut |new, here| {
            self.add_law(&[text, &new].concat(), probability * here, law);
        });
    }

    /// Largest difference to the target's law over all texts.
    fn error(&self) -> f64 {
        let differences = self.law().into_iter().zip(self.world.target_law());
        differences.fold(0.0, |most, (found, expected)| {
            f64::max(most, (found - expected).abs())
        })
    }

    /// Mean tokens of a round behind token 0.
    fn tokens(&self) -> f64 {
        let mut mean = 0.0;
        self.round(&[], &mut |new, probability| {
            mean += probability * new.len() as f64;
        });
        mean
    }
}

/// Sums of a few thousand products in f64.
const TOLERANCE: f64 = 1e-9;

/// Red under: `residual` not subtracting, `p / (p + q)` in `accept_probability`, a stop at the first failure in
/// `BlockVerification`, `left / (left + lost)` there replaced by `reach`, `reach` left out of its product.
#[test]
fn the_joint_law_is_the_targets_under_every_rule() {
    let rules: [&dyn VerifyRule; 3] = [&SpeculativeSampling, &TargetOnly, &BlockVerification];
    for world in World::several() {
        for rule in rules {
            for gamma in 1..=3 {
                let world = &world;
                let error = Decoding { world, rule, gamma }.error();
                assert!(
                    error < TOLERANCE,
                    "{} with {gamma} drafts: {error}",
                    rule.name()
                );
            }
        }
    }
}

/// A random tree of drafts behind `text`: up to three children at each node, up to three deep.
fn tree_behind(text: &[usize], seed: u64) -> DraftTree {
    let place = text
        .iter()
        .fold(1, |place, token| place * (TOKENS + 1) + token);
    let mut stream = Stream::new(seed, Purpose::Check, place as u64);
    let mut tree = DraftTree::default();
    let mut level = vec![None];
    for _ in 0..3 {
        let mut next = Vec::new();
        for parent in level {
            for id in stream.permutation(TOKENS).into_iter().take(stream.below(4)) {
                next.push(Some(tree.ids.len()));
                tree.ids.push(id as u32);
                tree.parents.push(parent);
            }
        }
        level = next;
    }
    tree
}

/// Adds the law of what becomes of `text`, with a tree of its own in every round, to `law`.
fn add_law_of_trees(world: &World, seed: u64, text: &[usize], share: f64, law: &mut [f64]) {
    if text.len() >= LENGTH {
        law[code(text)] += share;
        return;
    }
    let tree = tree_behind(text, seed);
    let last = text.last().copied().unwrap_or(0);
    let lasts = std::iter::once(last).chain(tree.ids.iter().map(|&id| id as usize));
    let row = TreeToVerify {
        tree: &tree,
        logits: &lasts
            .flat_map(|last| world.p[last].clone())
            .collect::<Vec<f32>>(),
        vocab_size: TOKENS,
        sampling: &world.sampling,
        stop_ids: &[],
        position: text.len(),
    };
    let run = |branches: &mut Branches| walk_tree(&TargetOnly, &row, branches);
    Branches::every(run, |walk, probability| {
        assert_eq!(walk.tokens.len(), walk.accepted + 1);
        let new = walk.tokens.iter().map(|&token| token as usize);
        let text: Vec<usize> = text.iter().copied().chain(new).collect();
        add_law_of_trees(world, seed, &text, share * probability, law);
    });
}

/// Red under: `|node: usize| node + 1` in `walk_tree` replaced by `|node: usize| node`.
#[test]
fn the_joint_law_is_the_targets_under_every_tree() {
    for world in World::several() {
        for seed in 0..10 {
            let mut law = vec![0.0; TOKENS.pow(LENGTH as u32)];
            add_law_of_trees(&world, seed, &[], 1.0, &mut law);
            for (found, expected) in law.into_iter().zip(world.target_law()) {
                assert!((found - expected).abs() < TOLERANCE, "{found} {expected}");
            }
        }
    }
}

/// Red under: a stop at the first failure in `BlockVerification`.
#[test]
fn block_verification_accepts_at_least_as_much_as_token_by_token() {
    let mut gained = 0;
    for world in World::several() {
        for gamma in 1..=3 {
            let world = &world;
            let tokens = |rule| Decoding { world, rule, gamma }.tokens();
            let [block, single] = [tokens(&BlockVerification), tokens(&SpeculativeSampling)];
            assert!(
                block > single - TOLERANCE,
                "{gamma} drafts: {block} {single}"
            );
            gained += usize::from(block > single + 1e-3);
        }
    }
    assert!(gained > 10, "{gained} cases show a difference");
}

#[test]
fn the_first_draft_is_accepted_as_theory_says() {
    for world in World::several() {
        let (p, q) = (world.target(0), world.drafter_of_target(0));
        let tokens = |rule| {
            let world = &world;
            Decoding {
                world,
                rule,
                gamma: 1,
            }
            .tokens()
        };
        let overlap: f64 = p.iter().zip(&q).map(|(p, q)| p.min(*q)).sum();
        for rule in [&SpeculativeSampling as &dyn VerifyRule, &BlockVerification] {
            assert!(
                (tokens(rule) - 1.0 - overlap).abs() < TOLERANCE,
                "{}",
                rule.name()
            );
        }
        let best = (0..TOKENS).max_by(|&a, &b| q[a].total_cmp(&q[b])).unwrap();
        assert!((tokens(&TargetOnly) - 1.0 - p[best]).abs() < TOLERANCE);
    }
}

/// Speculative sampling with one fault.
#[derive(Clone, Copy, Debug)]
enum Broken {
    /// The residual subtracts the drafted token's probability from every token.
    ScalarResidual,
    /// The bonus token is the most probable one.
    CertainBonus,
    /// The ratio has the drafter's probabilities as they were before they were rounded to draw the draft.
    RatioOfOtherNumbers,
}

impl VerifyRule for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn is_lossless(&self, _sampling: &Sampling) -> bool {
        true
    }

    fn draft_choice(&self) -> DraftChoice {
        DraftChoice::Drawn
    }

    fn realised(&self) -> Option<Realised> {
        None
    }

    fn verify(&self, row: &RowToVerify<'_>, chance: &mut dyn Chance) -> Verdict {
        for (index, draft) in row.drafts.iter().enumerate() {
            let p = row.probabilities(index);
            let q = draft.probability_of(draft.id);
            if !chance.accepts(
                row.position + index,
                accept_probability(p[draft.id as usize], q),
            ) {
                let weights = match self {
                    Self::ScalarResidual => p.iter().map(|p| (p - q).max(0.0)).collect(),
                    _ => residual(&p, 1.0, draft),
                };
                let is_empty = weights.iter().all(|&weight| weight <= 0.0);
                let weights = if is_empty { p } else { weights };
                let next = chance.picks(row.position, &weights);
                let accepted = index;
                return Verdict { accepted, next };
            }
        }
        let accepted = row.drafts.len();
        let next = match self {
            Self::CertainBonus => argmax(row.logits_at(accepted)).unwrap() as u32,
            _ => chance.picks(row.position, &row.probabilities(accepted)),
        };
        Verdict { accepted, next }
    }
}

#[test]
fn almost_right_rules_are_caught() {
    let worlds = World::several();
    for rule in [Broken::ScalarResidual, Broken::CertainBonus] {
        let error = |world| {
            let rule = &rule;
            Decoding {
                world,
                rule,
                gamma: 2,
            }
            .error()
        };
        let worst = worlds.iter().map(error).fold(0.0, f64::max);
        assert!(worst > 1e-2, "{rule:?}: {worst}");
    }
}

/// The law of one token drafted from probabilities in bf16, under the rule and under one whose ratio has those in f64.
fn error_of_one_rounded_token(world: &World, rule: &dyn VerifyRule, ratio_knows: bool) -> f64 {
    let exact = world.drafter(0);
    let rounded: Vec<f64> = exact.iter().map(|&q| bf16::from_f64(q).to_f64()).collect();
    let total: f64 = rounded.iter().sum();
    let rounded: Vec<f64> = rounded.iter().map(|q| q / total).collect();
    let mut law = [0.0; TOKENS];
    let run = |branches: &mut Branches| {
        let index = branches.choose(&rounded);
        let mut draft = world.drawn(0, index);
        if let DraftDistribution::Drawn { probabilities, .. } = &mut draft.distribution {
            *probabilities = if ratio_knows {
                rounded.clone()
            } else {
                exact.clone()
            };
        }
        world.verified(rule, &[], &[draft], branches)[0]
    };
    Branches::every(run, |token, probability| law[token] += probability);
    let differences = law.iter().zip(world.target(0));
    differences.fold(0.0, |most, (found, expected)| {
        f64::max(most, (found - expected).abs())
    })
}

/// A draft drawn in bf16 whose ratio uses f32: the text leaves the target's law, by little and for ever.
#[test]
fn a_ratio_of_other_numbers_than_the_draft_was_drawn_from_is_caught() {
    let worlds = World::several();
    let worst = |rule: &dyn VerifyRule, ratio_knows| {
        let error = |world| error_of_one_rounded_token(world, rule, ratio_knows);
        worlds.iter().map(error).fold(0.0, f64::max)
    };
    assert!(worst(&SpeculativeSampling, true) < TOLERANCE);
    assert!(worst(&Broken::RatioOfOtherNumbers, false) > 1e-5);
}
