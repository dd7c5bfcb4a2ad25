//! Turn marks: which tokens of a conversation the target generated.
//!
//! Marks come from prefix comparison of rendered texts, never from character offsets of tokens and never
//! from patterns. For each assistant turn, the text that a server would send (all turns before it, with
//! generation header) must be how the row goes on; what the server inserts (header, an empty think
//! block) is thereby prompt, not generation. The text from there through the first control token after
//! the turn's content (its END) is generated; the newline after END is not.

use draftsmith_models::slot;

use crate::source::{Conversation, DropReason, FinishReason, Message, RowProblem};
use crate::template::{ChatTemplate, GenerationPrompt, RenderInput, TemplateOptions};
use crate::tokenizer::ChatTokenizer;

/// Stands for a turn's content, to find what the template writes before and after it.
const MARKER: &str = "\u{fdd0}content\u{fdd1}";

/// Token ids with turn marks, before truncation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MarkedTokens {
    /// Token ids, length S.
    pub ids: Vec<u32>,
    /// 0 for a token the target did not generate, else the number of its assistant turn, from 1.
    pub turns: Vec<u32>,
    /// Tokens before the first generated one.
    pub prompt_len: usize,
    /// Index of the END token of the last turn, if the target generated one.
    pub end_index: Option<usize>,
}

impl MarkedTokens {
    /// Whether any slot of depth 0, hence any slot, is valid.
    pub fn has_slot(&self) -> bool {
        has_slot(&self.turns)
    }

    /// Keeps the first `max_len` tokens; returns whether any was removed.
    pub fn truncate(&mut self, max_len: usize) -> bool {
        let clipped = self.ids.len() > max_len;
        self.ids.truncate(max_len);
        self.turns.truncate(max_len);
        self.prompt_len = self.prompt_len.min(max_len);
        self.end_index = self.end_index.filter(|index| *index < max_len);
        clipped
    }

    /// Number of generated tokens.
    pub fn num_generated(&self) -> usize {
        self.turns.iter().filter(|turn| **turn != 0).count()
    }
}

/// Whether a row with these marks has a valid slot.
pub fn has_slot(turns: &[u32]) -> bool {
    (1..turns.len()).any(|anchor| slot::is_valid(turns, anchor, 0))
}

/// Renders, tokenises and marks conversations with one template and one set of options.
#[derive(Clone, Copy, Debug)]
pub struct Marker<'a> {
    tokenizer: &'a ChatTokenizer,
    template: &'a ChatTemplate,
    options: &'a TemplateOptions,
}

/// Pieces of one rendered assistant turn.
struct TurnText {
    /// Everything that the server sends.
    prompt: String,
    /// What the template, not the target, writes between prompt and content; mostly empty.
    inserted: String,
    /// The generated text before END.
    content: String,
    /// END, with what precedes it after the content; empty when the template writes no control token.
    end: String,
    /// What follows END.
    rest: String,
}

impl<'a> Marker<'a> {
    /// A marker for conversations rendered with `options`.
    pub fn new(
        tokenizer: &'a ChatTokenizer,
        template: &'a ChatTemplate,
        options: &'a TemplateOptions,
    ) -> Self {
        Self {
            tokenizer,
            template,
            options,
        }
    }

