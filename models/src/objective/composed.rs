//! One chunk of the objective in tensor operations: any device, any type.

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::chunk::{Chunk, ChunkOutput, distinct_places};
use super::{ObjectiveInput, SlotScores};
use crate::batch::{TeacherFigures, index_tensor};
use crate::loss::LossRows;
use crate::vocab::VocabMap;
use crate::weights::host_values;

pub(super) fn evaluate(chunk: &Chunk<'_>) -> ChunkOutput {
    let rows = ChunkRows::new(chunk);
    let device = chunk.input.hidden.device();
    let mut values = Vec::with_capacity(chunk.terms.len());
    let mut grad: Option<Tensor<2>> = None;
    for term in chunk.terms {
        let terms = term.loss.evaluate(&rows.loss_rows);
        let scale: Vec<f32> = chunk
            .range
            .clone()
            .map(|index| term.factor(index) * chunk.scale[index])
            .collect();
        let shape = [scale.len(), 1];
        let scaled = terms.grad * Tensor::from_data(TensorData::new(scale, shape), &device);
        grad = Some(match grad {
            Some(grad) => grad + scaled,
            None => scaled,
        });
        let at_slots = host_values(&terms.value).into_iter();
        let at_slots = at_slots.zip(chunk.range.clone());
        values.push(
            at_slots
                .map(|(value, index)| term.value(index, value))
                .collect(),
        );
    }
    ChunkOutput {
        terms: values,
        grad_logits: grad,
        scores: rows.scores(),
    }
}

/// Figures of rows of target logits `[n, V]` and the data token that follows each.
pub(super) fn figures(logits: &Tensor<2>, tokens: &[u32]) -> Vec<TeacherFigures> {
    let whole = WholeVocabulary::of_logits(logits, tokens);
    let argmax = whole.argmax.to_data();
    let numbers = host_values(&whole.log_z)
        .into_iter()
        .zip(host_values(&whole.log_p_token));
    numbers
        .zip(argmax.iter::<i64>())
        .map(|((log_z, log_p_next), argmax)| TeacherFigures {
            log_z,
            log_p_next,
            argmax: argmax as u32,
        })
        .collect()
}

/// Figures of the target's distribution over its whole vocabulary, one row a teacher position.
struct WholeVocabulary {
    /// Log-sum-exp of the logits, `[P, 1]`.
    log_z: Tensor<2>,
    /// Log-probability of the data token that follows, `[P]`.
    log_p_token: Tensor<1>,
    /// Most probable token, absolute id, `[P]`.
    argmax: Tensor<1, Int>,
}

impl WholeVocabulary {
    fn of_logits(logits: &Tensor<2>, tokens: &[u32]) -> Self {
        let log_z = log_sum_exp(logits.clone());
        let tokens = ids(tokens, &logits.device()).unsqueeze_dim(1);
        let log_p_token = logits.clone().gather(1, tokens) - log_z.clone();
        Self {
            log_z,
            log_p_token: log_p_token.squeeze_dim::<1>(1),
            argmax: logits.clone().argmax(1).squeeze_dim::<1>(1),
        }
    }

    fn of_figures(figures: &[TeacherFigures], device: &Device) -> Self {
        let column = |value: fn(&TeacherFigures) -> f32| {
            let values: Vec<f32> = figures.iter().map(value).collect();
            Tensor::<1>::from_floats(values.as_slice(), device)
        };
        let argmax: Vec<u32> = figures.iter().map(|at| at.argmax).collect();
        Self {
            log_z: column(|at| at.log_z).unsqueeze_dim(1),
            log_p_token: column(|at| at.log_p_next),
            argmax: ids(&argmax, device),
        }
    }
}

/// The target's share of a chunk, one row a distinct teacher position.
struct TeacherRows {
    /// `[P, V_draft]`.
    log_p: Tensor<2>,
    /// Log-probability of the data token that follows, `[P]`.
    log_p_token: Tensor<1>,
    /// Most probable token, absolute id, `[P]`.
    argmax: Tensor<1, Int>,
    /// The data token that follows.
    tokens: Vec<u32>,
}

impl TeacherRows {
    fn new(input: &ObjectiveInput<'_>, places: &[(usize, usize)], temperature: f64) -> Self {
        let device = input.hidden.device();
        let tokens = input.tokens_after(places);
        let vocab = input.teacher.vocab;
        let (kept, whole) = if let Some((kept, figures)) = input.kept_teacher(places, temperature) {
            (kept, WholeVocabulary::of_figures(&figures, &device))
        } else {
            let logits = input.teacher_logits(places, temperature); // [P, V]
            let whole = WholeVocabulary::of_logits(&logits, &tokens);
            let kept = if vocab.is_full() {
                logits
            } else {
                logits.select(1, ids(vocab.target_ids(), &device))
            };
            (kept, whole)
        };
        Self {
            log_p: kept - whole.log_z,
            log_p_token: whole.log_p_token,
            argmax: whole.argmax,
            tokens,
        }
    }

