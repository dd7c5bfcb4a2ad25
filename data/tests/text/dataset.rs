//! The data set on disk, its splits, and what is shown of it.

use draftsmith_data::dataset::{Dataset, is_set_aside};
use draftsmith_data::error::DataError;
use draftsmith_data::inspect;
use draftsmith_data::prepare::{DataConfig, Texts, ValidationFile, prepare};
use draftsmith_data::prompts::{self, PromptSettings};
use draftsmith_data::source::Roles;
use draftsmith_data::template::TemplateOptions;
use draftsmith_models::error::Diagnose;
use draftsmith_models::sample::Sampling;
use serde_json::{Value, json};

use crate::fixture::{Fixture, PLAIN, chat};

fn rows(count: usize) -> Vec<Value> {
    (0..count)
        .map(|index| {
            let mut row = chat(
                &format!("row-{index}"),
                &[("user", "hi"), ("assistant", &"b".repeat(3 + index % 7))],
            );
            row["source"] = json!(if index % 3 == 0 { "one" } else { "two" });
            row
        })
        .collect()
}

#[test]
fn a_data_set_comes_back_as_it_was_written() {
    let fixture = Fixture::new(PLAIN);
    let made = fixture.prepare(&rows(2500)).unwrap();
    let opened = Dataset::open(&fixture.out()).unwrap();
    assert_eq!(opened.manifest(), made.manifest());
    assert_eq!(opened.len(), 2500);
    for index in [0, 1023, 1024, 2047, 2048, 2499] {
        let row = opened.row(index);
        assert_eq!(row.key, format!("row-{index}"));
        let generated = row.turns.iter().filter(|turn| **turn == 1).count();
        assert_eq!(generated, 3 + index % 7 + 1);
        assert_eq!(
            row.turns.iter().position(|turn| *turn == 1),
            Some(opened.prompt_len(index))
        );
        assert_eq!(opened.row_len(index), row.len());
    }
    let manifest = opened.manifest();
    let all = (0..2500).map(|index| 4 + index % 7);
    let text = manifest.training_text();
    assert_eq!(manifest.texts.len(), 1);
    assert_eq!((text.rows, text.tokens), (2500, manifest.tokens));
    assert_eq!(text.generated_tokens, all.clone().sum::<usize>());
    assert_eq!(text.anchors, all.map(|len| len - 1).sum::<usize>());
    let sources: Vec<(&str, usize)> = manifest
        .summary
        .sources
        .iter()
        .map(|source| (source.source.as_str(), source.rows))
        .collect();
    assert_eq!(sources, [("one", 834), ("two", 1666)]);
    assert_eq!(
        manifest
            .summary
            .sources
            .iter()
            .map(|s| s.generated_tokens)
            .sum::<usize>(),
        text.generated_tokens
    );
    let lengths = manifest.summary.generated_len;
    assert_eq!((lengths.min, lengths.median, lengths.max), (4, 7, 10));
}

#[test]
fn the_same_inputs_give_the_same_bytes() {
    let [first, second] = [0, 1].map(|_| {
        let fixture = Fixture::new(PLAIN);
        let dataset = fixture.prepare(&rows(50)).unwrap();
        dataset.manifest().clone()
    });
    // The places of the files differ, the data do not.
    assert_eq!(first.data_blake3, second.data_blake3);
}

#[test]
fn damage_and_other_versions_are_refused() {
    let fixture = Fixture::new(PLAIN);
    fixture.prepare(&rows(5)).unwrap();
    let data = fixture.out().join("tokens.arrow");
    let whole = fs_err::read(&data).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [flipped, whole[..whole.len() - 7].to_vec()] {
        fs_err::write(&data, damaged).unwrap();
        let error = Dataset::open(&fixture.out()).unwrap_err();
        assert!(
            matches!(error, DataError::Format { .. }) && error.is_user_error(),
            "{error}"
        );
    }
    fs_err::write(&data, &whole).unwrap();
    assert!(Dataset::open(&fixture.out()).is_ok());
    let manifest = fixture.out().join("manifest.json");
    let text = fs_err::read_to_string(&manifest).unwrap();
    fs_err::write(
        &manifest,
        text.replace("\"format_version\": 2", "\"format_version\": 3"),
    )
    .unwrap();
    let error = Dataset::open(&fixture.out()).unwrap_err();
    assert!(
        error.to_string().ends_with("format version 3, expected 2"),
        "{error}"
    );
}

