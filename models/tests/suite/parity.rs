//! The parity gate: training rows equal step-by-step decoding with a cache, for every slot.

use burn::tensor::{Device, FloatDType};
use draftsmith_models::batch::{DraftBatch, TokenBatch};
use draftsmith_models::drafter::{AnyDrafter, DrafterContext};
use draftsmith_models::parity::{Rounds, moved, replay};
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::slot::{batch_slots, valid_slots};
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;

use crate::drafter_golden::Case;
use crate::families::Family;
use crate::support::{row, states_of, tiny_target};

/// The same f32 sums in another order: a few units of 6e-8 per step, relative to the largest logit.
const TOLERANCE: f32 = 5e-6;

/// A drafter of which every part says something, and a batch with states of the tiny target.
fn drafter_and_batch(family: &Family, turns: &[&[u32]], depths: usize) -> (AnyDrafter, DraftBatch) {
    let target = tiny_target("base");
    let rows = turns.iter().enumerate().map(|(index, turns)| {
        let mut stream = Stream::new(5, Purpose::Check, index as u64);
        let ids: Vec<u32> = turns.iter().map(|_| stream.below(320) as u32).collect();
        row(&ids, turns)
    });
    let tokens = TokenBatch {
        rows: rows.collect(),
    };
    let vocab = VocabMap::new((0..320).step_by(3).collect(), 320).unwrap();
    let context = DrafterContext {
        target: target.spec(),
        ends: target.ends(),
        vocab: &vocab,
    };
    let config = family.config(depths);
    let drafter = AnyDrafter::init(&config, context, 7, &Device::flex()).unwrap();
    let drafter = moved(drafter, 7);
    let states = states_of(&target, &tokens, &drafter.state_spec().aux_layer_ids);
    (drafter, DraftBatch { tokens, states })
}

fn check(turns: &[&[u32]], depths: usize) {
    let target = tiny_target("base");
    let all: usize = turns
        .iter()
        .map(|turns| valid_slots(turns, 0, depths).len())
        .sum();
    for family in Family::variants() {
        let (drafter, batch) = drafter_and_batch(&family, turns, depths);
        let family = family.what();
        let every = replay(&drafter, &batch, target.ends(), Rounds::EveryAnchor);
        assert_eq!(every.num_slots, all, "{family}: every slot is visited");
        assert!(every.holds(TOLERANCE), "{family}: {every:?}");
        let varying = replay(&drafter, &batch, target.ends(), Rounds::Varying);
        assert!(varying.num_slots < all, "{family}");
        assert!(varying.holds(TOLERANCE), "{family}: {varying:?}");
    }
}

/// Red under: `(width as f64).sqrt().recip()` in `noise_scale` replaced by 0.
#[test]
fn a_moved_drafter_has_no_parameter_at_its_first_values() {
    for family in Family::all() {
        let target = tiny_target("base");
        let context = DrafterContext {
            target: target.spec(),
            ends: target.ends(),
            vocab: &VocabMap::full(320),
        };
        let config = family.config(3);
        let fresh = AnyDrafter::init(&config, context, 7, &Device::flex()).unwrap();
        let [first, again] =
            [fresh.clone(), fresh.clone()].map(|fresh| moved(fresh, 1).to_tensors());
        for ((before, after), again) in fresh.to_tensors().iter().zip(&first).zip(&again) {
            let what = format!("{} {}", family.name, after.name);
            assert_eq!((&before.name, &before.shape), (&after.name, &after.shape));
            assert!(before.bytes != after.bytes, "{what}");
            assert!(after.bytes.iter().any(|byte| *byte != 0), "{what}");
            assert!(after.bytes == again.bytes, "{what}");
        }
    }
}

/// Pitfall 44: 6 tokens, 4 steps. Red under: `+ bias` left out of `Dspark::next_logits`; `mask.clone()` of the later steps in `unrolled_attention`
/// shifted by one key (`Tensor::cat(vec![mask.narrow(3, 1, len - 1), mask.narrow(3, len - 1, 1)], 3)`).
#[test]
fn pitfall_44_later_steps_see_the_keys_that_serving_sees() {
    check(&[&[0, 1, 1, 1, 1, 1]], 4);
}

#[test]
fn rows_of_different_length_and_several_turns() {
    let long: Vec<u32> = (0..40).map(|t| u32::from(t > 8)).collect();
    check(
        &[
            &[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2, 0],
            &[0, 1, 1, 2, 2, 2, 2, 2],
            &long,
            &[0, 0, 0, 0, 1, 1],
        ],
        4,
    );
}

#[test]
fn the_golden_drafters_decode_as_they_were_trained() {
    for case in Case::all() {
        let drafter = case.drafter(&Device::flex());
        for rounds in [Rounds::EveryAnchor, Rounds::Varying] {
            let found = replay(&drafter, &case.batch, &case.ends, rounds);
            assert!(found.holds(TOLERANCE), "{}: {found:?}", case.what);
        }
    }
}

/// Rows of a batch do not touch each other: the outputs of a row are those of the row alone.
#[test]
fn padding_and_neighbours_change_nothing() {
    let turns: [&[u32]; 2] = [&[0, 0, 1, 1, 1, 1, 1, 1, 1], &[0, 1, 1, 1]];
    let target = tiny_target("base");
    for family in Family::all() {
        neighbours_change_nothing(&family, &turns, &target);
    }
}

fn neighbours_change_nothing(family: &Family, turns: &[&[u32]], target: &TargetModel) {
    let (drafter, both) = drafter_and_batch(family, turns, 3);
    let slots = batch_slots(&both.tokens, 3);
    let together = drafter.draft_slots(&both, &slots, target.ends(), FloatDType::F32);
    let tokens = TokenBatch {
        rows: vec![both.tokens.rows[1].clone()],
    };
    let states = states_of(target, &tokens, &drafter.state_spec().aux_layer_ids);
    let single = batch_slots(&tokens, 3);
    let batch = DraftBatch { tokens, states };
    let alone = drafter.draft_slots(&batch, &single, target.ends(), FloatDType::F32);
    let first = slots.iter().position(|s| s.row == 1).unwrap();
    let rows = together.narrow(0, first, single.len());
    let difference = (rows - alone).abs().max().into_scalar::<f32>();
    // Rows are normed to magnitude about one.
    assert!(difference < TOLERANCE, "{difference}");
}
