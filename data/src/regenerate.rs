//! `draftsmith regenerate`: the target answers every prompt itself, in batches, resumable.
//!
//! Beside the output `answers.jsonl` stand `answers.manifest.json` and, until the work is complete, the
//! folder `answers.parts` with one file a finished batch. A crash loses the batch in the making and
//! nothing else. The random numbers of a row depend on the seed and its id alone, and the batches on
//! the list of prompts alone, so that an interrupted run ends with the same file as an undisturbed one.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use draftsmith_models::file;
use draftsmith_models::generate::{self, Continuation, FinishReason, GenerateSettings};
use draftsmith_models::rng::{Purpose, stable_hash};
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::DataError;
use crate::prompts::Prompt;
use crate::source::Message;
use crate::tokenizer::ChatTokenizer;

/// Version of the manifest and the part files; files of another version are not reused.
pub const FORMAT_VERSION: u32 = 1;

/// Settings of `[regenerate]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RegenerateConfig {
    /// How tokens are drawn; default temperature 1 without truncation, the target's own distribution.
    pub sampling: Sampling,
    /// Most tokens of an answer, the end-of-turn token included; default 256.
    pub max_new_tokens: usize,
    /// Prompts answered together; default 32.
    pub batch_rows: usize,
    /// Seed of the random numbers; default 0.
    pub seed: u64,
    /// Further settings at which the prompts set aside for validation are answered, one text each. Validations measure
    /// all texts, each as it was drawn. Default: none.
    pub validation_sampling: Vec<Sampling>,
}

impl Default for RegenerateConfig {
    fn default() -> Self {
        Self {
            sampling: Sampling::default(),
            max_new_tokens: 256,
            batch_rows: 32,
            seed: 0,
            validation_sampling: Vec::new(),
        }
    }
}

impl RegenerateConfig {
    /// The settings of one text alone, which decide its answers.
    #[must_use]
    pub fn of_text(&self, sampling: Sampling) -> Self {
        Self {
            sampling,
            validation_sampling: Vec::new(),
            ..self.clone()
        }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`DataError`] naming the key.
    pub fn validate(&self) -> Result<(), DataError> {
        self.sampling.validate("regenerate.sampling")?;
        for (place, sampling) in self.validation_sampling.iter().enumerate() {
            sampling.validate(&format!("regenerate.validation_sampling[{place}]"))?;
            let is_known =
                *sampling == self.sampling || self.validation_sampling[..place].contains(sampling);
            if is_known {
                return Err(DataError::setting(
                    format!(
                        "`regenerate.validation_sampling[{place}]` repeats {}, a setting that is measured already",
                        sampling.label()
                    ),
                    "name each setting once; `regenerate.sampling` counts, too",
                ));
            }
        }
        for (key, value) in [
            ("max_new_tokens", self.max_new_tokens),
            ("batch_rows", self.batch_rows),
        ] {
            if value == 0 {
                return Err(DataError::setting(
                    format!("`regenerate.{key}` is 0, expected a positive number"),
                    "leave the key out to use its default",
                ));
            }
        }
        Ok(())
    }
}

/// Who answers.
#[derive(Clone, Copy, Debug)]
pub struct Answerer<'a> {
    /// The target.
    pub target: &'a TargetModel,
    /// Its fingerprint; answers of another target are not reused.
    pub fingerprint: &'a str,
    /// Its tokenizer, for the text of the answers.
    pub tokenizer: &'a ChatTokenizer,
}

/// How far the work is; answers found finished count as done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegenerateProgress {
    /// Prompts answered.
    pub done_rows: usize,
    /// Prompts in all.
    pub num_rows: usize,
    /// Tokens generated in this run.
    pub new_tokens: u64,
}

/// What a run of the stage did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegenerateReport {
    /// Prompts in all.
    pub num_rows: usize,
    /// Answers taken from earlier work.
    pub kept_rows: usize,
    /// Answers generated now.
    pub new_rows: usize,
    /// Tokens generated now.
    pub new_tokens: u64,
    /// False when `progress` ended the work early; then the output file is not written yet.
    pub is_complete: bool,
}

