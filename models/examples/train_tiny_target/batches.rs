//! Tokenised conversations in batches of similar length, without waste and without cut documents.

use std::path::Path;

use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::rng::{Purpose, Stream};
use serde::Deserialize;

/// Content of the corpus file that `train_tokenizer` writes: one list of ids per conversation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Corpus {
    /// Conversations to learn from.
    pub(crate) train: Vec<Vec<u32>>,
    /// Held-out conversations.
    pub(crate) valid: Vec<Vec<u32>>,
}

impl Corpus {
    /// Reads the file and cuts every conversation to `max_len` + 1 tokens.
    pub(crate) fn read(path: &Path, max_len: usize) -> Result<Self, ModelError> {
        let mut corpus: Self = file::read_json(path)?;
        for row in corpus.train.iter_mut().chain(&mut corpus.valid) {
            row.truncate(max_len + 1);
        }
        Ok(corpus)
    }
}

/// Conversations of one batch; token `i` of a row is the input whose label is token `i + 1`.
#[derive(Debug)]
pub(crate) struct TokenRows<'a> {
    rows: Vec<&'a [u32]>,
    len: usize,
}

impl TokenRows<'_> {
    pub(crate) fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// Inputs of the longest row.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Number of labels in the batch.
    pub(crate) fn num_labels(&self) -> usize {
        self.rows.iter().map(|row| row.len() - 1).sum()
    }

    /// Input ids, flat `[B * S]`, padded on the right with id 0.
    pub(crate) fn inputs(&self) -> Vec<i32> {
        let mut flat = Vec::with_capacity(self.rows.len() * self.len);
        for row in &self.rows {
            flat.extend(row[..row.len() - 1].iter().map(|&id| id as i32));
            flat.resize(flat.len() + self.len + 1 - row.len(), 0);
        }
        flat
    }

    /// Indices into the flat inputs that have a label, in the order of [`TokenRows::labels`].
    pub(crate) fn label_places(&self) -> impl Iterator<Item = usize> {
        let len = self.len;
        let rows = self.rows.iter().enumerate();
        rows.flat_map(move |(row, ids)| (0..ids.len() - 1).map(move |i| row * len + i))
    }

    /// The next token of every input.
    pub(crate) fn labels(&self) -> impl Iterator<Item = usize> {
        self.rows
            .iter()
            .flat_map(|row| row[1..].iter().map(|&id| id as usize))
    }
}

/// Batches of at most `budget` padded inputs, rows of similar length together.
///
/// Their order and the choice among rows of equal length are a pure function of (seed, epoch).
pub(crate) fn batches(
    rows: &[Vec<u32>],
    budget: usize,
    seed: u64,
    epoch: u64,
) -> Vec<TokenRows<'_>> {
    let mut stream = Stream::new(seed, Purpose::DataOrder, epoch);
    let mut order = stream.permutation(rows.len());
    order.retain(|&row| rows[row].len() > 1);
    order.sort_by_key(|&row| rows[row].len());
    let mut groups: Vec<TokenRows<'_>> = Vec::new();
    let mut current: Vec<&[u32]> = Vec::new();
    for row in order {
        let len = rows[row].len() - 1;
        if !current.is_empty() && (current.len() + 1) * len > budget {
            groups.push(group(std::mem::take(&mut current)));
        }
        current.push(&rows[row]);
    }
    if !current.is_empty() {
        groups.push(group(current));
    }
    let mut slots: Vec<Option<TokenRows<'_>>> = groups.into_iter().map(Some).collect();
    let shuffled = stream.permutation(slots.len());
    shuffled
        .into_iter()
        .filter_map(|place| slots[place].take())
        .collect()
}

fn group(rows: Vec<&[u32]>) -> TokenRows<'_> {
    let len = rows.iter().map(|row| row.len() - 1).max().unwrap_or(0);
    TokenRows { rows, len }
}
