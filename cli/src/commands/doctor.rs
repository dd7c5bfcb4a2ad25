//! `draftsmith doctor`: do device, target, tokenizer, template and drafter belong together?

use burn::tensor::Tensor;
use draftsmith_data::tokenizer::ChatTokenizer;
use draftsmith_eval::enumeration::RuleCheck;
use draftsmith_models::batch::{DraftBatch, TokenBatch, TokenRow};
use draftsmith_models::checkpoint;
use draftsmith_models::drafter::{AnyDrafter, DrafterContext};
use draftsmith_models::parity::{Rounds, moved, replay};
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::vocab::VocabMap;
use draftsmith_trainer::device_check::TensorDifference;
use serde::Serialize;

use super::gradient_check;
use crate::device::DeviceChoice;
use crate::run_file::DrafterRun;
use crate::session::Session;
use crate::stages;

/// Largest difference between training and decoding logits, relative to the largest logit: f32 sums of
/// a few thousand terms in two orders differ by about 1e-5.
const PARITY_TOLERANCE: f32 = 1e-4;
/// Seed of the noise on fresh parameters.
const NOISE_SEED: u64 = 1;
/// Rows and tokens of the made-up batch for the parity gate.
const CHECK_ROWS: u64 = 2;
const CHECK_LEN: usize = 24;

/// Outcome of one check.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    name: String,
    passed: bool,
    detail: String,
    /// Tensor by tensor, where a device is compared with the processor.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tensors: Vec<TensorDifference>,
    /// Figures, where the law of a rule is checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    law: Option<RuleCheck>,
}

impl Check {
    pub(super) fn new(name: impl Into<String>, passed: bool, detail: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            passed,
            detail: detail.into(),
            tensors: Vec::new(),
            law: None,
        }
    }

    /// Of one verification rule by itself.
    pub(super) fn of_rule(found: RuleCheck) -> Self {
        let name = format!("law of `{}` over {}", found.rule, found.shape.name());
        Self {
            law: Some(found.clone()),
            ..Self::new(name, found.holds(), found.describe())
        }
    }
}

/// Runs all checks; fails when one of them does.
pub(crate) fn doctor(session: &Session, lossless: bool) -> anyhow::Result<()> {
    let mut checks = vec![device_check(session)];
    checks.extend(tokenizer_checks(session));
    for run in &session.run_file().drafter.0 {
        checks.extend(parity_checks(session, run)?);
        if session.run_file().run.device != DeviceChoice::Cpu {
            checks.push(gradients_check(session, run)?);
        }
    }
    if lossless {
        checks.extend(super::lossless::checks(session)?);
    }
    session.console().value(&checks, || describe(&checks))?;
    let failed = checks.iter().filter(|check| !check.passed).count();
    anyhow::ensure!(failed == 0, "{failed} of {} checks failed", checks.len());
    Ok(())
}

fn describe(checks: &[Check]) -> String {
    let lines: Vec<String> = checks
        .iter()
        .map(|check| {
            let verdict = if check.passed { "ok  " } else { "FAIL" };
            format!("{verdict} {}: {}", check.name, check.detail)
        })
        .collect();
    lines.join("\n")
}

/// A sum of which every term is known exactly.
fn device_check(session: &Session) -> Check {
    let sum = Tensor::<1>::ones([4096], session.device()).sum();
    let found = draftsmith_models::weights::host_values(&sum);
    let device = &session.run_file().run.device;
    Check::new(
        "device",
        found == [4096.0],
        format!("`{device}` adds 4096 ones to {found:?}"),
    )
}

fn tokenizer_checks(session: &Session) -> Vec<Check> {
    let tokenizer = match stages::tokenizer(session) {
        Ok(tokenizer) => tokenizer,
        Err(error) => {
            return vec![Check::new("tokenizer", false, format!("{error:#}"))];
        }
    };
    let vocab_size = session.spec().vocab_size;
    let fits = tokenizer.check_vocab(vocab_size);
    vec![
        Check::new(
            "tokenizer",
            fits.is_ok(),
            fits.map_or_else(
                |error| error.to_string(),
                |()| format!("{} of {vocab_size} ids", tokenizer.vocab_size()),
            ),
        ),
        end_check(session, &tokenizer),
        Check::new(
            "chat template",
            tokenizer.template_if_any().is_some(),
            match tokenizer.template_if_any() {
                Some(template) => format!("{} characters", template.source().len()),
                None => "the target folder has none".to_owned(),
            },
        ),
    ]
}

