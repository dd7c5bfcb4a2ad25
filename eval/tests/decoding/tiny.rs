//! A tiny random Llama, random drafters for it, and proposers that are told what to draft.

use std::collections::BTreeMap;

use burn::tensor::{Device, FloatDType};
use draftsmith_eval::decode::{
    DecodeOutput, DecodeSettings, Decoder, Sequence, SequenceRecord, decode,
};
use draftsmith_eval::error::EvalError;
use draftsmith_eval::propose::{DraftRule, DraftToken, NoProposer, ProposeRow, Proposer};
use draftsmith_eval::verify;
use draftsmith_models::drafter::{AnyDrafter, Committed, DrafterContext};
use draftsmith_models::file::write_atomic;
use draftsmith_models::rng::{Purpose, Stream, stable_hash};
use draftsmith_models::sample::Sampling;
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::{NamedTensor, write_safetensors};
use safetensors::Dtype;

use crate::families::Family;

pub(crate) const VOCAB: usize = 16;
const HIDDEN: usize = 16;
const INTERMEDIATE: usize = 24;
const LAYERS: usize = 3;
const HEAD_DIM: usize = 8;
const KV_WIDTH: usize = HEAD_DIM;

fn matrix(name: &str, shape: [usize; 2], scale: f64) -> NamedTensor {
    let mut stream = Stream::new(11, Purpose::Check, stable_hash(name));
    let std = scale / (shape[1] as f64).sqrt();
    let values: Vec<f32> = (0..shape[0] * shape[1])
        .map(|_| (stream.normal() * std) as f32)
        .collect();
    NamedTensor::float(name, &shape, &values, Dtype::F32)
}

fn gain(name: &str) -> NamedTensor {
    NamedTensor::float(name, &[HIDDEN], &[1.0; HIDDEN], Dtype::F32)
}

fn tensors() -> Vec<NamedTensor> {
    let mut all = vec![
        matrix("model.embed_tokens.weight", [VOCAB, HIDDEN], 4.0),
        gain("model.norm.weight"),
        // Logits of standard deviation 2: neither flat nor certain.
        matrix("lm_head.weight", [VOCAB, HIDDEN], 2.0),
    ];
    for layer in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        for (part, shape) in [
            ("self_attn.q_proj", [HIDDEN, HIDDEN]),
            ("self_attn.k_proj", [KV_WIDTH, HIDDEN]),
            ("self_attn.v_proj", [KV_WIDTH, HIDDEN]),
            ("self_attn.o_proj", [HIDDEN, HIDDEN]),
            ("mlp.gate_proj", [INTERMEDIATE, HIDDEN]),
            ("mlp.up_proj", [INTERMEDIATE, HIDDEN]),
            ("mlp.down_proj", [HIDDEN, INTERMEDIATE]),
        ] {
            all.push(matrix(&name(part), shape, 1.5));
        }
        all.push(gain(&name("input_layernorm")));
        all.push(gain(&name("post_attention_layernorm")));
    }
    all
}

/// A random Llama of 16 tokens in f32, written to a folder and loaded like any other.
pub(crate) fn target() -> TargetModel {
    let folder = tempfile::tempdir().unwrap();
    let config = serde_json::json!({
        "model_type": "llama", "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 256, "tie_word_embeddings": false, "eos_token_id": 15
    });
    write_atomic(
        &folder.path().join("config.json"),
        config.to_string().as_bytes(),
    )
    .unwrap();
    write_safetensors(&folder.path().join("model.safetensors"), &tensors(), &[]).unwrap();
    TargetModel::load(folder.path(), FloatDType::F32, &Device::flex()).unwrap()
}

/// A fresh EAGLE-3 drafter of four depths.
pub(crate) fn drafter(target: &TargetModel, vocab: &VocabMap) -> AnyDrafter {
    drafter_of(&Family::named("eagle3"), target, vocab)
}

/// A fresh drafter of four depths of every family.
pub(crate) fn drafters(target: &TargetModel, vocab: &VocabMap) -> Vec<AnyDrafter> {
    let families = Family::all().into_iter();
    families
        .map(|family| drafter_of(&family, target, vocab))
        .collect()
}

