//! Writes the checkpoint of an untrained drafter for a target, and its exports in f32.
//!
//! `random_checkpoint TARGET OUT [family=eagle3] [layers=0,3,5] [vocab=128] [steps=3] [seed=1]` and, for EAGLE-3,
//! `[residual=normed] [norms=all]` (or `norms=each`: with a norm of each captured state in place of one over all),
//! for DFlash `[layout=anchor_predicts] [window=6]`,
//! writes `OUT/checkpoint` and `OUT/export/<format>`. Norm gains are moved away from one, so that a norm
//! that an engine skips or swaps shows in the logits. Without `vocab` the draft vocabulary is full.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use draftsmith_export::{ExportConfig, ExportDtype, export_all};
use draftsmith_models::checkpoint::{self, DrafterCard, TemplateRecord};
use draftsmith_models::drafter::{AnyDrafter, DrafterConfig, DrafterContext};
use draftsmith_models::fingerprint::target_fingerprint;
use draftsmith_models::rng::{Purpose, Stream, stable_hash};
use draftsmith_models::target::{TargetEnds, TargetSpec};
use draftsmith_models::vocab::VocabMap;
use draftsmith_models::weights::{NamedTensor, WeightFolder, write_safetensors};
use safetensors::tensor::Dtype;
use serde_json::json;

mod support;
use support::{Outcome, list};

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [target, out, options @ ..] = arguments.as_slice() else {
        return Err("usage: random_checkpoint TARGET OUT [key=value ..]".into());
    };
    let options: BTreeMap<&str, &str> = options
        .iter()
        .filter_map(|text| text.split_once('='))
        .collect();
    let (target, out) = (Path::new(target), Path::new(out));
    let device = Device::flex();
    let spec = TargetSpec::from_folder(target)?;
    let weights = WeightFolder::open(target)?;
    let ends = TargetEnds::load(&weights, &spec, FloatDType::F32, &device)?;
    let config = settings(&options)?;
    let seed: u64 = options.get("seed").unwrap_or(&"1").parse()?;
    let vocab = match options.get("vocab") {
        None => VocabMap::full(spec.vocab_size),
        Some(size) => scattered(size.parse()?, spec.vocab_size, seed)?,
    };
    let context = DrafterContext {
        target: &spec,
        ends: &ends,
        vocab: &vocab,
    };
    let drafter = AnyDrafter::init(&config, context, seed, &device)?;
    let drafter = perturbed(drafter, seed, &out.join("perturbed.safetensors"))?;
    let card = DrafterCard {
        format_version: checkpoint::FORMAT_VERSION,
        aux_layer_ids: drafter.state_spec().aux_layer_ids,
        drafter: config,
        vocab,
        target: spec,
        target_fingerprint: target_fingerprint(target)?,
        template: TemplateRecord::default(),
        weights_blake3: String::new(),
        step: 0,
    };
    let folder = out.join("checkpoint");
    checkpoint::save(&folder, &drafter, card)?;
    let settings = ExportConfig {
        dtype: ExportDtype::F32,
        ..ExportConfig::default()
    };
    export_all(&folder, target, &out.join("export"), &settings, None)?;
    Ok(())
}

/// The drafter that the options ask for.
fn settings(options: &BTreeMap<&str, &str>) -> Outcome<DrafterConfig> {
    let layers: Option<Vec<usize>> = options.get("layers").map(|text| list(text)).transpose()?;
    let steps: usize = options.get("steps").unwrap_or(&"3").parse()?;
    let aux_norm = match options.get("norms") {
        Some(&"all") => "concatenated",
        Some(&"each") => "each",
        _ => "none",
    };
    let has_all_norms = aux_norm != "none";
    let window: Option<usize> = options.get("window").map(|text| text.parse()).transpose()?;
    let family = *options.get("family").unwrap_or(&"eagle3");
    let table = match family {
        "mtp" => json!({ "depths": steps }),
        "dflash" => {
            let layout = options.get("layout").unwrap_or(&"anchor_as_bonus");
            let anchor_drafts = usize::from(*layout == "anchor_as_bonus");
            json!({
                "mask_token": 511, "num_layers": 2, "block_size": steps + anchor_drafts,
                "layout": layout, "aux_layer_ids": layers, "sliding_window": window,
            })
        }
        "dspark" => json!({
            "mask_token": 511, "num_layers": 2, "block_size": steps, "markov_rank": 8,
            "aux_layer_ids": layers, "sliding_window": window,
        }),
        _ => json!({
            "ttt_steps": steps, "aux_layer_ids": layers,
            "aux_norm": aux_norm,
            "norm_before_residual": has_all_norms || options.get("residual") == Some(&"normed"),
            "norm_output": has_all_norms,
        }),
    };
    Ok(DrafterConfig::deserialize_family(family, table)?)
}

/// `size` ids drawn without replacement.
fn scattered(size: usize, target_vocab: usize, seed: u64) -> Outcome<VocabMap> {
    let order = Stream::new(seed, Purpose::Check, 0).permutation(target_vocab);
    let ids = order.into_iter().take(size).map(|id| id as u32).collect();
    Ok(VocabMap::new(ids, target_vocab)?)
}

/// Norm gains uniform in `[0.5, 2)`, and noise where a drafter starts at zero, by way of a file that is removed again.
fn perturbed(drafter: AnyDrafter, seed: u64, path: &Path) -> Outcome<AnyDrafter> {
    let tensors: Vec<NamedTensor> = drafter
        .to_tensors()
        .into_iter()
        .map(|tensor| match tensor.shape.as_slice() {
            [width] => gain(&tensor.name, *width, seed),
            shape if tensor.bytes.iter().all(|&byte| byte == 0) => noise(&tensor.name, shape, seed),
            _ => tensor,
        })
        .collect();
    write_safetensors(path, &tensors, &[])?;
    let drafter = drafter.load_tensors(&WeightFolder::open_file(path)?)?;
    fs_err::remove_file(path)?;
    Ok(drafter)
}

fn noise(name: &str, shape: &[usize], seed: u64) -> NamedTensor {
    let mut stream = Stream::new(seed, Purpose::Check, stable_hash(name));
    let len = shape.iter().product();
    let values: Vec<f32> = (0..len).map(|_| (stream.normal() * 20.0) as f32).collect();
    NamedTensor::float(name, shape, &values, Dtype::F32)
}

fn gain(name: &str, width: usize, seed: u64) -> NamedTensor {
    let mut stream = Stream::new(seed, Purpose::Check, stable_hash(name));
    let values: Vec<f32> = (0..width)
        .map(|_| (0.5 + 1.5 * stream.uniform()) as f32)
        .collect();
    NamedTensor::float(name, &[width], &values, Dtype::F32)
}
