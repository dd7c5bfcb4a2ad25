//! The target against transformers: logits and captured states of every layer.

use burn::tensor::{Device, Int, Tensor};
use draftsmith_models::batch::{DraftBatch, TokenBatch};
use draftsmith_models::drafter::eagle3::{Eagle3, Eagle3Config};
use draftsmith_models::drafter::{Drafter, DrafterContext, aux_layers};
use draftsmith_models::layers::rope::{RopeScaling, RopeSpec, RopeTable};
use draftsmith_models::objective::{Objective, ObjectiveInput, Teacher};
use draftsmith_models::slot::valid_slots;
use draftsmith_models::target::TargetModel;
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::{NamedTensor, host_values, write_safetensors};
use safetensors::tensor::Dtype;

use crate::support::{Golden, assert_close, at, golden_path, largest, row, states_of, tiny_target};

/// Design section 4: logits absolutely, states relative to the largest magnitude of their row.
const LOGITS: f32 = 3e-4;
const STATES: f32 = 5e-6;

fn expected(case: &str) -> Golden {
    Golden::open(
        &golden_path("tiny_llama")
            .join(case)
            .join("expected.safetensors"),
    )
}

/// The sequences of a case as one padded batch; every token counts as generated.
fn rows_of(golden: &Golden) -> TokenBatch {
    let ids = (0..)
        .map(|index| format!("ids.{index}"))
        .take_while(|name| golden.contains(name))
        .map(|name| golden.integers(&name));
    TokenBatch {
        rows: ids
            .map(|ids| {
                let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
                row(&ids, &vec![1; ids.len()])
            })
            .collect(),
    }
}

/// Compares all rows of a padded batch with the sequences run one by one.
fn check(target: &TargetModel, golden: &Golden) {
    let batch = rows_of(golden);
    let num_layers = target.spec().num_layers;
    let all: Vec<usize> = (0..num_layers).collect();
    let states = states_of(target, &batch, &all);
    let hidden = target.spec().hidden_size;
    for (index, tokens) in batch.rows.iter().enumerate() {
        let logits = golden.floats(&format!("logits.{index}"));
        let layers = golden.floats(&format!("states.{index}"));
        let kept = golden.shape(&format!("logits.{index}"))[0];
        for place in 0..kept {
            let position = tokens.len() - kept + place;
            let found = at(&states.aux, index, position);
            for layer in 0..num_layers {
                let start = (layer * kept + place) * hidden;
                let want = &layers[start..start + hidden];
                let got = &found[layer * hidden..(layer + 1) * hidden];
                let what = format!("row {index}, position {position}, layer {layer}");
                assert_close(&what, got, want, STATES * largest(want));
            }
            let last = at(&states.final_hidden, index, position);
            assert_eq!(last, &found[(num_layers - 1) * hidden..]);
            let row = crate::support::tensor(&last, [1, hidden]);
            let vocab = target.spec().vocab_size;
            let want = &logits[place * vocab..(place + 1) * vocab];
            let got = host_values(&target.ends().logits(row));
            assert_close(&format!("logits {index} {position}"), &got, want, LOGITS);
        }
    }
}

fn check_case(case: &str) {
    check(&tiny_target(case), &expected(case));
}

#[test]
fn a_llama_target_equals_transformers() {
    check_case("base");
}

#[test]
fn a_qwen2_target_with_biases_equals_transformers() {
    check_case("qwen2");
}

#[test]
fn a_qwen3_target_with_query_and_key_norms_equals_transformers() {
    check_case("qwen3");
}

#[test]
fn a_bf16_file_is_read_as_f32() {
    check_case("bf16");
}

/// Pitfall 35. Red under: `embedding.clone()` for the tied head replaced by `embedding.zeros_like()`.
#[test]
fn pitfall_35_a_tied_target_takes_its_head_from_the_embedding() {
    check_case("tied");
}

/// Pitfall 36. Red under: `self.files.len()` in `add_file` replaced by 0.
#[test]
fn pitfall_36_single_and_sharded_folders_give_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let source = golden_path("tiny_llama/base");
    fs_err::copy(
        source.join("config.json"),
        folder.path().join("config.json"),
    )
    .unwrap();
    let tensors = Golden::open(&source.join("model.safetensors")).named("");
    write_shards(folder.path(), &tensors);
    let target = TargetModel::load(
        folder.path(),
        burn::tensor::FloatDType::F32,
        &Device::flex(),
    );
    check(&target.unwrap(), &expected("base"));
}