fn drafter_of(family: &Family, target: &TargetModel, vocab: &VocabMap) -> AnyDrafter {
    let config = family.config(4);
    let context = DrafterContext {
        target: target.spec(),
        ends: target.ends(),
        vocab,
    };
    AnyDrafter::init(&config, context, 5, target.device()).unwrap()
}

/// Twelve of the sixteen tokens.
pub(crate) fn reduced_vocab() -> VocabMap {
    VocabMap::new((0..VOCAB as u32).filter(|id| id % 4 != 1).collect(), VOCAB).unwrap()
}

/// Prompts of different length.
pub(crate) fn prompts(count: usize) -> Vec<Sequence> {
    let mut stream = Stream::new(3, Purpose::Check, 1);
    (0..count)
        .map(|index| Sequence {
            id: format!("prompt {index}"),
            prompt: (0..2 + stream.below(9))
                .map(|_| stream.below(VOCAB) as u32)
                .collect(),
        })
        .collect()
}

pub(crate) fn settings(temperature: f64, batch_rows: usize) -> DecodeSettings {
    DecodeSettings {
        sampling: Sampling::at(temperature),
        gamma: 4,
        max_new_tokens: 40,
        stop_ids: Vec::new(),
        batch_rows,
        batch_invariant: false,
        tree: None,
        seed: 17,
    }
}

/// Decodes greedily at temperature 0, else by speculative sampling.
pub(crate) fn run(
    target: &TargetModel,
    proposer: &mut dyn Proposer,
    sequences: &[Sequence],
    settings: &DecodeSettings,
) -> DecodeOutput {
    run_by("sampling", target, proposer, sequences, settings)
}

/// Decodes greedily at temperature 0, else by the rule of that name.
pub(crate) fn run_by(
    rule: &str,
    target: &TargetModel,
    proposer: &mut dyn Proposer,
    sequences: &[Sequence],
    settings: &DecodeSettings,
) -> DecodeOutput {
    let decoder = Decoder {
        target,
        rule: verify::for_sampling(rule, &settings.sampling).unwrap(),
        settings,
    };
    decode(&decoder, proposer, sequences, &mut |_| true).unwrap()
}

pub(crate) fn plain(
    target: &TargetModel,
    sequences: &[Sequence],
    settings: &DecodeSettings,
) -> Vec<SequenceRecord> {
    run(target, &mut NoProposer, sequences, settings).records
}

pub(crate) fn texts(records: &[SequenceRecord]) -> Vec<&[u32]> {
    records.iter().map(|record| record.ids.as_slice()).collect()
}

/// The true continuation of every sequence, found by its stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Truth(BTreeMap<u64, (usize, Vec<u32>)>);

impl Truth {
    pub(crate) fn new(sequences: &[Sequence], records: &[SequenceRecord]) -> Self {
        let entry = |(sequence, record): (&Sequence, &SequenceRecord)| {
            let known = (sequence.prompt.len(), record.ids.clone());
            (sequence.stream(), known)
        };
        Self(sequences.iter().zip(records).map(entry).collect())
    }

    /// The tokens that follow the committed ones of a row.
    pub(crate) fn next(&self, row: &ProposeRow<'_>) -> Vec<u32> {
        let (prompt_len, ids) = &self.0[&row.stream];
        let start = row.tokens.len() - prompt_len;
        let rest = ids.get(start..).unwrap_or(&[]);
        rest[..rest.len().min(row.max_tokens)].to_vec()
    }
}

/// Drafts the true continuation.
#[derive(Debug)]
pub(crate) struct Oracle(pub(crate) Truth);

impl Proposer for Oracle {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn begin(&mut self, _num_rows: usize, _capacity: usize) {}

    fn propose(
        &mut self,
        rows: &[ProposeRow<'_>],
        _rule: &DraftRule,
    ) -> Result<Vec<Vec<DraftToken>>, EvalError> {
        let drafts = |row| {
            self.0
                .next(row)
                .into_iter()
                .map(DraftToken::certain)
                .collect()
        };
        Ok(rows.iter().map(drafts).collect())
    }

    fn commit(&mut self, _committed: &Committed) {}

    fn keep_rows(&mut self, _rows: &[usize]) {}
}
