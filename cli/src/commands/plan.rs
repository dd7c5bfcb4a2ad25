//! `draftsmith plan`: what a run will need, before it starts.

use draftsmith_data::cache::CaptureMode;
use draftsmith_data::cache::format::TEACHER_BYTES_PER_TOKEN;
use draftsmith_data::dataset::Dataset;
use draftsmith_models::batch::TokenRow;
use draftsmith_models::drafter::{AnyDrafter, DrafterContext};
use draftsmith_models::vocab::VocabMap;
use serde::Serialize;

use crate::errors::CliError;
use crate::run_file::{DraftVocab, DrafterRun, TargetDtype};
use crate::session::Session;
use crate::stages;

/// Bytes of a GiB.
const GIB: f64 = (1_u64 << 30) as f64;

/// The forecast of a run.
#[derive(Debug, Serialize)]
struct Forecast {
    /// Bytes of the frozen target in memory.
    target_bytes: u64,
    /// Rows and tokens, once the data are prepared.
    data: Option<DataForecast>,
    /// One entry a drafter.
    drafters: Vec<DrafterForecast>,
}

/// What is known of the rows.
#[derive(Debug, Serialize)]
struct DataForecast {
    rows: usize,
    tokens: usize,
    generated_tokens: usize,
}

/// What one drafter needs.
#[derive(Debug, Serialize)]
struct DrafterForecast {
    family: &'static str,
    /// Trained numbers.
    parameters: u64,
    /// Parameters, gradient and two moments, f32.
    training_bytes: u64,
    /// Bytes of cached states of all rows, with the teacher's figures where they are wanted; absent before the data are prepared.
    state_bytes: Option<u64>,
    /// Optimizer steps; absent before the data are prepared.
    steps: Option<u64>,
}

/// Prints the forecast; refuses what exceeds `[limits]`.
pub(crate) fn plan(session: &Session) -> anyhow::Result<()> {
    let forecast = forecast(session)?;
    session.console().value(&forecast, || describe(&forecast))?;
    refuse_excess(session, &forecast)
}

fn forecast(session: &Session) -> anyhow::Result<Forecast> {
    let dataset = stages::dataset(session).ok();
    let run_file = session.run_file();
    let drafters = run_file.drafter.0.iter();
    Ok(Forecast {
        target_bytes: target_bytes(session),
        data: dataset.as_ref().map(|dataset| DataForecast {
            rows: dataset.len(),
            tokens: dataset.manifest().tokens,
            generated_tokens: dataset.manifest().generated_tokens,
        }),
        drafters: drafters
            .map(|drafter| drafter_forecast(session, drafter, dataset.as_ref()))
            .collect::<anyhow::Result<_>>()?,
    })
}

/// Weights of the blocks, embedding and head from the shape alone.
fn target_bytes(session: &Session) -> u64 {
    let spec = session.spec();
    let attention = 2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads);
    let block = attention + 3 * spec.hidden_size * spec.intermediate_size;
    let ends = spec.vocab_size * spec.hidden_size * if spec.tie_word_embeddings { 1 } else { 2 };
    let numbers = (spec.num_layers * block + ends) as u64;
    match session.run_file().target.dtype {
        TargetDtype::F32 => 4 * numbers,
        TargetDtype::Bf16 => 2 * numbers,
    }
}

fn drafter_forecast(
    session: &Session,
    run: &DrafterRun,
    dataset: Option<&Dataset>,
) -> anyhow::Result<DrafterForecast> {
    let spec = session.spec();
    let size = match run.draft_vocab {
        DraftVocab::Full => spec.vocab_size,
        DraftVocab::Size(size) => size,
    };
    // Which tokens they are does not matter here, only how many.
    let vocab = VocabMap::new((0..size as u32).collect(), spec.vocab_size)?;
    let context = DrafterContext {
        target: spec,
        ends: session.target()?.ends(),
        vocab: &vocab,
    };
    let drafter = AnyDrafter::init(&run.config, context, 0, session.device())?;
    let tensors = drafter.to_tensors();
    let numbers = |tensor: &draftsmith_models::weights::NamedTensor| {
        tensor.shape.iter().product::<usize>() as u64
    };
    let parameters = tensors.iter().map(numbers).sum();
    let numbers_per_token = (drafter.state_spec().aux_layer_ids.len() + 1) * spec.hidden_size;
    let mut bytes_per_token = 2 * numbers_per_token as u64;
    if run.draft_vocab.is_reduced(spec.vocab_size) {
        bytes_per_token += TEACHER_BYTES_PER_TOKEN;
    }
    Ok(DrafterForecast {
        family: run.family(),
        parameters,
        training_bytes: 16 * parameters,
        state_bytes: dataset.map(|data| data.manifest().tokens as u64 * bytes_per_token),
        steps: dataset.map(|data| steps(session, run, data)).transpose()?,
    })
}

fn steps(session: &Session, run: &DrafterRun, dataset: &Dataset) -> anyhow::Result<u64> {
    let split = stages::split(session, dataset);
    let rows: Vec<TokenRow> = split.train.iter().map(|&row| dataset.row(row)).collect();
    Ok(draftsmith_trainer::plan(&rows, session.run_file().train_of(run))?.steps)
}

fn describe(forecast: &Forecast) -> String {
    let mut lines = vec![format!(
        "target    {:.2} GiB in memory",
        forecast.target_bytes as f64 / GIB
    )];
    lines.push(match &forecast.data {
        Some(data) => format!(
            "data      {} rows, {} tokens, {} of them written by the target",
            data.rows, data.tokens, data.generated_tokens
        ),
        None => "data      not prepared yet: steps and disk space are unknown".to_owned(),
    });
    for drafter in &forecast.drafters {
        lines.push(format!(
            "{:<9} {} parameters, {:.2} GiB to train them",
            drafter.family,
            drafter.parameters,
            drafter.training_bytes as f64 / GIB
        ));
        if let (Some(bytes), Some(steps)) = (drafter.state_bytes, drafter.steps) {
            let gib = bytes as f64 / GIB;
            lines.push(format!(
                "          {steps} steps; cached states would take {gib:.2} GiB"
            ));
        }
    }
    lines.join("\n")
}

fn refuse_excess(session: &Session, forecast: &Forecast) -> anyhow::Result<()> {
    let limits = &session.run_file().limits;
    let training = forecast.drafters.iter().map(|d| d.training_bytes).max();
    let memory = (forecast.target_bytes + training.unwrap_or(0)) as f64 / GIB;
    let states = forecast.drafters.iter().filter_map(|d| d.state_bytes).max();
    let disk = if session.run_file().capture.mode == CaptureMode::Cached {
        states.unwrap_or(0) as f64 / GIB
    } else {
        0.0
    };
    for (key, needed, limit) in [
        ("memory_gib", memory, limits.memory_gib),
        ("disk_gib", disk, limits.disk_gib),
    ] {
        if let Some(limit) = limit.filter(|limit| needed > *limit) {
            return Err(CliError::usage(
                format!("the run needs {needed:.2} GiB, more than `limits.{key}` = {limit}"),
                "use fewer rows, `capture.mode = \"online\"`, or raise the limit",
            )
            .into());
        }
    }
    Ok(())
}
