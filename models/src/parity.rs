//! The parity gate: a training row must compute what step-by-step decoding computes for the same slot.
//!
//! [`replay`] plays real decode rounds on a batch whose target states are known (observe the committed
//! positions, draft to the full depth, roll back, commit some tokens) and compares the logits of every
//! valid (anchor, depth) with those of [`AnyDrafter::draft_slots`]. A difference beyond rounding means
//! that the drafter is trained on rows that serving never sees.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{FloatDType, Int, Tensor, TensorData};

use crate::batch::{DraftBatch, index_tensor};
use crate::drafter::{AnyDrafter, Committed, DraftState};
use crate::rng::{Purpose, Stream};
use crate::slot::{Slot, batch_slots};
use crate::target::TargetEnds;
use crate::weights::host_values;

/// How many tokens each replayed round commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounds {
    /// One token a round, so that every anchor is visited.
    EveryAnchor,
    /// 1 to `num_depths + 1` tokens, differing by row and round as acceptance does.
    Varying,
}

/// What a replay saw.
#[derive(Clone, Debug, PartialEq)]
pub struct Parity {
    /// Number of slots compared.
    pub num_slots: usize,
    /// Largest absolute difference between two logits of the same slot and token.
    pub max_abs_diff: f32,
    /// Largest absolute logit of the training rows, the scale of the difference.
    pub max_abs_logit: f32,
    /// The slot of the largest difference.
    pub worst: Option<Slot>,
}

impl Parity {
    /// Whether the difference is below `tolerance` times the largest logit and something was compared.
    ///
    /// The comparison is false for a difference that is not a number.
    pub fn holds(&self, tolerance: f32) -> bool {
        self.num_slots > 0 && self.max_abs_diff <= tolerance * self.max_abs_logit.max(1.0)
    }
}

/// Replays decoding over all rows of `batch` and compares it with the training pass, both in f32.
///
/// `drafter` must live on a device without gradient tracking. Rows leave the replay when they are
/// finished, as they do in serving.
pub fn replay(
    drafter: &AnyDrafter,
    batch: &DraftBatch,
    ends: &TargetEnds,
    rounds: Rounds,
) -> Parity {
    let mut expected = Expected::new(drafter, batch, ends);
    let num_depths = drafter.num_depths();
    let capacity = batch.tokens.padded_len() + 2 * num_depths + 2;
    let mut state = drafter.open(batch.tokens.num_rows(), capacity);
    let mut replayed: Vec<Replayed> = (0..batch.tokens.num_rows())
        .map(|row| Replayed {
            row,
            observed: 0,
            anchor: first_anchor(&batch.tokens.rows[row].turns),
        })
        .collect();
    let mut round = 0;
    loop {
        leave_finished(&mut state, &mut replayed, batch);
        if replayed.is_empty() {
            return expected.parity;
        }
        drafter.observe(&mut state, committed(batch, &replayed), ends);
        for depth in 0..num_depths {
            let fed: Vec<u32> = replayed.iter().map(|r| r.token(batch, depth)).collect();
            let previous = (depth > 0).then_some(fed.as_slice());
            let logits = drafter.next_logits(&mut state, previous, ends);
            expected.compare(&logits, &replayed, depth);
        }
        for row in &mut replayed {
            let step = match rounds {
                Rounds::EveryAnchor => 1,
                Rounds::Varying => 1 + (row.row + round) % (num_depths + 1),
            };
            row.observed = row.anchor;
            row.anchor += step;
        }
        round += 1;
    }
}

/// The drafter with noise on every parameter, a pure function of `seed`; for a device without gradient tracking.
///
/// A fresh drafter has parts that say nothing, such as a bias that starts at zero: a replay cannot tell whether decoding
/// computes them. Values move by a tenth of the size of their tensor, and a tensor of zeros is filled.
pub fn moved(drafter: AnyDrafter, seed: u64) -> AnyDrafter {
    drafter.map(&mut Noise { seed, tensor: 0 })
}

/// Draws the noise of one parameter after another.
struct Noise {
    seed: u64,
    tensor: u64,
}

impl ModuleMapper for Noise {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let mut stream = Stream::new(self.seed, Purpose::Check, self.tensor);
        self.tensor += 1;
        param.map(|value| {
            let (shape, device) = (value.dims(), value.device());
            let mut values = host_values(&value);
            let scale = noise_scale(&values, shape[D - 1]);
            for value in &mut values {
                *value += (stream.normal() * scale) as f32;
            }
            Tensor::from_data(TensorData::new(values, shape), &device)
        })
    }
}

/// Standard deviation of the noise of a tensor with rows of `width` values. A row of zeros is filled such that it has
/// about length 1.
fn noise_scale(values: &[f32], width: usize) -> f64 {
    let sum: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
    let size = (sum / values.len() as f64).sqrt();
    if size > 0.0 {
        0.1 * size
    } else {
        (width as f64).sqrt().recip()
    }
}

