//! From a JSON object to a [`Conversation`]: every key style ends in the same form.

use serde_json::{Map, Value};

use super::{
    Conversation, DropReason, FinishReason, Message, RoleCensus, Roles, RowProblem, TokenIds,
};

/// Where a row stands, for rows without an id.
pub(super) struct Place<'a> {
    /// File name without its ending.
    pub stem: &'a str,
    /// Line number, from 1.
    pub line: usize,
}

/// Reads one row. Unknown roles are added to `census`; their rows come back as malformed.
pub(super) fn parse(
    mut object: Map<String, Value>,
    place: &Place<'_>,
    roles: &Roles,
    census: &mut RoleCensus,
) -> Result<Conversation, RowProblem> {
    let ids = token_ids(&mut object)?;
    let turns = object.remove("conversations");
    let turns = match turns.or_else(|| object.remove("messages")) {
        Some(Value::Array(turns)) => turns,
        Some(Value::Null) | None if ids.is_some() => Vec::new(),
        Some(Value::Null) | None => return Err(DropReason::NoConversation.into()),
        Some(other) => return Err(RowProblem::new(DropReason::MalformedTurn, kind(&other))),
    };
    let mut messages = Vec::with_capacity(turns.len() + 1);
    for turn in turns {
        messages.push(message(turn, roles, census)?);
    }
    add_system_column(&mut object, &mut messages);
    if ids.is_none() {
        check_order(&messages)?;
    }
    Ok(Conversation {
        id: identity(&object, place),
        source: text_of(&object, "source").unwrap_or_else(|| place.stem.to_owned()),
        category: text_of(&object, "category"),
        messages,
        tools: object.remove("tools").filter(|tools| !tools.is_null()),
        finish_reason: finish_reason(&object)?,
        ids,
    })
}

fn identity(object: &Map<String, Value>, place: &Place<'_>) -> String {
    match object.get("id") {
        Some(Value::String(id)) if !id.is_empty() => id.clone(),
        Some(Value::Number(id)) => id.to_string(),
        _ => format!("{}-{}", place.stem, place.line),
    }
}

fn text_of(object: &Map<String, Value>, key: &str) -> Option<String> {
    let text = object.get(key)?.as_str()?;
    (!text.is_empty()).then(|| text.to_owned())
}

/// A `system` column beside the turns is the system turn, unless the turns have their own.
fn add_system_column(object: &mut Map<String, Value>, messages: &mut Vec<Message>) {
    let has_own = messages.first().is_some_and(|first| first.role == "system");
    if let Some(text) = text_of(object, "system").filter(|_| !has_own && !messages.is_empty()) {
        messages.insert(0, Message::new("system", text));
    }
}

fn check_order(messages: &[Message]) -> Result<(), RowProblem> {
    let first = messages.iter().find(|message| message.role != "system");
    match first {
        None => Err(DropReason::NoTurns.into()),
        Some(first) if first.is_assistant() => Err(DropReason::FirstTurnAssistant.into()),
        Some(_) => Ok(()),
    }
}

fn finish_reason(object: &Map<String, Value>) -> Result<Option<FinishReason>, RowProblem> {
    match object.get("finish_reason") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) if name == "stop" => Ok(Some(FinishReason::Stop)),
        Some(Value::String(name)) if name == "length" => Ok(Some(FinishReason::Length)),
        Some(other) => Err(RowProblem::new(DropReason::FinishReason, other)),
    }
}

fn token_ids(object: &mut Map<String, Value>) -> Result<Option<TokenIds>, RowProblem> {
    match (object.remove("prompt_ids"), object.remove("answer_ids")) {
        (None, None) => Ok(None),
        (Some(prompt), Some(answer)) => Ok(Some(TokenIds {
            prompt: id_list("prompt_ids", prompt)?,
            answer: id_list("answer_ids", answer)?,
        })),
        (prompt, _) => {
            let missing = if prompt.is_none() {
                "prompt_ids"
            } else {
                "answer_ids"
            };
            let detail = format!("`{missing}` is missing");
            Err(RowProblem::new(DropReason::MalformedIds, detail))
        }
    }
}

fn id_list(key: &str, value: Value) -> Result<Vec<u32>, RowProblem> {
    serde_json::from_value(value)
        .map_err(|e| RowProblem::new(DropReason::MalformedIds, format!("`{key}`: {e}")))
}

fn message(turn: Value, roles: &Roles, census: &mut RoleCensus) -> Result<Message, RowProblem> {
    let Value::Object(mut turn) = turn else {
        return Err(RowProblem::new(DropReason::MalformedTurn, kind(&turn)));
    };
    let role = turn.remove("role").or_else(|| turn.remove("from"));
    let Some(Value::String(role)) = role else {
        return Err(DropReason::MalformedTurn.into());
    };
    let Some(role) = roles.resolve(&role) else {
        census.add(&role);
        let detail = format!("unknown role `{role}`");
        return Err(RowProblem::new(DropReason::MalformedTurn, detail));
    };
    let content = turn.remove("content").filter(|value| !value.is_null());
    let content = content.or_else(|| turn.remove("value"));
    turn.retain(|_, value| !value.is_null());
    Ok(Message {
        role: role.to_owned(),
        content: text(content)?,
        extra: turn,
    })
}

/// Text of a turn: null, a missing key and an empty list are all no text, never the word `None`.
fn text(content: Option<Value>) -> Result<String, RowProblem> {
    match content {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let parts: Result<Vec<String>, RowProblem> = parts.iter().map(part).collect();
            Ok(parts?.concat())
        }
        Some(other) => Err(RowProblem::new(DropReason::NotText, kind(&other))),
    }
}

fn part(part: &Value) -> Result<String, RowProblem> {
    match part {
        Value::String(text) => Ok(text.clone()),
        Value::Object(fields) => match fields.get("text") {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(Value::Null) => Ok(String::new()),
            _ => Err(RowProblem::new(DropReason::NotText, "part without `text`")),
        },
        Value::Null => Ok(String::new()),
        other => Err(RowProblem::new(DropReason::NotText, kind(other))),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
