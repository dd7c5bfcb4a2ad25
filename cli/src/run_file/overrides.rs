//! `--set section.key=value`: one override, read as a line of TOML.

use super::source::Source;
use crate::errors::CliError;

/// A parsed override.
#[derive(Clone, Debug)]
pub(crate) struct Override {
    path: Vec<String>,
    value: toml::Value,
    /// The override as a TOML document of its own.
    pub(crate) source: Source,
}

impl Override {
    /// Reads `section.key=value`; a value that is not TOML is taken as a string.
    ///
    /// # Errors
    /// [`CliError::RunFile`] when there is no `=` or the key is not a dotted path.
    pub(crate) fn parse(typed: &str) -> Result<Self, CliError> {
        let malformed = || CliError::RunFile {
            message: format!("`--set {typed}` is not of the form `section.key=value`"),
            snippet: String::new(),
            hint: Some("for example `--set train.max_steps=20`".to_owned()),
        };
        let (key, value) = typed.split_once('=').ok_or_else(malformed)?;
        let key = key.trim();
        let path: Vec<String> = key.split('.').map(|part| part.trim().to_owned()).collect();
        if path.len() < 2 || path.iter().any(|part| !is_bare_key(part)) {
            return Err(malformed());
        }
        let plain = format!("{key} = {}", value.trim());
        let (text, table) = match toml::from_str::<toml::Table>(&plain) {
            Ok(table) => (plain, table),
            Err(_not_toml) => {
                let quoted = format!("{key} = {}", toml::Value::String(value.trim().to_owned()));
                let table = toml::from_str(&quoted).map_err(|_not_even_as_text| malformed())?;
                (quoted, table)
            }
        };
        let value = value_at(&table, &path).ok_or_else(malformed)?;
        Ok(Self {
            path,
            value,
            source: Source {
                name: format!("--set {typed}"),
                text,
            },
        })
    }

    /// Replaces the value in a whole document.
    pub(crate) fn apply(&self, document: &mut toml::Table) {
        let mut table = document;
        let Some((last, tables)) = self.path.split_last() else {
            return;
        };
        for part in tables {
            let entry = table
                .entry(part.clone())
                .or_insert_with(|| toml::Value::Table(toml::Table::new()));
            if !entry.is_table() {
                *entry = toml::Value::Table(toml::Table::new());
            }
            let toml::Value::Table(inner) = entry else {
                return;
            };
            table = inner;
        }
        table.insert(last.clone(), self.value.clone());
    }
}

fn is_bare_key(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    !part.is_empty() && part.chars().all(allowed)
}

fn value_at(table: &toml::Table, path: &[String]) -> Option<toml::Value> {
    let (first, rest) = path.split_first()?;
    let value = table.get(first)?;
    if rest.is_empty() {
        return Some(value.clone());
    }
    value_at(value.as_table()?, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(document: &str, typed: &str) -> toml::Table {
        let mut table: toml::Table = toml::from_str(document).unwrap();
        Override::parse(typed).unwrap().apply(&mut table);
        table
    }

    #[test]
    fn a_table_value_replaces_the_old_table_whole() {
        let table = applied(
            "[objective]\nlosses = { kl = 1.0 }\n",
            "objective.losses={ tv = 0.9 }",
        );
        let expected: toml::Table = toml::from_str("[objective]\nlosses = { tv = 0.9 }\n").unwrap();
        assert_eq!(table, expected);
    }

    #[test]
    fn a_value_that_is_not_toml_is_a_string() {
        let table = applied("", "run.out=runs/try 1");
        assert_eq!(table["run"]["out"].as_str(), Some("runs/try 1"));
    }

    #[test]
    fn anything_else_is_refused() {
        for typed in ["train.steps", "steps=1", "train.=1", "a b.c=1"] {
            assert!(Override::parse(typed).is_err(), "{typed}");
        }
    }
}
