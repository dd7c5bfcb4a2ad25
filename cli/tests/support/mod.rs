//! A tiny random target, data files and run files for tests of the whole program.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    reason = "each test program uses another part of this module"
)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use draftsmith_models::file;
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::weights::{NamedTensor, write_safetensors};
use safetensors::Dtype;
use serde_json::{Value, json};

/// Ids 0 to 255 are bytes; these follow.
const SPECIAL: [&str; 4] = ["<bos>", "<start>", "<end>", "<pad>"];
/// Rows of the embedding; more than the tokenizer knows, as in published models.
pub const VOCAB: usize = 320;
const HIDDEN: usize = 16;
const LAYERS: usize = 8;
const TEMPLATE: &str = "{% for message in messages %}{{ '<start>' + message['role'] + '\\n' + \
message['content'] + '<end>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}\
{{ '<start>assistant\\n' }}{% endif %}";

/// A folder for one test, with a target, prompts and a run file in it.
pub struct Workplace {
    folder: tempfile::TempDir,
}

/// What a command left.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Workplace {
    /// Target, prompts and `run.toml` that fit together.
    pub fn new() -> Self {
        let place = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        write_target(&place.path("target"), &weights());
        place.write("prompts.jsonl", &prompts(12));
        place.write("run.toml", RUN_FILE);
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        file::write_atomic(&self.path(name), text.as_bytes()).unwrap();
    }

    pub fn read(&self, name: &str) -> String {
        file::read_text(&self.path(name)).unwrap()
    }

    /// Replaces a piece of `run.toml` that must be there.
    pub fn edit(&self, old: &str, new: &str) {
        let text = self.read("run.toml");
        assert!(text.contains(old), "`{old}` is not in the run file");
        self.write("run.toml", &text.replace(old, new));
    }

    /// Gives the prompts answers, so that the target writes none.
    pub fn answer(&self) {
        self.edit("[regenerate]\nmax_new_tokens = 12\n", "");
        let answer =
            r#"}, { "role": "assistant", "content": "la la la la" }], "finish_reason": "stop""#;
        let rows = prompts(12).replace("}]", answer);
        self.write("prompts.jsonl", &rows);
    }

    /// The stages up to training, where the prompts have answers.
    pub fn prepare_and_train(&self) {
        for command in ["prepare", "train"] {
            let outcome = self.run(&[command, "run.toml"]);
            assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        }
    }

    /// Runs the program in this folder.
    pub fn run(&self, arguments: &[&str]) -> Outcome {
        let output = self.command(arguments).output().unwrap();
        Outcome {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Starts the program in this folder and does not wait for it.
    pub fn start(&self, arguments: &[&str]) -> std::process::Child {
        let mut command = self.command(arguments);
        command.stderr(std::process::Stdio::null()).spawn().unwrap()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_draftsmith"));
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .env("RAYON_NUM_THREADS", "1");
        command
    }

    /// Runs the program and expects a refusal: status 2, no run folder, and the whole text of
    /// `tests/messages/<message>.txt`. `UPDATE_MESSAGES=1` writes that file; read what it wrote.
    pub fn refused(&self, arguments: &[&str], message: &str) {
        let outcome = self.run(arguments);
        assert_eq!(outcome.stdout, "");
        assert!(
            !self.path("out").exists(),
            "the run folder was written: {}",
            outcome.stderr
        );
        self.compare(&outcome, &outcome.stderr, message);
    }

    /// As [`Workplace::refused`] for a run folder that earlier commands wrote; lines about the progress
    /// before the message are passed over.
    pub fn refused_later(&self, arguments: &[&str], message: &str) {
        let outcome = self.run(arguments);
        let start = outcome.stderr.find("error: ").unwrap_or_default();
        self.compare(&outcome, &outcome.stderr[start..], message);
    }

    fn compare(&self, outcome: &Outcome, text: &str, message: &str) {
        let found = text.replace(&self.folder.path().display().to_string(), "<place>");
        assert_eq!(outcome.code, 2, "{found}");
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/messages")
            .join(format!("{message}.txt"));
        if std::env::var_os("UPDATE_MESSAGES").is_some() {
            file::write_atomic(&file, found.as_bytes()).unwrap();
        }
        assert_eq!(found, file::read_text(&file).unwrap());
    }
}

/// A run that takes seconds.
pub const RUN_FILE: &str = r#"[run]
out = "out"

[target]
path = "target"

[data]
files = ["prompts.jsonl"]
validation_fraction = 0.25

[regenerate]
max_new_tokens = 12

[drafter.eagle3]
ttt_steps = 2
draft_vocab = 128

[optimizer]
learning_rate = 1e-3

[train]
batch_tokens = 256
max_steps = 4

[eval]
max_new_tokens = 8
gamma = 2
"#;

/// Prompt rows; more than one length, so that batches are padded.
pub fn prompts(count: usize) -> String {
    let rows = (0..count).map(|number| {
        let content = format!("Say {} {}", "la ".repeat(number % 4), number);
        json!({ "id": format!("p{number}"), "conversations": [{ "role": "user", "content": content }] })
    });
    rows.fold(String::new(), |text, row: Value| text + &format!("{row}\n"))
}

/// Parameters by name; 0.3 is large enough that logits differ clearly.
pub fn weights() -> BTreeMap<String, (Vec<usize>, f64)> {
    let mut shapes = BTreeMap::from([
        (
            "model.embed_tokens.weight".to_owned(),
            (vec![VOCAB, HIDDEN], 1.0),
        ),
        ("model.norm.weight".to_owned(), (vec![HIDDEN], 0.0)),
    ]);
    for layer in 0..LAYERS {
        let mut add = |name: &str, shape: &[usize], scale: f64| {
            shapes.insert(
                format!("model.layers.{layer}.{name}.weight"),
                (shape.to_vec(), scale),
            );
        };
        add("input_layernorm", &[HIDDEN], 0.0);
        add("post_attention_layernorm", &[HIDDEN], 0.0);
        add("self_attn.q_proj", &[16, HIDDEN], 0.3);
        add("self_attn.k_proj", &[8, HIDDEN], 0.3);
        add("self_attn.v_proj", &[8, HIDDEN], 0.3);
        add("self_attn.o_proj", &[HIDDEN, 16], 0.3);
        add("mlp.gate_proj", &[32, HIDDEN], 0.3);
        add("mlp.up_proj", &[32, HIDDEN], 0.3);
        add("mlp.down_proj", &[HIDDEN, 32], 0.3);
    }
    shapes
}

/// Writes a Llama-shaped target; a scale of 0 means norm gains around 1.
pub fn write_target(folder: &Path, shapes: &BTreeMap<String, (Vec<usize>, f64)>) {
    let tensors: Vec<NamedTensor> = shapes
        .iter()
        .enumerate()
        .map(|(number, (name, (shape, scale)))| {
            let mut stream = Stream::new(7, Purpose::Check, number as u64);
            let count: usize = shape.iter().product();
            let values: Vec<f32> = (0..count)
                .map(|_| {
                    let draw = stream.normal();
                    (if *scale == 0.0 {
                        1.0 + 0.2 * draw
                    } else {
                        scale * draw
                    }) as f32
                })
                .collect();
            NamedTensor::float(name.clone(), shape, &values, Dtype::F32)
        })
        .collect();
    write_safetensors(&folder.join("model.safetensors"), &tensors, &[]).unwrap();
    file::write_json(&folder.join("config.json"), &config()).unwrap();
    file::write_json(&folder.join("tokenizer.json"), &tokenizer()).unwrap();
    let settings = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>", "eos_token": "<end>", "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    });
    file::write_json(&folder.join("tokenizer_config.json"), &settings).unwrap();
}

fn config() -> Value {
    json!({
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": true,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 259,
    })
}

/// A byte-level tokenizer without merges.
pub fn tokenizer() -> Value {
    let mut vocab: BTreeMap<String, usize> = (0..=255_u8)
        .map(|byte| (byte_char(byte).to_string(), usize::from(byte)))
        .collect();
    let added: Vec<Value> = SPECIAL
        .iter()
        .enumerate()
        .map(|(number, content)| {
            vocab.insert((*content).to_owned(), 256 + number);
            json!({
                "id": 256 + number, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true,
            })
        })
        .collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": [],
        },
    })
}

/// The printable stand-in that byte-level tokenizers use for a byte (GPT-2's table).
fn byte_char(byte: u8) -> char {
    let is_printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_printable(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|&b| !is_printable(b)).count() as u32;
    char::from_u32(256 + place).unwrap()
}
