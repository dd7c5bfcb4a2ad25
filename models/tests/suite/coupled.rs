//! Objectives that couple slots, against f64 finite differences of their definitions.
//!
//! The definitions are written from the process that they describe, in the probabilities of single drafts:
//! nothing here knows the factors that the objective derives from them. `expected_length` and
//! `round_count` are differentiated as a whole. The weights of D-PACE are detached by definition, so they
//! are frozen while the rest of the objective moves.

use std::collections::BTreeMap;

use draftsmith_models::loss;
use draftsmith_models::objective::{Normalize, ObjectiveConfig, SlotWeight};
use draftsmith_models::slot::Slot;

use crate::objective::{Toy, check_against_plain, config, overlap};

/// What both sides say at one slot.
pub(crate) struct Draft {
    pub(crate) slot: Slot,
    /// Turn of its tokens.
    pub(crate) turn: u32,
    /// The drafter over the draft vocabulary, `[V_draft]`.
    pub(crate) q: Vec<f64>,
    /// The target over the draft vocabulary, not renormalised, `[V_draft]`.
    pub(crate) p: Vec<f64>,
    /// The target's probability of the data token.
    pub(crate) p_token: f64,
    /// Draft id of the data token.
    pub(crate) label: Option<u32>,
}

impl Draft {
    /// Probability that the draft is accepted.
    pub(crate) fn alpha(&self) -> f64 {
        overlap(&self.p, &self.q)
    }

    /// The drafter's probability of the data token; 0 outside the draft vocabulary.
    fn q_token(&self) -> f64 {
        self.label.map_or(0.0, |label| self.q[label as usize])
    }

    /// Probability that the data token is drafted and accepted, over that of the data token.
    fn ratio(&self) -> f64 {
        (self.q_token() / self.p_token).min(1.0)
    }
}

/// The drafts of each round by depth; a round is a row, a turn and an anchor.
fn rounds(drafts: &[Draft]) -> BTreeMap<(usize, u32, usize), Vec<&Draft>> {
    let mut rounds: BTreeMap<_, Vec<&Draft>> = BTreeMap::new();
    for draft in drafts {
        let key = (draft.slot.row, draft.turn, draft.slot.anchor);
        rounds.entry(key).or_default().push(draft);
    }
    for round in rounds.values_mut() {
        round.sort_by_key(|draft| draft.slot.depth);
    }
    rounds
}

/// Expected weight of the drafts that are not accepted, summed over all rounds (2606.12370; theory of the
/// expected length): the first rejection loses the draft and all behind it.
pub(crate) fn expected_length(drafts: &[Draft], weight: impl Fn(usize) -> f64) -> f64 {
    let mut lost = 0.0;
    for round in rounds(drafts).values() {
        let mut reached = 1.0;
        for (place, draft) in round.iter().enumerate() {
            let behind = round[place..].iter().map(|draft| weight(draft.slot.depth));
            lost += reached * (1.0 - draft.alpha()) * behind.sum::<f64>();
            reached *= draft.alpha();
        }
    }
    lost
}

/// Expected rounds of decoding all turns, each from its first anchor on.
pub(crate) fn round_count(drafts: &[Draft]) -> f64 {
    let rounds = rounds(drafts);
    let is_first = |&&(row, turn, anchor): &&(usize, u32, usize)| {
        !rounds.contains_key(&(row, turn, anchor - 1))
    };
    let first = rounds.keys().filter(is_first);
    first.map(|&from| rounds_from(&rounds, from)).sum()
}

/// Expected rounds from an anchor to the end of its turn, none at the end: a round commits the drafts it
/// accepts and one token more.
fn rounds_from(
    rounds: &BTreeMap<(usize, u32, usize), Vec<&Draft>>,
    (row, turn, anchor): (usize, u32, usize),
) -> f64 {
    let Some(drafts) = rounds.get(&(row, turn, anchor)) else {
        return 0.0;
    };
    let after = |accepted: usize| rounds_from(rounds, (row, turn, anchor + accepted + 1));
    let mut expected = 1.0;
    let mut reached = 1.0;
    for (accepted, draft) in drafts.iter().enumerate() {
        expected += reached * (1.0 - draft.ratio()) * after(accepted);
        reached *= draft.ratio();
    }
    expected + reached * after(drafts.len())
}

