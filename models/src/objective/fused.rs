//! One chunk of the objective on the CPU: a single pass over each row of logits.
//!
//! The row of draft logits is turned into the row of its gradient in place; besides the logits only the
//! teacher's rows and two rows a thread exist. The formulas are those of [`super::composed`].
#![expect(
    clippy::inline_always,
    reason = "the vector width of a caller reaches only what is inlined into it"
)]

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::chunk::{Chunk, ChunkOutput, distinct_places};
use super::terms::SlotTerm;
use super::{ObjectiveInput, SlotScores};
use crate::batch::TeacherFigures;
use crate::host;
use crate::host::exp::exp;
use crate::host::row::{self, vectorised};
use crate::loss::SlotRow;
use crate::vocab::VocabMap;

pub(super) fn applies(input: &ObjectiveInput<'_>) -> bool {
    host::is_host(&input.hidden) && host::is_host(&input.head)
}

pub(super) fn evaluate(chunk: &Chunk<'_>) -> ChunkOutput {
    let (places, place_of_slot) = distinct_places(chunk.slots());
    let teacher = TeacherRows::new(chunk.input, &places, chunk.temperature);
    let device = chunk.input.hidden.device();
    let logits = chunk.draft_logits();
    let shape = logits.dims();
    let vocab = chunk.input.teacher.vocab;
    assert_eq!(shape[1], vocab.len(), "the head has one row a draft token");
    let mut rows = host::take(logits);
    let figures: Vec<SlotFigures> = rows
        .par_chunks_exact_mut(shape[1])
        .enumerate()
        .map_init(Scratch::default, |scratch, (index, row)| {
            let place = teacher.place(place_of_slot[index]);
            scratch.slot(row, &place, vocab, chunk, chunk.range.start + index)
        })
        .collect();
    let has_terms = !chunk.terms.is_empty();
    ChunkOutput {
        grad_logits: has_terms.then(|| host::give(rows, shape, &device)),
        terms: (0..chunk.terms.len())
            .map(|term| figures.iter().map(|slot| slot.terms[term]).collect())
            .collect(),
        scores: scores(&figures, &teacher, &place_of_slot),
    }
}

/// The target's share of a chunk, one row a distinct teacher position.
struct TeacherRows {
    width: usize,
    /// `[P, V_draft]`, flat.
    log_p: Vec<f32>,
    /// `[P, V_draft]`, flat; not renormalised.
    p: Vec<f32>,
    places: Vec<PlaceFigures>,
}

/// Figures of one teacher position.
struct PlaceFigures {
    log_mass: f32,
    log_p_token: f32,
    argmax: u32,
    token: u32,
    /// Draft id of the token.
    label: Option<usize>,
}

/// One row of [`TeacherRows`].
struct Place<'a> {
    log_p: &'a [f32],
    p: &'a [f32],
    figures: &'a PlaceFigures,
}

impl TeacherRows {
    fn new(input: &ObjectiveInput<'_>, places: &[(usize, usize)], temperature: f64) -> Self {
        let tokens = input.tokens_after(places);
        let vocab = input.teacher.vocab;
        match input.kept_teacher(places, temperature) {
            Some((logits, figures)) => Self::of_kept(host::take(logits), &figures, tokens, vocab),
            None => Self::of_whole(input.teacher_logits(places, temperature), tokens, vocab),
        }
    }

    /// From logits over the whole vocabulary, `[P, V]`.
    fn of_whole(logits: Tensor<2>, tokens: Vec<u32>, vocab: &VocabMap) -> Self {
        let [_, target_vocab] = logits.dims();
        let width = vocab.len();
        let logits = host::take(logits);
        let mut log_p = vec![0.0; tokens.len() * width];
        let mut p = vec![0.0; tokens.len() * width];
        let places = logits
            .par_chunks_exact(target_vocab)
            .zip(log_p.par_chunks_exact_mut(width))
            .zip(p.par_chunks_exact_mut(width))
            .zip(tokens)
            .map(|(((logits, log_p), p), token)| {
                vectorised(|| whole_row(logits, token, vocab, log_p, p))
            })
            .collect();
        Self {
            width,
            log_p,
            p,
            places,
        }
    }

    /// From logits of the draft vocabulary, `[P, V_draft]` flat, and figures of the whole one.
    fn of_kept(
        mut logits: Vec<f32>,
        figures: &[TeacherFigures],
        tokens: Vec<u32>,
        vocab: &VocabMap,
    ) -> Self {
        let width = vocab.len();
        let mut p = vec![0.0; tokens.len() * width];
        let places = logits
            .par_chunks_exact_mut(width)
            .zip(p.par_chunks_exact_mut(width))
            .zip(figures)
            .zip(tokens)
            .map(|(((logits, p), figures), token)| {
                vectorised(|| kept_row(logits, p, *figures, token, vocab))
            })
            .collect();
        Self {
            width,
            log_p: logits,
            p,
            places,
        }
    }

    fn place(&self, index: usize) -> Place<'_> {
        let range = index * self.width..(index + 1) * self.width;
        Place {
            log_p: &self.log_p[range.clone()],
            p: &self.p[range],
            figures: &self.places[index],
        }
    }
}