    /// Draft ids of the data tokens (0 where unknown) and 1 or 0 for known or not, `[P, 1]` each.
    fn labels(&self, vocab: &VocabMap, device: &Device) -> (Tensor<2, Int>, Tensor<2>) {
        let draft = |token: &u32| vocab.to_draft(*token);
        let label: Vec<u32> = self.tokens.iter().map(|x| draft(x).unwrap_or(0)).collect();
        let is_known = |token: &u32| f32::from(u8::from(draft(token).is_some()));
        let known: Vec<f32> = self.tokens.iter().map(is_known).collect();
        let known = Tensor::<1>::from_floats(known.as_slice(), device);
        (ids(&label, device).unsqueeze_dim(1), known.unsqueeze_dim(1))
    }
}

/// Distributions of one chunk of slots.
struct ChunkRows {
    loss_rows: LossRows,
    log_p_token: Tensor<1>,
    draft_argmax: Tensor<1, Int>,
    target_argmax: Tensor<1, Int>,
    token: Tensor<1, Int>,
}

impl ChunkRows {
    fn new(chunk: &Chunk<'_>) -> Self {
        let input = chunk.input;
        let device = input.hidden.device();
        let vocab = input.teacher.vocab;
        let (places, place_of_slot) = distinct_places(chunk.slots());
        let teacher = TeacherRows::new(input, &places, chunk.temperature);
        let (label, known) = teacher.labels(vocab, &device);
        let draft_logits = chunk.draft_logits();
        // The same formula as the teacher's: a drafter that agrees has q = p to the last bit, and only
        // then is the gradient of TV zero.
        let log_q = draft_logits.clone() - log_sum_exp(draft_logits.clone());
        let draft_argmax = absolute(draft_logits.argmax(1).squeeze_dim::<1>(1), vocab);

        // Several slots share a teacher position: spread its row after the costly functions.
        let spread = index_tensor(place_of_slot, &device);
        let log_mass = log_sum_exp(teacher.log_p.clone());
        Self {
            loss_rows: LossRows {
                q: log_q.clone().exp(),
                log_q,
                log_mass: log_mass.select(0, spread.clone()),
                p: teacher.log_p.clone().exp().select(0, spread.clone()),
                log_p: teacher.log_p.select(0, spread.clone()),
                label: label.select(0, spread.clone()),
                label_known: known.select(0, spread.clone()),
            },
            log_p_token: teacher.log_p_token.select(0, spread.clone()),
            draft_argmax,
            target_argmax: teacher.argmax.select(0, spread.clone()),
            token: ids(&teacher.tokens, &device).select(0, spread),
        }
    }

    fn scores(&self) -> SlotScores {
        let rows = &self.loss_rows;
        let unknown = rows.label_known.clone().equal_scalar(0.0);
        let log_q_token = rows.log_q.clone().gather(1, rows.label.clone());
        let log_q_token = log_q_token.mask_fill(unknown, f32::NEG_INFINITY);
        let same = |left: &Tensor<1, Int>, right: &Tensor<1, Int>| {
            let equal = left.clone().equal(right.clone()).int();
            equal
                .to_data()
                .iter::<i64>()
                .map(|value| value != 0)
                .collect::<Vec<bool>>()
        };
        SlotScores {
            alpha: host_values(&rows.alpha()),
            log_p_token: host_values(&self.log_p_token),
            log_q_token: host_values(&log_q_token),
            log_q_best: host_values(&rows.log_q.clone().max_dim(1)),
            argmax_agrees: same(&self.draft_argmax, &self.target_argmax),
            argmax_is_token: same(&self.draft_argmax, &self.token),
        }
    }
}

fn ids(values: &[u32], device: &Device) -> Tensor<1, Int> {
    index_tensor(values.iter().map(|&id| id as usize), device)
}

fn absolute(draft_ids: Tensor<1, Int>, vocab: &VocabMap) -> Tensor<1, Int> {
    if vocab.is_full() {
        return draft_ids;
    }
    let table = ids(vocab.target_ids(), &draft_ids.device());
    table.select(0, draft_ids)
}

/// `log(sum(exp(x)))` over the last axis, `[n, V]` to `[n, 1]`.
fn log_sum_exp(x: Tensor<2>) -> Tensor<2> {
    let max = x.clone().max_dim(1);
    (x - max.clone()).exp().sum_dim(1).log() + max
}
