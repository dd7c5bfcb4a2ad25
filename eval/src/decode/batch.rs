//! One batch of sequences from prefill to the last stop token.

use std::time::Instant;

use draftsmith_models::batch::{StateSpec, TargetStates, index_tensor};
use draftsmith_models::generate::FinishReason;
use draftsmith_models::target::KvCache;
use draftsmith_models::weights::host_values;

use super::{DecodeSettings, Decoder, Round, Sequence, SequenceRecord, TimeSplit};
use crate::error::EvalError;
use crate::propose::{DraftChoice, DraftRule, DraftToken, ProposeRow, Proposer};
use crate::verify::{Coins, RowToVerify, TopTwo};

/// Decodes `sequences` together; `report` gets (new tokens, newly finished) after each step.
pub(super) fn decode_batch(
    decoder: &Decoder<'_>,
    proposer: &mut dyn Proposer,
    sequences: &[&Sequence],
    report: &mut dyn FnMut(usize, usize) -> bool,
) -> Result<(Vec<SequenceRecord>, TimeSplit), EvalError> {
    let mut batch = Batch::new(decoder, proposer, sequences);
    let mut done: Vec<Option<SequenceRecord>> = vec![None; sequences.len()];
    let mut new_tokens = batch.prefill()?;
    loop {
        let start = Instant::now();
        let finished = batch.take_finished(&mut done);
        batch.time.other += start.elapsed().as_secs_f64();
        if !report(new_tokens, finished) {
            return Err(EvalError::Interrupted);
        }
        if batch.rows.is_empty() {
            break;
        }
        new_tokens = batch.round()?;
    }
    Ok((done.into_iter().flatten().collect(), batch.time))
}

/// A sequence that has not ended.
#[derive(Debug)]
pub(super) struct Row {
    /// Place in the batch as given.
    place: usize,
    pub(super) id: String,
    pub(super) stream: u64,
    prompt_len: usize,
    /// Prompt and continuation.
    pub(super) ids: Vec<u32>,
    pub(super) rounds: Vec<Round>,
    pub(super) top_two: Vec<TopTwo>,
}

impl Row {
    fn num_new(&self) -> usize {
        self.ids.len() - self.prompt_len
    }

    fn finish(&self, settings: &DecodeSettings) -> Option<FinishReason> {
        match self.ids.last() {
            _ if self.num_new() == 0 => None,
            Some(last) if settings.stop_ids.contains(last) => Some(FinishReason::Stop),
            _ if self.num_new() >= settings.max_new_tokens => Some(FinishReason::Length),
            _ => None,
        }
    }

    /// Drafts that can still become text beside the target's own token of the round.
    fn max_drafts(&self, settings: &DecodeSettings) -> usize {
        let left = settings.max_new_tokens - self.num_new();
        settings.gamma.min(left.saturating_sub(1))
    }

    fn into_record(self, finish: FinishReason) -> SequenceRecord {
        SequenceRecord {
            id: self.id,
            ids: self.ids[self.prompt_len..].to_vec(),
            rounds: self.rounds,
            top_two: self.top_two,
            finish,
        }
    }
}

pub(super) struct Batch<'a, 'p> {
    pub(super) decoder: &'a Decoder<'a>,
    pub(super) proposer: &'p mut dyn Proposer,
    pub(super) want: StateSpec,
    pub(super) cache: KvCache,
    pub(super) rows: Vec<Row>,
    pub(super) time: TimeSplit,
}

impl<'a, 'p> Batch<'a, 'p> {
    fn new(
        decoder: &'a Decoder<'a>,
        proposer: &'p mut dyn Proposer,
        sequences: &[&Sequence],
    ) -> Self {
        let settings = decoder.settings;
        let longest = sequences.iter().map(|s| s.prompt.len()).max().unwrap_or(0);
        // Drafts are written behind the text, and a short row is padded like its longest neighbour.
        let capacity = longest + settings.max_new_tokens + 2 * settings.gamma + 2;
        proposer.begin(sequences.len(), capacity);
        let rows = sequences.iter().enumerate().map(|(place, sequence)| Row {
            place,
            id: sequence.id.clone(),
            stream: sequence.stream(),
            prompt_len: sequence.prompt.len(),
            ids: sequence.prompt.clone(),
            rounds: Vec::new(),
            top_two: Vec::new(),
        });
        Self {
            want: proposer.state_spec(),
            cache: decoder.target.new_cache(sequences.len(), capacity),
            rows: rows.collect(),
            time: TimeSplit::default(),
            proposer,
            decoder,
        }
    }

