//! The MTP head that a target brings along: read into our drafter, written back into the target's files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use draftsmith_export::{ExportConfig, ExportError, export, target_head};
use draftsmith_models::checkpoint::{self, DrafterCard, TemplateRecord};
use draftsmith_models::drafter::{AnyDrafter, Committed, DrafterConfig, DrafterContext, Origin};
use draftsmith_models::error::Diagnose;
use draftsmith_models::fingerprint::target_fingerprint;
use draftsmith_models::rng::{Purpose, Stream};
use draftsmith_models::target::{TargetEnds, TargetSpec};
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::{NamedTensor, WeightFolder, host_values, write_safetensors};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use crate::common::random;

const VOCAB: usize = 48;
const HIDDEN: usize = 16;

/// A tiny target with a head of either layout.
struct Place {
    folder: tempfile::TempDir,
    settings: Value,
}

/// What the test changes of the target's configuration and of its tensors.
type Change<'a> = &'a dyn Fn(&mut Value, &mut Vec<NamedTensor>);

impl Place {
    fn new(layout: &str, dtype: Dtype) -> Self {
        Self::changed(layout, dtype, &|_, _| {})
    }

    /// Two shards, and the head's tensors in both of them.
    fn changed(layout: &str, dtype: Dtype, change: Change<'_>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("model");
        let mut config = config(layout);
        let mut tensors = ends(dtype);
        tensors.extend(head(layout, dtype));
        change(&mut config, &mut tensors);
        draftsmith_models::file::write_json(&target.join("config.json"), &config).unwrap();
        draftsmith_models::file::write_atomic(&target.join("notes.txt"), b"kept").unwrap();
        let (ends, head) = tensors.split_at(2);
        let middle = head.len() / 2;
        let shards = [
            [ends, &head[..middle]].concat(),
            head[middle..].to_vec(),
            vec![random("model.other.weight", &[4], 0.0, 1.0, dtype)],
        ];
        let mut weight_map = BTreeMap::new();
        for (number, shard) in shards.iter().enumerate() {
            let name = format!("model-{number}.safetensors");
            write_safetensors(&target.join(&name), shard, &[("origin", "a test")]).unwrap();
            weight_map.extend(shard.iter().map(|t| (t.name.clone(), name.clone())));
        }
        let index = json!({ "metadata": {}, "weight_map": weight_map });
        draftsmith_models::file::write_json(&target.join("model.safetensors.index.json"), &index)
            .unwrap();
        let settings = match layout {
            "mimo" => json!({ "half_order": "hidden_first", "zero_first_embedding": true }),
            _ => json!({ "half_order": "embedding_first", "zero_first_embedding": false }),
        };
        Self { folder, settings }
    }

    fn target(&self) -> PathBuf {
        self.folder.path().join("model")
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("export").join("target")
    }

    fn spec(&self) -> TargetSpec {
        TargetSpec::from_folder(&self.target()).unwrap()
    }

    fn ends(&self) -> TargetEnds {
        let weights = WeightFolder::open(&self.target()).unwrap();
        TargetEnds::load(&weights, &self.spec(), FloatDType::F32, &Device::flex()).unwrap()
    }

    fn head(&self) -> Result<Origin, ExportError> {
        let name = "target".to_owned();
        target_head(&self.target(), &self.spec(), "abc", name)
    }

    /// The target's head as a drafter under the given settings.
    fn drafter(&self, settings: &Value) -> AnyDrafter {
        let config = DrafterConfig::deserialize_family("mtp", settings.clone()).unwrap();
        let (spec, ends, vocab) = (self.spec(), self.ends(), VocabMap::full(VOCAB));
        let context = DrafterContext {
            target: &spec,
            ends: &ends,
            vocab: &vocab,
        };
        let fresh = AnyDrafter::init(&config, context, 3, &Device::flex().autodiff()).unwrap();
        let (started, said) = fresh
            .start_from(&self.head().unwrap(), &config, &vocab)
            .unwrap();
        assert!(said.fresh.is_empty(), "{said:?}");
        started
    }

