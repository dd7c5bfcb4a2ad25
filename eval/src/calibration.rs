//! [`Calibration`]: at which temperature and cut a drafter's tokens are drawn, depth by depth, so that they are accepted most often.
//!
//! Speculative sampling accepts a draft with probability `sum(min(p, q))`, whatever `q` is, as long as draft and ratio use the
//! same numbers (Leviathan et al. 2211.17192); so `q` may be tempered and cut without touching the law of the text. A
//! drafter trained by cross entropy is often too sharp or too flat at depth. Temperature and cut are chosen on given
//! text, slots weighted by how likely a round of decoding reaches them.

use std::path::Path;

use draftsmith_models::batch::{TargetStates, TokenBatch, TokenRow};
use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::sample::Sampling;
use draftsmith_models::vocab::VocabMap;
use serde::{Deserialize, Serialize};

use crate::error::EvalError;
use crate::exact::{Candidate, ExactSettings, for_each_batch, for_each_reached_slot};

/// Name of the file in the folder of a checkpoint.
pub const FILE: &str = "calibration.json";
/// Version of the file.
const FORMAT_VERSION: u32 = 2;
/// Draft temperatures that are tried, as multiples of the target's; 1 first, so that a tie changes nothing.
const TEMPERATURES: [f64; 11] = [1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.35, 1.5, 1.75];
/// Cuts that are tried then: tokens below this share of the drafter's most probable one are not drafted.
const CUTS: [f64; 6] = [0.0, 0.01, 0.02, 0.05, 0.1, 0.2];

/// How drafts are drawn at each depth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    format_version: u32,
    /// Temperature and truncation of the text and the decoding that it was chosen for.
    pub sampling: Sampling,
    /// The best temperature for all depths together, as a multiple of the target's and without a cut: what exported weights can
    /// hold. None where the target's own is best.
    pub shared_temperature: Option<f64>,
    /// One entry a depth; deeper drafts are drawn as those of the last.
    pub depths: Vec<DepthCalibration>,
}

/// How drafts are drawn at one depth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DepthCalibration {
    /// Multiple of the target's temperature.
    pub temperature: f64,
    /// Least share of the most probable token, as `min_p`.
    pub cut: f64,
    /// Mean overlap `sum(min(p, q))` at the slots that rounds reach, before.
    pub overlap_before: f64,
    /// The same with temperature and cut.
    pub overlap: f64,
    /// The same with the shared temperature.
    pub overlap_shared: f64,
}

impl Calibration {
    /// How a draft at `depth` is drawn where the target draws by `sampling`.
    pub fn at(&self, sampling: Sampling, depth: usize) -> Sampling {
        let entry = self.depths.get(depth).or(self.depths.last());
        entry.map_or(sampling, |entry| entry.apply(sampling))
    }

    /// The shared temperature at every depth, and no cut.
    #[must_use]
    pub fn shared(&self) -> Self {
        let flat = |depth: &DepthCalibration| DepthCalibration {
            temperature: self.shared_temperature.unwrap_or(1.0),
            cut: 0.0,
            overlap: depth.overlap_shared,
            ..*depth
        };
        Self {
            depths: self.depths.iter().map(flat).collect(),
            ..self.clone()
        }
    }

    /// Writes it into the folder of a checkpoint.
    ///
    /// # Errors
    /// [`EvalError::Model`] naming the path.
    pub fn write(&self, folder: &Path) -> Result<(), EvalError> {
        Ok(file::write_json(&folder.join(FILE), self)?)
    }

    /// Leaves a checkpoint without one.
    ///
    /// # Errors
    /// [`EvalError::Model`] naming the path.
    pub fn remove(folder: &Path) -> Result<(), EvalError> {
        let path = folder.join(FILE);
        match fs_err::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(ModelError::io(&path, error).into())
            }
            _ => Ok(()),
        }
    }

    /// That of the checkpoint in `folder`, if it was calibrated.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the file is malformed or of another version.
    pub fn read(folder: &Path) -> Result<Option<Self>, EvalError> {
        let path = folder.join(FILE);
        if !path.exists() {
            return Ok(None);
        }
        let found: Self = file::read_json(&path)?;
        let is_positive = |temperature: f64| temperature.is_finite() && temperature > 0.0;
        let is_valid = |depth: &DepthCalibration| {
            is_positive(depth.temperature) && (0.0..=1.0).contains(&depth.cut)
        };
        let is_whole =
            found.shared_temperature.is_none_or(is_positive) && found.depths.iter().all(is_valid);
        if found.format_version != FORMAT_VERSION || !is_whole {
            let reason = format!(
                "format version {}, or a temperature or cut out of range; expected version {FORMAT_VERSION}",
                found.format_version
            );
            return Err(ModelError::malformed(&path, "calibration", reason).into());
        }
        Ok(Some(found))
    }
}

impl DepthCalibration {
    fn apply(&self, sampling: Sampling) -> Sampling {
        Sampling {
            temperature: sampling.temperature * self.temperature,
            min_p: sampling.min_p.max(self.cut),
            ..sampling
        }
    }
}

