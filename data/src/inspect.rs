//! What `draftsmith inspect` shows: tokens with their marks, the slot table, vocabulary coverage.

use std::fmt::Write as _;

use draftsmith_models::batch::TokenRow;
use draftsmith_models::slot::valid_slots;
use serde::Serialize;

use crate::dataset::Dataset;
use crate::error::DataError;
use crate::tokenizer::ChatTokenizer;

/// Vocabulary sizes of the coverage table.
const COVERAGE_SIZES: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16_384];

/// One token of a row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InspectedToken {
    /// Index in the row.
    pub position: usize,
    /// Token id.
    pub id: u32,
    /// Its text; a piece of a character shows as U+FFFD.
    pub text: String,
    /// 0 when the target did not generate it, else the number of its assistant turn.
    pub turn: u32,
}

/// One valid slot of a row, with what it reads and predicts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InspectedSlot {
    /// Index of the last committed token.
    pub anchor: usize,
    /// Index of the drafted token in its proposal.
    pub depth: usize,
    /// Id of the newest token the drafter is fed, at `anchor + depth`.
    pub input_id: u32,
    /// Position of the target state that teaches the slot.
    pub teacher_position: usize,
    /// Position of the label.
    pub label_position: usize,
    /// Id of the label.
    pub label_id: u32,
}

/// One row of a data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InspectedRow {
    /// Identity of the row.
    pub key: String,
    /// Its corpus.
    pub source: String,
    /// All tokens.
    pub tokens: Vec<InspectedToken>,
    /// The valid slots, by anchor, then depth.
    pub slots: Vec<InspectedSlot>,
}

/// Share of the generated tokens that the most frequent ids cover.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Coverage {
    /// Number of most frequent ids.
    pub vocab_size: usize,
    /// Share of all generated tokens, 0 to 1.
    pub share: f64,
}

/// How generated tokens spread over the vocabulary.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VocabularyCoverage {
    /// Distinct ids among the generated tokens.
    pub distinct: usize,
    /// Generated tokens.
    pub tokens: u64,
    /// Coverage by vocabularies of growing size.
    pub coverage: Vec<Coverage>,
}

/// Tokens and slots of row `index`; slots of depth below `num_depths`.
///
/// # Errors
/// [`DataError::Setting`] when there is no such row, [`DataError::Tokenizer`] when decoding fails.
pub fn row(
    dataset: &Dataset,
    index: usize,
    num_depths: usize,
    tokenizer: &ChatTokenizer,
) -> Result<InspectedRow, DataError> {
    if index >= dataset.len() {
        return Err(DataError::setting(
            format!(
                "row {index} does not exist, the data set has {} rows",
                dataset.len()
            ),
            "rows are counted from 0",
        ));
    }
    let row = dataset.row(index);
    let tokens = row.ids.iter().zip(&row.turns).enumerate();
    let tokens = tokens.map(|(position, (&id, &turn))| {
        let text = tokenizer.decode(&[id])?;
        Ok(InspectedToken {
            position,
            id,
            text,
            turn,
        })
    });
    Ok(InspectedRow {
        tokens: tokens.collect::<Result<_, DataError>>()?,
        slots: slots(&row, num_depths),
        source: dataset.source(index).to_owned(),
        key: row.key,
    })
}

fn slots(row: &TokenRow, num_depths: usize) -> Vec<InspectedSlot> {
    let mut slots = valid_slots(&row.turns, 0, num_depths);
    slots.sort_unstable();
    let slots = slots.into_iter();
    slots
        .map(|slot| InspectedSlot {
            anchor: slot.anchor,
            depth: slot.depth,
            input_id: row.ids[slot.teacher_position()],
            teacher_position: slot.teacher_position(),
            label_position: slot.label_position(),
            label_id: row.ids[slot.label_position()],
        })
        .collect()
}

