//! `draftsmith plan`: what a run will need, before it starts.

use burn::module::Module;
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
    /// Bytes of the cached states of all rows, for all drafters; 0 where nothing is cached.
    state_bytes: u64,
}

/// What one drafter needs.
#[derive(Debug, Serialize)]
struct DrafterForecast {
    family: &'static str,
    /// Numbers that are trained.
    parameters: u64,
    /// All numbers, and gradient and two moments of those that are trained, f32.
    training_bytes: u64,
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
    let is_prepared = stages::dataset_folder(session).exists();
    let dataset = is_prepared.then(|| stages::dataset(session)).transpose()?;
    let run_file = session.run_file();
    let drafters = run_file.drafter.0.iter();
    let of_data = |dataset: &Dataset| -> anyhow::Result<DataForecast> {
        let text = dataset.manifest().training_text();
        Ok(DataForecast {
            rows: text.rows,
            tokens: text.tokens,
            generated_tokens: text.generated_tokens,
            state_bytes: stages::capture::forecast(session, dataset)?,
        })
    };
    Ok(Forecast {
        target_bytes: target_bytes(session),
        data: dataset.as_ref().map(of_data).transpose()?,
        drafters: drafters
            .map(|drafter| drafter_forecast(session, drafter, dataset.as_ref()))
            .collect::<anyhow::Result<_>>()?,
    })
}

/// Weights of the blocks, embedding and head from the shape alone.
fn target_bytes(session: &Session) -> u64 {
    let spec = session.spec();
    let ends = spec.vocab_size * spec.hidden_size * if spec.tie_word_embeddings { 1 } else { 2 };
    let numbers = (spec.num_block_weights() + ends) as u64;
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
    let all = drafter.num_params() as u64;
    let frozen = match drafter.trained_head() {
        Some(_) => 0,
        None => drafter.head().shape().num_elements() as u64,
    };
    let parameters = all - frozen;
    Ok(DrafterForecast {
        family: run.family(),
        parameters,
        training_bytes: 4 * all + 12 * parameters,
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
        Some(data) => {
            let states = match data.state_bytes {
                0 => "no states are cached".to_owned(),
                bytes => format!("cached states take {:.2} GiB", bytes as f64 / GIB),
            };
            format!(
                "data      {} rows, {} tokens, {} of them written by the target; {states}",
                data.rows, data.tokens, data.generated_tokens
            )
        }
        None => "data      not prepared yet: steps and disk space are unknown".to_owned(),
    });
    for drafter in &forecast.drafters {
        lines.push(format!(
            "{:<9} {} parameters, {:.2} GiB to train them",
            drafter.family,
            drafter.parameters,
            drafter.training_bytes as f64 / GIB
        ));
        if let Some(steps) = drafter.steps {
            lines.push(format!("          {steps} steps"));
        }
    }
    lines.join("\n")
}

fn refuse_excess(session: &Session, forecast: &Forecast) -> anyhow::Result<()> {
    let limits = &session.run_file().limits;
    let training = forecast.drafters.iter().map(|d| d.training_bytes).max();
    let memory = (forecast.target_bytes + training.unwrap_or(0)) as f64 / GIB;
    let disk = forecast.data.as_ref().map_or(0, |data| data.state_bytes) as f64 / GIB;
    let smaller = "a smaller drafter or draft vocabulary needs less, and so does `target.dtype = \"bf16\"`; or raise the limit";
    let fewer = "use fewer rows, `capture.mode = \"online\"`, or raise the limit";
    for (key, needed, limit, hint) in [
        ("memory_gib", memory, limits.memory_gib, smaller),
        ("disk_gib", disk, limits.disk_gib, fewer),
    ] {
        if let Some(limit) = limit.filter(|limit| needed > *limit) {
            return Err(CliError::usage(
                format!("the run needs {needed:.2} GiB, more than `limits.{key}` = {limit}"),
                hint,
            )
            .into());
        }
    }
    Ok(())
}
