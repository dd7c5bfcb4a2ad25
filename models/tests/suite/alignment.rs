//! Which tokens and states a slot may depend on, and which tokens it is trained to predict.

use burn::tensor::{Device, FloatDType, Tensor};
use draftsmith_models::batch::{DraftBatch, TargetStates, TokenBatch};
use draftsmith_models::drafter::{AnchorDraw, AnyDrafter, DrafterConfig, DrafterContext};
use draftsmith_models::objective::{
    Normalize, Objective, ObjectiveConfig, ObjectiveInput, ObjectiveOutput, SlotWeight, Teacher,
};
use draftsmith_models::slot::{Slot, valid_slots};
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::host_values;

use crate::families::Family;
use crate::support::{assert_close, normal, row, states_of, tensor, tiny_target};

const STEPS: usize = 3;

struct Fixture {
    family: Family,
    target: TargetModel,
    drafter: AnyDrafter,
    batch: DraftBatch,
    slots: Vec<Slot>,
}

impl Fixture {
    /// Every family and every variant of one.
    fn of_every_family() -> Vec<Self> {
        Family::variants().into_iter().map(Self::new).collect()
    }

    /// 12 tokens, all different, with the assistant span 6 ..= 9 (9 is END).
    fn new(family: Family) -> Self {
        let target = tiny_target("base");
        let ids: Vec<u32> = (0..12).map(|t| 20 + 7 * t).collect();
        let turns = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0];
        let tokens = TokenBatch {
            rows: vec![row(&ids, &turns)],
        };
        let vocab = VocabMap::full(320);
        let context = DrafterContext {
            target: target.spec(),
            ends: target.ends(),
            vocab: &vocab,
        };
        let drafter = AnyDrafter::init(&family.config(STEPS), context, 3, &Device::flex()).unwrap();
        let states = states_of(&target, &tokens, &drafter.state_spec().aux_layer_ids);
        Self {
            slots: valid_slots(&turns, 0, STEPS),
            batch: DraftBatch { tokens, states },
            family,
            target,
            drafter,
        }
    }

    fn hidden(&self, batch: &DraftBatch) -> Tensor<2> {
        self.drafter
            .draft_slots(batch, &self.slots, self.target.ends(), FloatDType::F32)
    }

    /// Cross entropy of each slot for fixed drafter outputs.
    fn loss(&self, batch: &DraftBatch, hidden: Tensor<2>) -> ObjectiveOutput {
        let config = ObjectiveConfig {
            losses: [("ce".to_owned(), 1.0)].into(),
            ..ObjectiveConfig::default()
        };
        let vocab = VocabMap::full(320);
        let input = ObjectiveInput {
            slots: &self.slots,
            hidden,
            head: self.drafter.head(),
            batch,
            teacher: Teacher::new(self.target.ends(), &vocab),
            head_gradient: None,
        };
        let objective = Objective::new(&config).unwrap();
        objective.evaluate(input, 1.0)
    }

    /// The slots whose rows of `changed` differ from those of the unchanged batch.
    fn moved(&self, before: &[f32], after: &[f32]) -> Vec<Slot> {
        let width = before.len() / self.slots.len();
        let differs = |index: &usize| {
            before[index * width..(index + 1) * width] != after[index * width..(index + 1) * width]
        };
        (0..self.slots.len())
            .filter(differs)
            .map(|index| self.slots[index])
            .collect()
    }

    fn with_token(&self, position: usize, id: u32) -> DraftBatch {
        let mut batch = self.batch.clone();
        batch.tokens.rows[0].ids[position] = id;
        batch
    }
}

/// Pitfall 14: the labels that receive gradient at each step, found by changing one token at a time
/// with the drafter's outputs held fixed. With s = 6, e = 9: s+1 is a label, e+2 and s are not.
/// Red under: `ids[t + 1]` in `ChunkRows::new` replaced by `ids[t]`; `a ..= a+d` instead of
/// `a ..= a+1+d` in `slot::is_valid`.
#[test]
fn pitfall_14_labels_are_the_generated_tokens_after_the_first() {
    for fixture in Fixture::of_every_family() {
        let hidden = fixture.hidden(&fixture.batch);
        let before = fixture.loss(&fixture.batch, hidden.clone()).loss;
        let mut labels: [Vec<usize>; STEPS] = Default::default();
        for position in 0..12 {
            let changed = fixture.with_token(position, 300);
            let after = fixture.loss(&changed, hidden.clone()).loss;
            for slot in fixture.moved(&before, &after) {
                assert_eq!(slot.label_position(), position);
                labels[slot.depth].push(position);
            }
        }
        assert_eq!(labels, [vec![7, 8, 9], vec![8, 9], vec![9]]);
    }
}