    /// Runs the prompts and draws the first token of each; returns the number of new tokens.
    fn prefill(&mut self) -> Result<usize, EvalError> {
        let start = Instant::now();
        let prompts: Vec<Vec<u32>> = self.rows.iter().map(|row| row.ids.clone()).collect();
        let states = self.forward(&prompts);
        let last: Vec<usize> = prompts.iter().map(|prompt| prompt.len() - 1).collect();
        let logits = self.logits(&states, &last, &vec![1; prompts.len()]);
        let vocab_size = self.decoder.target.spec().vocab_size;
        for (index, scores) in logits.chunks(vocab_size).enumerate() {
            self.settle(index, &[], scores)?;
        }
        self.commit(states, &last.iter().map(|len| len + 1).collect::<Vec<_>>());
        self.time.prefill += start.elapsed().as_secs_f64();
        Ok(self.rows.len())
    }

    /// One round for every row; returns the number of new tokens.
    fn round(&mut self) -> Result<usize, EvalError> {
        match self.decoder.settings.tree {
            Some(shape) => self.tree_round(shape),
            None => self.chain_round(),
        }
    }

    fn chain_round(&mut self) -> Result<usize, EvalError> {
        let start = Instant::now();
        let drafts = self.propose()?;
        let drafted = Instant::now();
        let fed: Vec<Vec<u32>> = self
            .rows
            .iter()
            .zip(&drafts)
            .map(|(row, drafts)| {
                let pending = row.ids.last().copied();
                pending
                    .into_iter()
                    .chain(drafts.iter().map(|draft| draft.id))
                    .collect()
            })
            .collect();
        let begun = Instant::now();
        let states = self.forward(&fed);
        let nums: Vec<usize> = fed.iter().map(Vec::len).collect();
        let logits = self.logits(&states, &vec![0; fed.len()], &nums);
        let verified = Instant::now();
        let vocab_size = self.decoder.target.spec().vocab_size;
        let mut rest = logits.as_slice();
        let mut committed = Vec::with_capacity(drafts.len());
        for (index, drafts) in drafts.iter().enumerate() {
            let (scores, after) = rest.split_at(nums[index] * vocab_size);
            rest = after;
            committed.push(self.settle(index, drafts, scores)?);
        }
        let settled = Instant::now();
        self.commit(states, &committed);
        self.time.draft += (drafted - start + settled.elapsed()).as_secs_f64();
        self.time.other += (begun - drafted).as_secs_f64();
        self.time.verify += (verified - begun).as_secs_f64();
        self.time.sample += (settled - verified).as_secs_f64();
        Ok(committed.iter().sum())
    }

    /// Drafts of every row, cut behind a stop token: nothing after it could become text.
    fn propose(&mut self) -> Result<Vec<Vec<DraftToken>>, EvalError> {
        let rule = self.draft_rule();
        let settings = self.decoder.settings;
        let (rows, proposer) = self.rows_to_propose();
        let mut drafts = proposer.propose(&rows, &rule)?;
        for (drafts, row) in drafts.iter_mut().zip(&rows) {
            let is_stop = |draft: &DraftToken| settings.stop_ids.contains(&draft.id);
            let end = drafts
                .iter()
                .position(is_stop)
                .map_or(drafts.len(), |at| at + 1);
            drafts.truncate(end.min(row.max_tokens));
        }
        Ok(drafts)
    }

    pub(super) fn draft_rule(&self) -> DraftRule {
        DraftRule {
            sampling: self.decoder.settings.sampling,
            choice: self.decoder.rule.draft_choice(),
            seed: self.decoder.settings.seed,
        }
    }

    /// What is asked of the proposer, and the proposer.
    pub(super) fn rows_to_propose(&mut self) -> (Vec<ProposeRow<'_>>, &mut dyn Proposer) {
        let settings = self.decoder.settings;
        let rows = self.rows.iter().map(|row| ProposeRow {
            tokens: &row.ids,
            max_tokens: row.max_drafts(settings),
            stream: row.stream,
            stop_ids: &settings.stop_ids,
        });
        (rows.collect(), &mut *self.proposer)
    }

    /// Runs new tokens of every row behind the cached ones.
    fn forward(&mut self, new: &[Vec<u32>]) -> TargetStates {
        let target = self.decoder.target;
        let rows: Vec<&[u32]> = new.iter().map(Vec::as_slice).collect();
        if self.decoder.settings.batch_invariant {
            return target.forward_alone(&rows, &self.want, &mut self.cache);
        }
        target.forward_cached(&rows, &self.want, &mut self.cache)
    }

