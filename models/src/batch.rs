//! What travels between the crates: token rows, target states and training batches.

use burn::tensor::{Device, Int, Tensor, TensorData};

/// One tokenised document with the marks that say which tokens the target generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRow {
    /// Identity of the row in its data set; stable across runs.
    pub key: String,
    /// Token ids, length S.
    pub ids: Vec<u32>,
    /// 0 for a token the target did not generate, else the number of its assistant turn, from 1.
    pub turns: Vec<u32>,
}

impl TokenRow {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether the row holds no token.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

/// Rows that are processed together, padded on the right to the longest.
#[derive(Clone, Debug)]
pub struct TokenBatch {
    /// The rows, B of them.
    pub rows: Vec<TokenRow>,
}

impl TokenBatch {
    /// Number of rows, B.
    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// Length of the longest row, S.
    pub fn padded_len(&self) -> usize {
        self.rows.iter().map(TokenRow::len).max().unwrap_or(0)
    }

    /// Token ids of every row.
    pub fn ids(&self) -> Vec<&[u32]> {
        self.rows.iter().map(|row| row.ids.as_slice()).collect()
    }
}

/// Rows of ids as one tensor `[B, S]`, padded on the right with id 0.
pub fn padded_ids(rows: &[&[u32]], device: &Device) -> Tensor<2, Int> {
    let padded_len = rows.iter().map(|row| row.len()).max().unwrap_or(0);
    let mut flat = Vec::with_capacity(rows.len() * padded_len);
    for row in rows {
        flat.extend(row.iter().map(|&id| id as i32));
        flat.resize(flat.len() + padded_len - row.len(), 0);
    }
    Tensor::from_data(TensorData::new(flat, [rows.len(), padded_len]), device)
}

/// A host list of indices as an integer tensor `[N]`.
pub fn index_tensor(indices: impl IntoIterator<Item = usize>, device: &Device) -> Tensor<1, Int> {
    let flat: Vec<i32> = indices.into_iter().map(|index| index as i32).collect();
    let len = flat.len();
    Tensor::from_data(TensorData::new(flat, [len]), device)
}

/// Which states of the target a drafter reads.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateSpec {
    /// Zero-based indices of the blocks whose *output* is captured, strictly increasing.
    pub aux_layer_ids: Vec<usize>,
}

/// Hidden states of the frozen target for one batch.
#[derive(Clone, Debug)]
pub struct TargetStates {
    /// Outputs of the chosen blocks, concatenated in ascending layer order, `[B, S, K*H]`.
    pub aux: Tensor<3>,
    /// Output of the last block *before* the final norm, `[B, S, H]`.
    pub final_hidden: Tensor<3>,
    /// Figures of the teacher at each position of each row, without padding; absent where only the states
    /// themselves are known.
    pub teacher: Option<Vec<Vec<TeacherFigures>>>,
}

/// What the target's distribution at one position says over its whole vocabulary, at temperature 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TeacherFigures {
    /// Log-sum-exp of the logits.
    pub log_z: f32,
    /// Log-probability of the data token that follows.
    pub log_p_next: f32,
    /// Most probable token.
    pub argmax: u32,
}

impl TeacherFigures {
    /// Stands where no token that the target generated follows: no slot is taught there.
    pub const ABSENT: Self = Self {
        log_z: f32::NAN,
        log_p_next: f32::NAN,
        argmax: 0,
    };
}

/// Positions of a row whose distribution can teach: a token that the target generated follows.
pub fn teaching_positions(turns: &[u32]) -> impl Iterator<Item = usize> {
    let follows = turns.iter().skip(1).enumerate();
    follows
        .filter(|(_, turn)| **turn != 0)
        .map(|(position, _)| position)
}

/// A training batch: tokens with their target states.
#[derive(Clone, Debug)]
pub struct DraftBatch {
    /// The token rows, B of them.
    pub tokens: TokenBatch,
    /// States of the same rows; frozen, never part of a gradient graph.
    pub states: TargetStates,
}
