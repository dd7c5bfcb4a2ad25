//! Rows of every key style end in the same form, and nothing vanishes in silence.

use draftsmith_data::error::DataError;
use draftsmith_data::prepare::{Texts, prepare};
use draftsmith_data::source::DropReason;
use draftsmith_models::error::Diagnose;
use serde_json::{Value, json};

use crate::fixture::{Fixture, PLAIN, chat, config, generated, text};

fn good(id: &str) -> Value {
    chat(id, &[("user", "hi"), ("assistant", "hello")])
}

/// Seen red: `check_order` in `source/row.rs` returning early with success (the row is then rendered with
/// the assistant's turn first).
#[test]
fn pitfall_01_bad_rows_are_dropped_with_line_and_reason() {
    let fixture = Fixture::new(PLAIN);
    let rows = [
        good("a"),
        json!({"id": "b", "messages": []}),
        chat("c", &[("assistant", "hello"), ("user", "hi")]),
        chat(
            "d",
            &[("user", "hi"), ("user", "you"), ("assistant", "hello")],
        ),
        good("e"),
        json!({"id": "f"}),
        json!({"id": "g", "conversations": [{"content": "no role"}]}),
        json!({"id": "h", "conversations": [{"role": "user", "content": [{"type": "image"}]}]}),
        chat("i", &[("user", "a prompt only")]),
        good("a"),
    ];
    let dataset = fixture.prepare(&rows).unwrap();
    let counts = &dataset.manifest().counts;
    let keys: Vec<&str> = (0..dataset.len()).map(|index| dataset.key(index)).collect();
    assert_eq!(keys, ["a", "d", "e"]);
    assert_eq!((counts.read, counts.kept), (10, 3));
    assert_eq!(
        counts.read,
        counts.kept + counts.dropped.values().sum::<usize>()
    );
    let dropped: Vec<(usize, &str)> = counts
        .dropped_rows
        .iter()
        .map(|row| (row.line, row.reason.as_str()))
        .collect();
    assert_eq!(
        dropped,
        [
            (2, DropReason::NoTurns.label()),
            (3, DropReason::FirstTurnAssistant.label()),
            (6, DropReason::NoConversation.label()),
            (7, DropReason::MalformedTurn.label()),
            (8, DropReason::NotText.label()),
            (9, DropReason::NoAssistantTurn.label()),
            (10, DropReason::DuplicateId.label()),
        ]
    );
}

#[test]
fn a_conversation_that_the_template_refuses_is_dropped_with_its_words() {
    let strict = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}{{ '<|start|>' + m.role + '\\n' + m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}";
    let fixture = Fixture::new(strict);
    let rows = [
        good("a"),
        chat(
            "b",
            &[("user", "hi"), ("user", "you"), ("assistant", "hello")],
        ),
    ];
    let dataset = fixture.prepare(&rows).unwrap();
    let dropped = &dataset.manifest().counts.dropped_rows;
    assert_eq!(dropped.len(), 1);
    assert_eq!(dropped[0].reason, DropReason::TemplateRefused.label());
    assert_eq!(dropped[0].detail, "must alternate");
}

/// Seen red: `None` in `text` of `source/row.rs` giving `"None"` for `Value::Null`.
#[test]
fn pitfall_03_null_text_is_no_text_in_every_key_style() {
    let fixture = Fixture::new(PLAIN);
    let row = |id: &str, answer: Value| json!({"id": id, "conversations": [{"role": "user", "content": "hi"}, answer]});
    let rows = [
        row("null", json!({"role": "assistant", "content": null})),
        row("missing", json!({"role": "assistant"})),
        row("value", json!({"from": "gpt", "value": null})),
        row("list", json!({"role": "assistant", "content": []})),
        row(
            "parts",
            json!({"role": "assistant", "content": [{"type": "text", "text": null}, null]}),
        ),
        good("good"),
        json!({"id": "user", "messages": [{"from": "human", "value": null},
            {"role": "assistant", "content": "hello"}]}),
    ];
    let dataset = fixture.prepare(&rows).unwrap();
    let counts = &dataset.manifest().counts;
    assert_eq!(counts.dropped_for(DropReason::EmptyAssistantTurn), 5);
    assert_eq!((counts.read, counts.kept), (7, 2));
    let tokenizer = fixture.tokenizer();
    for index in 0..dataset.len() {
        let text = text(&dataset, index, &tokenizer).to_lowercase();
        assert!(!text.contains("none") && !text.contains("null"), "{text}");
    }
}

/// Seen red: `gpt` mapped to `user` in `source/mod.rs`.
#[test]
fn pitfall_04_key_styles_give_the_same_tokens_and_marks() {
    let fixture = Fixture::new(PLAIN);
    let rows = [
        chat(
            "a",
            &[
                ("user", "hi"),
                ("assistant", "hello"),
                ("user", "an"),
                ("assistant", "llo"),
            ],
        ),
        json!({"id": "b", "conversations": [{"from": "human", "value": "hi"},
            {"from": "gpt", "value": "hello"}, {"from": "human", "value": "an"},
            {"from": "gpt", "value": "llo"}]}),
        json!({"id": "c", "messages": [{"from": "human", "value": "hi"},
            {"role": "assistant", "content": "hello"}, {"role": "human", "value": "an"},
            {"from": "assistant", "content": [{"type": "text", "text": "ll"}, "o"]}]}),
    ];
    let dataset = fixture.prepare(&rows).unwrap();
    assert_eq!(dataset.len(), 3);
    let first = dataset.row(0);
    assert!(first.turns.contains(&1) && first.turns.contains(&2));
    for index in 1..3 {
        let row = dataset.row(index);
        assert_eq!((&row.ids, &row.turns), (&first.ids, &first.turns));
    }
}

