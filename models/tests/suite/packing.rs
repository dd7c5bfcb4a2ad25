//! Documents that are computed together stay apart.
//!
//! Nothing is packed into one row here: each document is a row of its own, what works on single positions runs over the
//! real positions of all rows, and attention never leaves a row. What packing must guarantee therefore holds for
//! the rows of a micro-batch.

use burn::tensor::{Device, FloatDType};
use draftsmith_models::batch::{DraftBatch, TokenBatch, TokenRow};
use draftsmith_models::drafter::{AnyDrafter, DrafterContext};
use draftsmith_models::objective::{Objective, ObjectiveConfig, ObjectiveInput, Teacher};
use draftsmith_models::slot::batch_slots;
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;

use crate::families::Family;
use crate::support::{assert_close, row, states_of, tiny_target};

/// Drafts of a block of four.
const DEPTHS: usize = 3;

/// A document of `len` tokens, generated from its third on; its end is the end of the row.
fn document(len: u32, first_id: u32) -> TokenRow {
    let ids: Vec<u32> = (0..len).map(|t| first_id + 3 * t).collect();
    let turns: Vec<u32> = (0..len).map(|t| u32::from(t >= 2)).collect();
    row(&ids, &turns)
}

/// Loss of each slot of documents that are computed together, document after document.
fn losses(drafter: &AnyDrafter, target: &TargetModel, documents: &[TokenRow]) -> Vec<Vec<f32>> {
    let tokens = TokenBatch {
        rows: documents.to_vec(),
    };
    let slots = batch_slots(&tokens, DEPTHS);
    let vocab = VocabMap::full(320);
    let batch = DraftBatch {
        states: states_of(target, &tokens, &drafter.state_spec().aux_layer_ids),
        tokens,
    };
    let input = ObjectiveInput {
        slots: &slots,
        hidden: drafter.draft_slots(&batch, &slots, target.ends(), FloatDType::F32),
        head: drafter.head(),
        batch: &batch,
        teacher: Teacher::new(target.ends(), &vocab),
        head_gradient: None,
    };
    let objective = Objective::new(&ObjectiveConfig::default()).unwrap();
    let loss = objective.evaluate(input, 1.0).loss;
    let of_document = |index: usize| {
        let of_row = slots
            .iter()
            .zip(&loss)
            .filter(|(slot, _)| slot.row == index);
        of_row.map(|(_, loss)| *loss).collect()
    };
    (0..documents.len()).map(of_document).collect()
}

/// Documents of 9 and 11 tokens, blocks of 4. Red under: `row * len + t` in `UnrollPlan::context_of` replaced by `t` (EAGLE-3,
/// MTP); `ids_of(row)` in `BlockPlan::anchor_ids` replaced by `ids_of(self.rows[0])` (DFlash, DSpark).
#[test]
fn pitfall_46_documents_computed_together_do_not_touch() {
    let target = tiny_target("base");
    let (short, long, other) = (document(9, 20), document(11, 60), document(11, 150));
    let vocab = VocabMap::full(320);
    for family in Family::variants() {
        let context = DrafterContext {
            target: target.spec(),
            ends: target.ends(),
            vocab: &vocab,
        };
        let config = family.config(DEPTHS);
        let drafter = AnyDrafter::init(&config, context, 5, &Device::flex()).unwrap();
        let of = |documents: &[&TokenRow]| {
            let documents: Vec<TokenRow> = documents.iter().map(|&row| row.clone()).collect();
            losses(&drafter, &target, &documents)
        };
        let together = of(&[&short, &long]);
        // The slots of a document end with it: 6 anchors of 9 tokens with 1, 2, 3, 3, .. depths left.
        assert_eq!(together[0].len(), 6 + 5 + 4);
        assert_eq!(together[1].len(), 8 + 7 + 6);
        // Values near 6; the products of another batch size sum in another order.
        let what = &family.what();
        assert_close(what, &together[0], &of(&[&short])[0], 1e-4);
        assert_close(what, &together[1], &of(&[&long])[0], 1e-4);
        let with_other = of(&[&short, &other]);
        assert_eq!(together[0], with_other[0], "{what}");
        assert_ne!(together[1], with_other[1], "{what}");
        assert_close(what, &of(&[&long, &short])[1], &together[0], 1e-4);
    }
}
