//! Times training steps of an EAGLE-3 drafter at the shapes of SmolLM2-135M, with random states.
//!
//! `cargo run --release -p draftsmith-trainer --example step_bench -- [steps] [trained|frozen] [chunk_positions] [whole-teacher]`
//!
//! The states bring the teacher's figures, as captured ones do; with `whole-teacher` they do not, as those of a target
//! that runs beside the training, and each step computes the teacher over the whole vocabulary.
//! Prints the median of each phase over the steps after the first, and the peak of the resident memory.
#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
#![expect(
    clippy::expect_used,
    reason = "a benchmark with constant inputs has nobody to report errors to"
)]

use std::time::Duration;

use burn::tensor::{Device, Tensor, TensorData};
use draftsmith_data::error::DataError;
use draftsmith_data::hidden::HiddenStateSource;
use draftsmith_models::batch::{StateSpec, TargetStates, TeacherFigures, TokenBatch, TokenRow};
use draftsmith_models::drafter::eagle3::Eagle3Config;
use draftsmith_models::drafter::{AnchorDraw, AnyDrafter, DrafterConfig, DrafterContext, HeadMode};
use draftsmith_models::layers::rope::{RopeScaling, RopeSpec};
use draftsmith_models::objective::{Objective, ObjectiveConfig, Teacher, teacher_figures};
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::target::{TargetEnds, TargetSpec};
use draftsmith_models::vocab::VocabMap;
use draftsmith_trainer::config::{Compute, OptimizerConfig};
use draftsmith_trainer::optimizer::optimizer;
use draftsmith_trainer::step::{Learner, Phases};

/// The allocator of the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const VOCAB: usize = 49_152;
const DRAFT_VOCAB: usize = 8192;
const HIDDEN: usize = 576;
const ROWS: usize = 4;
const ROW_LEN: usize = 225;
const PROMPT_LEN: usize = 45;
const TTT_STEPS: usize = 3;
const DRAW: AnchorDraw = AnchorDraw { seed: 0, step: 0 };

#[expect(clippy::too_many_lines, reason = "one bench, read from top to bottom")]
fn main() {
    let (flags, words): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|word| word == "whole-teacher");
    let mut args = words.into_iter();
    let steps: usize = args
        .next()
        .map_or(6, |text| text.parse().expect("a number of steps"));
    let head = match args.next().as_deref() {
        Some("frozen") => HeadMode::Frozen,
        _ => HeadMode::Trained,
    };
    let mut objective = ObjectiveConfig::default();
    if let Some(text) = args.next() {
        objective.chunk_positions = text.parse().expect("a number of positions");
    }
    let inner = Device::flex();
    let device = inner.clone().autodiff();
    let spec = smollm2();
    let ends = TargetEnds {
        embedding: random([VOCAB, HIDDEN], 0.1, 1, &inner),
        final_norm: Tensor::ones([HIDDEN], &inner),
        head: random([VOCAB, HIDDEN], 0.1, 1, &inner),
        rms_norm_eps: spec.rms_norm_eps,
    };
    let ids = (0..DRAFT_VOCAB as u32).map(|index| index * 6).collect();
    let vocab = VocabMap::new(ids, VOCAB).expect("distinct ids");
    let config = DrafterConfig::Eagle3(Eagle3Config {
        ttt_steps: TTT_STEPS,
        head,
        ..Eagle3Config::default()
    });
    let context = DrafterContext {
        target: &spec,
        ends: &ends,
        vocab: &vocab,
    };
    let drafter = AnyDrafter::init(&config, context, 0, &device).expect("valid settings");
    let mut learner = Learner {
        optimizer: optimizer(&OptimizerConfig::default(), &drafter),
        drafter,
        objective: Objective::new(&objective).expect("valid settings"),
        teacher: Teacher::new(&ends, &vocab),
        compute: Compute::F32.dtype(),
        clip_norm: 1.0,
    };
    let rows = rows();
    let final_hidden = random([ROWS, ROW_LEN, HIDDEN], 1.0, 3, &inner);
    let source = Constant {
        spec: learner.drafter.state_spec(),
        states: TargetStates {
            aux: random([ROWS, ROW_LEN, 3 * HIDDEN], 1.0, 2, &inner),
            teacher: flags
                .is_empty()
                .then(|| figures(&ends, &final_hidden, &rows)),
            final_hidden,
        },
    };
    let batch: Vec<usize> = (0..ROWS).collect();
    println!("peak memory before the first step: {} MB", peak_megabytes());
    let mut phases = Vec::new();
    for step in 0..=steps {
        let report = learner
            .step(std::slice::from_ref(&batch), &rows, &source, 1e-4, DRAW)
            .expect("the source never fails");
        if step == 0 {
            let slots = report.slots();
            println!(
                "{} tokens, {slots} slots a step, head {head:?}",
                report.tokens
            );
        } else {
            phases.push(report.phases);
        }
    }
    print(&phases);
}