    /// Saves a drafter as a checkpoint and exports it.
    fn export(&self, drafter: &AnyDrafter, settings: &Value) -> Result<Vec<String>, ExportError> {
        let checkpoint = self.folder.path().join("checkpoint");
        let card = DrafterCard {
            format_version: checkpoint::FORMAT_VERSION,
            drafter: DrafterConfig::deserialize_family("mtp", settings.clone()).unwrap(),
            aux_layer_ids: Vec::new(),
            vocab: VocabMap::full(VOCAB),
            target: self.spec(),
            target_fingerprint: target_fingerprint(&self.target()).unwrap(),
            template: TemplateRecord::default(),
            weights_blake3: String::new(),
            step: 0,
        };
        checkpoint::save(&checkpoint, drafter, card).unwrap();
        let settings = ExportConfig::default();
        let report = export(
            "target",
            &checkpoint,
            &self.target(),
            &self.out(),
            &settings,
        )?;
        Ok(report.tensors.into_iter().map(|t| t.name).collect())
    }
}

fn config(layout: &str) -> Value {
    let mut config = json!({
        "model_type": "mimo", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 64,
        "tie_word_embeddings": true, "attention_bias": true, "num_nextn_predict_layers": 1,
    });
    if layout == "qwen" {
        config["model_type"] = json!("qwen3");
        config["attention_bias"] = json!(false);
        config["attn_output_gate"] = json!(false);
        config["num_nextn_predict_layers"] = Value::Null;
        config["mtp_num_hidden_layers"] = json!(1);
    }
    config
}

fn ends(dtype: Dtype) -> Vec<NamedTensor> {
    vec![
        random(
            "model.embed_tokens.weight",
            &[VOCAB, HIDDEN],
            -1.0,
            2.0,
            dtype,
        ),
        random("model.norm.weight", &[HIDDEN], 0.5, 1.0, dtype),
    ]
}

/// The head as its layout stores it; a gain less 1 may be smaller than any f32 next to 1.
fn head(layout: &str, dtype: Dtype) -> Vec<NamedTensor> {
    let (tops, block) = match layout {
        "mimo" => (
            [
                "token_layernorm",
                "hidden_layernorm",
                "input_proj",
                "final_layernorm",
            ]
            .map(|name| format!("model.mtp_layers.0.{name}.weight")),
            "model.mtp_layers.0",
        ),
        _ => (
            ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"]
                .map(|name| format!("mtp.{name}.weight")),
            "mtp.layers.0",
        ),
    };
    let gain = |name: &str, width: usize| {
        if layout == "mimo" {
            return random(name, &[width], 0.5, 1.0, dtype);
        }
        let mut values = f32s(&random(name, &[width], -0.5, 1.0, Dtype::F32));
        values[0] = 1e-9;
        values[1] = 0.001_234_567_8;
        NamedTensor::float(name, &[width], &values, dtype)
    };
    let matrix = |name: &str, shape: [usize; 2]| random(name, &shape, -0.4, 0.8, dtype);
    let part = |name: &str| format!("{block}.{name}.weight");
    let mut tensors = vec![
        gain(&tops[0], HIDDEN),
        gain(&tops[1], HIDDEN),
        matrix(&tops[2], [HIDDEN, 2 * HIDDEN]),
        gain(&tops[3], HIDDEN),
        gain(&part("input_layernorm"), HIDDEN),
        gain(&part("post_attention_layernorm"), HIDDEN),
        matrix(&part("self_attn.q_proj"), [16, HIDDEN]),
        matrix(&part("self_attn.k_proj"), [8, HIDDEN]),
        matrix(&part("self_attn.v_proj"), [8, HIDDEN]),
        matrix(&part("self_attn.o_proj"), [HIDDEN, 16]),
        matrix(&part("mlp.gate_proj"), [24, HIDDEN]),
        matrix(&part("mlp.up_proj"), [24, HIDDEN]),
        matrix(&part("mlp.down_proj"), [HIDDEN, 24]),
    ];
    if layout == "mimo" {
        for (letter, width) in [("q", 16), ("k", 8), ("v", 8)] {
            let name = format!("{block}.self_attn.{letter}_proj.bias");
            tensors.push(random(&name, &[width], -0.5, 1.0, dtype));
        }
    } else {
        tensors.push(gain(&part("self_attn.q_norm"), 4));
        tensors.push(gain(&part("self_attn.k_norm"), 4));
    }
    tensors
}

fn f32s(tensor: &NamedTensor) -> Vec<f32> {
    let (words, _) = tensor.bytes.as_chunks::<4>();
    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    fs_err::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, fs_err::read(path).unwrap())
        })
        .collect()
}

