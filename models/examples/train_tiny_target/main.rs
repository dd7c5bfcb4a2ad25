//! Trains the embedded target of `assets/tiny-target` from a tokenised corpus.
//!
//! ```text
//! cargo run --release -p draftsmith-models --example train_tiny_target -- \
//!     --corpus tiny/corpus.json --run tiny/run --out tiny/target
//! ```
//!
//! The corpus comes from the `train_tokenizer` example of `draftsmith-data`. Started again, it resumes
//! from the last checkpoint in the run folder and goes on as if it had never stopped.

mod batches;
mod checkpoint;
mod model;
mod settings;

use std::io::Write as _;
use std::time::Instant;

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module as _, ParamGroup};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{AdamWConfig, AdjustLrFn, GradientsParams, ModuleOptimizer, MuonConfig};
use burn::tensor::{Device, Tensor};
use draftsmith_models::error::{Diagnose as _, ModelError};
use draftsmith_models::target::TargetSpec;
use draftsmith_models::weights::host_values;

use batches::{Corpus, TokenRows, batches};
use model::{Source, TinyLlama};
use settings::Settings;

/// Allocation dominates the CPU backend with the system allocator (`mmap` of every large tensor).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Steps between two log lines.
const LOG_EVERY: usize = 10;

fn main() -> std::process::ExitCode {
    match Settings::parse(std::env::args().skip(1)).and_then(|settings| train(&settings)) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("error: {error}"));
            if let Some(hint) = error.hint() {
                say(&format!("hint: {hint}"));
            }
            std::process::ExitCode::FAILURE
        }
    }
}

/// Writes one line to standard output; a closed pipe is no reason to stop training.
fn say(line: &str) {
    let _ignored = writeln!(std::io::stdout(), "{line}");
}

fn train(settings: &Settings) -> Result<(), ModelError> {
    let corpus = Corpus::read(&settings.corpus, settings::MAX_POSITIONS)?;
    let device = Device::flex().autodiff();
    let spec = TargetSpec::from_json(&settings::model_config(), "config.json".as_ref())?;
    let optimizer = optimizer()?;
    let mut state = match checkpoint::latest(&settings.run)? {
        Some(found) => found.load(spec, optimizer, &device)?,
        None => State {
            model: TinyLlama::new(spec, &Source::Seed(settings.seed), &device)?,
            optimizer,
            step: 0,
        },
    };
    let mut log = Log::start();
    let mut epoch = Epoch::of(&corpus.train, settings, state.step);
    while state.step < settings.steps {
        if state.step >= epoch.end() {
            epoch = Epoch::of(&corpus.train, settings, state.step);
        }
        let rows = &epoch.batches[state.step - epoch.start];
        let rate = settings.rate_at(state.step);
        let loss = state.advance(rows, rate);
        log.add(loss, rows.num_labels(), state.step, rate);
        if state.step % settings.save_every == 0 || state.step == settings.steps {
            // A quarter of the held-out rows shows the direction; the last figure is over all of them.
            let rows = &corpus.valid;
            let is_last = state.step == settings.steps;
            let shown = if is_last {
                rows.as_slice()
            } else {
                &rows[..rows.len().div_ceil(4)]
            };
            let valid = validate(&state.model, shown, settings);
            say(&format!("step {} valid loss {valid:.4}", state.step));
            checkpoint::save(&state, &settings.run)?;
            checkpoint::export(&state.model, &settings.out)?;
        }
    }
    Ok(())
}

/// Muon for the matrices of the blocks, AdamW for the embedding and the gains.
///
/// With the update scaled to the size AdamW's has, both share one learning rate (Liu et al. 2025,
/// 2502.16982). On this little data Muon learns more from each token.
fn optimizer() -> Result<ModuleOptimizer, ModelError> {
    let matrices =
        ParamGroup::from_regex(r"blocks\.\d+\.(q|k|v|o|gate|up|down)$").map_err(|e| {
            ModelError::setting(format!("no parameter group: {e:?}"), "fix the pattern")
        })?;
    let muon = MuonConfig::new()
        .with_weight_decay(Some(WeightDecayConfig::new(0.1)))
        .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW)
        .build();
    Ok(AdamWConfig::new()
        .with_beta_2(0.98)
        .with_epsilon(1e-8)
        .with_weight_decay(0.1)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .init()
        .with_group(matrices, muon, None))
}

/// Everything a checkpoint holds.
pub(crate) struct State {
    /// The weights, in f32.
    pub(crate) model: TinyLlama,
    /// Moments of every parameter.
    pub(crate) optimizer: ModuleOptimizer,
    /// Steps done.
    pub(crate) step: usize,
}

impl State {
    /// One step; returns the loss before it.
    fn advance(&mut self, rows: &TokenRows<'_>, rate: f64) -> f32 {
        let loss = self.model.loss(rows);
        let value = scalar(&loss);
        let gradients = GradientsParams::from_grads(loss.backward(), &self.model);
        self.model = self.optimizer.step(rate, self.model.clone(), gradients);
        self.step += 1;
        value
    }
}

/// The batches of one pass over the data and the step it starts at.
struct Epoch<'a> {
    start: usize,
    batches: Vec<TokenRows<'a>>,
}

impl<'a> Epoch<'a> {
    /// The pass that holds `step`; walked from the beginning, because passes differ in length.
    fn of(rows: &'a [Vec<u32>], settings: &Settings, step: usize) -> Self {
        let mut start = 0;
        let mut index = 0;
        loop {
            let batches = batches(rows, settings.batch_tokens, settings.seed, index);
            if step < start + batches.len() || batches.is_empty() {
                return Self { start, batches };
            }
            start += batches.len();
            index += 1;
        }
    }

    fn end(&self) -> usize {
        self.start + self.batches.len()
    }
}

/// Mean loss in nats per token over the held-out rows, without gradient tracking.
fn validate(model: &TinyLlama, rows: &[Vec<u32>], settings: &Settings) -> f64 {
    let model = model.valid();
    let (mut sum, mut count) = (0.0, 0);
    for batch in batches(rows, settings.batch_tokens, settings.seed, 0) {
        sum += f64::from(scalar(&model.loss(&batch))) * batch.num_labels() as f64;
        count += batch.num_labels();
    }
    sum / f64::from(u32::try_from(count.max(1)).unwrap_or(u32::MAX))
}

/// The one value of a tensor; NaN when it has none.
fn scalar(tensor: &Tensor<1>) -> f32 {
    host_values(tensor).first().copied().unwrap_or(f32::NAN)
}

/// Loss and speed since the last line.
struct Log {
    since: Instant,
    loss: f64,
    tokens: usize,
}

impl Log {
    fn start() -> Self {
        Self {
            since: Instant::now(),
            loss: 0.0,
            tokens: 0,
        }
    }

    fn add(&mut self, loss: f32, tokens: usize, step: usize, rate: f64) {
        self.loss += f64::from(loss) / LOG_EVERY as f64;
        self.tokens += tokens;
        if step.is_multiple_of(LOG_EVERY) {
            let speed = self.tokens as f64 / self.since.elapsed().as_secs_f64();
            say(&format!(
                "step {step} loss {:.4} rate {rate:.2e} {speed:.0} tok/s",
                self.loss
            ));
            *self = Self::start();
        }
    }
}
