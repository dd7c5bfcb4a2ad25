//! Plain generation: the target alone, rows of different length in one batch.

use crate::batch::StateSpec;
use crate::rng::{Purpose, Stream};
use crate::sample::{Sampling, draw};
use crate::target::TargetModel;
use crate::weights::host_values;

/// One prompt to continue.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Token ids, at least one.
    pub ids: Vec<u32>,
    /// Stream of random numbers; a pure function of the row's identity, never of the batch.
    pub stream: u64,
}

/// When a continuation ends and how its tokens are drawn.
#[derive(Clone, Debug)]
pub struct GenerateSettings {
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Most new tokens, the end token included.
    pub max_new_tokens: usize,
    /// Tokens that end a continuation; they are part of it.
    pub stop_ids: Vec<u32>,
    /// Seed of the run.
    pub seed: u64,
    /// What the numbers are for.
    pub purpose: Purpose,
}

/// Why a continuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The target wrote a stop token.
    Stop,
    /// The length limit cut it off.
    Length,
}

/// A finished continuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continuation {
    /// New token ids, the stop token included.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
}

/// Continues all prompts together and returns the continuations in the same order.
///
/// The text of a row depends on its prompt, its stream and the settings, not on the other rows (up to
/// floating-point rounding of batched matrix products). `progress` is called with the number of new
/// tokens after each step and may end the generation early by returning false.
pub fn generate(
    target: &TargetModel,
    prompts: &[Prompt],
    settings: &GenerateSettings,
    mut progress: impl FnMut(usize) -> bool,
) -> Option<Vec<Continuation>> {
    let mut done: Vec<Option<Continuation>> = vec![None; prompts.len()];
    let mut new_ids: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
    let mut active: Vec<usize> = (0..prompts.len()).collect();
    let longest = prompts
        .iter()
        .map(|prompt| prompt.ids.len())
        .max()
        .unwrap_or(0);
    let mut cache = target.new_cache(prompts.len(), longest + settings.max_new_tokens);
    let mut next: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.ids.clone()).collect();
    while !active.is_empty() {
        let rows: Vec<&[u32]> = active.iter().map(|&row| next[row].as_slice()).collect();
        let logits = last_logits(target, &rows, &mut cache);
        let vocab = target.spec().vocab_size;
        for (place, &row) in active.iter().enumerate() {
            let probabilities = settings
                .sampling
                .probabilities(&logits[place * vocab..(place + 1) * vocab]);
            let index = new_ids[row].len() as u64;
            let uniform =
                Stream::at(settings.seed, settings.purpose, prompts[row].stream, index).uniform();
            let id = draw(&probabilities, uniform);
            new_ids[row].push(id);
            next[row] = vec![id];
            if let Some(finish) = finish_reason(settings, &new_ids[row]) {
                done[row] = Some(Continuation {
                    ids: std::mem::take(&mut new_ids[row]),
                    finish,
                });
            }
        }
        if !progress(active.len()) {
            return None;
        }
        let kept: Vec<usize> = (0..active.len())
            .filter(|&place| done[active[place]].is_none())
            .collect();
        if kept.len() < active.len() {
            cache.select_rows(&kept);
            active = kept.iter().map(|&place| active[place]).collect();
        }
    }
    done.into_iter().collect()
}

fn finish_reason(settings: &GenerateSettings, new_ids: &[u32]) -> Option<FinishReason> {
    match new_ids.last() {
        Some(last) if settings.stop_ids.contains(last) => Some(FinishReason::Stop),
        _ if new_ids.len() >= settings.max_new_tokens => Some(FinishReason::Length),
        _ => None,
    }
}

/// Logits of the last real token of each row, flat `[B * V]`.
fn last_logits(
    target: &TargetModel,
    rows: &[&[u32]],
    cache: &mut crate::target::KvCache,
) -> Vec<f32> {
    let len = rows.iter().map(|row| row.len()).max().unwrap_or(0);
    let last = rows
        .iter()
        .enumerate()
        .map(|(index, row)| index * len + row.len() - 1);
    let indices = crate::batch::index_tensor(last, target.device());
    let none = StateSpec {
        aux_layer_ids: Vec::new(),
    };
    let hidden = target.forward_cached(rows, &none, cache).final_hidden;
    let rows = hidden.flatten::<2>(0, 1).select(0, indices);
    host_values(&target.ends().logits(rows))
}