/// Logits of two chained depths after four positions, `[2][V]`.
fn logits(place: &Place, drafter: &AnyDrafter) -> Vec<Vec<f32>> {
    let device = Device::flex();
    let mut stream = Stream::new(3, Purpose::Check, 1);
    let states: Vec<f32> = (0..4 * HIDDEN).map(|_| stream.normal() as f32).collect();
    let drafter = burn::module::Module::valid(drafter);
    let ends = place.ends();
    let mut state = drafter.open(1, 8);
    let committed = Committed {
        aux: Tensor::zeros([1, 4, 0], &device),
        final_hidden: Tensor::from_data(TensorData::new(states, [1, 4, HIDDEN]), &device),
        next_ids: draftsmith_models::batch::padded_ids(&[&[7, 1, 30, 4]], &device),
        lens: vec![4],
    };
    drafter.observe(&mut state, committed, &ends);
    let first = host_values(&drafter.next_logits(&mut state, None, &ends));
    let second = host_values(&drafter.next_logits(&mut state, Some(&[9]), &ends));
    vec![first, second]
}

fn largest_difference(left: &[Vec<f32>], right: &[Vec<f32>]) -> f32 {
    let pairs = left.iter().flatten().zip(right.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Also gains stored less 1, some of which are lost when 1 is added.
#[test]
fn a_head_that_was_not_trained_comes_back_bit_for_bit() {
    for layout in ["mimo", "qwen"] {
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let place = Place::new(layout, dtype);
            let drafter = place.drafter(&place.settings);
            let written = place.export(&drafter, &place.settings).unwrap();
            let expected = head(layout, dtype).len();
            assert_eq!(written.len(), expected, "{layout} {dtype:?}");
            assert_eq!(
                contents(&place.out()),
                contents(&place.target()),
                "{layout} {dtype:?}"
            );
        }
    }
}

#[test]
fn a_trained_tensor_changes_alone() {
    for layout in ["mimo", "qwen"] {
        let place = Place::new(layout, Dtype::F32);
        let drafter = place.drafter(&place.settings);
        let tensors: Vec<NamedTensor> = drafter
            .to_tensors()
            .into_iter()
            .map(|tensor| match tensor.name.as_str() {
                "hidden_norm" => {
                    NamedTensor::float("hidden_norm", &[HIDDEN], &[3.0; HIDDEN], Dtype::F32)
                }
                _ => tensor,
            })
            .collect();
        let path = place.folder.path().join("trained.safetensors");
        write_safetensors(&path, &tensors, &[]).unwrap();
        let trained = drafter
            .load_tensors(&WeightFolder::open_file(&path).unwrap())
            .unwrap();
        place.export(&trained, &place.settings).unwrap();
        let (name, stored) = match layout {
            "mimo" => ("model.mtp_layers.0.hidden_layernorm.weight", 3.0),
            _ => ("mtp.pre_fc_norm_hidden.weight", 2.0),
        };
        let (before, after) = (
            WeightFolder::open(&place.target()).unwrap(),
            WeightFolder::open(&place.out()).unwrap(),
        );
        assert!(before.names().eq(after.names()));
        for other in before.names() {
            let [left, right] = [&before, &after].map(|w| crate::common::raw(w, other).unwrap());
            assert_eq!(left == right, other != name, "{layout}: {other}");
        }
        assert_eq!(crate::common::values(&after, name), [stored; HIDDEN]);
        let kept = [
            "config.json",
            "model.safetensors.index.json",
            "notes.txt",
            "model-2.safetensors",
        ];
        let (old, new) = (contents(&place.target()), contents(&place.out()));
        assert!(kept.iter().all(|name| old[*name] == new[*name]));
    }
}

#[test]
fn swapped_halves_draft_something_else() {
    let mimo = Place::new("mimo", Dtype::F32);
    let own = logits(&mimo, &mimo.drafter(&mimo.settings));
    let mut swapped = mimo.settings.clone();
    swapped["half_order"] = json!("embedding_first");
    let other = logits(&mimo, &mimo.drafter(&swapped));
    assert!(largest_difference(&own, &other) > 0.1);
    let mut kept = mimo.settings.clone();
    kept["zero_first_embedding"] = json!(false);
    let other = logits(&mimo, &mimo.drafter(&kept));
    assert!(largest_difference(&own, &other) > 1e-3);
}

/// Pitfall 77: one head in both layouts, halves swapped, gains less 1. Red under: `gain_offset: 0.0` for both.
#[test]
fn pitfall_77_the_same_head_in_the_other_layout_drafts_the_same() {
    let qwen = Place::new("qwen", Dtype::F32);
    let expected = logits(&qwen, &qwen.drafter(&qwen.settings));
    let names = BTreeMap::from([
        ("mtp.pre_fc_norm_embedding.weight", "token_layernorm"),
        ("mtp.pre_fc_norm_hidden.weight", "hidden_layernorm"),
        ("mtp.fc.weight", "input_proj"),
        ("mtp.norm.weight", "final_layernorm"),
    ]);
    let mimo = Place::changed("qwen", Dtype::F32, &|config, tensors| {
        config["num_nextn_predict_layers"] = json!(1);
        for tensor in &mut tensors[2..] {
            let mut values = f32s(tensor);
            match tensor.shape.as_slice() {
                [_] => values.iter_mut().for_each(|v| *v += 1.0),
                [_, width] if tensor.name == "mtp.fc.weight" => {
                    values
                        .chunks_mut(*width)
                        .for_each(|row| row.rotate_left(width / 2));
                }
                _ => {}
            }
            let name = names.get(tensor.name.as_str()).map_or_else(
                || tensor.name.replace("mtp.layers.0", "model.mtp_layers.0"),
                |part| format!("model.mtp_layers.0.{part}.weight"),
            );
            *tensor = NamedTensor::float(name, &tensor.shape, &values, Dtype::F32);
        }
    });
    let settings = json!({ "half_order": "hidden_first", "zero_first_embedding": false });
    let found = logits(&mimo, &mimo.drafter(&settings));
    // The columns of one product in another order: a few units of 6e-8 of logits up to about 10.
    assert!(largest_difference(&found, &expected) < 1e-5);
}

#[test]
fn settings_that_contradict_the_layout_are_refused_with_the_value_to_set() {
    for (layout, key, value, expected) in [
        (
            "mimo",
            "half_order",
            json!("embedding_first"),
            "\"hidden_first\", expected \"embedding_first\"",
        ),
        (
            "qwen",
            "half_order",
            json!("hidden_first"),
            "\"embedding_first\", expected \"hidden_first\"",
        ),
        (
            "mimo",
            "zero_first_embedding",
            json!(false),
            "true, expected false",
        ),
        (
            "qwen",
            "zero_first_embedding",
            json!(true),
            "false, expected true",
        ),
    ] {
        let place = Place::new(layout, Dtype::F32);
        let mut settings = place.settings.clone();
        settings[key] = value.clone();
        let config = DrafterConfig::deserialize_family("mtp", settings.clone()).unwrap();
        let error = place
            .head()
            .unwrap()
            .check(&config, &place.spec(), "abc")
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("`drafter.mtp` cannot start from `target`: its `{key}` is {expected}")
        );
        let formats = ExportConfig {
            formats: vec!["target".to_owned()],
            ..ExportConfig::default()
        };
        let error = draftsmith_export::check(&formats, &config, &place.spec(), &place.target());
        let found = place.drafter(&place.settings);
        let same = error.unwrap_err().to_string();
        assert_eq!(
            place.export(&found, &settings).unwrap_err().to_string(),
            same
        );
        assert_eq!(
            same,
            format!(
                "the layout `target` cannot express this drafter: `{key}` is {value}, but the target's head is read \
                 with {}",
                place.settings[key]
            )
        );
    }
}