fn end_check(session: &Session, tokenizer: &ChatTokenizer) -> Check {
    let known = tokenizer.end_ids();
    let agree = session
        .spec()
        .eos_token_ids
        .iter()
        .all(|id| known.contains(id));
    let passed = !known.is_empty() && agree;
    Check::new("end tokens", passed, format!("{known:?}"))
}

/// A drafter must compute the same logits in a training row and step by step: a fresh one with noise on every
/// parameter, because some parts start at zero, and the trained one of the run if there is one.
fn parity_checks(session: &Session, run: &DrafterRun) -> anyhow::Result<Vec<Check>> {
    let vocab = VocabMap::full(session.spec().vocab_size);
    let context = DrafterContext {
        target: session.spec(),
        ends: session.target()?.ends(),
        vocab: &vocab,
    };
    let fresh = AnyDrafter::init(&run.config, context, 0, session.device())?;
    let family = run.family();
    let mut checks = vec![parity_check(session, family, &moved(fresh, NOISE_SEED))?];
    if let Some(trained) = trained(session, run)? {
        let name = format!("trained {family}");
        checks.push(parity_check(session, &name, &trained)?);
    }
    Ok(checks)
}

/// The drafter that a run of these settings on this target has trained so far.
fn trained(session: &Session, run: &DrafterRun) -> anyhow::Result<Option<AnyDrafter>> {
    if !stages::train::has_checkpoints(session, run) {
        return Ok(None);
    }
    let Ok(folder) = stages::train::chosen_checkpoint(session, run) else {
        return Ok(None);
    };
    let card = checkpoint::load_card(&folder)?;
    if card.drafter != run.config || card.target_fingerprint != session.target_fingerprint()? {
        return Ok(None); // `run` would set it aside, or refuse
    }
    let ends = session.target()?.ends();
    let (drafter, _) = checkpoint::load(&folder, ends, session.device())?;
    Ok(Some(drafter))
}

fn parity_check(session: &Session, name: &str, drafter: &AnyDrafter) -> anyhow::Result<Check> {
    let target = session.target()?;
    let tokens = made_up_rows(session.spec().vocab_size);
    let states = target.forward(&tokens.ids(), &drafter.state_spec());
    let batch = DraftBatch { tokens, states };
    let parity = replay(drafter, &batch, target.ends(), Rounds::Varying);
    Ok(Check::new(
        format!("parity of `{name}`"),
        parity.holds(PARITY_TOLERANCE),
        format!(
            "{} slots, largest difference {:.1e} of logits up to {:.1}",
            parity.num_slots, parity.max_abs_diff, parity.max_abs_logit
        ),
    ))
}

/// A card must compute the processor's gradients.
fn gradients_check(session: &Session, run: &DrafterRun) -> anyhow::Result<Check> {
    let rows = made_up_rows(session.spec().vocab_size).rows;
    let found = gradient_check::compare(session, run, rows)?;
    let name = format!("gradients of `{}`", run.family());
    Ok(Check {
        tensors: found.tensors.clone(),
        ..Check::new(name, found.passed(), found.describe())
    })
}

fn made_up_rows(vocab_size: usize) -> TokenBatch {
    let row = |number: u64| {
        let mut stream = Stream::new(0, Purpose::Check, number);
        let len = CHECK_LEN - 5 * number as usize;
        TokenRow {
            key: format!("check {number}"),
            ids: (0..len).map(|_| stream.below(vocab_size) as u32).collect(),
            turns: (0..len).map(|t| u32::from(t >= 4)).collect(),
        }
    };
    TokenBatch {
        rows: (0..CHECK_ROWS).map(row).collect(),
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_eval::enumeration::{Method, Shape};

    use super::*;

    /// Red under: `found.holds()` in `of_rule` replaced by `true`; `self.bound` in `RuleCheck::holds` by 1.0.
    #[test]
    fn a_rule_off_its_law_fails() {
        let of_figure = |figure| {
            Check::of_rule(RuleCheck {
                rule: "sampling",
                shape: Shape::Trees,
                method: Method::Enumeration,
                cases: 45,
                figure,
                bound: 1e-9,
            })
        };
        let [good, bad] = [2.2e-16, 0.03].map(of_figure);
        assert!(good.passed && !bad.passed);
        let expected = "FAIL law of `sampling` over trees: 45 cases enumerated, largest error 3.0e-2 (bound 1e-9)";
        assert_eq!(describe(&[bad]), expected);
    }
}