/// How to take one phase out of the times of a step.
type Part = fn(&Phases) -> Duration;

fn print(phases: &[Phases]) {
    let mut total = 0.0;
    let parts: [(&str, Part); 5] = [
        ("states", |p| p.states),
        ("draft_slots forward", |p| p.forward),
        ("objective", |p| p.objective),
        ("backward", |p| p.backward),
        ("clip + optimizer", |p| p.update),
    ];
    for (name, part) in parts {
        let mut times: Vec<f64> = phases.iter().map(|p| part(p).as_secs_f64() * 1e3).collect();
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        total += median;
        println!("{name:>20} {median:9.1} ms");
    }
    let speed = (ROWS * ROW_LEN) as f64 / total * 1e3;
    println!("{:>20} {total:9.1} ms, {speed:.0} tokens/s", "step");
    println!("peak memory: {} MB", peak_megabytes());
}

#[derive(Debug)]
struct Constant {
    spec: StateSpec,
    states: TargetStates,
}

impl HiddenStateSource for Constant {
    fn spec(&self) -> &StateSpec {
        &self.spec
    }

    fn states(&self, _batch: &TokenBatch) -> Result<TargetStates, DataError> {
        Ok(self.states.clone())
    }
}

fn rows() -> Vec<TokenRow> {
    let mut stream = Stream::new(0, Purpose::Check, 0);
    let row = |index: usize| TokenRow {
        key: index.to_string(),
        ids: (0..ROW_LEN).map(|_| stream.below(VOCAB) as u32).collect(),
        turns: (0..ROW_LEN).map(|t| u32::from(t >= PROMPT_LEN)).collect(),
    };
    (0..ROWS).map(row).collect()
}

/// Figures of every position, row after row; those before the answer teach nobody and are as good as any.
fn figures(
    ends: &TargetEnds,
    final_hidden: &Tensor<3>,
    rows: &[TokenRow],
) -> Vec<Vec<TeacherFigures>> {
    let flat = final_hidden.clone().flatten::<2>(0, 1);
    let next: Vec<u32> = rows
        .iter()
        .flat_map(|row| row.ids[1..].iter().chain(&row.ids[..1]).copied())
        .collect();
    let figures = teacher_figures(ends, flat, &next);
    figures.chunks(ROW_LEN).map(<[_]>::to_vec).collect()
}

fn random<const D: usize>(
    shape: [usize; D],
    scale: f64,
    stream: u64,
    device: &Device,
) -> Tensor<D> {
    let mut stream = Stream::new(0, Purpose::Check, stream);
    let values: Vec<f32> = (0..shape.iter().product::<usize>())
        .map(|_| ((stream.uniform() - 0.5) * scale) as f32)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn smollm2() -> TargetSpec {
    TargetSpec {
        model_type: "llama".to_owned(),
        vocab_size: VOCAB,
        hidden_size: HIDDEN,
        intermediate_size: 1536,
        num_layers: 30,
        num_heads: 9,
        num_kv_heads: 3,
        head_dim: 64,
        rms_norm_eps: 1e-5,
        rope: RopeSpec {
            theta: 1e5,
            scaling: RopeScaling::Default,
        },
        max_position_embeddings: 8192,
        tie_word_embeddings: true,
        qk_norm: false,
        qkv_bias: false,
        bos_token_id: Some(1),
        eos_token_ids: vec![2],
        pad_token_id: Some(2),
    }
}

/// Peak of the resident memory of this process; 0 where the system does not tell.
fn peak_megabytes() -> u64 {
    let status = fs_err::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) / 1024
}