/// The reason why a changed target is refused.
fn refused(layout: &str, change: Change<'_>) -> String {
    let place = Place::changed(layout, Dtype::F32, change);
    let error = place.head().unwrap_err();
    assert!(error.is_user_error() && error.hint().is_some());
    let target = place.target();
    let start = format!(
        "the MTP head of the target in `{}` cannot be used: ",
        target.display()
    );
    let message = error.to_string();
    message
        .strip_prefix(&start)
        .unwrap_or_else(|| panic!("{message}"))
        .to_owned()
}

fn extra(name: &'static str) -> impl Fn(&mut Value, &mut Vec<NamedTensor>) {
    move |_, tensors| tensors.push(random(name, &[4], 0.0, 1.0, Dtype::F32))
}

#[test]
fn heads_that_are_not_one_dense_block_are_refused_by_tensor() {
    assert_eq!(
        refused("qwen", &extra("mtp.layers.0.mlp.experts.3.up_proj.weight")),
        "tensor `mtp.layers.0.mlp.experts.3.up_proj.weight` is part of a mixture of experts, expected a dense block"
    );
    assert_eq!(
        refused(
            "mimo",
            &extra("model.mtp_layers.0.self_attn.kv_a_proj_with_mqa.weight")
        ),
        "tensor `model.mtp_layers.0.self_attn.kv_a_proj_with_mqa.weight` is part of latent attention (MLA), expected q, \
         k and v of the target's shape"
    );
    assert_eq!(
        refused("mimo", &extra("model.mtp_layers.1.input_proj.weight")),
        "tensor `model.mtp_layers.1.input_proj.weight` belongs to a second layer, expected one"
    );
    assert_eq!(
        refused("qwen", &extra("mtp.layers.0.self_attn.sinks")),
        "tensor `mtp.layers.0.self_attn.sinks` has no place in a block of the target's shape"
    );
    let gated = |_: &mut Value, tensors: &mut Vec<NamedTensor>| {
        let name = "mtp.layers.0.self_attn.q_proj.weight";
        let place = tensors.iter().position(|t| t.name == name).unwrap();
        tensors[place] = random(name, &[32, HIDDEN], 0.0, 1.0, Dtype::F32);
    };
    assert_eq!(
        refused("qwen", &gated),
        "tensor `mtp.layers.0.self_attn.q_proj.weight` has shape [32, 16], expected [16, 16]: attention with an output \
         gate (`attn_output_gate`) is not computed"
    );
    let lacking = |_: &mut Value, tensors: &mut Vec<NamedTensor>| {
        tensors.retain(|t| t.name != "mtp.norm.weight");
    };
    assert_eq!(
        refused("qwen", &lacking),
        "tensor `mtp.norm.weight` is missing"
    );
}