/// A row that is still being decoded.
struct Replayed {
    /// Row of the batch.
    row: usize,
    /// Positions observed so far.
    observed: usize,
    /// Last committed token of the coming round.
    anchor: usize,
}

impl Replayed {
    /// The token fed at `depth`; 0 past the end of the row, where no slot is compared.
    fn token(&self, batch: &DraftBatch, depth: usize) -> u32 {
        let ids = &batch.tokens.rows[self.row].ids;
        ids.get(self.anchor + depth).copied().unwrap_or(0)
    }
}

/// The first generated token with a state before it; 1 for a row without one.
fn first_anchor(turns: &[u32]) -> usize {
    (1..turns.len()).find(|&t| turns[t] != 0).unwrap_or(1)
}

/// Drops the rows whose anchor has no token after it.
fn leave_finished(state: &mut DraftState, replayed: &mut Vec<Replayed>, batch: &DraftBatch) {
    let goes_on = |r: &Replayed| r.anchor + 1 < batch.tokens.rows[r.row].len();
    let kept: Vec<usize> = (0..replayed.len())
        .filter(|&place| goes_on(&replayed[place]))
        .collect();
    if kept.len() < replayed.len() {
        replayed.retain(goes_on);
        if !kept.is_empty() {
            state.select_rows(&kept);
        }
    }
}

/// Positions `observed .. anchor` of every row, padded on the right with position 0.
fn committed(batch: &DraftBatch, replayed: &[Replayed]) -> Committed {
    let lens: Vec<usize> = replayed.iter().map(|r| r.anchor - r.observed).collect();
    let longest = lens.iter().max().copied().unwrap_or(0);
    let [_, len, _] = batch.states.final_hidden.dims();
    let mut places = Vec::with_capacity(replayed.len() * longest);
    let mut next_ids = Vec::with_capacity(replayed.len() * longest);
    for (row, &real) in replayed.iter().zip(&lens) {
        let ids = &batch.tokens.rows[row.row].ids;
        for offset in 0..longest {
            let position = if offset < real {
                row.observed + offset
            } else {
                0
            };
            places.push(row.row * len + position);
            next_ids.push(ids[position + 1] as i32);
        }
    }
    let device = batch.states.final_hidden.device();
    let at = index_tensor(places, &device);
    let take = |states: &Tensor<3>| {
        let width = states.dims()[2];
        if width == 0 {
            // A drafter without captured states; `reshape` would read the 0 as "as before".
            return Tensor::zeros([replayed.len(), longest, 0], &device);
        }
        states
            .clone()
            .flatten::<2>(0, 1)
            .select(0, at.clone())
            .reshape([replayed.len(), longest, width])
    };
    let data = TensorData::new(next_ids, [replayed.len(), longest]);
    Committed {
        aux: take(&batch.states.aux),
        final_hidden: take(&batch.states.final_hidden),
        next_ids: Tensor::<2, Int>::from_data(data, &device),
        lens,
    }
}

/// Logits of the training pass, and how far the replay is from them.
struct Expected {
    logits: Vec<f32>,
    vocab: usize,
    index: HashMap<Slot, usize>,
    parity: Parity,
}

impl Expected {
    fn new(drafter: &AnyDrafter, batch: &DraftBatch, ends: &TargetEnds) -> Self {
        let slots = batch_slots(&batch.tokens, drafter.num_depths());
        let hidden = drafter.draft_slots(batch, &slots, ends, FloatDType::F32);
        let head = drafter.head();
        let vocab = head.dims()[0];
        let logits = host_values(&hidden.matmul(head.transpose()));
        let index = slots.iter().enumerate().map(|(i, s)| (*s, i));
        Self {
            parity: Parity {
                num_slots: 0,
                max_abs_diff: 0.0,
                max_abs_logit: logits.iter().fold(0.0, |max, x| x.abs().max(max)),
                worst: None,
            },
            index: index.collect(),
            logits,
            vocab,
        }
    }

    fn compare(&mut self, logits: &Tensor<2>, replayed: &[Replayed], depth: usize) {
        let decoded = host_values(logits);
        for (row, decoded) in replayed.iter().zip(decoded.chunks_exact(self.vocab)) {
            let slot = Slot {
                row: row.row,
                anchor: row.anchor,
                depth,
            };
            let Some(&index) = self.index.get(&slot) else {
                continue;
            };
            let trained = &self.logits[index * self.vocab..(index + 1) * self.vocab];
            self.parity.num_slots += 1;
            for (left, right) in decoded.iter().zip(trained) {
                let difference = (left - right).abs();
                if difference > self.parity.max_abs_diff || difference.is_nan() {
                    self.parity.max_abs_diff = difference;
                    self.parity.worst = Some(slot);
                }
            }
        }
    }
}