/// Red under: `resolve` in `source/mod.rs` ending with `.or(Some("assistant"))`.
#[test]
fn pitfall_11_unknown_roles_are_listed_and_never_guessed() {
    let fixture = Fixture::new(PLAIN);
    let rows = [
        good("a"),
        chat("b", &[("user", "hi"), ("my_model_v2", "hello")]),
        chat(
            "c",
            &[("user", "hi"), ("critic", "no"), ("assistant", "hello")],
        ),
        chat("d", &[("developer", "x"), ("user", "hi"), ("critic", "no")]),
    ];
    let error = fixture.prepare(&rows).unwrap_err();
    assert_eq!(
        error.to_string(),
        "unknown roles: `critic` (1 turns), `developer` (1 turns), `my_model_v2` (1 turns)"
    );
    assert!(error.is_user_error());
    assert!(!fixture.out().exists(), "nothing is written");
    let mapped = fixture.prepare_with(&rows, |config| {
        for (from, to) in [
            ("my_model_v2", "assistant"),
            ("critic", "user"),
            ("developer", "system"),
        ] {
            config.roles.insert(from.to_owned(), to.to_owned());
        }
    });
    let dataset = mapped.unwrap();
    assert_eq!(dataset.len(), 3);
    assert_eq!(
        generated(&dataset, 1, &fixture.tokenizer()),
        ["hello<|end|>"]
    );
}

/// Red under: `add_system_column` in `source/row.rs` doing nothing.
#[test]
fn pitfall_12_system_text_survives_in_every_form() {
    let fixture = Fixture::new(PLAIN);
    let rows = [
        chat(
            "a",
            &[("system", "terse"), ("user", "hi"), ("assistant", "hello")],
        ),
        json!({"id": "b", "conversations": [{"from": "system", "value": "terse"},
            {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}),
        json!({"id": "c", "system": "terse", "conversations": [{"from": "human", "value": "hi"},
            {"from": "gpt", "value": "hello"}]}),
    ];
    let dataset = fixture.prepare(&rows).unwrap();
    let tokenizer = fixture.tokenizer();
    for index in 0..3 {
        assert_eq!(dataset.row(index).ids, dataset.row(0).ids);
        assert_eq!(
            text(&dataset, index, &tokenizer).matches("terse").count(),
            1
        );
    }
}

#[test]
fn lines_end_at_newline_only() {
    let fixture = Fixture::new(PLAIN);
    let line = "{\"id\":\"a\",\"conversations\":[{\"role\":\"user\",\"content\":\"one\u{2028}two\u{85}\"},{\"role\":\"assistant\",\"content\":\"hello\u{2029}\"}]}";
    let path = fixture.text(
        "rows.jsonl",
        &format!("{line}\r\n\n  \n{}", line.replace("\"a\"", "7")),
    );
    let dataset = prepare(
        &config(&path),
        &Texts::default(),
        &fixture.tokenizer(),
        &fixture.out(),
    );
    let dataset = dataset.unwrap();
    assert_eq!(dataset.len(), 2);
    assert_eq!(dataset.key(1), "7");
    assert_eq!(
        generated(&dataset, 0, &fixture.tokenizer()),
        ["hello\u{2029}<|end|>"]
    );
}

#[test]
fn a_cut_line_is_an_error_with_its_place_and_nothing_is_written() {
    let fixture = Fixture::new(PLAIN);
    let whole = good("a").to_string();
    let path = fixture.text("rows.jsonl", &format!("{whole}\n{}", &whole[..20]));
    let result = prepare(
        &config(&path),
        &Texts::default(),
        &fixture.tokenizer(),
        &fixture.out(),
    );
    let error = result.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "`{}` line 2, column 20: the JSON object is cut off before its closing brace",
            path.display()
        )
    );
    assert!(error.is_user_error() && error.hint().is_some());
    assert!(!fixture.out().exists());

    let path = fixture.text("rows.jsonl", "{\"id\": 1,}\n");
    let error = prepare(
        &config(&path),
        &Texts::default(),
        &fixture.tokenizer(),
        &fixture.out(),
    );
    assert!(matches!(
        error,
        Err(DataError::Line {
            line: 1,
            column: 10,
            ..
        })
    ));
}

#[test]
fn an_empty_data_set_is_an_error_with_its_reasons() {
    let fixture = Fixture::new(PLAIN);
    let rows = [
        chat("a", &[("user", "hi")]),
        chat("b", &[("user", "hi"), ("assistant", "")]),
    ];
    let error = fixture.prepare(&rows).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the data set is empty: 2 rows read, none kept (assistant turn without text: 1, no assistant turn: 1)"
    );
    assert!(error.is_user_error());
    assert!(!fixture.out().exists());
    let error = fixture.prepare(&[]).unwrap_err();
    assert!(error.to_string().contains("0 rows read"));
}

#[test]
fn fields_that_the_template_never_reads_are_reported() {
    let fixture = Fixture::new(PLAIN);
    let rows = [
        json!({"id": "a", "conversations": [{"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "thinking": "hm", "name": null}]}),
    ];
    let dataset = fixture.prepare(&rows).unwrap();
    let unread = &dataset.manifest().counts.unread_fields;
    assert_eq!(
        unread.iter().collect::<Vec<_>>(),
        [(&"thinking".to_owned(), &1)]
    );
}
