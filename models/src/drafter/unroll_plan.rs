//! [`UnrollPlan`]: which rows of a batch a drafter that is unrolled over its own outputs computes.
//!
//! Row `t = a - 1` of an anchor `a` is a *query*, computed at every step. All rows before the last anchor
//! are *context*: the queries attend to their keys of step 0, and nothing else of them is needed. What
//! works on each row alone runs over the real rows, `[1, M, X]` for the context and `[1, N, X]` for the
//! queries; attention pads them to `[B, S, X]` and `[B, A, X]`.

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::block_plan::anchors_of;
use crate::batch::{DraftBatch, index_tensor};
use crate::layers::attention::Causal;
use crate::layers::ragged::Ragged;
use crate::slot::Slot;
use crate::target::forward::positions;

/// The rows that some slots need.
pub(super) struct UnrollPlan<'a> {
    batch: &'a DraftBatch,
    /// Batch row and ascending anchors, for rows that have any.
    anchors: Vec<(usize, Vec<usize>)>,
    /// Positions of each of these rows before its last anchor.
    pub(super) context: Ragged,
    /// Queries of each of these rows.
    pub(super) queries: Ragged,
    /// Steps until the deepest slot.
    pub(super) num_steps: usize,
}

impl<'a> UnrollPlan<'a> {
    pub(super) fn new(batch: &'a DraftBatch, slots: &[Slot]) -> Self {
        let anchors: Vec<_> = anchors_of(slots).into_iter().collect();
        let lens = |len: fn(&[usize]) -> usize| {
            Ragged::new(anchors.iter().map(|(_, anchors)| len(anchors)).collect())
        };
        Self {
            batch,
            context: lens(|anchors| anchors.last().copied().unwrap_or(0)),
            queries: lens(<[usize]>::len),
            num_steps: slots.iter().map(|slot| slot.depth + 1).max().unwrap_or(0),
            anchors,
        }
    }

    /// Batch row and position of every context row.
    fn context_places(&self) -> impl Iterator<Item = (usize, usize)> {
        let last = |anchors: &Vec<usize>| anchors.last().copied().unwrap_or(0);
        self.anchors
            .iter()
            .flat_map(move |(row, anchors)| (0..last(anchors)).map(|t| (*row, t)))
    }

    /// The context rows of states `[B, S, X]` of the whole batch, `[1, M, X]`.
    pub(super) fn context_of(&self, states: &Tensor<3>) -> Tensor<3> {
        let [num_rows, len, width] = states.dims();
        let places = self.context_places().map(|(row, t)| row * len + t);
        let places = index_tensor(places, &states.device());
        let flat = states.clone().reshape([1, num_rows * len, width]);
        flat.select(1, places)
    }

    /// The queries among context rows, `[1, M, X]` to `[1, N, X]`.
    pub(super) fn queries_of(&self, context: Tensor<3>) -> Tensor<3> {
        let mut start = 0;
        let mut places = Vec::new();
        for (_, anchors) in &self.anchors {
            places.extend(anchors.iter().map(|anchor| start + anchor - 1));
            start += anchors.last().copied().unwrap_or(0);
        }
        let places = index_tensor(places, &context.device());
        context.select(1, places)
    }

    fn ids(&self, places: impl Iterator<Item = (usize, usize)>, device: &Device) -> Tensor<2, Int> {
        let rows = &self.batch.tokens.rows;
        // A query near the end of its row has no slot at later steps: its token may not exist.
        let id = |(row, t): (usize, usize)| rows[row].ids.get(t).copied().unwrap_or(0) as usize;
        index_tensor(places.map(id), device).unsqueeze_dim(0)
    }

    /// Tokens `x_{t+1}` that the context rows are fed at step 0, `[1, M]`.
    pub(super) fn context_ids(&self, device: &Device) -> Tensor<2, Int> {
        self.ids(self.context_places().map(|(row, t)| (row, t + 1)), device)
    }

    /// Tokens `x_{a+step}` that the queries are fed, `[1, N]`.
    pub(super) fn query_ids(&self, step: usize, device: &Device) -> Tensor<2, Int> {
        let anchors = self.anchors.iter();
        let places = anchors.flat_map(|(row, anchors)| anchors.iter().map(|a| (*row, a + step)));
        self.ids(places, device)
    }

    /// Positions `t` of the padded context, `[B, S]`.
    pub(super) fn context_positions(&self, device: &Device) -> Tensor<2, Int> {
        let starts = vec![0; self.anchors.len()];
        positions(&starts, self.context.padded_len(), device)
    }

    /// Positions `t + step` of the padded queries, `[B, A]`.
    pub(super) fn query_positions(&self, step: usize, device: &Device) -> Tensor<2, Int> {
        let positions = self.padded_queries().into_iter();
        let positions = positions.map(|t| (t + step) as i32).collect();
        let shape = [self.anchors.len(), self.queries.padded_len()];
        Tensor::from_data(TensorData::new::<i32, _>(positions, shape), device)
    }

    /// 0 for every context row at position 0, 1 for the others, `[1, M, 1]`.
    pub(super) fn is_not_first(&self, device: &Device) -> Tensor<3> {
        let values: Vec<f32> = self
            .context_places()
            .map(|(_, t)| if t == 0 { 0.0 } else { 1.0 })
            .collect();
        let len = values.len();
        Tensor::from_data(TensorData::new(values, [1, len, 1]), device)
    }

    /// Which context keys each query sees: those of its own position and before.
    pub(super) fn causal(&self) -> Causal {
        let positions = self.padded_queries();
        Causal::at(positions, self.anchors.len(), self.context.padded_len())
    }

    /// Position `a - 1` of each query, padding at 0, `[B, A]` flat.
    fn padded_queries(&self) -> Vec<usize> {
        let len = self.queries.padded_len();
        let mut positions = Vec::with_capacity(self.anchors.len() * len);
        for (_, anchors) in &self.anchors {
            positions.extend(anchors.iter().map(|anchor| anchor - 1));
            positions.resize(positions.len() + len - anchors.len(), 0);
        }
        positions
    }

    /// The rows of slots among the outputs of each step, `[1, N, X]` each: `[slots, X]`.
    #[expect(clippy::expect_used, reason = "the plan was made from these slots")]
    pub(super) fn slot_rows(&self, steps: Vec<Tensor<3>>, slots: &[Slot]) -> Tensor<2> {
        let num_queries: usize = self.anchors.iter().map(|(_, anchors)| anchors.len()).sum();
        let mut first = std::collections::BTreeMap::new();
        let mut start = 0;
        for (row, anchors) in &self.anchors {
            first.insert(*row, (start, anchors));
            start += anchors.len();
        }
        let place = |slot: &Slot| {
            let (start, anchors) = first[&slot.row];
            let found = anchors.binary_search(&slot.anchor);
            slot.depth * num_queries + start + found.expect("every slot has its query")
        };
        let outputs = Tensor::cat(steps, 1).squeeze_dim::<2>(0);
        let places = index_tensor(slots.iter().map(place), &outputs.device());
        outputs.select(0, places)
    }
}
