//! A refused run file in the words of the user: what, where, and the nearest valid name.

use std::ops::Range;

use draftsmith_models::drafter::{DrafterConfig, FAMILIES};

use super::drafters::SHARED_KEYS;
use super::fields::{fields_by, fields_of};
use super::source::Source;
use crate::errors::CliError;

/// Names of at least this similarity (Jaro-Winkler, 0 to 1) are worth a suggestion.
const SIMILAR: f64 = 0.75;

/// Turns an error of the TOML reader into a refusal with place, caret and hint.
pub(crate) fn refuse(source: &Source, error: &toml::de::Error) -> CliError {
    let span = error.span().unwrap_or(0..0);
    let table = source.table_at(span.start);
    let (message, hint) = match Unknown::parse(error.message()) {
        Some(unknown) => unknown.explain(table.as_deref()),
        None => (in_words(error.message()), None),
    };
    CliError::RunFile {
        message: format!("run file refused: {message}"),
        snippet: source.snippet(&span),
        hint,
    }
}

/// Puts place and caret on an error about a setting, if a source sets the key it names.
///
/// `prefix` is the table the keys of the message stand in, for drafters with tables of their own.
pub(crate) fn place(
    sources: &[&Source],
    prefix: Option<&str>,
    message: &str,
    hint: Option<String>,
) -> CliError {
    let found = sources
        .iter()
        .rev()
        .find_map(|source| Some(source.snippet(&place_in(source, prefix, message)?)));
    CliError::RunFile {
        message: format!("run file refused: {message}"),
        snippet: found.unwrap_or_default(),
        hint,
    }
}

/// Place of the first backticked dotted key of `message` in a source.
fn place_in(source: &Source, prefix: Option<&str>, message: &str) -> Option<Range<usize>> {
    message.split('`').skip(1).step_by(2).find_map(|name| {
        let own = prefix.and_then(|prefix| source.locate(&format!("{prefix}.{name}")));
        let common = || name.contains('.').then(|| source.locate(name)).flatten();
        own.or_else(common)
    })
}

/// `unknown field`, `unknown variant` and their lists of valid names, as serde writes them.
struct Unknown {
    is_key: bool,
    name: String,
    valid: Vec<String>,
}

impl Unknown {
    fn parse(message: &str) -> Option<Self> {
        let is_key = message.starts_with("unknown field");
        if !is_key && !message.starts_with("unknown variant") {
            return None;
        }
        let mut quoted = message.split('`').skip(1).step_by(2).map(str::to_owned);
        Some(Self {
            is_key,
            name: quoted.next()?,
            valid: quoted.collect(),
        })
    }

    /// Message and hint for a name in `table`.
    fn explain(mut self, table: Option<&str>) -> (String, Option<String>) {
        let place = table.map_or_else(|| "the run file".to_owned(), |table| format!("`[{table}]`"));
        let is_family = !self.is_key
            && self
                .valid
                .iter()
                .map(String::as_str)
                .eq(FAMILIES.iter().copied());
        if is_family {
            let list = self.valid.join("`, `");
            let hint = self.nearest().map_or_else(
                || format!("the families are: `{list}`"),
                |near| format!("did you mean `{near}`? the families are: `{list}`"),
            );
            return (
                format!("unknown drafter family `{}`", self.name),
                Some(hint),
            );
        }
        if self.is_key && table.is_some_and(|table| table.starts_with("drafter.")) {
            self.valid
                .extend(SHARED_KEYS.iter().map(|key| (*key).to_owned()));
        }
        let kind = match (self.is_key, table) {
            (true, None) => "section",
            (true, Some(_)) => "key",
            (false, _) => "name",
        };
        let message = format!("unknown {kind} `{}` in {place}", self.name);
        (message, Some(self.hint(kind, &place)))
    }

    fn hint(&self, kind: &str, place: &str) -> String {
        let list = self.valid.join("`, `");
        let near = self
            .nearest()
            .map(|near| format!("did you mean `{near}`? "));
        let elsewhere = self.is_key.then(|| owner_of(&self.name)).flatten();
        match (near, elsewhere) {
            (_, Some(section)) => format!("`{}` belongs in `[{section}]`", self.name),
            (near, None) => {
                let near = near.unwrap_or_default();
                format!("{near}the {kind}s of {place} are: `{list}`")
            }
        }
    }

    fn nearest(&self) -> Option<&str> {
        let name = self.name.to_lowercase();
        let scored = self
            .valid
            .iter()
            .map(|valid| (strsim::jaro_winkler(&name, valid), valid));
        let best = scored.max_by(|left, right| left.0.total_cmp(&right.0))?;
        (best.0 >= SIMILAR).then_some(best.1.as_str())
    }
}

/// The section that has a key of exactly this name.
fn owner_of(key: &str) -> Option<String> {
    let known = super::sections().into_iter().chain(family_sections());
    known
        .into_iter()
        .find(|(_, fields)| fields.contains(&key))
        .map(|(section, _)| section)
}

fn family_sections() -> impl Iterator<Item = (String, &'static [&'static str])> {
    FAMILIES.iter().map(|family| {
        let fields = fields_by(|probe| DrafterConfig::deserialize_family(family, probe).map(drop));
        (format!("drafter.{family}"), fields)
    })
}

/// The names of a section's struct, for [`super::sections`].
pub(crate) fn section<T: serde::de::DeserializeOwned>(
    name: &str,
) -> (String, &'static [&'static str]) {
    (name.to_owned(), fields_of::<T>())
}

/// The reader's message on one line, with kinds of numbers as people say them.
fn in_words(message: &str) -> String {
    let message = message.lines().collect::<Vec<_>>().join(": ");
    let Some((text, expected)) = message.rsplit_once("expected ") else {
        return message;
    };
    let expected = match expected {
        "u32" | "u64" | "usize" => "a whole number of at least 0",
        "f64" => "a number",
        "a boolean" => "true or false",
        "path string" => "a path in quotes",
        other => other,
    };
    format!("{text}expected {expected}")
}