#[test]
fn targets_without_a_known_head_or_with_several_are_refused() {
    let without = |_: &mut Value, tensors: &mut Vec<NamedTensor>| tensors.truncate(2);
    let names = "`model.mtp_layers.` (MiMo) or `mtp.` (Qwen3.5)";
    assert_eq!(
        refused("mimo", &without),
        format!("no tensor starts with {names}")
    );
    let deepseek = |_: &mut Value, tensors: &mut Vec<NamedTensor>| {
        tensors.truncate(2);
        tensors.push(random(
            "model.layers.3.eh_proj.weight",
            &[16, 32],
            0.0,
            1.0,
            Dtype::F32,
        ));
    };
    assert_eq!(
        refused("mimo", &deepseek),
        format!(
            "tensor `model.layers.3.eh_proj.weight` is in the layout of DeepSeek, expected {names}"
        )
    );
    assert_eq!(
        refused("mimo", &|config, _| config["num_nextn_predict_layers"] =
            json!(2)),
        "`num_nextn_predict_layers` in `config.json` is 2, expected 1"
    );
    assert_eq!(
        refused("qwen", &|config, _| config["mtp_num_hidden_layers"] =
            Value::Null),
        "`mtp_num_hidden_layers` in `config.json` is missing, expected 1"
    );
}

#[test]
fn an_earlier_export_is_replaced_and_anything_else_is_left_alone() {
    let place = Place::new("mimo", Dtype::F32);
    let drafter = place.drafter(&place.settings);
    for _ in 0..2 {
        place.export(&drafter, &place.settings).unwrap();
    }
    let siblings = fs_err::read_dir(place.out().parent().unwrap())
        .unwrap()
        .count();
    assert_eq!(siblings, 1, "no temporary folder stays behind");
    draftsmith_models::file::write_atomic(&place.out().join("mine.txt"), b"mine").unwrap();
    let error = place.export(&drafter, &place.settings).unwrap_err();
    assert!(matches!(error, ExportError::OutTaken { .. }), "{error}");
    let (checkpoint, settings) = (
        place.folder.path().join("checkpoint"),
        ExportConfig::default(),
    );
    let error = export(
        "target",
        &checkpoint,
        &place.target(),
        &place.target(),
        &settings,
    )
    .unwrap_err();
    assert!(
        error.to_string().contains("holds `the target itself`"),
        "{error}"
    );
    assert_eq!(
        fs_err::read(place.target().join("notes.txt")).unwrap(),
        b"kept"
    );
}