    /// Tokens and marks of a whole conversation.
    ///
    /// Turns after the last assistant turn are not part of the row. The END of the last turn counts as
    /// generated unless the answer was cut by a length limit.
    ///
    /// # Errors
    /// Why this conversation cannot be used.
    pub fn mark(&self, conversation: &Conversation) -> Result<MarkedTokens, RowProblem> {
        let messages = &conversation.messages;
        let assistant: Vec<usize> = (0..messages.len())
            .filter(|&index| messages[index].is_assistant())
            .collect();
        let Some(&last) = assistant.last() else {
            return Err(DropReason::NoAssistantTurn.into());
        };
        if assistant.iter().any(|&index| messages[index].is_empty()) {
            return Err(DropReason::EmptyAssistantTurn.into());
        }
        let mut row = RowBuilder::new(self.tokenizer);
        for (turn, &index) in (1..).zip(&assistant) {
            let text = self.turn_text(conversation, index)?;
            let Some(prompt) = text.prompt.strip_prefix(row.text.as_str()) else {
                let detail = format!("before assistant turn {turn}");
                return Err(RowProblem::new(DropReason::HistoryRewritten, detail));
            };
            let cut = index == last && conversation.finish_reason == Some(FinishReason::Length);
            row.push(prompt, 0)?;
            row.push(&text.inserted, 0)?;
            row.push(&text.content, turn)?;
            row.push(&text.end, if cut { 0 } else { turn })?;
            if index == last {
                row.row.end_index = row.end_index().filter(|_| !cut && !text.end.is_empty());
                row.push(&text.rest, 0)?;
            }
        }
        Ok(row.row)
    }

    /// Token ids of a prompt: the turns, with the header of the assistant's next turn.
    ///
    /// # Errors
    /// Why it cannot be rendered or tokenised.
    pub fn prompt_ids(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
    ) -> Result<Vec<u32>, RowProblem> {
        let text = self.render(messages, tools, GenerationPrompt::Add)?;
        self.tokenizer
            .encode(&text)
            .map_err(|e| RowProblem::new(DropReason::Tokenizer, e))
    }

    /// Rendered text of turns.
    ///
    /// # Errors
    /// The template's refusal.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
        generation_prompt: GenerationPrompt,
    ) -> Result<String, RowProblem> {
        let input = RenderInput {
            messages,
            tools,
            options: self.options,
            generation_prompt,
        };
        self.template
            .render(input)
            .map_err(|reason| RowProblem::new(DropReason::TemplateRefused, reason))
    }

    fn turn_text(&self, row: &Conversation, index: usize) -> Result<TurnText, RowProblem> {
        let tools = row.tools.as_ref();
        let messages = &row.messages;
        let prompt = self.render(&messages[..index], tools, GenerationPrompt::Add)?;
        let full = self.render(&messages[..=index], tools, GenerationPrompt::Omit)?;
        let mut marked = messages[..=index].to_vec();
        MARKER.clone_into(&mut marked[index].content);
        let marked = self.render(&marked, tools, GenerationPrompt::Omit)?;
        let Some((head, tail)) = marked.rsplit_once(MARKER) else {
            let detail = "it does not print the content of an assistant turn";
            return Err(RowProblem::new(DropReason::TemplateRefused, detail));
        };
        // Usually the prompt is a prefix of the rendered turn. Some templates put an empty think block
        // into the prompt that they do not render into the history: then the answer is what follows the
        // turn's own header, and the row holds what the server sent.
        let answer = full.strip_prefix(prompt.as_str());
        let answer =
            answer.or_else(|| full.strip_prefix(head).filter(|_| prompt.starts_with(head)));
        let Some(content) = answer.and_then(|answer| answer.strip_suffix(tail)) else {
            let detail = format!("turn {} of the conversation", index + 1);
            return Err(RowProblem::new(DropReason::PromptNotPrefix, detail));
        };
        let inserted = inserted_text(&messages[index], &prompt, head)
            .filter(|inserted| content.starts_with(inserted))
            .unwrap_or_default();
        let end = self.end_of_turn(tail);
        Ok(TurnText {
            inserted: inserted.to_owned(),
            content: content[inserted.len()..].to_owned(),
            end: tail[..end].to_owned(),
            rest: tail[end..].to_owned(),
            prompt,
        })
    }

    /// Byte index after the first control token of what follows a turn's content; 0 if there is none.
    fn end_of_turn(&self, tail: &str) -> usize {
        let tokens = self.tokenizer.special_tokens().values();
        let places = tokens.filter_map(|token| Some((tail.find(token.as_str())?, token.len())));
        // Of two tokens at the same place the longer one is what the tokenizer sees.
        let first = places.min_by_key(|&(start, len)| (start, usize::MAX - len));
        first.map_or(0, |(start, len)| start + len)
    }
}