/// Chooses temperature and cut of every depth on `rows`, whose marked tokens the target drew by `settings.sampling`.
///
/// # Errors
/// [`EvalError`] when the settings are greedy, the states cannot be had, a score is not a number, or no row has a round.
pub fn calibrate(
    candidate: Candidate<'_>,
    rows: &[TokenRow],
    settings: &ExactSettings,
    mut states: impl FnMut(&TokenBatch) -> Result<TargetStates, EvalError>,
) -> Result<Calibration, EvalError> {
    if settings.sampling.is_greedy() {
        return Err(EvalError::setting(
            "drafts of greedy decoding are not drawn, so there is nothing to calibrate",
            "calibrate on text that was drawn at a temperature above 0",
        ));
    }
    let pass = Pass {
        candidate: Candidate {
            calibration: None,
            ..candidate
        },
        rows,
        settings,
    };
    let tempered = |temperature: f64| Sampling {
        temperature: settings.sampling.temperature * temperature,
        ..settings.sampling
    };
    // All temperatures first; then the cuts at the best of them.
    let temperatures = pass.run(&mut states, |_| TEMPERATURES.map(tempered).into())?;
    let shared = temperatures.best_shared(TEMPERATURES.len());
    let chosen = temperatures.best(&TEMPERATURES);
    let cuts = pass.run(&mut states, |depth| {
        let chosen = tempered(chosen[depth].0);
        let cut = |cut: f64| Sampling {
            min_p: chosen.min_p.max(cut),
            ..chosen
        };
        CUTS.map(cut).into()
    })?;
    let of_depth = |(depth, (cut, overlap)): (usize, (f64, f64))| DepthCalibration {
        temperature: chosen[depth].0,
        cut,
        overlap_before: temperatures.mean(depth, 0),
        overlap,
        overlap_shared: temperatures.mean(depth, shared),
    };
    let depths: Vec<DepthCalibration> = cuts
        .best(&CUTS)
        .into_iter()
        .enumerate()
        .map(of_depth)
        .collect();
    if depths.is_empty() {
        return Err(EvalError::NothingToMeasure {
            num_rows: rows.len(),
        });
    }
    Ok(Calibration {
        format_version: FORMAT_VERSION,
        sampling: settings.sampling,
        shared_temperature: (shared > 0).then(|| TEMPERATURES[shared]),
        depths,
    })
}

/// One reading of the text.
struct Pass<'a> {
    candidate: Candidate<'a>,
    rows: &'a [TokenRow],
    settings: &'a ExactSettings,
}

impl Pass<'_> {
    /// The overlaps of all slots under the options of their depth.
    fn run(
        &self,
        states: &mut impl FnMut(&TokenBatch) -> Result<TargetStates, EvalError>,
        options: impl Fn(usize) -> Vec<Sampling>,
    ) -> Result<Search, EvalError> {
        let mut search = Search::default();
        for_each_batch(self.rows, self.settings, states, |batch| {
            for_each_reached_slot(self.candidate, batch, self.settings, |slot| {
                let of = |option: &Sampling| {
                    let q = option.probabilities(slot.draft);
                    overlap(slot.p, &q, self.candidate.vocab)
                };
                let overlaps = options(slot.depth).iter().map(of).collect::<Vec<f64>>();
                search.add(slot.depth, slot.weight, overlaps);
            })
        })?;
        Ok(search)
    }
}

/// `sum(min(p, q))`, `q` over the draft vocabulary.
fn overlap(p: &[f64], q: &[f64], vocab: &VocabMap) -> f64 {
    let ids = vocab.target_ids().iter();
    ids.zip(q).map(|(&id, &q)| q.min(p[id as usize])).sum()
}

/// Weighted sums of overlaps, by depth and option.
#[derive(Debug, Default)]
struct Search {
    weights: Vec<f64>,
    sums: Vec<Vec<f64>>,
}

impl Search {
    fn add(&mut self, depth: usize, weight: f64, overlaps: Vec<f64>) {
        if self.sums.len() <= depth {
            self.weights.resize(depth + 1, 0.0);
            self.sums.resize(depth + 1, Vec::new());
        }
        self.weights[depth] += weight;
        let sums = &mut self.sums[depth];
        for (option, overlap) in overlaps.into_iter().enumerate() {
            if sums.len() <= option {
                sums.push(0.0);
            }
            sums[option] += weight * overlap;
        }
    }

    fn mean(&self, depth: usize, option: usize) -> f64 {
        self.sums[depth]
            .get(option)
            .map_or(0.0, |sum| sum / self.weights[depth].max(f64::MIN_POSITIVE))
    }

    /// The option with the largest overlaps over all depths, each slot weighted by its reach: with reach held fixed, the most
    /// accepted drafts a round. The first of equals.
    fn best_shared(&self, num_options: usize) -> usize {
        let total = |option: usize| self.sums.iter().map(|sums| sums[option]).sum::<f64>();
        let pick = |best: usize, option: usize| {
            if total(option) > total(best) {
                option
            } else {
                best
            }
        };
        (0..num_options).reduce(pick).unwrap_or(0)
    }

    /// The best option of every depth and its mean overlap; the first of equals.
    fn best(&self, options: &[f64]) -> Vec<(f64, f64)> {
        let of_depth = |depth: usize| {
            let means = (0..options.len()).map(|option| self.mean(depth, option));
            let pick = |best: (usize, f64), (option, mean): (usize, f64)| {
                if mean > best.1 { (option, mean) } else { best }
            };
            let (option, mean) = means.enumerate().fold((0, 0.0), pick);
            (options[option], mean)
        };
        (0..self.sums.len()).map(of_depth).collect()
    }
}
