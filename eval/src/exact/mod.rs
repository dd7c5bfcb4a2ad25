//! [`exact`]: the tau of real decoding, computed from teacher-forced text without decoding it.
//!
//! On text the target generated, the probability that a draft is accepted *and* equals the text is known
//! for every (anchor, depth); the round DP of [`crate::round_dp`] turns them into the expected number of
//! rounds. The figure is exact (given equal numerics) when the text was drawn as it is measured: greedy
//! text for `greedy`, text of the same temperature and truncation for the others. It has no coin noise, so
//! it needs far less text than decoding, and it needs no caches. Training validates with it.

mod ratios;
mod reached;
mod schedule;
mod sums;
mod target_law;

use draftsmith_data::hidden::HiddenStateSource;
use draftsmith_models::batch::{DraftBatch, TargetStates, TokenBatch, TokenRow};
use draftsmith_models::drafter::AnyDrafter;
use draftsmith_models::objective::Teacher;
use draftsmith_models::sample::Sampling;
use draftsmith_models::slot::is_valid;
use draftsmith_models::target::TargetEnds;
use draftsmith_models::vocab::VocabMap;
use serde::{Deserialize, Serialize};

pub(crate) use self::reached::for_each_reached_slot;
pub use self::schedule::{ScheduledTau, THRESHOLDS};
use self::sums::Sums;
use crate::bootstrap::Interval;
use crate::calibration::Calibration;
use crate::error::EvalError;
use crate::verify::{SpeculativeSampling, VerifyRule};

/// The drafter under measurement.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The drafter, on a device without gradient tracking.
    pub drafter: &'a AnyDrafter,
    /// Embedding, final norm and head of the target.
    pub ends: &'a TargetEnds,
    /// Draft vocabulary.
    pub vocab: &'a VocabMap,
    /// How its drafts are drawn where they are drawn; unset means as the target's tokens are.
    pub calibration: Option<&'a Calibration>,
}

impl Candidate<'_> {
    /// How a draft at `depth` is drawn under a rule.
    fn draft_sampling(&self, rule: &dyn VerifyRule, sampling: Sampling, depth: usize) -> Sampling {
        match self.calibration {
            Some(calibration) if rule.draft_choice().is_drawn() => calibration.at(sampling, depth),
            _ => sampling,
        }
    }
}

/// Rule and sizes of an exact evaluation.
#[derive(Clone, Copy, Debug)]
pub struct ExactSettings {
    /// The rule by which drafts are verified; one that judges each draft by itself.
    pub rule: &'static dyn VerifyRule,
    /// Temperature and truncation of target and drafter.
    pub sampling: Sampling,
    /// Drafts a round, at most; unset means the depths the drafter was trained for.
    pub depths: Option<usize>,
    /// How the target drew the text; unset where nobody knows.
    pub text: Option<Sampling>,
    /// Rows processed together.
    pub batch_rows: usize,
    /// Teacher positions whose logits exist at one time.
    pub chunk_positions: usize,
    /// Bootstrap resamples of the interval; 0 gives none.
    pub resamples: usize,
    /// Seed of the resampling.
    pub seed: u64,
}

impl Default for ExactSettings {
    fn default() -> Self {
        Self {
            rule: &SpeculativeSampling,
            sampling: Sampling::default(),
            depths: None,
            text: Some(Sampling::default()),
            batch_rows: 4,
            chunk_positions: 256,
            resamples: 1000,
            seed: 0,
        }
    }
}

impl ExactSettings {
    /// Whether the text was drawn at the temperature and with the truncation of the decoding that is measured.
    pub fn text_matches_rule(&self) -> bool {
        self.text == Some(self.sampling)
    }
}

/// What the exact evaluator found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExactReport {
    /// Verification rule.
    pub rule: String,
    /// Temperature and truncation of the measured decoding.
    pub sampling: Sampling,
    /// How the text was drawn; unset where nobody knows.
    pub text: Option<Sampling>,
    /// Whether the text was drawn as the rule decodes, so that the figures are those of real decoding.
    pub text_matches_rule: bool,
    /// Rows with at least one round.
    pub num_rows: usize,
    /// Turns with at least one round.
    pub num_turns: usize,
    /// Tokens committed in rounds: those of each turn but its first.
    pub num_tokens: usize,
    /// One entry for each gamma, `1 ..= num_depths`.
    pub by_gamma: Vec<ExactTau>,
    /// Expected rounds that verify 0, 1, .. drafts, one list for each entry of `by_gamma`: with it any cost of a round gives
    /// the cost of the text.
    pub rounds_by_drafts: Vec<Vec<f64>>,
    /// The same with the largest gamma, where a round verifies only drafts that the drafter believes in.
    pub by_confidence: Vec<ScheduledTau>,
    /// Conditional acceptance per depth over the rounds decoding visits with the largest gamma.
    pub acceptance_by_depth: Vec<Option<f64>>,
    /// Survival per depth over the same rounds.
    pub survival_by_depth: Vec<Option<f64>>,
}

