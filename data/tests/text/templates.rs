//! Rendered texts equal those of Hugging Face transformers, byte for byte.

use draftsmith_data::source::Message;
use draftsmith_data::template::{ChatTemplate, GenerationPrompt, RenderInput, TemplateOptions};
use serde::Deserialize;
use serde_json::{Map, Value};

const GOLDEN: &str = include_str!("../golden/templates/cases.json");

#[derive(Deserialize)]
struct Golden {
    special_tokens: Map<String, Value>,
    templates: Map<String, Value>,
    conversations: Map<String, Value>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    conversation: String,
    options: TemplateOptions,
    tools: Option<Value>,
    add_generation_prompt: bool,
    expected: Option<String>,
    error: Option<String>,
}

fn messages(conversation: &Value) -> Vec<Message> {
    let turns = conversation.as_array().unwrap().iter();
    turns
        .map(|turn| {
            let mut extra = turn.as_object().unwrap().clone();
            let mut take = |key: &str| extra.remove(key).unwrap().as_str().unwrap().to_owned();
            Message {
                role: take("role"),
                content: take("content"),
                extra,
            }
        })
        .collect()
}

/// Seen red: `trim_blocks(false)` in `template.rs`, and without `lstrip_blocks`.
#[test]
fn pitfall_07_rendered_text_is_byte_equal_to_transformers() {
    let golden: Golden = serde_json::from_str(GOLDEN).unwrap();
    let mut wrong = Vec::new();
    for case in &golden.cases {
        let source = golden.templates[&case.template]
            .as_str()
            .unwrap()
            .to_owned();
        let special = golden.special_tokens.clone().into_iter().collect();
        let template = ChatTemplate::new(source, special).unwrap();
        let rendered = template.render(RenderInput {
            messages: &messages(&golden.conversations[&case.conversation]),
            tools: case.tools.as_ref(),
            options: &case.options,
            generation_prompt: if case.add_generation_prompt {
                GenerationPrompt::Add
            } else {
                GenerationPrompt::Omit
            },
        });
        let expected = match (&case.expected, &case.error) {
            (Some(text), _) => Ok(text.clone()),
            (None, error) => Err(error.clone().unwrap()),
        };
        if rendered != expected {
            wrong.push(format!(
                "{} {} {}\n  found    {rendered:?}\n  expected {expected:?}",
                case.template, case.conversation, case.add_generation_prompt
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        golden.cases.len(),
        wrong.join("\n")
    );
    assert!(golden.templates.len() >= 5);
}