/// Text that the template writes into every answer of this form, such as an empty think block in a row
/// without reasoning: the target did not choose it. White space is left to the answer, since it may share
/// a token with its first word.
fn inserted_text<'a>(message: &Message, prompt: &str, head: &'a str) -> Option<&'a str> {
    let inserted = head.strip_prefix(prompt)?;
    // Other fields of the turn (reasoning, tool calls) may be what stands there.
    (message.extra.is_empty() && !inserted.trim().is_empty()).then_some(inserted)
}

/// Tokens of a text that grows piece by piece.
struct RowBuilder<'a> {
    tokenizer: &'a ChatTokenizer,
    text: String,
    row: MarkedTokens,
}

impl<'a> RowBuilder<'a> {
    fn new(tokenizer: &'a ChatTokenizer) -> Self {
        Self {
            tokenizer,
            text: String::new(),
            row: MarkedTokens::default(),
        }
    }

    fn end_index(&self) -> Option<usize> {
        self.row.ids.len().checked_sub(1)
    }

    /// Appends a piece whose tokens all carry the mark `turn`.
    ///
    /// The ids so far stay: a server has committed them before the next piece exists. Where the tokenizer
    /// would merge across the border, the piece is encoded by itself.
    fn push(&mut self, piece: &str, turn: u32) -> Result<(), RowProblem> {
        if piece.is_empty() {
            return Ok(());
        }
        self.text.push_str(piece);
        let ids = &mut self.row.ids;
        if let Some(id) = self.tokenizer.special_id(piece) {
            // A control token is never part of another token: no need to encode everything again.
            ids.push(id);
        } else if let Some(whole) = continued(self.tokenizer, &self.text, ids)? {
            *ids = whole;
        } else {
            ids.extend(encode(self.tokenizer, piece)?);
            let spelled = self.tokenizer.decode(ids);
            let spelled = spelled.map_err(|e| RowProblem::new(DropReason::Tokenizer, e))?;
            if spelled != self.text {
                let detail = "prompt and answer share a token";
                return Err(RowProblem::new(DropReason::Tokenizer, detail));
            }
        }
        if turn != 0 && self.row.prompt_len == 0 {
            self.row.prompt_len = self.row.turns.len();
        }
        self.row.turns.resize(self.row.ids.len(), turn);
        Ok(())
    }
}

/// Token ids of the whole text, if they go on from `ids`.
fn continued(
    tokenizer: &ChatTokenizer,
    text: &str,
    ids: &[u32],
) -> Result<Option<Vec<u32>>, RowProblem> {
    let whole = encode(tokenizer, text)?;
    Ok(whole.starts_with(ids).then_some(whole))
}

fn encode(tokenizer: &ChatTokenizer, text: &str) -> Result<Vec<u32>, RowProblem> {
    tokenizer
        .encode(text)
        .map_err(|e| RowProblem::new(DropReason::Tokenizer, e))
}

/// Marks of a row that carries its exact tokens: every answer id was generated.
///
/// No end-of-turn token is added: a cut answer has none, a finished one holds it already.
///
/// # Errors
/// [`DropReason::MalformedIds`] without prompt, since a turn needs a state before its first token.
pub fn mark_ids(
    ids: &crate::source::TokenIds,
    end_ids: &[u32],
) -> Result<MarkedTokens, RowProblem> {
    if ids.prompt.is_empty() {
        return Err(RowProblem::new(
            DropReason::MalformedIds,
            "`prompt_ids` is empty",
        ));
    }
    let mut turns = vec![0; ids.prompt.len()];
    turns.resize(ids.prompt.len() + ids.answer.len(), 1);
    let ends = ids.answer.last().is_some_and(|id| end_ids.contains(id));
    Ok(MarkedTokens {
        end_index: Some(turns.len() - 1).filter(|_| ends),
        ids: [ids.prompt.as_slice(), ids.answer.as_slice()].concat(),
        turns,
        prompt_len: ids.prompt.len(),
    })
}
