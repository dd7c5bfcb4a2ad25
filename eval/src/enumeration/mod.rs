//! [`check_rules`]: has the text the target's law under every rule, whatever the drafter does?
//!
//! In worlds of four tokens the law of a text is known. Rules take every random decision through
//! [`crate::verify::Chance`], so that each answer can be given in turn, drafts included, and the law of the text be summed
//! from the rule's own code ([`Decoding::law`]). Noise that is shared is no choice among a few and cannot be enumerated;
//! the texts of such a rule are drawn and counted ([`ChiSquare`]).

mod chance;
mod chi_square;
mod decoding;
mod world;

use draftsmith_models::sample::Sampling;
use serde::Serialize;

use crate::propose::DraftChoice;
use crate::verify::{Coins, RULES, VerifyRule};

pub use chance::{Branches, RoundChance};
pub use chi_square::ChiSquare;
pub use decoding::{Decoding, Drafts, largest_difference};
pub use world::{LENGTH, TEXTS, TOKENS, Table, World, code};

/// Largest error of an enumerated law: sums of a few thousand products in f64.
pub const TOLERANCE: f64 = 1e-9;
/// Texts that are drawn in a world.
pub const DRAWS: u64 = 50_000;
/// Seed of their random numbers.
const SEED: u64 = 4;

/// The shape of drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// One behind the other.
    Chains,
    /// Several behind one.
    Trees,
}

impl Shape {
    /// The name as in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chains => "chains",
            Self::Trees => "trees",
        }
    }
}

/// How a rule is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The law is computed.
    Enumeration,
    /// Texts are drawn.
    ChiSquare,
}

/// What was found of one rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RuleCheck {
    /// Name of the rule.
    pub rule: &'static str,
    /// What it verified.
    pub shape: Shape,
    /// How it was checked.
    pub method: Method,
    /// Worlds, each counted once for every length or seed of its drafts.
    pub cases: usize,
    /// Enumeration: largest difference of the probability of a text to the target's; chi-square: the statistic of the case
    /// that is nearest to its bound.
    pub figure: f64,
    /// What `figure` must stay below.
    pub bound: f64,
}

impl RuleCheck {
    /// Whether the text has the target's law.
    pub fn holds(&self) -> bool {
        self.figure < self.bound
    }

    /// The figures in words.
    pub fn describe(&self) -> String {
        let Self {
            cases,
            figure,
            bound,
            ..
        } = self;
        match self.method {
            Method::Enumeration => {
                format!("{cases} cases enumerated, largest error {figure:.1e} (bound {bound:.0e})")
            }
            Method::ChiSquare => {
                format!("{cases} cases drawn, chi-square {figure:.1} (bound {bound:.1})")
            }
        }
    }
}

/// Every rule over chains, and over trees where it verifies them.
pub fn check_rules() -> Vec<RuleCheck> {
    let chains = RULES.iter().map(|rule| check(*rule, Shape::Chains));
    let trees = RULES.iter().filter(|rule| rule.walks_trees());
    let trees = trees.map(|rule| check(*rule, Shape::Trees));
    chains.chain(trees).collect()
}

fn check(rule: &dyn VerifyRule, shape: Shape) -> RuleCheck {
    match rule.draft_choice() {
        DraftChoice::SharedNoise => check_drawn(rule, shape),
        _ => check_enumerated(rule, shape),
    }
}

/// Computes the law of the text. A rule that is lossless at temperature 0 only is checked there.
pub fn check_enumerated(rule: &dyn VerifyRule, shape: Shape) -> RuleCheck {
    let warm = Sampling::default();
    let is_lossless = rule.is_lossless(&warm);
    let sampling = if is_lossless {
        warm
    } else {
        Sampling::greedy()
    };
    let drafts: Vec<Drafts> = match shape {
        Shape::Chains => (1..=3).map(Drafts::Chain).collect(),
        Shape::Trees => (0..10).map(Drafts::Tree).collect(),
    };
    let worlds = World::several(sampling);
    let errors = worlds.iter().flat_map(|world| {
        let decoding = |&drafts| Decoding {
            world,
            rule,
            drafts,
        };
        drafts.iter().map(decoding).map(|decoding| decoding.error())
    });
    RuleCheck {
        rule: rule.name(),
        shape,
        method: Method::Enumeration,
        cases: worlds.len() * drafts.len(),
        figure: errors.fold(0.0, f64::max),
        bound: TOLERANCE,
    }
}

/// Draws texts and counts them.
pub fn check_drawn(rule: &dyn VerifyRule, shape: Shape) -> RuleCheck {
    let drafts = match shape {
        Shape::Chains => Drafts::Chain(2),
        Shape::Trees => Drafts::Tree(0),
    };
    let worlds = World::at_several_settings();
    let found = worlds.iter().map(|world| {
        let decoding = Decoding {
            world,
            rule,
            drafts,
        };
        distance(world, |stream| {
            decoding.text(|first| coins(rule, stream, first))
        })
    });
    let nearest = found.reduce(|one, other| {
        let share = |found: &ChiSquare| found.statistic / found.bound;
        if share(&other) > share(&one) {
            other
        } else {
            one
        }
    });
    RuleCheck {
        rule: rule.name(),
        shape,
        method: Method::ChiSquare,
        cases: worlds.len(),
        figure: nearest.map_or(0.0, |found| found.statistic),
        bound: nearest.map_or(0.0, |found| found.bound),
    }
}

/// The random numbers of decoding, in the round that begins at position `first`.
fn coins(rule: &dyn VerifyRule, stream: u64, first: usize) -> Coins {
    let is_new = rule.draft_choice() == DraftChoice::DrawnEachRound;
    Coins {
        seed: SEED,
        stream,
        round: is_new.then_some(first),
    }
}

/// Chi-square of drawn texts, by the stream of their random numbers, against the target's law.
pub fn distance(world: &World, text: impl Fn(u64) -> usize) -> ChiSquare {
    let mut counts = vec![0.0; TEXTS];
    for stream in 0..DRAWS {
        counts[text(stream)] += 1.0;
    }
    ChiSquare::new(&counts, &world.target_law())
}
