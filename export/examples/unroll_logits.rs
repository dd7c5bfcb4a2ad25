//! Writes the logits of every valid training slot of one row, for comparison with another trainer.
//!
//! `unroll_logits TARGET DRAFTER IDS TURNS OUT.safetensors`, where IDS and TURNS are `1,2,3` (a turn of
//! 0 marks a token that the target did not generate). The file holds `ids` `[S]`, `aux` `[S, K*H]`, the
//! `anchors` `[N]`, `depths` `[N]` and `logits` `[N, V_draft]` of the slots, the `vocab` `[V_draft]` and
//! the number of `steps` `[1]`.

use std::path::Path;

use burn::tensor::FloatDType;
use draftsmith_models::batch::{DraftBatch, TokenBatch, TokenRow};
use draftsmith_models::slot::{Slot, batch_slots};
use draftsmith_models::weights::write_safetensors;

mod support;
use support::{Outcome, float, ids, list, open};

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [target, drafter, row_ids, turns, out] = arguments.as_slice() else {
        return Err("usage: unroll_logits TARGET DRAFTER IDS TURNS OUT.safetensors".into());
    };
    let row = TokenRow {
        key: "row".to_owned(),
        ids: list(row_ids)?,
        turns: list(turns)?,
    };
    if row.ids.len() != row.turns.len() {
        return Err("IDS and TURNS differ in length".into());
    }
    let (model, drafter, card) = open(Path::new(target), Path::new(drafter))?;
    let tokens = TokenBatch {
        rows: vec![row.clone()],
    };
    let states = model.forward(&tokens.ids(), &drafter.state_spec());
    let batch = DraftBatch { tokens, states };
    let slots = batch_slots(&batch.tokens, drafter.num_depths());
    let hidden = drafter.draft_slots(&batch, &slots, model.ends(), FloatDType::F32);
    let logits = hidden.matmul(drafter.head().transpose());
    let column =
        |of: fn(&Slot) -> usize| -> Vec<u32> { slots.iter().map(|slot| of(slot) as u32).collect() };
    let tensors = [
        ids("ids", &row.ids),
        float("aux", &batch.states.aux.squeeze_dim::<2>(0)),
        ids("anchors", &column(|slot| slot.anchor)),
        ids("depths", &column(|slot| slot.depth)),
        float("logits", &logits),
        ids("vocab", card.vocab.target_ids()),
        ids("steps", &[drafter.num_depths() as u32]),
    ];
    Ok(write_safetensors(Path::new(out), &tensors, &[])?)
}