#[test]
fn a_row_is_split_by_its_own_id_only() {
    let fixture = Fixture::new(PLAIN);
    let keys = |dataset: &Dataset, indices: &[usize]| -> Vec<String> {
        indices
            .iter()
            .map(|index| dataset.key(*index).to_owned())
            .collect()
    };
    let all = fixture.prepare(&rows(1000)).unwrap();
    let split = all.split(0.1, 7);
    let [validation] = split.validation.as_slice() else {
        panic!("one text")
    };
    assert_eq!(split.train.len() + validation.len(), 1000);
    // 1000 draws of probability 0.1: mean 100, standard deviation 9.5; four of them.
    assert!(
        (62..=138).contains(&validation.len()),
        "{}",
        validation.len()
    );
    assert_ne!(split, all.split(0.1, 8));
    assert!(all.split(0.0, 7).validation[0].is_empty());
    let chosen = keys(&all, validation);
    let fewer: Vec<Value> = rows(1000).into_iter().skip(500).collect();
    let half = fixture.prepare(&fewer).unwrap();
    let chosen_of_half = keys(&half, &half.split(0.1, 7).validation[0]);
    let expected: Vec<String> = chosen
        .into_iter()
        .filter(|key| key[4..].parse::<usize>().unwrap() >= 500)
        .collect();
    assert_eq!(chosen_of_half, expected);
}

/// A text drawn otherwise measures and does nothing else: it neither trains nor shapes the draft vocabulary, and limits of the
/// training text do not cut it.
///
/// Seen red: `split` without `text > 0`; `token_counts` without its `continue`; `max_rows` left in `validation_rows`.
#[test]
fn validation_texts_only_measure() {
    let fixture = Fixture::new(PLAIN);
    let training: Vec<Value> = rows(40);
    let others: Vec<Value> = (0..40)
        .map(|index| {
            chat(
                &format!("row-{index}"),
                &[("user", "hi"), ("assistant", "ccc")],
            )
        })
        .collect();
    let config = DataConfig {
        max_rows: Some(30),
        ..crate::fixture::config(&fixture.jsonl("rows.jsonl", &training))
    };
    let drawn = |temperature, name: &str, rows: &[Value]| ValidationFile {
        sampling: Sampling::at(temperature),
        path: fixture.jsonl(name, rows),
    };
    let texts = Texts {
        training: Some(Sampling::at(0.8)),
        validation: vec![
            drawn(0.0, "greedy.jsonl", &others),
            drawn(1.0, "drawn.jsonl", &others[..7]),
        ],
    };
    let dataset = prepare(&config, &texts, &fixture.tokenizer(), &fixture.out()).unwrap();
    let found: Vec<(Option<Sampling>, usize)> = dataset
        .manifest()
        .texts
        .iter()
        .map(|text| (text.sampling, text.rows))
        .collect();
    let expected = [(0.8, 30), (0.0, 40), (1.0, 7)];
    assert_eq!(
        found,
        expected.map(|(temperature, rows)| (Some(Sampling::at(temperature)), rows))
    );
    assert_eq!(dataset.key(30), "row-0@t0");
    assert_eq!(dataset.key(76), "row-6@t1");
    let split = dataset.split(0.3, 7);
    assert!(split.train.iter().all(|index| *index < 30));
    let expected: Vec<usize> = (0..30)
        .filter(|index| is_set_aside(&format!("row-{index}"), 0.3, 7))
        .collect();
    assert_eq!(split.validation[0], expected);
    assert_eq!(split.validation[1], (30..70).collect::<Vec<_>>());
    assert_eq!(split.validation[2], (70..77).collect::<Vec<_>>());
    let with = dataset.token_counts(266).unwrap();
    let alone = fixture
        .prepare_with(&training, |config| config.max_rows = Some(30))
        .unwrap();
    assert_eq!(with, alone.token_counts(266).unwrap());
    assert_eq!(dataset.manifest().summary, alone.manifest().summary);
}

#[test]
fn limits_stop_in_file_order() {
    let fixture = Fixture::new(PLAIN);
    let dataset = fixture
        .prepare_with(&rows(100), |config| config.max_generated_tokens = Some(20))
        .unwrap();
    // 4 + 5 + 6 = 15 tokens are too few, the fourth row brings 7 more.
    assert_eq!(
        (
            dataset.len(),
            dataset.manifest().training_text().generated_tokens
        ),
        (4, 22)
    );
    assert_eq!(dataset.manifest().counts.read, 4);
    let dataset = fixture
        .prepare_with(&rows(100), |config| config.max_rows = Some(3))
        .unwrap();
    assert_eq!(dataset.len(), 3);
}

#[test]
fn generated_tokens_are_counted_and_ids_outside_the_vocabulary_refused() {
    let fixture = Fixture::new(PLAIN);
    let rows = [json!({"id": "a", "prompt_ids": [9, 9], "answer_ids": [5, 6, 5, 2]})];
    let dataset = fixture.prepare(&rows).unwrap();
    let counts = dataset.token_counts(10).unwrap();
    assert_eq!(counts, [0, 0, 1, 0, 0, 2, 1, 0, 0, 0]);
    let error = dataset.token_counts(9).unwrap_err();
    assert_eq!(
        error.to_string(),
        "row `a`: token id 9 is outside the target's vocabulary of 9 tokens"
    );
    let tokenizer = fixture.tokenizer();
    assert_eq!(tokenizer.vocab_size(), 266);
    assert!(tokenizer.check_vocab(266).is_ok() && tokenizer.check_vocab(300).is_ok());
    let error = tokenizer.check_vocab(265).unwrap_err().to_string();
    assert!(
        error.ends_with("token id 265 is outside the target's vocabulary of 265 tokens"),
        "{error}"
    );
}

