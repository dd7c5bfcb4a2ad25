//! [`JsonlRows`]: one JSON object a line, with exact places for what is wrong.
//!
//! Lines end at `\n` only: texts may hold U+2028 and other characters that some libraries take for the
//! end of a line. A line that is not a whole JSON object is an error, since it means a damaged file; a
//! whole object that makes no usable row is the row's own problem and is counted.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{PlacedRow, RoleCensus, Roles, row};
use crate::error::DataError;

/// An object with its line number.
type NumberedObject = (usize, Map<String, Value>);

/// The objects of a JSON Lines file with their line numbers.
#[derive(Debug)]
pub struct JsonlObjects {
    path: PathBuf,
    reader: BufReader<fs_err::File>,
    line: usize,
    buffer: Vec<u8>,
}

impl JsonlObjects {
    /// Opens `path`.
    ///
    /// # Errors
    /// [`DataError::Model`] naming the path.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = fs_err::File::open(path).map_err(|e| DataError::io(path, e))?;
        Ok(Self {
            path: path.to_owned(),
            reader: BufReader::new(file),
            line: 0,
            buffer: Vec::new(),
        })
    }

    fn next_object(&mut self) -> Result<Option<NumberedObject>, DataError> {
        loop {
            self.buffer.clear();
            let read = self.reader.read_until(b'\n', &mut self.buffer);
            if read.map_err(|e| DataError::io(&self.path, e))? == 0 {
                return Ok(None);
            }
            self.line += 1;
            if !self.buffer.trim_ascii().is_empty() {
                return self.parse().map(|object| Some((self.line, object)));
            }
        }
    }

    fn parse(&self) -> Result<Map<String, Value>, DataError> {
        let bytes = self.buffer.strip_suffix(b"\n").unwrap_or(&self.buffer);
        let text = std::str::from_utf8(bytes)
            .map_err(|e| self.error(e.valid_up_to() + 1, "not UTF-8 text"))?;
        // Some editors put a byte order mark at the start of a file.
        let text = match self.line {
            1 => text.strip_prefix('\u{feff}').unwrap_or(text),
            _ => text,
        };
        match serde_json::from_str(text) {
            Ok(Value::Object(object)) => Ok(object),
            Ok(_) => Err(self.error(1, "expected a JSON object")),
            Err(e) if e.is_eof() => Err(self.error(
                e.column(),
                "the JSON object is cut off before its closing brace",
            )),
            Err(e) => Err(self.error(e.column(), &json_reason(&e))),
        }
    }

    fn error(&self, column: usize, reason: &str) -> DataError {
        DataError::Line {
            path: self.path.clone(),
            line: self.line,
            column,
            reason: reason.to_owned(),
        }
    }
}

impl Iterator for JsonlObjects {
    type Item = Result<NumberedObject, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_object().transpose()
    }
}

/// The parser's message without its own `at line 1 column 7`: each line is parsed by itself.
fn json_reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => format!("invalid JSON: {}", &text[..end]),
        None => format!("invalid JSON: {text}"),
    }
}

/// The rows of a JSON Lines file of conversations.
#[derive(Debug)]
pub struct JsonlRows<'a> {
    objects: JsonlObjects,
    stem: String,
    roles: &'a Roles,
    /// Roles that no rule resolves; check it after the last row.
    pub census: RoleCensus,
}

impl<'a> JsonlRows<'a> {
    /// Opens `path`.
    ///
    /// # Errors
    /// [`DataError::Model`] naming the path.
    pub fn open(path: &Path, roles: &'a Roles) -> Result<Self, DataError> {
        let stem = path.file_stem().unwrap_or_default();
        Ok(Self {
            objects: JsonlObjects::open(path)?,
            stem: stem.to_string_lossy().into_owned(),
            roles,
            census: RoleCensus::default(),
        })
    }
}

impl Iterator for JsonlRows<'_> {
    type Item = Result<PlacedRow, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (line, object) = match self.objects.next()? {
            Ok(next) => next,
            Err(error) => return Some(Err(error)),
        };
        let place = row::Place {
            stem: &self.stem,
            line,
        };
        Some(Ok(PlacedRow {
            path: self.objects.path.clone(),
            line,
            row: row::parse(object, &place, self.roles, &mut self.census),
        }))
    }
}