/// `answers.manifest.json`: what the answers belong to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnswersManifest {
    /// What decides the answers.
    pub identity: AnswersIdentity,
    /// Answers in the file.
    pub num_rows: usize,
    /// Tokens of all answers.
    pub num_tokens: u64,
    /// Answers that end with an end-of-turn token; the others were cut by the length limit.
    pub num_stopped: usize,
    /// blake3 of the answers file, hex.
    pub blake3: String,
}

/// Everything but the prompts that decides the answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnswersIdentity {
    /// Version of this format.
    pub format_version: u32,
    /// Fingerprint of the target.
    pub target_fingerprint: String,
    /// Settings.
    pub settings: RegenerateConfig,
}

/// Answers `prompts` and writes one JSON line each to `out`, in their order.
///
/// `progress` is called after each generated token of a batch; when it returns false the work stops
/// and the finished batches stay. Answers of an earlier run are kept when target, settings and prompt
/// are the same.
///
/// # Errors
/// [`DataError`] for settings out of range, prompts that repeat an id, are empty or leave no room for
/// an answer, and files that cannot be accessed.
pub fn regenerate(
    answerer: Answerer<'_>,
    prompts: &[Prompt],
    settings: &RegenerateConfig,
    out: &Path,
    progress: &mut dyn FnMut(RegenerateProgress) -> bool,
) -> Result<RegenerateReport, DataError> {
    settings.validate()?;
    check_prompts(prompts, answerer, settings)?;
    let files = Files::beside(out);
    let identity = AnswersIdentity {
        format_version: FORMAT_VERSION,
        target_fingerprint: answerer.fingerprint.to_owned(),
        settings: settings.clone(),
    };
    let mut done = files.finished(&identity, prompts)?;
    let mut report = RegenerateReport {
        num_rows: prompts.len(),
        kept_rows: done.len(),
        ..RegenerateReport::default()
    };
    for batch in batches(prompts, settings.batch_rows) {
        let missing: Vec<&Prompt> = batch
            .into_iter()
            .filter(|prompt| !done.contains_key(&prompt.key))
            .collect();
        if missing.is_empty() {
            continue;
        }
        files.begin(&identity)?;
        let Some(answers) = answer(answerer, &missing, settings, &mut report, progress) else {
            return Ok(report);
        };
        let lines = missing
            .iter()
            .zip(&answers)
            .map(|(prompt, answer)| AnswerLine::new(prompt, answer, answerer.tokenizer))
            .collect::<Result<Vec<_>, _>>()?;
        files.write_part(&lines)?;
        report.new_rows += lines.len();
        done.extend(lines.into_iter().map(|line| (line.id.clone(), line)));
    }
    files.complete(identity, prompts, &done)?;
    report.is_complete = true;
    Ok(report)
}

fn check_prompts(
    prompts: &[Prompt],
    answerer: Answerer<'_>,
    settings: &RegenerateConfig,
) -> Result<(), DataError> {
    let spec = answerer.target.spec();
    let mut seen = HashSet::with_capacity(prompts.len());
    for prompt in prompts {
        let place = || format!("prompt `{}`", prompt.key);
        if !seen.insert(prompt.key.as_str()) {
            let message = format!("{} appears twice", place());
            return Err(DataError::setting(message, "give each prompt its own `id`"));
        }
        let len = prompt.ids.len();
        if len == 0 || len + settings.max_new_tokens > spec.max_position_embeddings {
            return Err(DataError::setting(
                format!(
                    "{} has {len} tokens, expected at least 1 and, with `regenerate.max_new_tokens` = {}, \
                     at most {}, the longest context of the target",
                    place(),
                    settings.max_new_tokens,
                    spec.max_position_embeddings
                ),
                "lower `data.max_len` or `regenerate.max_new_tokens`",
            ));
        }
        crate::tokenizer::check_ids(&place(), &prompt.ids, spec.vocab_size)?;
    }
    Ok(())
}

/// Prompts of similar length together; depends on the list alone.
fn batches(prompts: &[Prompt], batch_rows: usize) -> Vec<Vec<&Prompt>> {
    let mut order: Vec<&Prompt> = prompts.iter().collect();
    order.sort_by_key(|prompt| std::cmp::Reverse(prompt.ids.len()));
    order.chunks(batch_rows).map(<[&Prompt]>::to_vec).collect()
}