#[test]
fn settings_are_checked_before_any_work() {
    let mut config = DataConfig::default();
    assert!(
        config
            .validate()
            .unwrap_err()
            .to_string()
            .starts_with("`data.files` is empty")
    );
    config.files = vec!["x.jsonl".into()];
    assert!(config.validate().is_ok());
    let bad = DataConfig {
        max_len: 1,
        ..config.clone()
    };
    assert!(bad.validate().is_err());
    let bad = DataConfig {
        validation_fraction: 1.0,
        ..config.clone()
    };
    assert!(bad.validate().is_err());
    let bad = DataConfig {
        roles: [("x".to_owned(), "y".to_owned())].into(),
        ..config
    };
    assert!(bad.validate().is_err());
    let typo = serde_json::from_str::<DataConfig>("{\"file\": []}").unwrap_err();
    assert!(typo.to_string().contains("unknown field `file`"));
}

#[test]
fn a_missing_input_is_the_users_mistake() {
    let fixture = Fixture::new(PLAIN);
    let config = DataConfig {
        files: vec![fixture.folder.path().join("absent.jsonl")],
        ..DataConfig::default()
    };
    let error = prepare(
        &config,
        &Texts::default(),
        &fixture.tokenizer(),
        &fixture.out(),
    );
    let error = error.unwrap_err();
    assert!(error.is_user_error() && error.to_string().contains("absent.jsonl"));
}

#[test]
fn inspection_shows_marks_slots_and_coverage() {
    let fixture = Fixture::new(PLAIN);
    let rows = [json!({"id": "a", "prompt_ids": [1, 101], "answer_ids": [262, 115, 2]})];
    let dataset = fixture.prepare(&rows).unwrap();
    let row = inspect::row(&dataset, 0, 4, &fixture.tokenizer()).unwrap();
    let slots: Vec<(usize, usize, u32, usize, u32)> = row
        .slots
        .iter()
        .map(|s| {
            (
                s.anchor,
                s.depth,
                s.input_id,
                s.teacher_position,
                s.label_id,
            )
        })
        .collect();
    assert_eq!(
        slots,
        [(2, 0, 262, 2, 115), (2, 1, 115, 3, 2), (3, 0, 115, 3, 2)]
    );
    insta::assert_snapshot!(inspect::render_row(&row), @r#"
    row `a` of rows
    position       id turn  text
           0        1    .  "<|start|>"
           1      101    .  "a"
           2      262    1  "hell"
           3      115    1  "o"
           4        2    1  "<|end|>"
      anchor    depth    input  teacher    label
           2        0      262     p[2]      115  "o"
           2        1      115     p[3]        2  "<|end|>"
           3        0      115     p[3]        2  "<|end|>"
    "#);
    let coverage = inspect::coverage(&dataset, 266).unwrap();
    assert_eq!((coverage.distinct, coverage.tokens), (3, 3));
    assert!(inspect::render_coverage(&coverage).starts_with("3 generated tokens, 3 distinct ids"));
    assert!(inspect::render_counts(&dataset).starts_with("1 rows read, 1 kept"));
    assert!(inspect::row(&dataset, 1, 4, &fixture.tokenizer()).is_err());
}

#[test]
fn prompts_end_with_the_header_of_the_answer() {
    let fixture = Fixture::new(PLAIN);
    let path = fixture.jsonl(
        "suite.jsonl",
        &[
            chat(
                "a",
                &[
                    ("system", "s"),
                    ("user", "hi"),
                    ("assistant", "old"),
                    ("user", "an"),
                ],
            ),
            chat("b", &[("user", "first"), ("user", "second")]),
            json!({"id": "c", "messages": []}),
            chat("d", &[("user", &"long".repeat(50))]),
            chat("a", &[("user", "again")]),
        ],
    );
    let roles = Roles::default();
    let settings = PromptSettings {
        roles: &roles,
        options: &TemplateOptions::new(),
        limit: None,
        max_len: 100,
    };
    let tokenizer = fixture.tokenizer();
    let found = prompts::read(std::slice::from_ref(&path), &tokenizer, &settings).unwrap();
    let texts: Vec<String> = found
        .prompts
        .iter()
        .map(|p| tokenizer.decode(&p.ids).unwrap())
        .collect();
    assert_eq!(
        texts,
        [
            "<|start|>system\ns<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n",
            "<|start|>user\nfirst<|end|>\n<|start|>assistant\n",
        ]
    );
    assert_eq!((found.counts.read, found.counts.kept), (5, 2));
    assert_eq!(found.counts.dropped.values().sum::<usize>(), 3);
    let limited = PromptSettings {
        limit: Some(1),
        ..settings
    };
    assert_eq!(
        prompts::read(&[path], &tokenizer, &limited)
            .unwrap()
            .prompts
            .len(),
        1
    );
}
