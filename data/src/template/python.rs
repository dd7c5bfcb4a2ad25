//! Values and filters with Python's behaviour, where templates can see the difference.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value, escape_formatter};
use serde_json::Value as Json;

/// A JSON value as a template value; objects keep the order of their keys.
pub(super) fn from_json(value: &Json) -> Value {
    match value {
        Json::Null => Value::from(()),
        Json::Bool(truth) => Value::from(*truth),
        Json::Number(number) => {
            if let Some(integer) = number.as_i64() {
                Value::from(integer)
            } else if let Some(integer) = number.as_u64() {
                Value::from(integer)
            } else {
                Value::from(number.as_f64().unwrap_or(f64::NAN))
            }
        }
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => Value::from(items.iter().map(from_json).collect::<Vec<Value>>()),
        Json::Object(fields) => {
            let fields = fields.iter();
            Value::from_pairs(fields.map(|(name, value)| (name.clone(), from_json(value))))
        }
    }
}

/// Jinja's test: whatever has a length and items, texts and mappings included.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined
    )
}

/// Jinja's test: `none` cannot be iterated over.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Prints a value as Python does; the engine's own way differs for numbers like 1e20 only.
pub(super) fn print(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        let mut text = String::new();
        write_number(&mut text, value);
        return out.write_str(&text).map_err(Error::from);
    }
    escape_formatter(out, state, value)
}

/// How `json.dumps` is asked to write.
struct JsonStyle {
    ensure_ascii: bool,
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// The `tojson` filter of transformers: `json.dumps` with its defaults, but `ensure_ascii=False`.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the engine passes keyword arguments by value"
)]
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let default_item = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (default_item.to_owned(), ": ".to_owned()),
    };
    let style = JsonStyle {
        ensure_ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    style.write(&mut out, value, 1)?;
    Ok(Value::from(out))
}

impl JsonStyle {
    fn write(&self, out: &mut String, value: &Value, level: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_number(out, value),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_all(out, ['[', ']'], level, &items, |out, item| {
                    self.write(out, item, level + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_all(out, ['{', '}'], level, &keys, |out, key| {
                    self.write_text(out, &key.to_string());
                    out.push_str(&self.key_separator);
                    self.write(out, &value.get_item(key)?, level + 1)
                })?;
            }
            kind => {
                let message = format!("an {kind} value is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn write_all(
        &self,
        out: &mut String,
        brackets: [char; 2],
        level: usize,
        items: &[Value],
        mut write: impl FnMut(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(brackets[0]);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(out, level);
            write(out, item)?;
        }
        if !items.is_empty() {
            self.new_line(out, level - 1);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn new_line(&self, out: &mut String, level: usize) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * level));
        }
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        push(out, format_args!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn push(out: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing to a text cannot fail.
    let _infallible = out.write_fmt(arguments);
}

/// Integers as they are, other numbers as Python's `repr`: shortest digits, `1e+16`, `1e-05`.
fn write_number(out: &mut String, value: &Value) {
    let number = f64::try_from(value.clone());
    match number {
        Ok(number) if !value.is_integer() => {
            let text = format!("{number:?}");
            match text.split_once('e') {
                None => out.push_str(&text),
                Some((digits, exponent)) => {
                    let (sign, exponent) = match exponent.strip_prefix('-') {
                        Some(exponent) => ('-', exponent),
                        None => ('+', exponent),
                    };
                    push(out, format_args!("{digits}e{sign}{exponent:0>2}"));
                }
            }
        }
        _ => push(out, format_args!("{value}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumped(json: &str, options: &[(&'static str, Value)]) -> String {
        let value: Json = serde_json::from_str(json).unwrap();
        let options: Kwargs = options.iter().cloned().collect();
        tojson(&from_json(&value), options).unwrap().to_string()
    }

    #[test]
    fn json_is_written_as_python_does() {
        // Expected texts are those of Python's `json.dumps(value, ensure_ascii=False)`.
        assert_eq!(
            dumped(
                r#"{"b":[1,2.5,1e-5,1e16,true,null],"a":"<\u00e9\u0001\"\n>"}"#,
                &[]
            ),
            "{\"b\": [1, 2.5, 1e-05, 1e+16, true, null], \"a\": \"<\u{e9}\\u0001\\\"\\n>\"}"
        );
        assert_eq!(
            dumped(r#"{"b":[],"a":{}}"#, &[("indent", Value::from(2))]),
            "{\n  \"b\": [],\n  \"a\": {}\n}"
        );
        assert_eq!(
            dumped("[1,[2]]", &[("indent", Value::from(1))]),
            "[\n 1,\n [\n  2\n ]\n]"
        );
        assert_eq!(
            dumped(r#""\u00e9""#, &[("ensure_ascii", Value::from(true))]),
            "\"\\u00e9\""
        );
        assert_eq!(
            dumped(r#"{"b":1,"a":2}"#, &[("sort_keys", Value::from(true))]),
            "{\"a\": 2, \"b\": 1}"
        );
    }
}
