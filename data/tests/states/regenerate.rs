//! Answers written by the target itself.

use std::path::Path;

use draftsmith_data::prompts::Prompt;
use draftsmith_data::regenerate::{Answerer, RegenerateConfig, RegenerateReport, regenerate};
use draftsmith_data::source::Message;
use draftsmith_data::tokenizer::ChatTokenizer;
use draftsmith_models::file;
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;
use serde_json::{Map, Value, json};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use crate::tiny;

/// The 256 bytes and four control tokens.
fn write_tokenizer(folder: &Path) {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut vocab: Map<String, Value> = Map::new();
    let specials = ["<bos>", "<start>", "<end>", "<pad>"].map(str::to_owned);
    let texts = alphabet.iter().map(char::to_string).chain(specials.clone());
    for (id, text) in texts.enumerate() {
        vocab.insert(text, json!(id));
    }
    let added: Vec<Value> = specials
        .iter()
        .enumerate()
        .map(|(index, text)| {
            json!({"id": 256 + index, "content": text, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false,
        "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []},
    });
    file::write_json(&folder.join("tokenizer.json"), &tokenizer).unwrap();
}

fn prompts() -> Vec<Prompt> {
    let prompt = |(index, row): (usize, draftsmith_models::batch::TokenRow)| Prompt {
        key: format!("prompt-{index}"),
        source: "suite".to_owned(),
        category: None,
        later: Vec::new(),
        tools: None,
        messages: vec![Message::new("user", format!("question {index}"))],
        ids: row.ids,
    };
    tiny::rows(&[3, 9, 4, 12, 5, 2, 7])
        .into_iter()
        .enumerate()
        .map(prompt)
        .collect()
}

fn settings(batch_rows: usize) -> RegenerateConfig {
    RegenerateConfig {
        sampling: Sampling::at(1.5),
        max_new_tokens: 24,
        batch_rows,
        seed: 5,
        ..RegenerateConfig::default()
    }
}

struct Fixture {
    folder: tempfile::TempDir,
    target: std::sync::Arc<TargetModel>,
    tokenizer: ChatTokenizer,
}

impl Fixture {
    fn new() -> Self {
        let (folder, target) = tiny::target();
        write_tokenizer(folder.path());
        let tokenizer = ChatTokenizer::load(folder.path()).unwrap();
        Self {
            folder,
            target,
            tokenizer,
        }
    }

    fn run(
        &self,
        prompts: &[Prompt],
        settings: &RegenerateConfig,
        name: &str,
        stop_after_rows: usize,
    ) -> RegenerateReport {
        let answerer = Answerer {
            target: &self.target,
            fingerprint: "fingerprint",
            tokenizer: &self.tokenizer,
        };
        let out = self.folder.path().join(name);
        let mut keep_on =
            |p: draftsmith_data::regenerate::RegenerateProgress| p.done_rows < stop_after_rows;
        regenerate(answerer, prompts, settings, &out, &mut keep_on).unwrap()
    }

    fn lines(&self, name: &str) -> Vec<Value> {
        let text = file::read_text(&self.folder.path().join(name)).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

#[test]
fn answers_carry_ids_text_and_the_reason_of_their_end() {
    let fixture = Fixture::new();
    let prompts = prompts();
    let report = fixture.run(&prompts, &settings(4), "a.jsonl", 99);
    assert_eq!((report.new_rows, report.kept_rows), (7, 0));
    assert!(report.is_complete);
    let lines = fixture.lines("a.jsonl");
    assert_eq!(lines.len(), 7);
    let mut tokens = 0;
    for (line, prompt) in lines.iter().zip(&prompts) {
        assert_eq!(line["id"], prompt.key.as_str());
        assert_eq!(line["prompt_ids"], json!(prompt.ids));
        let ids: Vec<u32> = serde_json::from_value(line["answer_ids"].clone()).unwrap();
        let is_stopped = ids.last() == Some(&258);
        assert_eq!(
            line["finish_reason"],
            if is_stopped { "stop" } else { "length" }
        );
        assert!(is_stopped || ids.len() == 24);
        assert_eq!(line["num_tokens"], ids.len());
        assert_eq!(line["conversations"][1]["role"], "assistant");
        let text = line["conversations"][1]["content"].as_str().unwrap();
        assert_eq!(text, fixture.tokenizer.decode_plain(&ids).unwrap());
        tokens += ids.len() as u64;
    }
    assert_eq!(report.new_tokens, tokens);
    let manifest: Value = file::read_json(&fixture.folder.path().join("a.manifest.json")).unwrap();
    assert_eq!(manifest["num_tokens"], tokens);
}

#[test]
fn an_interrupted_run_ends_with_the_file_of_an_undisturbed_one() {
    let fixture = Fixture::new();
    let prompts = prompts();
    fixture.run(&prompts, &settings(2), "whole.jsonl", 99);
    let stopped = fixture.run(&prompts, &settings(2), "cut.jsonl", 4);
    assert!(!stopped.is_complete);
    assert_eq!(stopped.new_rows, 4);
    assert!(!fixture.folder.path().join("cut.jsonl").exists());
    let resumed = fixture.run(&prompts, &settings(2), "cut.jsonl", 99);
    assert_eq!((resumed.kept_rows, resumed.new_rows), (4, 3));
    assert_eq!(fixture.lines("cut.jsonl"), fixture.lines("whole.jsonl"));
    assert!(!fixture.folder.path().join("cut.parts").exists());
    let again = fixture.run(&prompts, &settings(2), "cut.jsonl", 99);
    assert_eq!((again.kept_rows, again.new_rows), (7, 0));
}

#[test]
fn an_answer_depends_on_its_id_and_not_on_its_batch() {
    let fixture = Fixture::new();
    let prompts = prompts();
    fixture.run(&prompts, &settings(1), "one.jsonl", 99);
    fixture.run(&prompts, &settings(4), "four.jsonl", 99);
    assert_eq!(fixture.lines("one.jsonl"), fixture.lines("four.jsonl"));
    let mut renamed = prompts.clone();
    renamed[1].key = "another".to_owned();
    fixture.run(&renamed, &settings(4), "renamed.jsonl", 99);
    let (before, after) = (fixture.lines("four.jsonl"), fixture.lines("renamed.jsonl"));
    assert_ne!(before[1]["answer_ids"], after[1]["answer_ids"]);
    assert_eq!(before[2], after[2]);
}

#[test]
fn answers_of_other_settings_or_prompts_are_not_reused() {
    let fixture = Fixture::new();
    let mut prompts = prompts();
    fixture.run(&prompts, &settings(4), "a.jsonl", 99);
    prompts[0].ids.push(9);
    prompts.pop();
    let changed = fixture.run(&prompts, &settings(4), "a.jsonl", 99);
    assert_eq!((changed.kept_rows, changed.new_rows), (5, 1));
    assert_eq!(fixture.lines("a.jsonl").len(), 6);
    let mut other = settings(4);
    other.seed = 6;
    let reseeded = fixture.run(&prompts, &other, "a.jsonl", 99);
    assert_eq!((reseeded.kept_rows, reseeded.new_rows), (0, 6));
}

#[test]
fn prompts_that_leave_no_room_are_refused() {
    let fixture = Fixture::new();
    let answerer = Answerer {
        target: &fixture.target,
        fingerprint: "fingerprint",
        tokenizer: &fixture.tokenizer,
    };
    let mut prompts = prompts();
    prompts[2].ids = vec![1; 233];
    let out = fixture.folder.path().join("a.jsonl");
    let error = regenerate(answerer, &prompts, &settings(4), &out, &mut |_| true).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("prompt `prompt-2` has 233 tokens"),
        "{error}"
    );
    assert!(!out.exists());
}
