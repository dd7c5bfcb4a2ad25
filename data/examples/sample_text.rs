//! Prints continuations of a few chat prompts: greedy and at temperature 0.7.
//!
//! ```text
//! cargo run --release -p draftsmith-data --example sample_text -- MODEL_FOLDER ["PROMPT" ...]
//! ```

use std::error::Error;
use std::io::Write as _;
use std::path::PathBuf;

use burn::tensor::{Device, FloatDType};
use draftsmith_models::generate::{GenerateSettings, Prompt, generate};
use draftsmith_models::rng::{Purpose, stable_hash};
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;
use tokenizers::Tokenizer;

const PROMPTS: [&str; 4] = [
    "Tell me something.",
    "What is a good way to learn a new language?",
    "Mia has 3 boxes with 4 pencils each. How many pencils does she have?",
    "Write a short text about a garden in spring.",
];
const MAX_NEW_TOKENS: usize = 96;

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let folder = PathBuf::from(words.next().ok_or("expected a model folder")?);
    let mut prompts: Vec<String> = words.collect();
    if prompts.is_empty() {
        prompts = PROMPTS.map(str::to_owned).to_vec();
    }
    let target = TargetModel::load(&folder, FloatDType::F32, &Device::flex())?;
    let tokenizer =
        Tokenizer::from_file(folder.join("tokenizer.json")).map_err(|e| e.to_string())?;
    for sampling in [Sampling::greedy(), Sampling::at(0.7)] {
        print_all(&target, &tokenizer, &prompts, sampling)?;
    }
    Ok(())
}

fn print_all(
    target: &TargetModel,
    tokenizer: &Tokenizer,
    prompts: &[String],
    sampling: Sampling,
) -> Result<(), Box<dyn Error>> {
    let encoded: Vec<Prompt> = prompts
        .iter()
        .map(|prompt| encode(tokenizer, prompt))
        .collect::<Result<_, _>>()?;
    let settings = GenerateSettings {
        sampling,
        max_new_tokens: MAX_NEW_TOKENS,
        stop_ids: target.spec().eos_token_ids.clone(),
        seed: 1,
        purpose: Purpose::Target,
    };
    let mut out = std::io::stdout().lock();
    let continuations = generate(target, &encoded, &settings, |_| true).unwrap_or_default();
    for (prompt, continuation) in prompts.iter().zip(continuations) {
        let text = tokenizer
            .decode(&continuation.ids, true)
            .map_err(|e| e.to_string())?;
        let kind = format!("temperature {}", sampling.temperature);
        writeln!(
            out,
            "## {kind}: {prompt}\n{text} [{:?}]\n",
            continuation.finish
        )?;
    }
    Ok(())
}

fn encode(tokenizer: &Tokenizer, prompt: &str) -> Result<Prompt, Box<dyn Error>> {
    let text = format!("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n");
    let encoding = tokenizer.encode(text, false).map_err(|e| e.to_string())?;
    Ok(Prompt {
        ids: encoding.get_ids().to_vec(),
        stream: stable_hash(prompt),
    })
}
