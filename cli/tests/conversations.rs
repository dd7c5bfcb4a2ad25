//! Suites of conversations: later turns, categories.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use burn::tensor::{Device, FloatDType};
use draftsmith_data::mask::Marker;
use draftsmith_data::source::Message;
use draftsmith_data::template::TemplateOptions;
use draftsmith_data::tokenizer::ChatTokenizer;
use draftsmith_models::generate::{GenerateSettings, Prompt, generate};
use draftsmith_models::rng::{Purpose, stable_hash};
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;
use serde_json::{Value, json};
use support::Workplace;

const QUESTIONS: [[&str; 2]; 3] = [
    ["Say one.", "Say it again."],
    ["Count.", "Go on."],
    ["Sing.", ""],
];

/// Three conversations in two categories; the last one has a single turn.
fn talk() -> String {
    let row = |(number, turns): (usize, &[&str; 2])| {
        let turns = turns.iter().filter(|turn| !turn.is_empty());
        let turns = turns.map(|turn| json!({ "role": "user", "content": turn }));
        let category = if number == 1 { "maths" } else { "speech" };
        json!({
            "id": format!("talk-{number}"),
            "category": category,
            "conversations": turns.collect::<Vec<Value>>(),
        })
    };
    let rows = QUESTIONS.iter().enumerate().map(row);
    rows.fold(String::new(), |text, row| text + &format!("{row}\n"))
}

/// The report's hash of the second prompt of a conversation: what a server would see after the greedy answer.
fn second_prompt(place: &Workplace, [first, second]: [&str; 2]) -> String {
    let folder = place.path("target");
    let target = TargetModel::load(&folder, FloatDType::F32, &Device::flex()).unwrap();
    let tokenizer = ChatTokenizer::load(&folder).unwrap();
    let options = TemplateOptions::new();
    let marker = Marker::new(&tokenizer, tokenizer.template().unwrap(), &options);
    let mut messages = vec![Message::new("user", first)];
    let prompt = Prompt {
        ids: marker.prompt_ids(&messages, None).unwrap(),
        stream: 0,
    };
    let settings = GenerateSettings {
        sampling: Sampling::greedy(),
        max_new_tokens: 8,
        stop_ids: vec![258],
        seed: 0,
        purpose: Purpose::Check,
    };
    let answer = generate(&target, &[prompt], &settings, |_| true).unwrap();
    let answer = tokenizer.decode_plain(&answer[0].ids).unwrap();
    messages.push(Message::new("assistant", answer));
    messages.push(Message::new("user", second));
    let ids = marker.prompt_ids(&messages, None).unwrap();
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    format!("{:016x}", stable_hash(&ids.join(" ")))
}

/// Three prompts and two, whose rounds are all rounds.
fn check_categories(entry: &Value) {
    let categories = entry["by_category"].as_array().unwrap();
    let found: Vec<(&str, u64)> = categories
        .iter()
        .map(|one| {
            let name = one["category"].as_str().unwrap();
            (name, one["prompts"].as_u64().unwrap())
        })
        .collect();
    assert_eq!(found, [("speech", 3), ("maths", 2)]);
    let rounds = categories.iter().map(|one| one["rounds"].as_u64().unwrap());
    assert_eq!(Some(rounds.sum()), entry["counts"]["rounds"].as_u64());
}

/// Seen red: a temperature higher by 1 in `Asker::answers`; the push of the answer in `Prompt::next` left out; `is_asked` in
/// `cells` always true.
#[test]
fn later_turns_follow_the_targets_own_answers() {
    let place = Workplace::new();
    place.write("talk.jsonl", &talk());
    let suite = "eval.suites=[{ name = \"talk\", file = \"talk.jsonl\", turns = 2 }]";
    let outcome = place.run(&["run", "run.toml", "--set", suite]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let report: Value = serde_json::from_str(&place.read("out/eval/report.json")).unwrap();
    let entries = report["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 8, "four proposers at two temperatures");
    let ids = ["talk-0", "talk-1", "talk-2", "talk-0#2", "talk-1#2"];
    for entry in entries {
        let prompts = entry["prompts"].as_array().unwrap();
        let names = |key| {
            prompts
                .iter()
                .map(move |prompt| prompt[key].as_str().unwrap())
        };
        assert_eq!(names("id").collect::<Vec<_>>(), ids);
        let conversations: Vec<&str> = ids.iter().map(|id| &id[..6]).collect();
        assert_eq!(names("conversation").collect::<Vec<_>>(), conversations);
        // The same prompts whoever drafts, and at both temperatures where no answer stands in front.
        let is_greedy = entry["temperature"] == 0.0;
        let hashes = |entry: &Value, count: usize| -> Vec<Value> {
            let prompts = entry["prompts"].as_array().unwrap()[..count].iter();
            prompts.map(|prompt| prompt["prompt"].clone()).collect()
        };
        let first = &entries[if is_greedy { 0 } else { 4 }];
        assert_eq!(hashes(entry, 5), hashes(first, 5));
        assert_eq!(hashes(entry, 3), hashes(&entries[0], 3));
        check_categories(entry);
    }
    assert_ne!(entries[0]["prompts"][3], entries[4]["prompts"][3]);
    for number in 0..2 {
        assert_eq!(
            entries[0]["prompts"][3 + number]["prompt"],
            second_prompt(&place, QUESTIONS[number])
        );
    }
    let page = place.read("out/eval/report.html");
    assert!(page.contains("tau by category") && page.contains("<td>maths</td><td>2</td>"));
}