/// Figures of rows of target logits `[n, V]` and the data token that follows each.
pub(super) fn figures(logits: Tensor<2>, tokens: &[u32]) -> Vec<TeacherFigures> {
    let [_, target_vocab] = logits.dims();
    host::take(logits)
        .par_chunks_exact(target_vocab)
        .zip(tokens)
        .map(|(logits, token)| vectorised(|| row_figures(logits, *token)))
        .collect()
}

#[inline(always)]
fn row_figures(logits: &[f32], token: u32) -> TeacherFigures {
    let log_z = row::log_sum_exp(logits);
    TeacherFigures {
        log_z,
        log_p_next: logits[token as usize] - log_z,
        argmax: row::argmax(logits) as u32,
    }
}

#[inline(always)]
fn whole_row(
    logits: &[f32],
    token: u32,
    vocab: &VocabMap,
    log_p: &mut [f32],
    p: &mut [f32],
) -> PlaceFigures {
    for (kept, &id) in log_p.iter_mut().zip(vocab.target_ids()) {
        *kept = logits[id as usize];
    }
    kept_row(log_p, p, row_figures(logits, token), token, vocab)
}

/// Turns the logits of the draft vocabulary into `log p`.
#[inline(always)]
fn kept_row(
    logits: &mut [f32],
    p: &mut [f32],
    figures: TeacherFigures,
    token: u32,
    vocab: &VocabMap,
) -> PlaceFigures {
    for (logit, p) in logits.iter_mut().zip(p) {
        *logit -= figures.log_z;
        *p = exp(*logit);
    }
    PlaceFigures {
        log_mass: row::log_sum_exp(logits),
        log_p_token: figures.log_p_next,
        argmax: figures.argmax,
        token,
        label: vocab.to_draft(token).map(|id| id as usize),
    }
}

/// Figures of one slot.
struct SlotFigures {
    /// Each term of the mixture before its coefficient.
    terms: Vec<f32>,
    alpha: f32,
    log_q_token: f32,
    log_q_best: f32,
    /// Absolute id of the drafter's most probable token.
    argmax: u32,
}

/// Rows that one thread reuses from slot to slot.
#[derive(Default)]
struct Scratch {
    log_q: Vec<f32>,
    q: Vec<f32>,
}

impl Scratch {
    /// Replaces the draft logits in `row` by the gradient of slot `index` of the batch.
    fn slot(
        &mut self,
        row: &mut [f32],
        place: &Place<'_>,
        vocab: &VocabMap,
        chunk: &Chunk<'_>,
        index: usize,
    ) -> SlotFigures {
        self.log_q.resize(row.len(), 0.0);
        self.q.resize(row.len(), 0.0);
        let argmax = vectorised(|| log_softmax(row, &mut self.log_q, &mut self.q));
        let slot = SlotRow {
            log_q: &self.log_q,
            q: &self.q,
            p: place.p,
            log_p: place.log_p,
            log_mass: place.figures.log_mass,
            label: place.figures.label,
            alpha: vectorised(|| overlap(place, &self.q)),
        };
        row.fill(0.0);
        let mut evaluate = |term: &SlotTerm| {
            let scale = term.factor(index) * chunk.scale[index];
            term.value(index, term.loss.evaluate_row(&slot, scale, row))
        };
        let terms = chunk.terms.iter().map(&mut evaluate).collect();
        let log_q_token = slot.label.map_or(f32::NEG_INFINITY, |id| slot.log_q[id]);
        SlotFigures {
            terms,
            alpha: slot.alpha,
            log_q_token,
            log_q_best: self.log_q[argmax],
            argmax: vocab.target_ids()[argmax],
        }
    }
}

/// `log q` and `q` of a row of logits; returns the index of its largest value.
#[inline(always)]
fn log_softmax(logits: &[f32], log_q: &mut [f32], q: &mut [f32]) -> usize {
    let log_z = row::log_sum_exp(logits);
    for ((x, log_q), q) in logits.iter().zip(log_q).zip(q) {
        *log_q = x - log_z;
        *q = exp(*log_q);
    }
    row::argmax(logits)
}

/// `sum(min(p, q))`; not a number when either side is not.
#[inline(always)]
fn overlap(place: &Place<'_>, q: &[f32]) -> f32 {
    if place.figures.log_mass.is_nan() {
        return f32::NAN; // a comparison would pass over it
    }
    row::sum([place.p, q], |[p, q]| if p < q { p } else { q })
}

fn scores(figures: &[SlotFigures], teacher: &TeacherRows, place_of_slot: &[usize]) -> SlotScores {
    let mut scores = SlotScores::default();
    for (slot, &place) in figures.iter().zip(place_of_slot) {
        let place = &teacher.places[place];
        scores.alpha.push(slot.alpha);
        scores.log_p_token.push(place.log_p_token);
        scores.log_q_token.push(slot.log_q_token);
        scores.log_q_best.push(slot.log_q_best);
        scores.argmax_agrees.push(slot.argmax == place.argmax);
        scores.argmax_is_token.push(slot.argmax == place.token);
    }
    scores
}
