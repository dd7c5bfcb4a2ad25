//! A small tokenizer and chat templates, written into a temporary model folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_data::dataset::Dataset;
use draftsmith_data::error::DataError;
use draftsmith_data::prepare::{DataConfig, Texts, prepare};
use draftsmith_data::tokenizer::ChatTokenizer;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// START role newline text END newline, as plain as it gets.
pub(crate) const PLAIN: &str = "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}";

/// As [`PLAIN`], with the assistant's text in generation tags.
pub(crate) const TAGGED: &str = "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}{%- generation -%}{{ message['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}";

/// Writes an empty think block into the prompt when thinking is off, but not into the history.
pub(crate) const THINK_IN_PROMPT: &str = "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}";

/// Writes an empty think block into prompt and last answer when there is no reasoning, and drops it from
/// earlier turns.
pub(crate) const THINK_IN_LAST: &str = "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' and loop.last and '</think>' not in message['content'] %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ message['content'] + '<|end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}";

const SPECIAL: [&str; 4] = ["<s>", "<|start|>", "<|end|>", "<pad>"];
const MERGES: [(&str, &str); 6] = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("\u{10a}", "\u{10a}"), // Two newlines in the byte alphabet.
    ("a", "n"),
];

/// A model folder and whatever a test puts beside it.
pub(crate) struct Fixture {
    pub(crate) folder: TempDir,
}

impl Fixture {
    /// A folder whose template is `template`.
    pub(crate) fn new(template: &str) -> Self {
        Self::with_post_processor(template, &Value::Null)
    }

    /// As [`Fixture::new`], with a post-processor in the tokenizer.
    pub(crate) fn with_post_processor(template: &str, post_processor: &Value) -> Self {
        let folder = TempDir::new().unwrap();
        let write = |name: &str, value: &Value| {
            fs_err::write(folder.path().join(name), value.to_string()).unwrap();
        };
        write("tokenizer.json", &tokenizer_json(post_processor));
        write("generation_config.json", &json!({"eos_token_id": 2}));
        write(
            "tokenizer_config.json",
            &json!({"bos_token": "<s>", "eos_token": {"content": "<|end|>"}, "chat_template": template}),
        );
        Self { folder }
    }

    pub(crate) fn tokenizer(&self) -> ChatTokenizer {
        ChatTokenizer::load(self.folder.path()).unwrap()
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Writes a JSON Lines file and gives its path.
    pub(crate) fn jsonl(&self, name: &str, rows: &[Value]) -> PathBuf {
        let lines: Vec<String> = rows.iter().map(|row| format!("{row}\n")).collect();
        self.text(name, &lines.concat())
    }

    pub(crate) fn text(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs_err::write(&path, text).unwrap();
        path
    }

    /// Prepares rows with default settings.
    pub(crate) fn prepare(&self, rows: &[Value]) -> Result<Dataset, DataError> {
        self.prepare_with(rows, |_| {})
    }

    pub(crate) fn prepare_with(
        &self,
        rows: &[Value],
        change: impl FnOnce(&mut DataConfig),
    ) -> Result<Dataset, DataError> {
        let mut config = config(&self.jsonl("rows.jsonl", rows));
        change(&mut config);
        prepare(&config, &Texts::default(), &self.tokenizer(), &self.out())
    }
}

pub(crate) fn config(file: &Path) -> DataConfig {
    DataConfig {
        files: vec![file.to_owned()],
        ..DataConfig::default()
    }
}

/// A conversation row of (role, text) turns.
pub(crate) fn chat(id: &str, turns: &[(&str, &str)]) -> Value {
    let turns: Vec<Value> = turns
        .iter()
        .map(|(role, text)| json!({"role": role, "content": text}))
        .collect();
    json!({"id": id, "conversations": turns})
}

pub(crate) fn options(entries: &[(&str, Value)]) -> Map<String, Value> {
    entries
        .iter()
        .map(|(k, v)| ((*k).to_owned(), v.clone()))
        .collect()
}

/// Texts of the generated tokens of a row, by turn.
pub(crate) fn generated(dataset: &Dataset, index: usize, tokenizer: &ChatTokenizer) -> Vec<String> {
    let row = dataset.row(index);
    let mut turns: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (id, turn) in row.ids.iter().zip(&row.turns) {
        if *turn != 0 {
            turns.entry(*turn).or_default().push(*id);
        }
    }
    turns
        .values()
        .map(|ids| tokenizer.decode(ids).unwrap())
        .collect()
}

/// The whole text of a row.
pub(crate) fn text(dataset: &Dataset, index: usize, tokenizer: &ChatTokenizer) -> String {
    tokenizer.decode(&dataset.row(index).ids).unwrap()
}

/// Byte-level BPE: 4 special tokens, 256 bytes, a few merges.
fn tokenizer_json(post_processor: &Value) -> Value {
    let mut names: Vec<String> = SPECIAL.iter().map(|name| (*name).to_owned()).collect();
    names.extend((0..=255).map(|byte| byte_letter(byte).to_string()));
    names.extend(MERGES.iter().map(|(left, right)| format!("{left}{right}")));
    let vocab: Map<String, Value> = names
        .into_iter()
        .enumerate()
        .map(|(id, name)| (name, json!(id)))
        .collect();
    let special: Vec<Value> = SPECIAL
        .iter()
        .enumerate()
        .map(|(id, name)| {
            json!({"id": id, "content": name, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                            "use_regex": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": special,
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": post_processor,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
                  "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                  "byte_fallback": false, "ignore_merges": false, "vocab": vocab,
                  "merges": MERGES.iter().map(|(l, r)| json!([l, r])).collect::<Vec<_>>()},
    })
}

/// The letter that stands for a byte in byte-level vocabularies (GPT-2): printable bytes are themselves,
/// the others follow from U+0100 on.
fn byte_letter(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !printable(*other)).count();
    char::from_u32(256 + before as u32).unwrap()
}
