//! Trains the tokenizer of the embedded target and tokenises its corpus.
//!
//! ```text
//! cargo run --release -p draftsmith-data --example train_tokenizer -- ROWS.jsonl tiny tiny/target
//! ```
//!
//! `ROWS.jsonl` holds conversations of one user and one assistant message with `id`, `source` and
//! `finish_reason`. The second argument receives `corpus.json` (token ids, for `train_tiny_target`), the
//! third `tokenizer.json` and `tokenizer_config.json`.

use std::error::Error;
use std::path::{Path, PathBuf};

use draftsmith_models::file;
use draftsmith_models::rng::stable_hash;
use serde::Deserialize;
use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer};

/// Entries of the vocabulary, special tokens included.
const VOCAB_SIZE: usize = 2048;
/// Ids 0 to 4. `<|mask|>` is reserved for block drafters: no template and no text writes it.
const SPECIAL: [&str; 5] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|mask|>",
    "<|pad|>",
];
/// Longest text the target was made for.
const MAX_LENGTH: usize = 512;
/// One row in this many is held out.
const HELD_OUT: u64 = 50;
/// Rows of this source keep only their answer: the licence of its prompts is share-alike.
const ANSWER_ONLY: &str = "dolly_6400";
/// What the user says instead, chosen by the row's id.
const NEUTRAL: [&str; 12] = [
    "Tell me something.",
    "Write a short text.",
    "Please write a few sentences.",
    "Tell me about a topic you like.",
    "Share an interesting thought.",
    "Write a paragraph about anything.",
    "Explain something to me.",
    "Give me some information.",
    "What would you like to talk about?",
    "Say something useful.",
    "Write something for me to read.",
    "Teach me something new.",
];
/// The template writes no system message of its own.
const TEMPLATE: &str = "{% for message in messages %}\
    {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
    {% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// A row of the input; other keys are not needed.
#[derive(Deserialize)]
struct Row {
    id: String,
    conversations: Vec<Message>,
    source: String,
    finish_reason: String,
}

#[derive(Deserialize)]
struct Message {
    content: String,
}

/// Rendered conversations.
#[derive(Default)]
struct Texts {
    train: Vec<String>,
    valid: Vec<String>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let paths: Vec<PathBuf> = std::env::args().skip(1).map(PathBuf::from).collect();
    let [rows, corpus, target] = paths.as_slice() else {
        return Err("expected three paths: ROWS.jsonl, corpus folder, model folder".into());
    };
    let texts = read_texts(rows)?;
    let tokenizer = train(&texts.train).map_err(|e| e.to_string())?;
    let encode = |texts: &[String]| -> Result<Vec<Vec<u32>>, String> {
        let one = |text: &String| tokenizer.encode_fast(text.as_str(), false);
        let ids = texts
            .iter()
            .map(|text| one(text).map(|e| e.get_ids().to_vec()));
        ids.collect::<Result<_, _>>().map_err(|e| e.to_string())
    };
    file::write_json(
        &target.join("tokenizer.json"),
        &serde_json::to_value(&tokenizer)?,
    )?;
    file::write_json(&target.join("tokenizer_config.json"), &tokenizer_config())?;
    let ids = json!({ "train": encode(&texts.train)?, "valid": encode(&texts.valid)? });
    file::write_atomic(&corpus.join("corpus.json"), ids.to_string().as_bytes())?;
    Ok(())
}

/// Renders every usable row: not those that hold control tokens as text, or cut characters.
fn read_texts(path: &Path) -> Result<Texts, Box<dyn Error>> {
    let mut texts = Texts::default();
    for line in file::read_text(path)?.split('\n').filter(|l| !l.is_empty()) {
        let row: Row = serde_json::from_str(line)?;
        let [user, assistant] = row.conversations.as_slice() else {
            continue;
        };
        let damaged = |text: &str| text.contains("<|") || text.contains('\u{fffd}');
        if damaged(&user.content) || damaged(&assistant.content) {
            continue;
        }
        let hash = stable_hash(&row.id);
        let prompt = if row.source == ANSWER_ONLY {
            NEUTRAL[(hash % NEUTRAL.len() as u64) as usize]
        } else {
            &user.content
        };
        let text = render(prompt, &assistant.content, row.finish_reason == "stop");
        if hash.is_multiple_of(HELD_OUT) {
            texts.valid.push(text);
        } else {
            texts.train.push(text);
        }
    }
    Ok(texts)
}

/// The text of one conversation; an answer that a length limit cut off gets no end.
fn render(prompt: &str, answer: &str, is_finished: bool) -> String {
    let end = if is_finished { "<|im_end|>\n" } else { "" };
    format!("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}{end}")
}

/// Byte-level BPE; digits stand alone, so that numbers are written the same way everywhere.
fn train(texts: &[String]) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(BPE::default());
    let bytes = ByteLevel::new(false, true, true);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
        PreTokenizerWrapper::Digits(Digits::new(true)),
        PreTokenizerWrapper::ByteLevel(bytes),
    ])));
    tokenizer.with_decoder(Some(bytes));
    let special = |text: &&str| AddedToken::from(*text, true);
    let trainer = BpeTrainer::builder()
        .vocab_size(VOCAB_SIZE)
        .min_frequency(2)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(SPECIAL.iter().map(special).collect())
        .build();
    let mut trainer = TrainerWrapper::from(trainer);
    tokenizer.train(&mut trainer, texts.iter().map(String::as_str))?;
    Ok(tokenizer)
}

/// `tokenizer_config.json`; there is no beginning-of-text token.
fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": false,
        "bos_token": null,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "unk_token": null,
        "additional_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|mask|>"],
        "chat_template": TEMPLATE
    })
}