/// Tokens per round with up to `gamma` drafts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExactTau {
    /// Drafts a round, at most.
    pub gamma: usize,
    /// Pooled tokens per round, the target's own token included.
    pub tau: f64,
    /// 95 % bootstrap interval of `tau` over rows.
    pub interval: Option<Interval>,
    /// Verified drafts per round; fewer than `gamma` where texts end.
    pub drafts: f64,
    /// Expected rounds over all text.
    pub rounds: f64,
    /// Variance of the rounds of decoding this very text; of the coins alone, not of the text.
    pub rounds_variance: f64,
    /// Mean tokens of a round over uniformly chosen anchors, as other trainers log it; not the tau of
    /// decoding, because rounds restart after failures and so dwell in hard text.
    pub uniform_anchor_tau: f64,
}

/// Variance of the rounds from which on their number is close to normal; with fewer chances it is a small count, whose tail
/// is much longer.
const LEAST_VARIANCE: f64 = 10.0;

impl ExactTau {
    /// How far `rounds` of decoding the same text lie from what is expected, in standard deviations of the coins;
    /// `None` where too few coins decide anything for the figure to be normal.
    pub fn z(&self, rounds: f64) -> Option<f64> {
        let has_many = self.rounds_variance >= LEAST_VARIANCE;
        has_many.then(|| (rounds - self.rounds) / self.rounds_variance.sqrt())
    }
}

impl ExactReport {
    /// Tau for the largest gamma, the figure that selects checkpoints.
    pub fn tau(&self) -> f64 {
        self.by_gamma.last().map_or(1.0, |entry| entry.tau)
    }
}

/// Measures a drafter on `rows`, whose marked tokens the target generated.
///
/// All gammas from 1 to the drafter's number of depths are computed at once. Rows without a round are
/// skipped.
///
/// # Errors
/// [`EvalError`] when the states cannot be had, a score is not a number, or no row has a round.
pub fn exact(
    candidate: Candidate<'_>,
    source: &dyn HiddenStateSource,
    rows: &[TokenRow],
    settings: &ExactSettings,
) -> Result<ExactReport, EvalError> {
    let wanted = candidate.drafter.state_spec();
    if *source.spec() != wanted {
        return Err(EvalError::setting(
            format!(
                "the states hold layers {:?}, but the drafter reads {:?}",
                source.spec().aux_layer_ids,
                wanted.aux_layer_ids
            ),
            "capture the states again for this drafter, or set its `aux_layer_ids`",
        ));
    }
    exact_with(candidate, rows, settings, |tokens| {
        Ok(source.states(tokens)?)
    })
}

/// [`exact`] with states from any function of the tokens.
///
/// # Errors
/// As [`exact`].
pub fn exact_with(
    candidate: Candidate<'_>,
    rows: &[TokenRow],
    settings: &ExactSettings,
    mut states: impl FnMut(&TokenBatch) -> Result<TargetStates, EvalError>,
) -> Result<ExactReport, EvalError> {
    if settings.rule.realised().is_none() {
        return Err(EvalError::setting(
            format!(
                "the verification rule `{}` has no exact evaluation: it judges the drafts of a round together",
                settings.rule.name()
            ),
            "`sampling` bounds it from below",
        ));
    }
    let teacher = Teacher::new(candidate.ends, candidate.vocab);
    let depths = settings
        .depths
        .unwrap_or(candidate.drafter.num_depths())
        .min(candidate.drafter.max_depths().unwrap_or(usize::MAX));
    let mut sums = Sums::new(depths);
    for_each_batch(rows, settings, &mut states, |batch| {
        let table = ratios::of_batch(candidate, &teacher, batch, depths, settings)?;
        for (row, anchors) in batch.tokens.rows.iter().zip(&table) {
            sums.add_row(row, anchors);
        }
        Ok(())
    })?;
    if sums.is_empty() {
        return Err(EvalError::NothingToMeasure {
            num_rows: rows.len(),
        });
    }
    Ok(sums.report(settings))
}

/// Calls `visit` with the rows that have a round, some at a time, and their states.
pub(crate) fn for_each_batch(
    rows: &[TokenRow],
    settings: &ExactSettings,
    states: &mut impl FnMut(&TokenBatch) -> Result<TargetStates, EvalError>,
    mut visit: impl FnMut(&DraftBatch) -> Result<(), EvalError>,
) -> Result<(), EvalError> {
    let measurable: Vec<&TokenRow> = rows.iter().filter(|row| has_round(row)).collect();
    for chunk in measurable.chunks(settings.batch_rows.max(1)) {
        let tokens = TokenBatch {
            rows: chunk.iter().map(|row| (*row).clone()).collect(),
        };
        let states = states(&tokens)?;
        visit(&DraftBatch { tokens, states })?;
    }
    Ok(())
}

/// Whether decoding takes a round for the marked tokens of a row.
pub(crate) fn has_round(row: &TokenRow) -> bool {
    (1..row.len()).any(|anchor| is_valid(&row.turns, anchor, 0))
}