/// Answers of one batch; `None` when the work is to stop.
fn answer(
    answerer: Answerer<'_>,
    batch: &[&Prompt],
    settings: &RegenerateConfig,
    report: &mut RegenerateReport,
    progress: &mut dyn FnMut(RegenerateProgress) -> bool,
) -> Option<Vec<Continuation>> {
    let prompts: Vec<generate::Prompt> = batch
        .iter()
        .map(|prompt| generate::Prompt {
            ids: prompt.ids.clone(),
            stream: stable_hash(&prompt.key),
        })
        .collect();
    let settings = GenerateSettings {
        sampling: settings.sampling,
        max_new_tokens: settings.max_new_tokens,
        stop_ids: answerer.tokenizer.end_ids().to_vec(),
        seed: settings.seed,
        purpose: Purpose::Regenerate,
    };
    generate::generate(answerer.target, &prompts, &settings, |num_tokens| {
        report.new_tokens += num_tokens as u64;
        progress(RegenerateProgress {
            done_rows: report.kept_rows + report.new_rows,
            num_rows: report.num_rows,
            new_tokens: report.new_tokens,
        })
    })
}

/// One line of the answers file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AnswerLine {
    id: String,
    /// The prompt's turns and the answer, as text.
    conversations: Vec<Value>,
    /// Exactly what the target saw.
    prompt_ids: Vec<u32>,
    /// Exactly what the target wrote, the end-of-turn token included.
    answer_ids: Vec<u32>,
    finish_reason: FinishReason,
    /// Tokens of the answer.
    num_tokens: usize,
    source: String,
}

impl AnswerLine {
    fn new(
        prompt: &Prompt,
        answer: &Continuation,
        tokenizer: &ChatTokenizer,
    ) -> Result<Self, DataError> {
        let mut conversations: Vec<Value> = prompt.messages.iter().map(turn).collect();
        let text = tokenizer.decode_plain(&answer.ids)?;
        conversations.push(json!({"role": "assistant", "content": text}));
        Ok(Self {
            id: prompt.key.clone(),
            conversations,
            prompt_ids: prompt.ids.clone(),
            answer_ids: answer.ids.clone(),
            finish_reason: answer.finish,
            num_tokens: answer.ids.len(),
            source: prompt.source.clone(),
        })
    }
}

/// A turn with its extra fields in place, as the reader of conversations expects them.
fn turn(message: &Message) -> Value {
    let mut map = Map::new();
    map.insert("role".to_owned(), json!(message.role));
    map.insert("content".to_owned(), json!(message.content));
    map.extend(message.extra.clone());
    Value::Object(map)
}

/// The output file and what stands beside it.
struct Files {
    out: PathBuf,
    manifest: PathBuf,
    parts: PathBuf,
}

const IDENTITY: &str = "identity.json";

impl Files {
    fn beside(out: &Path) -> Self {
        Self {
            out: out.to_owned(),
            manifest: out.with_extension("manifest.json"),
            parts: out.with_extension("parts"),
        }
    }

    /// Answers of earlier runs that belong to `identity` and to one of `prompts`.
    fn finished(
        &self,
        identity: &AnswersIdentity,
        prompts: &[Prompt],
    ) -> Result<HashMap<String, AnswerLine>, DataError> {
        let ids: HashMap<&str, &[u32]> = prompts
            .iter()
            .map(|prompt| (prompt.key.as_str(), prompt.ids.as_slice()))
            .collect();
        let mut lines = self.lines_of_output(identity)?;
        lines.extend(self.lines_of_parts(identity)?);
        Ok(lines
            .into_iter()
            .filter(|line| ids.get(line.id.as_str()) == Some(&line.prompt_ids.as_slice()))
            .map(|line| (line.id.clone(), line))
            .collect())
    }

