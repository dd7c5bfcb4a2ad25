//! Drafts one greedy round after a prompt and writes what an engine must reproduce.
//!
//! `chain_logits TARGET DRAFTER PROMPT_IDS STEPS OUT.safetensors`, where DRAFTER is a checkpoint folder
//! or an exported one and PROMPT_IDS is `1,2,3`. The file holds `prompt` `[P]`, `aux` `[P, K*H]`, the
//! target's greedy `first` token `[1]`, the `drafted` target ids `[STEPS]`, the `logits` of each depth
//! `[STEPS, V_draft]`, the target ids of the draft `vocab` `[V_draft]` and our `layer_ids` `[K]`.

use std::path::Path;

use burn::tensor::{Device, Tensor};
use draftsmith_models::batch::padded_ids;
use draftsmith_models::drafter::Committed;
use draftsmith_models::weights::{host_values, write_safetensors};

mod support;
use support::{Outcome, argmax, float, ids, list, open};

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [target, drafter, prompt, steps, out] = arguments.as_slice() else {
        return Err("usage: chain_logits TARGET DRAFTER PROMPT_IDS STEPS OUT.safetensors".into());
    };
    let prompt: Vec<u32> = list(prompt)?;
    let steps: usize = steps.parse()?;
    let (model, drafter, card) = open(Path::new(target), Path::new(drafter))?;
    let device = Device::flex();
    let states = model.forward(&[&prompt], &drafter.state_spec());
    let [_, len, width] = states.final_hidden.dims();
    let last = states.final_hidden.clone().narrow(1, len - 1, 1);
    let first = argmax(&host_values(&model.ends().logits(last.reshape([1, width]))));

    let mut next = prompt[1..].to_vec();
    next.push(first);
    let mut state = drafter.open(1, len + steps);
    let committed = Committed {
        aux: states.aux.clone(),
        final_hidden: states.final_hidden,
        next_ids: padded_ids(&[&next], &device),
        lens: vec![len],
    };
    drafter.observe(&mut state, committed, model.ends());
    let mut drafted: Vec<u32> = Vec::new();
    let mut logits: Vec<Tensor<2>> = Vec::new();
    for _ in 0..steps {
        let previous = drafted.last().copied().map(|id| [id]);
        let row = drafter.next_logits(&mut state, previous.as_ref().map(|p| &p[..]), model.ends());
        drafted.push(card.vocab.to_target(argmax(&host_values(&row))));
        logits.push(row);
    }
    let layer_ids: Vec<u32> = card.aux_layer_ids.iter().map(|&id| id as u32).collect();
    let tensors = [
        ids("prompt", &prompt),
        float("aux", &states.aux.squeeze_dim::<2>(0)),
        ids("first", &[first]),
        ids("drafted", &drafted),
        float("logits", &Tensor::cat(logits, 0)),
        ids("vocab", card.vocab.target_ids()),
        ids("layer_ids", &layer_ids),
    ];
    Ok(write_safetensors(Path::new(out), &tensors, &[])?)
}