/// Weight of each draft (2605.18810): the sum over the drafts `m` from it on of the product of the smoothed
/// probabilities of the data token up to `m`.
pub(crate) fn dpace(drafts: &[Draft], smoothing: f64) -> Vec<f64> {
    let smoothed = |draft: &Draft| (1.0 - smoothing) * draft.q_token() + smoothing;
    let of_round = |draft: &Draft| {
        let place = |slot: Slot| (slot.row, slot.anchor);
        let wanted = place(draft.slot);
        drafts
            .iter()
            .filter(move |other| place(other.slot) == wanted)
    };
    let reach = |last: &Draft| -> f64 {
        let before = of_round(last).filter(|other| other.slot.depth <= last.slot.depth);
        before.map(smoothed).product()
    };
    let weight = |draft: &Draft| {
        let behind = of_round(draft).filter(|other| other.slot.depth >= draft.slot.depth);
        behind.map(reach).sum()
    };
    drafts.iter().map(weight).collect()
}

/// Red under: `before * tail` in `expected_length` of `objective/coupled.rs` replaced by `tail`;
/// `/ weight.at(slot.depth)` left out of `Term::for_slots`.
#[test]
fn expected_length_has_the_value_and_gradient_of_its_definition() {
    for toy in [Toy::new(None), Toy::reduced()] {
        for slot_weight in [SlotWeight::Uniform, SlotWeight::StepDecay(0.8)] {
            for (normalize, temperature) in [(Normalize::Weights, 1.0), (Normalize::Slots, 0.6)] {
                let config = ObjectiveConfig {
                    slot_weight,
                    normalize,
                    temperature,
                    ..config(&[("expected_length", 1.0)])
                };
                check_against_plain(&toy, &config);
            }
        }
    }
}

/// Red under: `visits[place]` in `rounds_of_turn` replaced by 1; `last == (row, anchor.wrapping_sub(1))` in
/// `turns` replaced by `last.0 == row`.
#[test]
fn round_count_has_the_value_and_gradient_of_its_definition() {
    for toy in [Toy::new(None), Toy::reduced()] {
        for temperature in [1.0, 0.6] {
            let config = ObjectiveConfig {
                temperature,
                ..config(&[("round_count", 1.0)])
            };
            check_against_plain(&toy, &config);
        }
    }
}

/// Red under: `(1.0 - smoothing) * q` in `dpace` of `objective/coupled.rs` replaced by `q`;
/// `self.own_factor(index)` left out of `SlotTerm::value`.
#[test]
fn dpace_weighs_value_and_gradient_of_every_loss() {
    for toy in [Toy::new(None), Toy::reduced()] {
        for name in loss::names() {
            let config = ObjectiveConfig {
                slot_weight: SlotWeight::Dpace(0.4),
                ..config(&[(name, 1.0)])
            };
            check_against_plain(&toy, &config);
        }
    }
}

/// Beside a coupled term the slot weight holds for the other terms, and the coefficients for all.
/// Red under: `dpace.map(<[f32]>::to_vec)` in `Term::for_slots` replaced by `None`.
#[test]
fn coupled_terms_mix_with_others_in_chunks() {
    let mixtures = [
        (
            SlotWeight::Dpace(0.5),
            [("expected_length", 0.7), ("ce", 0.2)],
        ),
        (
            SlotWeight::ExpDecay(2.0),
            [("expected_length", 0.7), ("kl", 0.2)],
        ),
        (
            SlotWeight::Uniform,
            [("round_count", 0.3), ("lk_hybrid", 0.5)],
        ),
    ];
    for toy in [Toy::new(None), Toy::reduced()] {
        for (slot_weight, losses) in &mixtures {
            let config = ObjectiveConfig {
                slot_weight: *slot_weight,
                temperature: 0.6,
                chunk_positions: 2,
                ..config(losses)
            };
            check_against_plain(&toy, &config);
        }
    }
}

/// The tests above see every branch: tokens that the drafter proposes too rarely, too often, and never; several
/// turns; rounds of every length; and no draft so near a kink that a difference could cross it.
#[test]
fn the_toy_batch_has_every_kind_of_draft() {
    let toy = Toy::reduced();
    let [hidden, head] = toy.wide();
    for temperature in [1.0, 0.6] {
        let drafts = toy.drafts(temperature, &hidden, &head);
        let count = |is: fn(&Draft) -> bool| drafts.iter().filter(|draft| is(draft)).count();
        assert!(count(|draft| draft.label.is_none()) > 0);
        assert!(count(|draft| draft.label.is_some() && draft.ratio() < 1.0) > 0);
        assert!(count(|draft| draft.ratio() >= 1.0) > 0);
        let mut lens: Vec<usize> = rounds(&drafts).values().map(Vec::len).collect();
        lens.sort_unstable();
        assert_eq!(lens, [1, 1, 1, 2, 2, 3, 3]);
        for draft in &drafts {
            // A step of 1e-5 moves a probability by less than a hundredth of this.
            let is_far = |p: f64, q: f64| (p - q).abs() > 1e-3 * q;
            assert!(draft.p.iter().zip(&draft.q).all(|(&p, &q)| is_far(p, q)));
        }
    }
}
