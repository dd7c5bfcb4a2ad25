//! [`Source`]: the text a setting came from, and pictures of places in it.

use std::ops::Range;

use toml::de::{DeTable, DeValue};

/// A piece of TOML that the user wrote.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// File name, or the `--set` as typed.
    pub(crate) name: String,
    /// The TOML text.
    pub(crate) text: String,
}

impl Source {
    /// Place and caret on lines of their own, starting with a line break:
    ///
    /// ```text
    ///   --> configs/x.toml:4:1
    ///   |
    /// 4 | ttt_step = 7
    ///   | ^^^^^^^^
    /// ```
    pub(crate) fn snippet(&self, span: &Range<usize>) -> String {
        let start = floor_char(&self.text, span.start.min(self.text.len()));
        let before = &self.text[..start];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let line_number = before.matches('\n').count() + 1;
        let column = self.text[line_start..start].chars().count() + 1;
        let line = self.text[line_start..].lines().next().unwrap_or("");
        let end = floor_char(&self.text, span.end.clamp(start, line_start + line.len()));
        let width = self.text[start..end.max(start)].chars().count().max(1);
        let gutter = " ".repeat(line_number.to_string().len());
        // An override has one line only, and its name shows it already.
        let place = if self.name.starts_with("--") {
            String::new()
        } else {
            format!(":{line_number}:{column}")
        };
        format!(
            "\n{gutter}--> {}{place}\n{gutter} |\n{line_number} | {line}\n{gutter} | {}{}",
            self.name,
            " ".repeat(column - 1),
            "^".repeat(width),
        )
    }

    /// Place of the value at a dotted path such as `objective.losses`, if the text sets it.
    pub(crate) fn locate(&self, path: &str) -> Option<Range<usize>> {
        let document = DeTable::parse(&self.text).ok()?;
        let mut table = document.get_ref();
        let mut parts = path.split('.').peekable();
        while let Some(part) = parts.next() {
            let (key, value) = table.iter().find(|(key, _)| key.get_ref() == part)?;
            if parts.peek().is_none() {
                return Some(key.span().start..value.span().end.max(key.span().end));
            }
            let DeValue::Table(inner) = value.get_ref() else {
                return Some(key.span().start..value.span().end);
            };
            table = inner;
        }
        None
    }

    /// The innermost table header above a place, for example `drafter.eagle3`.
    pub(crate) fn table_at(&self, place: usize) -> Option<String> {
        let end = floor_char(&self.text, place.min(self.text.len()));
        // `train.max_steps = 3`: the key before the last dot is the table.
        let line = self.text[..end].lines().next_back().unwrap_or("").trim();
        if let Some(dotted) = line.strip_suffix('.').filter(|line| !line.starts_with('[')) {
            return Some(dotted.to_owned());
        }
        let header = self.text[..end].lines().rev().find_map(|line| {
            let line = line.trim();
            let name = line.strip_prefix('[')?.split(']').next()?;
            let name = name.trim().trim_end_matches('.');
            (!name.starts_with('[')).then(|| name.to_owned())
        });
        header.filter(|name| !name.is_empty())
    }
}

/// The largest character boundary at or below `place`.
fn floor_char(text: &str, place: usize) -> usize {
    (0..=place)
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source {
            name: "x.toml".to_owned(),
            text: text.to_owned(),
        }
    }

    #[test]
    fn the_caret_stands_under_the_span() {
        let source = source("[run]\nseed = 1\nsede = 2\n");
        assert_eq!(
            source.snippet(&(15..19)),
            "\n --> x.toml:3:1\n  |\n3 | sede = 2\n  | ^^^^"
        );
    }

    #[test]
    fn places_beyond_the_text_or_inside_a_character_do_not_panic() {
        let source = source("a = \"\u{e9}\"");
        for start in 0..20 {
            assert!(
                source
                    .snippet(&(start..start + 3))
                    .contains("--> x.toml:1:")
            );
        }
    }

    #[test]
    fn values_are_found_by_their_dotted_path() {
        let source = source("[objective]\nlosses = { kl = 1.0 }\n");
        let span = source.locate("objective.losses").unwrap();
        assert_eq!(&source.text[span], "losses = { kl = 1.0 }");
        assert_eq!(source.locate("objective.other"), None);
        assert_eq!(source.table_at(14).as_deref(), Some("objective"));
    }
}