/// Pitfall 43: (newest state seen, newest token fed, label) of three slots, found by changing one position at a
/// time. Red under: `anchor + 1` for `anchor` in `BlockPlan::anchor_ids`; `..anchor` in `context_of_blocks` replaced by `..anchor + 1`.
#[test]
fn pitfall_43_every_family_reads_and_predicts_what_its_table_says() {
    for fixture in Fixture::of_every_family() {
        let family = fixture.family.what();
        let before = host_values(&fixture.hidden(&fixture.batch));
        let is_moved = |batch: &DraftBatch, slot: &Slot| {
            let after = host_values(&fixture.hidden(batch));
            fixture.moved(&before, &after).contains(slot)
        };
        for (anchor, depth) in [(6, 0), (6, 2), (7, 1)] {
            let slot = Slot {
                row: 0,
                anchor,
                depth,
            };
            let state = (0..12).rev().find(|&position| {
                let mut changed = fixture.batch.clone();
                changed.states = perturbed(&fixture.batch.states, position);
                is_moved(&changed, &slot)
            });
            let token = (0..12)
                .rev()
                .find(|&position| is_moved(&fixture.with_token(position, 300), &slot));
            let reads = fixture.family.reads();
            let fed = (0..12).rev().find(|&position| reads.has(&slot, position));
            let expected = (Some(anchor - 1), fed, anchor + 1 + depth);
            assert_eq!(
                (state, token, slot.label_position()),
                expected,
                "{family} {slot:?}"
            );
        }
    }
}

/// A stub that knows the text by heart reaches loss 0 under the documented labels, and under no shift of them.
#[test]
fn pitfall_43_a_memorising_stub_reaches_loss_zero_only_under_the_contract() {
    let fixture = Fixture::new(Family::named("eagle3"));
    let vocab = VocabMap::full(320);
    let ids = &fixture.batch.tokens.rows[0].ids;
    let loss = |shift: isize| {
        // Rows and head such that the logit of the remembered token stands 40 above all others.
        let one_hot = |id: usize| (0..320).map(move |column| if column == id { 40.0 } else { 0.0 });
        let remembered =
            |slot: &Slot| ids[slot.label_position().wrapping_add_signed(shift)] as usize;
        let rows: Vec<f32> = fixture
            .slots
            .iter()
            .flat_map(|slot| one_hot(remembered(slot)))
            .collect();
        let head: Vec<f32> = (0..320)
            .flat_map(|id| (0..320).map(move |c| f32::from(u8::from(c == id))))
            .collect();
        let input = ObjectiveInput {
            slots: &fixture.slots,
            hidden: tensor(&rows, [fixture.slots.len(), 320]),
            head: tensor(&head, [320, 320]),
            batch: &fixture.batch,
            teacher: Teacher::new(fixture.target.ends(), &vocab),
            head_gradient: None,
        };
        let config = ObjectiveConfig {
            losses: [("ce".to_owned(), 1.0)].into(),
            ..ObjectiveConfig::default()
        };
        let output = Objective::new(&config).unwrap().evaluate(input, 1.0);
        output
            .loss
            .iter()
            .fold(0.0_f32, |most, loss| most.max(*loss))
    };
    assert!(loss(0) < 1e-6, "{}", loss(0));
    for shift in [-2, -1, 1, 2] {
        assert!(loss(shift) > 39.0, "{shift}: {}", loss(shift));
    }
}

/// A slot's outputs depend on the token of its anchor, on those fed back, and on no later one.
/// Red under: `a + step` in `UnrollPlan::query_ids` replaced by `a + step + 1`, and `t + 1` in `context_ids` by `t + 2`.
#[test]
fn a_later_token_never_changes_an_earlier_slot() {
    for fixture in Fixture::of_every_family() {
        let before = host_values(&fixture.hidden(&fixture.batch));
        for position in 0..12 {
            let changed = fixture.with_token(position, 300);
            let after = host_values(&fixture.hidden(&changed));
            let reads = |slot: &Slot| fixture.family.reads().has(slot, position);
            let expected: Vec<Slot> = fixture.slots.iter().copied().filter(reads).collect();
            let what = format!("{}, token {position}", fixture.family.what());
            assert_eq!(fixture.moved(&before, &after), expected, "{what}");
        }
    }
}