/// Coverage of the generated tokens of a data set.
///
/// # Errors
/// [`DataError::TokenOutsideVocabulary`] when an id does not fit `vocab_size`.
pub fn coverage(dataset: &Dataset, vocab_size: usize) -> Result<VocabularyCoverage, DataError> {
    let mut counts = dataset.token_counts(vocab_size)?;
    counts.retain(|count| *count > 0);
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let tokens: u64 = counts.iter().sum();
    let sizes = COVERAGE_SIZES.into_iter().filter(|size| *size < vocab_size);
    let coverage = sizes.map(|size| Coverage {
        vocab_size: size,
        share: counts.iter().take(size).sum::<u64>() as f64 / tokens.max(1) as f64,
    });
    Ok(VocabularyCoverage {
        distinct: counts.len(),
        tokens,
        coverage: coverage.collect(),
    })
}

/// A row as text: one line a token (position, id, turn, text), then one line a slot.
pub fn render_row(row: &InspectedRow) -> String {
    let mut out = format!("row `{}` of {}\n", row.key, row.source);
    line(
        &mut out,
        format_args!("{:>8} {:>8} {:>4}  text", "position", "id", "turn"),
    );
    for token in &row.tokens {
        let turn = match token.turn {
            0 => ".".to_owned(),
            turn => turn.to_string(),
        };
        line(
            &mut out,
            format_args!(
                "{:>8} {:>8} {turn:>4}  {:?}",
                token.position, token.id, token.text
            ),
        );
    }
    line(
        &mut out,
        format_args!(
            "{:>8} {:>8} {:>8} {:>8} {:>8}",
            "anchor", "depth", "input", "teacher", "label"
        ),
    );
    for slot in &row.slots {
        line(
            &mut out,
            format_args!(
                "{:>8} {:>8} {:>8} {:>8} {:>8}  {:?}",
                slot.anchor,
                slot.depth,
                slot.input_id,
                format!("p[{}]", slot.teacher_position),
                slot.label_id,
                row.tokens[slot.label_position].text,
            ),
        );
    }
    out
}

/// Coverage as text.
pub fn render_coverage(coverage: &VocabularyCoverage) -> String {
    let mut out = String::new();
    line(
        &mut out,
        format_args!(
            "{} generated tokens, {} distinct ids",
            coverage.tokens, coverage.distinct
        ),
    );
    for entry in &coverage.coverage {
        line(
            &mut out,
            format_args!(
                "{:>8} most frequent ids cover {:>5.1} %",
                entry.vocab_size,
                100.0 * entry.share
            ),
        );
    }
    out
}

/// What happened to the rows, and what the data set holds, as text.
pub fn render_counts(dataset: &Dataset) -> String {
    let manifest = dataset.manifest();
    let counts = &manifest.counts;
    let text = manifest.training_text();
    let mut out = String::new();
    line(
        &mut out,
        format_args!(
            "{} rows read, {} kept, {} clipped to {} tokens; dropped: {}",
            counts.read,
            counts.kept,
            counts.clipped,
            manifest.max_len,
            counts.reasons()
        ),
    );
    line(
        &mut out,
        format_args!(
            "{} tokens, {} generated, {} anchors; {} rows end with a generated end-of-turn token",
            text.tokens, text.generated_tokens, text.anchors, counts.rows_with_generated_end
        ),
    );
    for source in &manifest.summary.sources {
        line(
            &mut out,
            format_args!(
                "  {}: {} rows, {} tokens, {} generated, {} clipped",
                source.source, source.rows, source.tokens, source.generated_tokens, source.clipped
            ),
        );
    }
    for text in &manifest.texts[1..] {
        let label = text.sampling.map(|sampling| sampling.label());
        line(
            &mut out,
            format_args!(
                "  validation text {}: {} rows, {} tokens, {} generated",
                label.as_deref().unwrap_or("?"),
                text.rows,
                text.tokens,
                text.generated_tokens
            ),
        );
    }
    if counts.prompt_differs > 0 {
        line(
            &mut out,
            format_args!(
                "warning: {} rows have a prompt that the chat template does not render today",
                counts.prompt_differs
            ),
        );
    }
    for (name, rows) in &counts.unread_fields {
        line(
            &mut out,
            format_args!("warning: the template never reads `{name}`, a field of {rows} turns"),
        );
    }
    out
}

fn line(out: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing to a text cannot fail.
    let _infallible = out.write_fmt(arguments);
    out.push('\n');
}
