//! Command line, model shape and schedule of the recipe.

use std::path::PathBuf;

use draftsmith_models::error::ModelError;
use serde_json::{Value, json};

/// Tokens of the embedded target's vocabulary, special ones included.
pub(crate) const VOCAB_SIZE: usize = 2048;
/// `<|im_end|>`.
const END: u32 = 2;
/// `<|pad|>`.
const PAD: u32 = 4;
/// Longest context.
pub(crate) const MAX_POSITIONS: usize = 512;

/// Settings, given as `--name value`.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// File written by `train_tokenizer`.
    pub(crate) corpus: PathBuf,
    /// Folder for checkpoints; training resumes from the one found there.
    pub(crate) run: PathBuf,
    /// Folder that receives `config.json` and `model.safetensors`.
    pub(crate) out: PathBuf,
    /// Steps of the whole schedule.
    pub(crate) steps: usize,
    /// Padded tokens of a batch.
    pub(crate) batch_tokens: usize,
    /// Highest learning rate.
    pub(crate) learning_rate: f64,
    /// Steps of the linear warm-up.
    pub(crate) warmup: usize,
    /// Steps between checkpoints.
    pub(crate) save_every: usize,
    /// Seed of initial values and data order.
    pub(crate) seed: u64,
}

impl Settings {
    /// Reads `--name value` pairs.
    pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, ModelError> {
        let mut settings = Self {
            corpus: PathBuf::from("tiny/corpus.json"),
            run: PathBuf::from("tiny/run"),
            out: PathBuf::from("tiny/target"),
            steps: 900,
            batch_tokens: 2048,
            learning_rate: 3e-3,
            warmup: 40,
            save_every: 100,
            seed: 1,
        };
        while let Some(name) = words.next() {
            let value = words.next().ok_or_else(|| usage(&name, "nothing"))?;
            match name.as_str() {
                "--corpus" => settings.corpus = value.into(),
                "--run" => settings.run = value.into(),
                "--out" => settings.out = value.into(),
                "--steps" => settings.steps = number(&name, &value)?,
                "--batch-tokens" => settings.batch_tokens = number(&name, &value)?,
                "--learning-rate" => settings.learning_rate = number(&name, &value)?,
                "--warmup" => settings.warmup = number(&name, &value)?,
                "--save-every" => settings.save_every = number(&name, &value)?,
                "--seed" => settings.seed = number(&name, &value)?,
                _ => return Err(usage(&name, &value)),
            }
        }
        Ok(settings)
    }

    /// Linear warm-up, a constant rate, and a linear descent over the last third of the steps.
    ///
    /// The constant part lets a resumed run choose another `--steps`: it then starts its descent there.
    pub(crate) fn rate_at(&self, step: usize) -> f64 {
        let rising = (step + 1) as f64 / self.warmup.max(1) as f64;
        let left = self.steps.saturating_sub(step) as f64;
        let falling = left / (self.steps as f64 / 3.0);
        self.learning_rate * rising.min(falling).min(1.0)
    }
}

fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<T, ModelError> {
    value.parse().map_err(|_not_a_number| usage(name, value))
}

fn usage(name: &str, value: &str) -> ModelError {
    ModelError::setting(
        format!("unexpected argument `{name}` with value `{value}`"),
        "options: --corpus --run --out --steps --batch-tokens --learning-rate --warmup --save-every --seed",
    )
}

/// `config.json` of the embedded target: 8 blocks, so that the default captured layers of EAGLE-3
/// (1, 3 and 4) are distinct and none is the last.
pub(crate) fn model_config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 192,
        "intermediate_size": 480,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": true,
        "attention_bias": false,
        "mlp_bias": false,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16"
    })
}

/// `generation_config.json` of the embedded target.
pub(crate) fn generation_config() -> Value {
    json!({ "eos_token_id": END, "pad_token_id": PAD })
}