/// The leak test of pitfall 42: states at positions `>= a` do not exist when the round of anchor `a` is
/// drafted. Red under: `start + anchor - 1` in `UnrollPlan::queries_of` replaced by `start + anchor` (EAGLE-3, MTP); `..anchor` in
/// `context_of_blocks` replaced by `..anchor + 1` (DFlash).
#[test]
fn pitfall_42_states_from_the_anchor_on_are_invisible() {
    for fixture in Fixture::of_every_family() {
        let before = host_values(&fixture.hidden(&fixture.batch));
        for position in 0..12 {
            let mut changed = fixture.batch.clone();
            changed.states = perturbed(&fixture.batch.states, position);
            let after = host_values(&fixture.hidden(&changed));
            let sees = |slot: &Slot| position < slot.anchor;
            let expected: Vec<Slot> = fixture.slots.iter().copied().filter(sees).collect();
            let what = format!("{}, state {position}", fixture.family.what());
            assert_eq!(fixture.moved(&before, &after), expected, "{what}");
        }
    }
}

/// Blocks do not see each other: the outputs of a slot are the same whatever else is drafted with it.
/// Red under: `..anchor` in `context_of_blocks` replaced by `..anchor + 1`, whose extra key depends on the pass.
#[test]
fn a_slot_does_not_depend_on_the_other_slots_of_its_pass() {
    for fixture in Fixture::of_every_family() {
        let all = host_values(&fixture.hidden(&fixture.batch));
        let width = all.len() / fixture.slots.len();
        for (index, slot) in fixture.slots.iter().enumerate() {
            let alone = fixture.drafter.draft_slots(
                &fixture.batch,
                &[*slot],
                fixture.target.ends(),
                FloatDType::F32,
            );
            let what = format!("{}, {slot:?}", fixture.family.what());
            let together = &all[index * width..(index + 1) * width];
            // Normed outputs of size about one; products of other sizes add in another order.
            assert_close(&what, &host_values(&alone), together, 5e-6);
        }
    }
}

/// A step trains all valid slots, or those of the anchors it drew.
#[test]
fn drawn_anchors_are_a_function_of_seed_step_and_row() {
    let mut settings = serde_json::json!({
        "mask_token": 7, "block_size": 4, "aux_layer_ids": [1, 3, 4], "anchors_per_row": 5,
    });
    settings["blocks_per_pass"] = 3.into();
    let config = DrafterConfig::deserialize_family("dflash", settings).unwrap();
    let target = tiny_target("base");
    let vocab = VocabMap::full(320);
    let context = DrafterContext {
        target: target.spec(),
        ends: target.ends(),
        vocab: &vocab,
    };
    let drafter = AnyDrafter::init(&config, context, 3, &Device::flex()).unwrap();
    let turns: Vec<u32> = (0..30).map(|t| u32::from(t > 4)).collect();
    let ids: Vec<u32> = (0..30).collect();
    let mut rows = vec![row(&ids, &turns), row(&ids, &turns)];
    rows[1].key = "other".to_owned();
    let tokens = TokenBatch { rows };
    let draw = |seed, step| drafter.training_slots(&tokens, AnchorDraw { seed, step });
    let anchors = |slots: &[Slot], row: usize| -> Vec<usize> {
        let of_row = slots
            .iter()
            .filter(|slot| slot.row == row && slot.depth == 0);
        of_row.map(|slot| slot.anchor).collect()
    };
    let first = draw(1, 0);
    assert_eq!(first, draw(1, 0));
    assert_eq!((anchors(&first, 0).len(), anchors(&first, 1).len()), (5, 5));
    let others = [draw(1, 1), draw(2, 0)];
    assert!(
        others
            .iter()
            .all(|other| anchors(other, 0) != anchors(&first, 0))
    );
    assert_ne!(
        anchors(&first, 0),
        anchors(&first, 1),
        "rows draw for themselves"
    );
    // The row's draw is its own, whatever stands beside it.
    let alone = TokenBatch {
        rows: vec![tokens.rows[1].clone()],
    };
    let alone = drafter.training_slots(&alone, AnchorDraw { seed: 1, step: 0 });
    assert_eq!(anchors(&alone, 0), anchors(&first, 1));
    let passes = drafter.passes(first.clone());
    assert_eq!(passes.len(), 4, "10 blocks, 3 a pass");
    let mut again: Vec<Slot> = passes.into_iter().flatten().collect();
    again.sort_unstable();
    let mut sorted = first;
    sorted.sort_unstable();
    assert_eq!(again, sorted, "every slot in one pass");
}

