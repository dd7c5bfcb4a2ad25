//! Training after a wrong draft: the next depth is fed the data token, on the drafter's own state.

use burn::tensor::{Device, FloatDType, Tensor};
use draftsmith_models::batch::{DraftBatch, TokenBatch, padded_ids};
use draftsmith_models::drafter::{AnyDrafter, Committed, DraftState, DrafterContext};
use draftsmith_models::objective::{Objective, ObjectiveConfig, ObjectiveInput, Teacher};
use draftsmith_models::sample::argmax;
use draftsmith_models::slot::{Slot, valid_slots};
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::{NamedTensor, WeightFolder, host_values, write_safetensors};
use safetensors::tensor::Dtype;

use crate::alignment::perturbed;
use crate::families::Family;
use crate::support::{assert_close, largest, normal, row, states_of, tiny_target};

const DEPTHS: usize = 3;
const VOCAB: usize = 320;
/// The round that goes wrong: its last committed token, and the drafter's wrong choice at depth 0.
const ANCHOR: usize = 6;
const WRONG: u32 = 301;

struct Round {
    family: Family,
    target: TargetModel,
    batch: DraftBatch,
    slots: Vec<Slot>,
    /// As it was initialised, and with a head that is wrong in the first slot.
    drafters: [AnyDrafter; 2],
}

impl Round {
    fn new(family: Family) -> Self {
        let target = tiny_target("base");
        let ids: Vec<u32> = (0..12).map(|t| 20 + 7 * t).collect();
        let turns = [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0];
        let tokens = TokenBatch {
            rows: vec![row(&ids, &turns)],
        };
        let vocab = VocabMap::full(VOCAB);
        let context = DrafterContext {
            target: target.spec(),
            ends: target.ends(),
            vocab: &vocab,
        };
        let device = Device::flex();
        let drafter = AnyDrafter::init(&family.config(DEPTHS), context, 3, &device).unwrap();
        let drafter = filled(drafter);
        let states = states_of(&target, &tokens, &drafter.state_spec().aux_layer_ids);
        let mut round = Self {
            family,
            slots: valid_slots(&turns, 0, DEPTHS),
            batch: DraftBatch { tokens, states },
            target,
            drafters: [drafter.clone(), drafter],
        };
        round.drafters[1] = round.mistaken();
        round
    }

    /// Output rows of all slots.
    fn rows(&self, drafter: &AnyDrafter) -> Tensor<2> {
        let ends = self.target.ends();
        drafter.draft_slots(&self.batch, &self.slots, ends, FloatDType::F32)
    }

    fn index(&self, anchor: usize, depth: usize) -> usize {
        let slot = Slot {
            row: 0,
            anchor,
            depth,
        };
        self.slots.iter().position(|other| *other == slot).unwrap()
    }

    /// The drafter whose head answers the first slot of the round with [`WRONG`].
    fn mistaken(&self) -> AnyDrafter {
        let drafter = &self.drafters[0];
        let rows = self.rows(drafter);
        let row = host_values(&rows.narrow(0, self.index(ANCHOR, 0), 1));
        let head = &self.family.parameters().head[0];
        let mut tensors = drafter.to_tensors();
        let tensor = tensors.iter_mut().find(|tensor| tensor.name == *head);
        let tensor = tensor.unwrap();
        let width = tensor.shape[1];
        // The product of the row with itself, twice.
        let bytes = row[..width].iter().flat_map(|x| (2.0 * x).to_le_bytes());
        let place = WRONG as usize * width * 4;
        tensor.bytes.splice(place..place + width * 4, bytes);
        loaded(drafter.clone(), &tensors)
    }

    /// A decoding state in front of the round.
    fn opened(&self, drafter: &AnyDrafter) -> DraftState {
        let ids = &self.batch.tokens.rows[0].ids;
        let mut state = drafter.open(1, ANCHOR + DEPTHS);
        let committed = Committed {
            aux: self.batch.states.aux.clone().narrow(1, 0, ANCHOR),
            final_hidden: self.batch.states.final_hidden.clone().narrow(1, 0, ANCHOR),
            next_ids: padded_ids(&[&ids[1..=ANCHOR]], &Device::flex()),
            lens: vec![ANCHOR],
        };
        drafter.observe(&mut state, committed, self.target.ends());
        state
    }

    /// Decoded logits of depth 1 after `fed` at depth 0; checks what the drafter itself would have chosen.
    fn decoded(&self, drafter: &AnyDrafter, fed: u32) -> Vec<f32> {
        let ends = self.target.ends();
        let mut state = self.opened(drafter);
        let first = host_values(&drafter.next_logits(&mut state, None, ends));
        assert_eq!(argmax(&first), Some(WRONG as usize), "{}", self.family.name);
        host_values(&drafter.next_logits(&mut state, Some(&[fed]), ends))
    }
}

/// Fills what starts at zero, so that everything that is fed shows in the logits.
fn filled(drafter: AnyDrafter) -> AnyDrafter {
    let fill = |(index, tensor): (usize, NamedTensor)| {
        if tensor.bytes.iter().any(|byte| *byte != 0) {
            return tensor;
        }
        let values = normal(index as u64, tensor.shape.iter().product(), 1.0);
        NamedTensor::float(tensor.name, &tensor.shape, &values, Dtype::F32)
    };
    let tensors: Vec<_> = drafter
        .to_tensors()
        .into_iter()
        .enumerate()
        .map(fill)
        .collect();
    loaded(drafter, &tensors)
}