    /// Logits of entries `starts[b] .. starts[b] + nums[b]` of every row, flat `[sum(nums) * V]`.
    pub(super) fn logits(
        &self,
        states: &TargetStates,
        starts: &[usize],
        nums: &[usize],
    ) -> Vec<f32> {
        let target = self.decoder.target;
        let [num_rows, len, width] = states.final_hidden.dims();
        let wanted = (0..num_rows)
            .flat_map(|row| (starts[row]..starts[row] + nums[row]).map(move |t| row * len + t));
        let flat = states.final_hidden.clone().reshape([num_rows * len, width]);
        let of = |entries: &[usize]| {
            let indices = index_tensor(entries.iter().copied(), target.device());
            host_values(&target.ends().logits(flat.clone().select(0, indices)))
        };
        let wanted: Vec<usize> = wanted.collect();
        if self.decoder.settings.batch_invariant {
            return wanted.chunks(1).flat_map(of).collect();
        }
        of(&wanted)
    }

    /// Verifies the drafts of one row against logits `[k + 1, V]` and appends what becomes text;
    /// returns the number of new tokens. Without drafts and rounds it draws the prefill's token.
    fn settle(
        &mut self,
        index: usize,
        drafts: &[DraftToken],
        logits: &[f32],
    ) -> Result<usize, EvalError> {
        let settings = self.decoder.settings;
        let row = &mut self.rows[index];
        if logits.iter().any(|value| !value.is_finite()) {
            return Err(EvalError::NotFinite {
                what: "the target's logits",
                id: row.id.clone(),
            });
        }
        let to_verify = RowToVerify {
            drafts,
            logits,
            vocab_size: self.decoder.target.spec().vocab_size,
            sampling: &settings.sampling,
            position: row.ids.len(),
        };
        let rule = self.decoder.rule;
        let draws_each_round = rule.draft_choice() == DraftChoice::DrawnEachRound;
        let mut coins = Coins {
            seed: settings.seed,
            stream: row.stream,
            round: draws_each_round.then_some(row.ids.len()),
        };
        let verdict = rule.verify(&to_verify, &mut coins);
        let is_prefill = row.num_new() == 0;
        let before = row.ids.len();
        let accepted = &drafts[..verdict.accepted];
        row.ids.extend(accepted.iter().map(|draft| draft.id));
        // A stop token can be accepted inside the block; it is the last draft then, and it ends the text.
        let ended = accepted
            .last()
            .is_some_and(|draft| settings.stop_ids.contains(&draft.id));
        if !ended {
            row.ids.push(verdict.next);
        }
        let committed = row.ids.len() - before;
        let own = |entry| rule.own_choice(&to_verify, entry, &mut coins);
        row.top_two.extend((0..committed).filter_map(own));
        if !is_prefill {
            row.rounds.push(Round {
                proposed: drafts.len(),
                accepted: verdict.accepted,
                committed,
            });
        }
        Ok(committed)
    }

    /// Rolls the target's cache back to the text (less its last token, whose states do not exist yet) and
    /// gives the proposer the states of the newly committed positions.
    fn commit(&mut self, states: TargetStates, committed: &[usize]) {
        for (index, row) in self.rows.iter().enumerate() {
            self.cache.truncate(index, row.ids.len() - 1);
        }
        self.tell_proposer(states, committed);
    }

    /// Moves ended rows out of the batch; returns how many.
    fn take_finished(&mut self, done: &mut [Option<SequenceRecord>]) -> usize {
        let settings = self.decoder.settings;
        let finishes: Vec<_> = self.rows.iter().map(|row| row.finish(settings)).collect();
        let kept: Vec<usize> = (0..self.rows.len())
            .filter(|&index| finishes[index].is_none())
            .collect();
        let num_finished = self.rows.len() - kept.len();
        if num_finished == 0 {
            return 0;
        }
        if !kept.is_empty() {
            self.cache.select_rows(&kept);
            self.proposer.keep_rows(&kept);
        }
        for (row, finish) in std::mem::take(&mut self.rows).into_iter().zip(finishes) {
            match finish {
                Some(finish) => {
                    let place = row.place;
                    done[place] = Some(row.into_record(finish));
                }
                None => self.rows.push(row),
            }
        }
        num_finished
    }
}
