//! How likely every draft of a batch is accepted, given the text.

use burn::tensor::FloatDType;
use draftsmith_models::batch::{DraftBatch, TokenRow};
use draftsmith_models::drafter::AnyDrafter;
use draftsmith_models::objective::{
    Objective, ObjectiveInput, SlotLogits, SlotScores, Teacher, for_each_slot_logits,
};
use draftsmith_models::sample::Sampling;
use draftsmith_models::slot::{Slot, batch_slots};

use super::target_law::{TargetLaw, is_finite};
use super::{Candidate, ExactSettings};
use crate::error::EvalError;
use crate::verify::{SlotLaw, TrainingScore};

/// One slot: how likely its draft is accepted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlotRatio {
    /// Accepted and equal to the text, given the text: `r`.
    pub(super) realised: f64,
    /// The same without knowing this token, or a value of the same mean over texts.
    pub(super) marginal: f64,
    /// How likely the drafter itself takes it to be accepted.
    pub(super) confidence: f64,
}

/// By anchor of each row, ratios by depth.
pub(super) type RatioTable = Vec<Vec<Vec<SlotRatio>>>;

/// The ratios of all slots of a batch up to `depths`.
///
/// # Errors
/// [`EvalError::NotFinite`] naming the row whose scores are not numbers.
pub(super) fn of_batch(
    candidate: Candidate<'_>,
    teacher: &Teacher<'_>,
    batch: &DraftBatch,
    depths: usize,
    settings: &ExactSettings,
) -> Result<RatioTable, EvalError> {
    let drafter = candidate.drafter;
    let rows = &batch.tokens.rows;
    let empty = |row: &TokenRow| vec![Vec::new(); row.len()];
    let mut table: RatioTable = rows.iter().map(empty).collect();
    for slots in drafter.passes(batch_slots(&batch.tokens, depths)) {
        let input = input(drafter, teacher, batch, &slots);
        let taught = drafter.confidence(input.hidden.clone());
        let taught = taught.map(|confidence| confidence.probabilities());
        for (index, ratio) in of_slots(candidate, &input, settings)
            .into_iter()
            .enumerate()
        {
            let slot = &slots[index];
            let mut ratio = ratio.ok_or_else(|| EvalError::NotFinite {
                what: "the acceptance scores",
                id: rows[slot.row].key.clone(),
            })?;
            if let Some(taught) = &taught {
                ratio.confidence = f64::from(taught[index]);
            }
            let depths = &mut table[slot.row][slot.anchor];
            depths.resize(depths.len().max(slot.depth + 1), SlotRatio::default());
            depths[slot.depth] = ratio;
        }
    }
    Ok(table)
}

/// Drafter and target at some slots of a batch.
pub(super) fn input<'a>(
    drafter: &AnyDrafter,
    teacher: &Teacher<'a>,
    batch: &'a DraftBatch,
    slots: &'a [Slot],
) -> ObjectiveInput<'a> {
    ObjectiveInput {
        slots,
        hidden: drafter.draft_slots(batch, slots, teacher.ends, FloatDType::F32),
        head: drafter.head(),
        batch,
        teacher: teacher.clone(),
        head_gradient: None,
    }
}

/// The ratio of each slot; `None` where a score is not a number.
fn of_slots(
    candidate: Candidate<'_>,
    input: &ObjectiveInput<'_>,
    settings: &ExactSettings,
) -> Vec<Option<SlotRatio>> {
    let sampling = settings.sampling;
    let is_plain = sampling == Sampling::at(sampling.temperature);
    let is_whole = is_plain && candidate.calibration.is_none();
    match settings.rule.training_score() {
        // Argmaxes are moved by no temperature.
        Some(TrainingScore::Argmax) => of_scores(input, settings, 1.0, true),
        Some(TrainingScore::Overlap) if is_whole => {
            of_scores(input, settings, sampling.temperature, false)
        }
        _ => of_laws(candidate, input, settings),
    }
}

/// From the scores of training, where they suffice: fast, and without the whole vocabulary where the batch brings
/// figures of it.
fn of_scores(
    input: &ObjectiveInput<'_>,
    settings: &ExactSettings,
    temperature: f64,
    is_greedy: bool,
) -> Vec<Option<SlotRatio>> {
    let scores = Objective::score(input, temperature, settings.chunk_positions);
    let slots = 0..input.slots.len();
    slots
        .map(|index| SlotRatio::of_scores(&scores, index, is_greedy))
        .collect()
}

/// From whole distributions, under any rule and truncation.
fn of_laws(
    candidate: Candidate<'_>,
    input: &ObjectiveInput<'_>,
    settings: &ExactSettings,
) -> Vec<Option<SlotRatio>> {
    let mut ratios = Vec::with_capacity(input.slots.len());
    let mut target = TargetLaw::default();
    for_each_slot_logits(input, settings.chunk_positions, |logits| {
        let depth = logits.slot.depth;
        let drawn = candidate.draft_sampling(settings.rule, settings.sampling, depth);
        ratios.push(of_law(input, settings, drawn, &mut target, &logits));
    });
    ratios
}

fn of_law(
    input: &ObjectiveInput<'_>,
    settings: &ExactSettings,
    drawn: Sampling,
    target: &mut TargetLaw,
    logits: &SlotLogits<'_>,
) -> Option<SlotRatio> {
    let p = target.at(logits, &settings.sampling)?;
    if !is_finite(logits.draft) {
        return None;
    }
    let q = drawn.probabilities(logits.draft);
    let slot = logits.slot;
    let law = SlotLaw {
        p,
        q: &q,
        vocab: input.teacher.vocab,
        token: input.batch.tokens.rows[slot.row].ids[slot.teacher_position() + 1],
    };
    let realised = settings.rule.realised()?(&law);
    Some(SlotRatio {
        realised,
        marginal: realised,
        confidence: q.iter().copied().fold(0.0, f64::max),
    })
}

impl SlotRatio {
    /// `None` when the scores are not numbers.
    fn of_scores(scores: &SlotScores, index: usize, is_greedy: bool) -> Option<Self> {
        let confidence = f64::from(scores.log_q_best[index]).exp();
        // Argmaxes of rows that are not numbers would look like figures.
        if is_greedy {
            return scores.alpha[index].is_finite().then(|| Self {
                realised: f64::from(u8::from(scores.argmax_is_token[index])),
                marginal: f64::from(u8::from(scores.argmax_agrees[index])),
                confidence,
            });
        }
        let log_ratio = f64::from(scores.log_q_token[index]) - f64::from(scores.log_p_token[index]);
        let marginal = f64::from(scores.alpha[index]);
        // A token outside the draft vocabulary has log q = -inf and is never accepted.
        (!log_ratio.is_nan() && marginal.is_finite()).then(|| Self {
            realised: log_ratio.exp().min(1.0),
            marginal,
            confidence,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_outside_the_draft_vocabulary_is_never_accepted() {
        let scores = SlotScores {
            alpha: vec![0.7, 0.7],
            log_p_token: vec![-1.0, -1.0],
            log_q_token: vec![f32::NEG_INFINITY, f32::NAN],
            log_q_best: vec![-0.1, -0.1],
            argmax_agrees: vec![false; 2],
            argmax_is_token: vec![false; 2],
        };
        let ratio = SlotRatio::of_scores(&scores, 0, false).unwrap();
        assert!(ratio.realised.abs() < f64::EPSILON);
        assert!(SlotRatio::of_scores(&scores, 1, false).is_none());
    }
}
