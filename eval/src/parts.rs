//! [`Parts`]: finished decodes of a run that has not ended, so that nothing is decoded twice.

use std::path::{Path, PathBuf};

use draftsmith_models::error::ModelError;
use draftsmith_models::file;
use draftsmith_models::rng::stable_hash;
use serde::{Deserialize, Serialize};

use crate::decode::{SequenceRecord, TimeSplit};
use crate::error::EvalError;
use crate::exact::ExactTau;

/// Version of the files.
const FORMAT_VERSION: u32 = 3;
/// File that says what the others were decoded from.
const KEY_FILE: &str = "key.json";

/// A folder of finished decodes, or none.
#[derive(Clone, Debug)]
pub struct Parts(Option<PathBuf>);

/// A finished decode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Every sequence.
    pub records: Vec<SequenceRecord>,
    /// Where the time went, in a decode.
    pub time: TimeSplit,
    /// That of the plain decodes that were timed in turn with this one, in a decode.
    pub plain_time: Option<TimeSplit>,
    /// The exact evaluation of the produced text, where there is one.
    pub exact: Option<ExactTau>,
    /// How surprising the text is, in standard deviations.
    pub text_z: Option<f64>,
    /// Tokens of probability zero under the truncation.
    pub outside: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartFile {
    format_version: u32,
    /// Which decode it is.
    name: String,
    part: Part,
}

#[derive(PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Key {
    format_version: u32,
    inputs: String,
}

impl Parts {
    /// Keeps nothing.
    pub fn none() -> Self {
        Self(None)
    }

    /// Opens a folder for decodes that follow from `inputs`, a hash; parts of other inputs are removed.
    ///
    /// # Errors
    /// [`EvalError::Model`] naming the path that cannot be written.
    pub fn open(folder: &Path, inputs: &str) -> Result<Self, EvalError> {
        let key = Key {
            format_version: FORMAT_VERSION,
            inputs: inputs.to_owned(),
        };
        let path = folder.join(KEY_FILE);
        if !file::read_json::<Key>(&path).is_ok_and(|found| found == key) {
            remove(folder)?;
            fs_err::create_dir_all(folder).map_err(|e| ModelError::io(folder, e))?;
            file::write_json(&path, &key)?;
        }
        Ok(Self(Some(folder.to_owned())))
    }

    /// The decode of that name, if it was finished; a damaged file is as good as none.
    pub fn load(&self, name: &str) -> Option<Part> {
        let found: PartFile = file::read_json(&self.path(name)?).ok()?;
        (found.format_version == FORMAT_VERSION && found.name == name).then_some(found.part)
    }

    /// Keeps a finished decode.
    ///
    /// # Errors
    /// [`EvalError::Model`] naming the path that cannot be written.
    pub fn save(&self, name: &str, part: Part) -> Result<(), EvalError> {
        let Some(path) = self.path(name) else {
            return Ok(());
        };
        let file = PartFile {
            format_version: FORMAT_VERSION,
            name: name.to_owned(),
            part,
        };
        Ok(file::write_json(&path, &file)?)
    }

    /// Removes the folder: the report holds everything.
    ///
    /// # Errors
    /// [`EvalError::Model`] naming the folder.
    pub fn remove(&self) -> Result<(), EvalError> {
        self.0.as_deref().map_or(Ok(()), remove)
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        let folder = self.0.as_ref()?;
        Some(folder.join(format!("{:016x}.json", stable_hash(name))))
    }
}

fn remove(folder: &Path) -> Result<(), EvalError> {
    if folder.exists() {
        fs_err::remove_dir_all(folder).map_err(|e| ModelError::io(folder, e))?;
    }
    Ok(())
}
