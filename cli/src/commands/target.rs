//! `draftsmith target`: import and describe target models.

use std::path::Path;

use draftsmith_data::import::show::TargetSummary;
use draftsmith_data::import::{ImportReport, import};

use crate::args::TargetCommand;
use crate::console::Console;
use crate::progress::Progress;

/// Does what `draftsmith target` asks for.
pub(crate) fn target(command: TargetCommand, console: &Console) -> anyhow::Result<()> {
    match command {
        TargetCommand::Import { source, folder } => import_target(&source, &folder, console),
        TargetCommand::Show { folder } => {
            let summary = TargetSummary::of_folder(&folder)?;
            console.value(&summary, || describe(&summary))
        }
    }
}

fn import_target(source: &Path, folder: &Path, console: &Console) -> anyhow::Result<()> {
    let mut progress = None;
    let report = import(source, folder, &mut |at| {
        let total = Some(at.num_tensors as u64);
        progress
            .get_or_insert_with(|| Progress::new(console, "import", total, "tensors"))
            .set(at.done_tensors as u64);
    })?;
    if let Some(progress) = progress {
        progress.finish_as(report.num_tensors as u64, "tensors");
    }
    console.value(&report, || imported(&report))
}

fn imported(report: &ImportReport) -> String {
    let types: Vec<String> = report
        .source_types
        .iter()
        .map(|(name, count)| format!("{count} {name}"))
        .collect();
    format!(
        "`{}` holds `{}`: {} tensors, {} parameters, dequantised from {}; licence {}",
        report.folder.display(),
        report.gguf,
        report.num_tensors,
        report.num_parameters,
        types.join(", "),
        report.license.as_deref().unwrap_or("not stated"),
    )
}

fn describe(summary: &TargetSummary) -> String {
    let spec = &summary.spec;
    let dtypes: Vec<String> = summary
        .dtypes
        .iter()
        .map(|(name, count)| format!("{count} {name}"))
        .collect();
    let mut lines = vec![
        format!("target       {}", summary.folder.display()),
        format!("model type   {}", spec.model_type),
        format!(
            "parameters   {} in {} tensors ({}), {} bytes",
            summary.num_parameters,
            summary.num_tensors,
            dtypes.join(", "),
            summary.weight_bytes
        ),
        format!(
            "shape        {} layers, hidden {}, MLP {}, {} query and {} key-value heads of {}",
            spec.num_layers,
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim
        ),
        format!(
            "vocabulary   {} tokens, head {}",
            spec.vocab_size,
            if spec.tie_word_embeddings {
                "tied"
            } else {
                "of its own"
            }
        ),
        format!("rope         {:?}", spec.rope),
        format!("end tokens   {:?}", spec.eos_token_ids),
    ];
    match &summary.tokenizer {
        None => lines.push("tokenizer    none".to_owned()),
        Some(facts) => lines.push(format!(
            "tokenizer    {} tokens, {} of them added; chat template: {}",
            facts.vocab_size,
            facts.num_added_tokens,
            if facts.has_chat_template { "yes" } else { "no" }
        )),
    }
    lines.push(format!("fingerprint  {}", summary.fingerprint));
    lines.join("\n")
}