fn loaded(drafter: AnyDrafter, tensors: &[NamedTensor]) -> AnyDrafter {
    assert!(tensors.iter().all(|tensor| tensor.dtype == Dtype::F32));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drafter.safetensors");
    write_safetensors(&path, tensors, &[]).unwrap();
    let weights = WeightFolder::open_file(&path).unwrap();
    drafter.load_tensors(&weights).unwrap()
}

/// Pitfall 45: a drafter that is wrong at depth 0 is fed the data token at depth 1 all the same: its training row is
/// what decoding computes after the data token, and not what it computes after the wrong one.
/// Red under: `a + step` in `UnrollPlan::query_ids` replaced by `a` (the unrolled families);
/// `slot.teacher_position()` in `Dspark::draft_slots` replaced by `slot.anchor`; `hidden` set to the fused target states
/// again at the end of each step of `Eagle3::unroll`.
#[test]
fn pitfall_45_after_a_wrong_draft_the_data_token_is_fed() {
    for round in Family::all().into_iter().map(Round::new) {
        let name = round.family.name;
        let [right, wrong] = &round.drafters;
        let rows = round.rows(wrong);
        // No output row depends on what the head says.
        assert_eq!(
            host_values(&round.rows(right)),
            host_values(&rows),
            "{name}"
        );
        let next = rows.narrow(0, round.index(ANCHOR, 1), 1);
        let trained = host_values(&next.matmul(wrong.head().transpose()));
        let data = round.batch.tokens.rows[0].ids[ANCHOR + 1];
        assert_ne!(data, WRONG);
        // The same f32 sums in another order, relative to the largest logit.
        let tolerance = 5e-6 * largest(&trained);
        let what = format!("{name} after the data token");
        assert_close(&what, &round.decoded(wrong, data), &trained, tolerance);
        let own = round.decoded(wrong, WRONG);
        let furthest = own.iter().zip(&trained).map(|(a, b)| (a - b).abs());
        let differs = furthest.fold(0.0, f32::max) > 1e-3 * largest(&trained);
        let is_seen = round.family.reads().is_fed();
        assert_eq!(differs, is_seen, "{name} after its own token");
    }
}

/// Pitfall 45: what depth 1 is fed at its other input is the drafter's own state. Target states from the anchor on
/// change nothing, and its row is not that of depth 0 one anchor later, which reads the target's next state.
/// Red under: `..anchor` in `context_of_blocks` replaced by `..anchor + 1`.
#[test]
fn pitfall_45_after_a_wrong_draft_the_state_is_the_drafters_own() {
    for mut round in Family::all().into_iter().map(Round::new) {
        let name = round.family.name;
        let drafter = round.drafters[1].clone();
        let row = |round: &Round, anchor, depth| {
            host_values(
                &round
                    .rows(&drafter)
                    .narrow(0, round.index(anchor, depth), 1),
            )
        };
        let own = row(&round, ANCHOR, 1);
        assert_ne!(own, row(&round, ANCHOR + 1, 0), "{name}");
        round.batch.states = perturbed(&round.batch.states, ANCHOR);
        assert_eq!(own, row(&round, ANCHOR, 1), "{name}");
        round.batch.states = perturbed(&round.batch.states, ANCHOR - 1);
        assert_ne!(own, row(&round, ANCHOR, 1), "{name}");
    }
}

/// Pitfall 45: the labels of every depth stay the data tokens, and the teacher stays the target after them.
/// Red under: `ids[t + 1]` in `ChunkRows::new` replaced by `ids[t]`.
#[test]
fn pitfall_45_a_wrong_draft_changes_no_label_and_no_teacher() {
    let config = ObjectiveConfig {
        losses: [("ce".to_owned(), 1.0)].into(),
        ..ObjectiveConfig::default()
    };
    let vocab = VocabMap::full(VOCAB);
    for round in Family::all().into_iter().map(Round::new) {
        let [right, wrong] = round.drafters.each_ref().map(|drafter| {
            let input = ObjectiveInput {
                slots: &round.slots,
                hidden: round.rows(drafter),
                head: drafter.head(),
                batch: &round.batch,
                teacher: Teacher::new(round.target.ends(), &vocab),
                head_gradient: None,
            };
            Objective::new(&config).unwrap().evaluate(input, 1.0)
        });
        let name = round.family.name;
        assert_eq!(right.scores.log_p_token, wrong.scores.log_p_token, "{name}");
        let first = round.index(ANCHOR, 0);
        assert!(!wrong.scores.argmax_is_token[first], "{name}");
        let head = round.drafters[1].head().transpose();
        let logits = host_values(&round.rows(&round.drafters[1]).matmul(head));
        for (slot, (logits, loss)) in round
            .slots
            .iter()
            .zip(logits.chunks(VOCAB).zip(&wrong.loss))
        {
            let most = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
            let sum: f32 = logits.iter().map(|logit| (logit - most).exp()).sum();
            let label = round.batch.tokens.rows[0].ids[slot.anchor + 1 + slot.depth];
            let expected = most + sum.ln() - logits[label as usize];
            // Sums of 320 terms in f32.
            assert_close(name, &[*loss], &[expected], 1e-5 * most.abs().max(1.0));
        }
    }
}