/// All states at positions `position ..` replaced by noise.
pub(crate) fn perturbed(states: &TargetStates, position: usize) -> TargetStates {
    let noise = |states: &Tensor<3>| {
        let [rows, len, width] = states.dims();
        let values = normal(77, rows * (len - position) * width, 5.0);
        let place = [0..rows, position..len, 0..width];
        let noise = tensor(&values, [rows, len - position, width]);
        states.clone().slice_assign(place, noise)
    };
    TargetStates {
        aux: noise(&states.aux),
        final_hidden: noise(&states.final_hidden),
        teacher: None,
    }
}

/// The same answer behind a longer prompt: drafter outputs and target states of the answer are given.
struct Answer {
    hidden: Vec<f32>,
    final_hidden: Vec<f32>,
}

impl Answer {
    fn objective(&self, prompt: usize, config: &ObjectiveConfig) -> (f64, ObjectiveOutput) {
        let target = tiny_target("base");
        let vocab = VocabMap::full(320);
        let answer = 6;
        let len = prompt + answer;
        let mut ids = vec![5; prompt];
        ids.extend([40, 41, 42, 43, 44, 45]);
        let turns: Vec<u32> = (0..len).map(|t| u32::from(t >= prompt)).collect();
        let mut states = normal(8, prompt * 16, 1.0);
        states.extend(&self.final_hidden);
        let slots = valid_slots(&turns, 0, STEPS);
        let batch = DraftBatch {
            tokens: TokenBatch {
                rows: vec![row(&ids, &turns)],
            },
            states: TargetStates {
                aux: Tensor::zeros([1, len, 1], &Device::flex()),
                final_hidden: tensor(&states, [1, len, 16]),
                teacher: None,
            },
        };
        let input = ObjectiveInput {
            slots: &slots,
            hidden: tensor(&self.hidden, [slots.len(), 16]),
            head: target.ends().head.clone(),
            batch: &batch,
            teacher: Teacher::new(target.ends(), &vocab),
            head_gradient: Some(0..16),
        };
        let objective = Objective::new(config).unwrap();
        let denominator = objective.denominator(&slots);
        let output = objective.evaluate(input, denominator);
        let sum: f64 = slots
            .iter()
            .zip(&output.loss)
            .map(|(slot, loss)| config.slot_weight.at(slot.depth) * f64::from(*loss))
            .sum();
        (sum / denominator, output)
    }
}

/// Pitfall 21: masked prompt tokens are in no denominator. Red under: `slots.len() as f64` in
/// `Objective::denominator` replaced by a count that grows with the anchor.
#[test]
fn pitfall_21_a_longer_prompt_changes_neither_loss_nor_gradient() {
    let answer = Answer {
        hidden: normal(1, 12 * 16, 1.0),
        final_hidden: normal(2, 6 * 16, 1.0),
    };
    for normalize in [Normalize::Slots, Normalize::Weights] {
        let config = ObjectiveConfig {
            slot_weight: SlotWeight::StepDecay(0.8),
            normalize,
            ..ObjectiveConfig::default()
        };
        let (short_loss, short) = answer.objective(4, &config);
        let (long_loss, long) = answer.objective(504, &config);
        assert!(
            (short_loss - long_loss).abs() < 1e-6,
            "{short_loss} {long_loss}"
        );
        let close = |x: &Tensor<2>, y: &Tensor<2>| {
            assert_close("gradient", &host_values(x), &host_values(y), 1e-7);
        };
        close(&short.grad_hidden, &long.grad_hidden);
        close(
            short.grad_head.as_ref().unwrap(),
            long.grad_head.as_ref().unwrap(),
        );
    }
}

/// Pitfall 21, decays: a constant loss of 1 per slot totals 1 under every decay when normalised by
/// weights. Red under: `Normalize::Weights` counting slots.
#[test]
fn pitfall_21_a_constant_loss_keeps_its_value_under_every_decay() {
    let slots = valid_slots(&[0, 1, 1, 1, 1, 1, 1, 1], 0, 5);
    for slot_weight in [
        SlotWeight::Uniform,
        SlotWeight::StepDecay(0.8),
        SlotWeight::StepDecay(0.1),
        SlotWeight::ExpDecay(4.0),
    ] {
        let objective = Objective::new(&ObjectiveConfig {
            slot_weight,
            ..ObjectiveConfig::default()
        })
        .unwrap();
        let sum: f64 = slots.iter().map(|slot| slot_weight.at(slot.depth)).sum();
        assert!((sum / objective.denominator(&slots) - 1.0).abs() < 1e-12);
    }
}