/// Three shards: the embedding in the first, the head in the last, the blocks spread over all.
pub(crate) fn write_shards(folder: &std::path::Path, tensors: &[NamedTensor]) {
    let mut shards: [Vec<NamedTensor>; 3] = Default::default();
    let mut map = serde_json::Map::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let shard = match tensor.name.as_str() {
            "model.embed_tokens.weight" => 0,
            "lm_head.weight" => 2,
            _ => index % 3,
        };
        map.insert(
            tensor.name.clone(),
            format!("model-{shard}.safetensors").into(),
        );
        shards[shard].push(tensor.clone());
    }
    for (index, shard) in shards.iter().enumerate() {
        let path = folder.join(format!("model-{index}.safetensors"));
        write_safetensors(&path, shard, &[]).unwrap();
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    let path = folder.join("model.safetensors.index.json");
    fs_err::write(path, index.to_string()).unwrap();
}

/// Pitfall 31: an id names the block whose *output* is taken, as a hook on that block sees it.
/// Red under: `captured.push` moved in front of `block.forward` (the id would name the input).
#[test]
fn pitfall_31_captured_states_are_the_outputs_of_the_named_blocks() {
    let (target, golden) = (tiny_target("base"), expected("base"));
    let batch = rows_of(&golden);
    let states = states_of(&target, &batch, &[2, 4, 5]);
    let (len, hidden) = (batch.rows[0].len(), 16);
    let layers = golden.floats("states.0");
    for position in 0..len {
        let found = at(&states.aux, 0, position);
        for (place, layer) in [2, 4, 5].into_iter().enumerate() {
            let start = (layer * len + position) * hidden;
            let want = &layers[start..start + hidden];
            let got = &found[place * hidden..(place + 1) * hidden];
            assert_close("captured state", got, want, STATES * largest(want));
        }
    }
}

/// Pitfall 33. Red under: `num_layers >= 7` replaced by `num_layers >= 4`.
#[test]
fn pitfall_33_shallow_targets_ask_for_explicit_layers() {
    for num_layers in [1, 2, 4, 5, 6] {
        assert_eq!(aux_layers::low_middle_high(num_layers), None);
        let message = aux_layers::choose("eagle3", None, None, num_layers);
        let message = message.unwrap_err().to_string();
        assert_eq!(
            message,
            format!(
                "a target of {num_layers} layers is too shallow for the layers that `eagle3` reads by \
                 default"
            )
        );
    }
    for num_layers in 7..=100 {
        let ids = aux_layers::low_middle_high(num_layers).unwrap();
        assert_eq!(ids, [1, num_layers / 2 - 1, num_layers - 4]);
        aux_layers::check("eagle3", &ids, num_layers).unwrap();
        if let Some(ids) = aux_layers::evenly_spread(num_layers, 5) {
            aux_layers::check("dflash", &ids, num_layers).unwrap();
        }
    }
    aux_layers::check("eagle3", &[0], 1).unwrap();
    aux_layers::check("eagle3", &[0, 1, 3], 4).unwrap();
    let refused: [&[usize]; 4] = [&[], &[1, 1, 2], &[2, 1, 3], &[1, 2, 4]];
    for ids in refused {
        let message = aux_layers::check("eagle3", ids, 4).unwrap_err().to_string();
        assert!(
            message.contains("expected strictly increasing ids below 4"),
            "{message}"
        );
    }
}

/// Pitfall 34: the teacher is `head(final_norm(h))`, with final-norm gains far from one.
/// Red under: `self.normed(final_hidden)` in `TargetEnds::logits` replaced by `final_hidden`.
#[test]
fn pitfall_34_the_teacher_is_the_targets_next_token_distribution() {
    let (target, golden) = (tiny_target("base"), expected("base"));
    let tokens = TokenBatch {
        rows: vec![rows_of(&golden).rows[0].clone()],
    };
    let states = states_of(&target, &tokens, &[1]);
    let batch = DraftBatch { tokens, states };
    let slots = valid_slots(&batch.tokens.rows[0].turns, 0, 1);
    let vocab = VocabMap::full(320);
    let input = ObjectiveInput {
        slots: &slots,
        hidden: Tensor::zeros([slots.len(), 16], &Device::flex()),
        head: Tensor::zeros([320, 16], &Device::flex()),
        batch: &batch,
        teacher: Teacher::new(target.ends(), &vocab),
        head_gradient: None,
    };
    let scores = Objective::score(&input, 1.0, 4);
    let logits = golden.floats("logits.0");
    for (slot, found) in slots.iter().zip(&scores.log_p_token) {
        let row = &logits[slot.teacher_position() * 320..][..320];
        let log_sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let token = batch.tokens.rows[0].ids[slot.label_position()] as usize;
        let want = f64::from(row[token]) - log_sum;
        // Logits agree within 3e-4, so log-probabilities within twice that.
        assert!(
            (f64::from(*found) - want).abs() < 6e-4,
            "{slot:?}: {found} {want}"
        );
    }
}

