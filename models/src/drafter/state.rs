//! [`DraftState`]: what a drafter remembers between rounds of decoding.

use burn::tensor::{Device, FloatDType, Int, Tensor};

use crate::batch::index_tensor;
use crate::target::KvCache;
use crate::target::kv_cache::CacheShape;

/// Newly committed positions of every row, with the target states that are now known.
///
/// Entry `i` of row `b` is position `t = (positions already observed) + i`: its states and the token
/// `x_{t+1}` that follows it, which is committed too.
#[derive(Clone, Debug)]
pub struct Committed {
    /// Captured states, concatenated, `[B, M, K*H]`; padded on the right.
    pub aux: Tensor<3>,
    /// Output of the last target block, before the final norm, `[B, M, H]`.
    pub final_hidden: Tensor<3>,
    /// The tokens that follow, `[B, M]`.
    pub next_ids: Tensor<2, Int>,
    /// Real entries of each row, at least 1 and at most M.
    pub lens: Vec<usize>,
}

/// What a drafter remembers between rounds.
#[derive(Clone, Debug)]
pub struct DraftState {
    /// Keys and values of observed positions, then of the tokens drafted in this round.
    pub cache: KvCache,
    /// Observed positions of each row, which is also the position of its last committed token; what the
    /// cache is rolled back to before each round.
    pub observed: Vec<usize>,
    /// Last committed token of each row.
    pub anchors: Vec<u32>,
    /// State fed to the next depth where it is not the output, `[B, 1, H]`.
    pub feedback: Option<Tensor<3>>,
    /// Output rows in front of the head, `[B, M, H]`: of the depth computed last, or of all depths.
    pub outputs: Option<Tensor<3>>,
    /// Which of `outputs` is the one of the current depth.
    depth: usize,
}

impl DraftState {
    /// Nothing observed yet.
    pub(super) fn new(shape: CacheShape, device: &Device) -> Self {
        let num_rows = shape.num_rows;
        Self {
            cache: KvCache::new(shape, FloatDType::F32, device),
            observed: vec![0; num_rows],
            anchors: vec![0; num_rows],
            feedback: None,
            outputs: None,
            depth: 0,
        }
    }

    /// Keeps only the given rows, in the given order.
    pub fn select_rows(&mut self, rows: &[usize]) {
        self.cache.select_rows(rows);
        self.observed = rows.iter().map(|&row| self.observed[row]).collect();
        self.anchors = rows.iter().map(|&row| self.anchors[row]).collect();
        self.feedback = self.feedback.take().map(|x| kept_rows(x, rows));
        self.outputs = self.outputs.take().map(|x| kept_rows(x, rows));
    }

    /// Forgets what was drafted in the last round.
    pub(super) fn roll_back(&mut self) {
        for (row, &observed) in self.observed.iter().enumerate() {
            self.cache.truncate(row, observed);
        }
    }

    /// Counts newly committed positions.
    pub(super) fn commit(&mut self, committed: &Committed) {
        for (observed, new) in self.observed.iter_mut().zip(&committed.lens) {
            *observed += new;
        }
        self.anchors = last_ids(&committed.next_ids, &committed.lens);
        self.depth = 0;
    }

    /// The output rows of the first depth, or of the one after the current, `[B, H]`.
    pub(super) fn next_output(&mut self, advance: bool) -> Tensor<2> {
        self.depth = if advance { self.depth + 1 } else { 0 };
        self.output()
    }

    /// The output rows of the current depth, `[B, H]`.
    #[expect(
        clippy::expect_used,
        reason = "drafting starts with observing the prompt"
    )]
    pub(super) fn output(&self) -> Tensor<2> {
        let outputs = self.outputs.clone();
        let outputs = outputs.expect("`observe` runs before `next_logits`");
        outputs.narrow(1, self.depth, 1).squeeze_dim::<2>(1)
    }
}

fn kept_rows<const D: usize>(x: Tensor<D>, rows: &[usize]) -> Tensor<D> {
    let indices = index_tensor(rows.iter().copied(), &x.device());
    x.select(0, indices)
}

/// The last real entry of each row, `[B, M, H]` to `[B, 1, H]`.
pub(super) fn last_rows(x: Tensor<3>, lens: &[usize]) -> Tensor<3> {
    let [batch, len, width] = x.dims();
    let last = lens
        .iter()
        .enumerate()
        .map(|(row, real)| row * len + real - 1);
    let indices = index_tensor(last, &x.device());
    x.reshape([batch * len, width])
        .select(0, indices)
        .reshape([batch, 1, width])
}

/// The last real id of each row of `[B, M]`.
fn last_ids(ids: &Tensor<2, Int>, lens: &[usize]) -> Vec<u32> {
    let len = ids.dims()[1];
    let flat: Vec<i64> = ids.to_data().iter::<i64>().collect();
    let last = |(row, real): (usize, &usize)| flat[row * len + real - 1] as u32;
    lens.iter().enumerate().map(last).collect()
}
