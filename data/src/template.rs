//! [`ChatTemplate`]: chat templates rendered byte for byte as Hugging Face transformers does.
//!
//! The settings are those of `transformers.utils.chat_template_utils`: block trimming and left-stripping
//! on, the final newline of the template removed, loop controls, `raise_exception`, `strftime_now`, and
//! a `tojson` that follows Python's `json.dumps` without escaping for HTML.

mod date;
mod python;

use std::path::Path;

use draftsmith_models::checkpoint::TemplateRecord;
use draftsmith_models::file;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use crate::error::DataError;
use crate::source::Message;

/// Options for a template, for example `enable_thinking`.
pub type TemplateOptions = Map<String, Json>;

const NAME: &str = "chat_template";
const CONFIG: &str = "tokenizer_config.json";
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// Keys of `tokenizer_config.json` that templates may print.
const SPECIAL_TOKEN_KEYS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// What is rendered.
#[derive(Clone, Copy, Debug)]
pub struct RenderInput<'a> {
    /// The turns.
    pub messages: &'a [Message],
    /// Tool descriptions.
    pub tools: Option<&'a Json>,
    /// Options of the template.
    pub options: &'a TemplateOptions,
    /// Whether the header of the assistant's next turn follows.
    pub generation_prompt: GenerationPrompt,
}

/// Whether the header of the assistant's next turn is rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// As a server does before it generates.
    Add,
    /// The turns only.
    Omit,
}

/// A compiled chat template with the special tokens it may print.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: Vec<(String, Json)>,
}

impl ChatTemplate {
    /// Reads the template of a model folder; `chat_template.jinja` wins over `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`DataError`] when a file is malformed, the template does not parse, or a list of named templates
    /// has none called `default`.
    pub fn load(folder: &Path) -> Result<Option<Self>, DataError> {
        let config_path = folder.join(CONFIG);
        let config: Map<String, Json> = if config_path.exists() {
            file::read_json(&config_path)?
        } else {
            Map::new()
        };
        let template_path = folder.join(TEMPLATE_FILE);
        let source = if template_path.exists() {
            Some(file::read_text(&template_path)?)
        } else {
            template_of_config(&config, &config_path)?
        };
        source
            .map(|source| Self::new(source, special_tokens(&config)))
            .transpose()
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// [`DataError::Template`] when it does not parse.
    pub fn new(source: String, special_tokens: Vec<(String, Json)>) -> Result<Self, DataError> {
        let mut environment = environment().map_err(|e| template_error(&e))?;
        environment
            .add_template_owned(NAME, without_generation_tags(&source))
            .map_err(|e| template_error(&e))?;
        Ok(Self {
            environment,
            source,
            special_tokens,
        })
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// The template's own refusal (`raise_exception`) or what the engine says; it concerns this
    /// conversation only.
    pub fn render(&self, input: RenderInput<'_>) -> Result<String, String> {
        let template = self.environment.get_template(NAME);
        let template = template.map_err(|e| e.to_string())?;
        let messages: Vec<Value> = input.messages.iter().map(message_value).collect();
        let mut context: Vec<(String, Value)> = vec![
            ("messages".to_owned(), Value::from(messages)),
            (
                "tools".to_owned(),
                input.tools.map_or(Value::from(()), python::from_json),
            ),
            ("documents".to_owned(), Value::from(())),
            (
                "add_generation_prompt".to_owned(),
                Value::from(input.generation_prompt == GenerationPrompt::Add),
            ),
        ];
        let values = self
            .special_tokens
            .iter()
            .map(|(name, value)| (name, value));
        for (name, value) in values.chain(input.options) {
            context.push((name.clone(), python::from_json(value)));
        }
        template
            .render(Value::from_pairs(context))
            .map_err(|e| e.detail().map_or_else(|| e.to_string(), ToOwned::to_owned))
    }

    /// What a checkpoint remembers about the template.
    pub fn record(&self, options: &TemplateOptions) -> TemplateRecord {
        TemplateRecord {
            blake3: blake3::hash(self.source.as_bytes()).to_hex().to_string(),
            options: options.clone(),
        }
    }

    /// Checks that the template reads every option.
    ///
    /// # Errors
    /// [`DataError::Setting`] naming the option: a mistyped one would change nothing in silence.
    pub fn check_options(&self, options: &TemplateOptions) -> Result<(), DataError> {
        match options.keys().find(|name| !self.reads(name)) {
            None => Ok(()),
            Some(name) => Err(DataError::setting(
                format!(
                    "`data.template_options` sets `{name}`, which the chat template never reads"
                ),
                "remove it or correct its name",
            )),
        }
    }

    /// Whether the text of the template mentions `name`.
    pub fn reads(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    /// The text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }
}

fn template_error(error: &Error) -> DataError {
    DataError::Template {
        name: NAME.to_owned(),
        reason: error.to_string(),
    }
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?,
    );
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        },
    );
    environment.add_function("strftime_now", |format: String| date::now(&format));
    environment.set_formatter(python::print);
    environment.add_filter("tojson", python::tojson);
    environment.add_test("sequence", python::is_sequence);
    environment.add_test("iterable", python::is_iterable);
    Ok(environment)
}