/// Pitfall 70, target part. Red under: `.map(|frequency| self.scale(frequency))` removed.
#[test]
fn pitfall_70_a_scaled_target_equals_transformers_far_out() {
    check_case("llama3");
}

/// Pitfall 70, tables: cosines and sines at positions 0, 50, 100 and 900.
/// Red under: `frequency / factor as f32` replaced by `frequency` in either arm.
#[test]
fn pitfall_70_rotary_tables_equal_transformers() {
    let golden = Golden::open(&golden_path("tiny_llama/rope_angles.safetensors"));
    let scalings = [
        ("default", RopeScaling::Default),
        ("linear", RopeScaling::Linear { factor: 4.0 }),
        (
            "llama3",
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 64,
            },
        ),
    ];
    let device = Device::flex();
    for (name, scaling) in scalings {
        let spec = RopeSpec {
            theta: 500_000.0,
            scaling,
        };
        let positions = Tensor::<2, Int>::from_data([[0, 50, 100, 900]], &device);
        let angles = RopeTable::new(&spec, 64, 901, &device).at(positions);
        // Rotating (1, 0) gives the cosine in the first half and the sine in the second.
        let ones = Tensor::<4>::ones([1, 1, 4, 32], &device);
        let unit = Tensor::cat(vec![ones.clone(), ones.zeros_like()], 3);
        let turned = angles.rotate(unit);
        let half = |start: usize| host_values(&turned.clone().narrow(3, start, 32));
        // An f32 angle of up to 900 is known to 900 x 2^-24 = 5e-5; both sides round it alike, except
        // where a frequency differs by one unit in the last place.
        assert_close(name, &half(0), &golden.floats(&format!("{name}.cos")), 1e-4);
        assert_close(
            name,
            &half(32),
            &golden.floats(&format!("{name}.sin")),
            1e-4,
        );
    }
}

/// Pitfall 71. Red under: the explicit key ignored (`hidden_size / num_heads` alone).
#[test]
fn pitfall_71_an_explicit_head_size_is_used_by_target_and_drafter() {
    let target = tiny_target("head_dim");
    check(&target, &expected("head_dim"));
    let vocab = VocabMap::full(320);
    let config = Eagle3Config {
        aux_layer_ids: Some(vec![0, 1, 2]),
        ..Eagle3Config::default()
    };
    let context = DrafterContext {
        target: target.spec(),
        ends: target.ends(),
        vocab: &vocab,
    };
    let drafter = Eagle3::init(&config, context, 1, &Device::flex()).unwrap();
    assert_eq!(drafter.q_proj.val().dims(), [32, 32]);
    assert_eq!(drafter.k_proj.val().dims(), [16, 32]);
    assert_eq!(drafter.v_proj.val().dims(), [16, 32]);
    assert_eq!(drafter.o_proj.val().dims(), [16, 32]);
}

/// The ends alone, as training loads them, are the model's.
#[test]
fn the_ends_need_only_three_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let source = Golden::open(&golden_path("tiny_llama/base/model.safetensors"));
    let wanted = [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ];
    let tensors: Vec<NamedTensor> = source
        .named("")
        .into_iter()
        .filter(|tensor| wanted.contains(&tensor.name.as_str()))
        .collect();
    assert!(tensors.iter().all(|tensor| tensor.dtype == Dtype::F32));
    write_safetensors(&path, &tensors, &[]).unwrap();
    let weights = draftsmith_models::weights::WeightFolder::open_file(&path).unwrap();
    let target = tiny_target("base");
    let ends = draftsmith_models::target::TargetEnds::load(
        &weights,
        target.spec(),
        burn::tensor::FloatDType::F32,
        &Device::flex(),
    )
    .unwrap();
    let rows = crate::support::tensor(&crate::support::normal(5, 32, 1.0), [2, 16]);
    assert_eq!(
        host_values(&ends.logits(rows.clone())),
        host_values(&target.ends().logits(rows))
    );
}