    fn lines_of_output(&self, identity: &AnswersIdentity) -> Result<Vec<AnswerLine>, DataError> {
        if !self.out.exists() || !self.manifest.exists() {
            return Ok(Vec::new());
        }
        // A manifest that does not parse is one of another version: its answers are not reused.
        let manifest = file::read_json::<AnswersManifest>(&self.manifest).ok();
        let bytes = file::read(&self.out)?;
        let is_ours = manifest.is_some_and(|manifest| {
            manifest.identity == *identity
                && manifest.blake3 == blake3::hash(&bytes).to_hex().as_str()
        });
        if is_ours {
            parse_lines(&self.out, &bytes)
        } else {
            Ok(Vec::new())
        }
    }

    fn lines_of_parts(&self, identity: &AnswersIdentity) -> Result<Vec<AnswerLine>, DataError> {
        if !self.parts.exists() {
            return Ok(Vec::new());
        }
        let found = file::read_json::<AnswersIdentity>(&self.parts.join(IDENTITY)).ok();
        if found.as_ref() != Some(identity) {
            self.remove_parts()?;
            return Ok(Vec::new());
        }
        let mut lines = Vec::new();
        for path in self.part_paths()? {
            lines.extend(parse_lines(&path, &file::read(&path)?)?);
        }
        Ok(lines)
    }

    fn part_paths(&self) -> Result<Vec<PathBuf>, DataError> {
        let mut paths = Vec::new();
        for entry in fs_err::read_dir(&self.parts).map_err(|e| DataError::io(&self.parts, e))? {
            let path = entry.map_err(|e| DataError::io(&self.parts, e))?.path();
            if path
                .extension()
                .is_some_and(|extension| extension == "jsonl")
            {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths)
    }

    /// Makes the folder for parts, once.
    fn begin(&self, identity: &AnswersIdentity) -> Result<(), DataError> {
        let path = self.parts.join(IDENTITY);
        if path.exists() {
            return Ok(());
        }
        Ok(file::write_json(&path, identity)?)
    }

    fn write_part(&self, lines: &[AnswerLine]) -> Result<(), DataError> {
        // Named by its rows, so that parts of another list of prompts are never replaced.
        let ids: Vec<&str> = lines.iter().map(|line| line.id.as_str()).collect();
        let name = format!("part-{:016x}.jsonl", stable_hash(&ids.join("\n")));
        let path = self.parts.join(name);
        let bytes = to_jsonl(&path, &lines.iter().collect::<Vec<_>>())?;
        file::write_atomic(&path, &bytes).map_err(|e| DataError::or_disk_full(e, &self.parts))
    }

    /// Writes the output, then its manifest, then removes the parts.
    fn complete(
        &self,
        identity: AnswersIdentity,
        prompts: &[Prompt],
        done: &HashMap<String, AnswerLine>,
    ) -> Result<(), DataError> {
        let lines: Vec<&AnswerLine> = prompts.iter().filter_map(|p| done.get(&p.key)).collect();
        let bytes = to_jsonl(&self.out, &lines)?;
        let is_stopped = |line: &&&AnswerLine| line.finish_reason == FinishReason::Stop;
        let manifest = AnswersManifest {
            identity,
            num_rows: lines.len(),
            num_tokens: lines.iter().map(|line| line.num_tokens as u64).sum(),
            num_stopped: lines.iter().filter(is_stopped).count(),
            blake3: blake3::hash(&bytes).to_hex().to_string(),
        };
        let folder = self.out.parent().unwrap_or(Path::new("."));
        file::write_atomic(&self.out, &bytes).map_err(|e| DataError::or_disk_full(e, folder))?;
        file::write_json(&self.manifest, &manifest)?;
        self.remove_parts()
    }

    fn remove_parts(&self) -> Result<(), DataError> {
        match fs_err::remove_dir_all(&self.parts) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(DataError::io(&self.parts, e))
            }
            _ => Ok(()),
        }
    }
}

fn to_jsonl(path: &Path, lines: &[&AnswerLine]) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::new();
    for line in lines {
        serde_json::to_writer(&mut bytes, line)
            .map_err(|e| DataError::format(path, "answers file", e))?;
        bytes.push(b'\n');
    }
    Ok(bytes)
}

fn parse_lines(path: &Path, bytes: &[u8]) -> Result<Vec<AnswerLine>, DataError> {
    bytes
        .split(|&byte| byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            serde_json::from_slice(line).map_err(|e| DataError::format(path, "answers file", e))
        })
        .collect()
}