fn message_value(message: &Message) -> Value {
    let own = [
        ("role".to_owned(), Value::from(message.role.as_str())),
        ("content".to_owned(), Value::from(message.content.as_str())),
    ];
    let extra = message.extra.iter();
    let extra = extra.map(|(name, value)| (name.clone(), python::from_json(value)));
    Value::from_pairs(own.into_iter().chain(extra))
}

fn template_of_config(
    config: &Map<String, Json>,
    path: &Path,
) -> Result<Option<String>, DataError> {
    let wrong = |reason: &str| DataError::format(path, "tokenizer configuration", reason);
    match config.get("chat_template") {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(source)) => Ok(Some(source.clone())),
        Some(Json::Array(named)) => {
            let default = named.iter().find(|entry| entry["name"] == "default");
            let source = default.and_then(|entry| entry["template"].as_str());
            match source {
                Some(source) => Ok(Some(source.to_owned())),
                None => Err(wrong("`chat_template` has no template named `default`")),
            }
        }
        Some(_) => Err(wrong("`chat_template` is neither a text nor a list")),
    }
}

/// Special tokens as transformers passes them: their text, under their own names.
fn special_tokens(config: &Map<String, Json>) -> Vec<(String, Json)> {
    let mut tokens = Vec::new();
    for key in SPECIAL_TOKEN_KEYS {
        let value = config.get(key);
        let text = value.map(|token| token.get("content").unwrap_or(token));
        if let Some(Json::String(text)) = text {
            tokens.push((key.to_owned(), Json::from(text.as_str())));
        }
    }
    tokens
}

/// Replaces transformers' own `{% generation %}` tags, which mark the assistant's text and print nothing,
/// by a block of the same scope and the same effect on white space.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        result.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inside = &tag[2..end];
        match inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => {
                result.push_str("{%");
                result.push_str(&inside.replacen("generation", " with ", 1));
            }
            "endgeneration" => {
                result.push_str("{%");
                result.push_str(&inside.replacen("endgeneration", " endwith ", 1));
            }
            _ => result.push_str(&tag[..end]),
        }
        result.push_str("%}");
        rest = &tag[end + 2..];
    }
    result.push_str(rest);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_keep_their_effect_on_white_space() {
        assert_eq!(
            without_generation_tags("a {%- generation -%} b {% endgeneration %} c {% if x %}"),
            "a {%-  with  -%} b {%  endwith  %} c {% if x %}"
        );
    }

    #[test]
    fn a_broken_template_is_an_error_with_its_place() {
        let error = ChatTemplate::new("{% for x in %}".to_owned(), Vec::new()).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("chat template `chat_template`: syntax error")
        );
    }

    #[test]
    fn an_option_that_the_template_never_reads_is_refused() {
        let template = ChatTemplate::new("{{ enable_thinking }}".to_owned(), Vec::new()).unwrap();
        let good = Map::from_iter([("enable_thinking".to_owned(), Json::Bool(false))]);
        let bad = Map::from_iter([("enable_thinkin_g".to_owned(), Json::Bool(false))]);
        assert!(template.check_options(&good).is_ok());
        assert!(template.check_options(&bad).is_err());
    }
}
