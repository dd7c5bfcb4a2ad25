//! [`Session`]: a checked run file with the device, and the target once something needs it.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::{Device, FloatDType};
use draftsmith_data::tokenizer::ChatTokenizer;
use draftsmith_models::drafter::MaskToken;
use draftsmith_models::file;
use draftsmith_models::fingerprint::{remembered_fingerprint, target_fingerprint};
use draftsmith_models::target::{TargetModel, TargetSpec};
use draftsmith_trainer::Interrupter;

use crate::args::RunArgs;
use crate::console::Console;
use crate::errors::CliError;
use crate::provenance::Provenance;
use crate::run_file::{DrafterRun, RunFile, TargetDtype};

/// Exit status of a program that the second Ctrl-C ends on the spot.
const KILLED: i32 = 130;

/// Whether training continues from the checkpoints of the run folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Restart {
    /// From the newest complete checkpoint, which must exist and fit the settings.
    Resume,
    /// From the newest checkpoint that fits; else from the start, with earlier training set aside.
    Continue,
    /// From the start; refused when there are checkpoints.
    Fresh,
}

/// Everything a command works with.
pub(crate) struct Session {
    run_file: RunFile,
    typed: String,
    restart: Restart,
    console: Console,
    device: Device,
    interrupt: Interrupt,
    spec: TargetSpec,
    target: OnceCell<Arc<TargetModel>>,
    fingerprint: OnceCell<String>,
}

impl Session {
    /// Checks run file, device and target configuration; writes nothing.
    pub(crate) fn open(args: &RunArgs, restart: Restart, console: Console) -> anyhow::Result<Self> {
        let mut run_file = RunFile::load(args)?;
        let device = run_file.run.device.find()?;
        let spec = TargetSpec::from_folder(&run_file.target.path)?;
        look_up_mask_tokens(&mut run_file)?;
        Ok(Self {
            run_file,
            typed: args.typed(),
            restart,
            console,
            device,
            interrupt: Interrupt::on_ctrl_c()?,
            spec,
            target: OnceCell::new(),
            fingerprint: OnceCell::new(),
        })
    }

    /// The resolved run file.
    pub(crate) fn run_file(&self) -> &RunFile {
        &self.run_file
    }

    /// Run file and what replaces parts of it as typed, for commands that hints name.
    pub(crate) fn typed(&self) -> &str {
        &self.typed
    }

    /// Whether training continues.
    pub(crate) fn restart(&self) -> Restart {
        self.restart
    }

    /// Where to print.
    pub(crate) fn console(&self) -> &Console {
        &self.console
    }

    /// The device that computes.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Ctrl-C.
    pub(crate) fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Shape of the target.
    pub(crate) fn spec(&self) -> &TargetSpec {
        &self.spec
    }

    /// The run folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.run_file.run.out
    }

    /// The folder of a drafter inside the run folder.
    pub(crate) fn drafter_folder(&self, drafter: &DrafterRun) -> PathBuf {
        self.folder().join(drafter.family())
    }

    /// The target, loaded when first asked for.
    pub(crate) fn target(&self) -> anyhow::Result<&TargetModel> {
        Ok(self.loaded_target()?)
    }

    /// The target, for whoever keeps it beyond a call.
    pub(crate) fn shared_target(&self) -> anyhow::Result<Arc<TargetModel>> {
        Ok(Arc::clone(self.loaded_target()?))
    }

    fn loaded_target(&self) -> anyhow::Result<&Arc<TargetModel>> {
        if let Some(target) = self.target.get() {
            return Ok(target);
        }
        let target = self.load_model(&self.run_file.target.path)?;
        Ok(self.target.get_or_init(|| Arc::new(target)))
    }

    /// A language model in the type and on the device of the target.
    pub(crate) fn load_model(&self, folder: &Path) -> anyhow::Result<TargetModel> {
        let dtype = match self.run_file.target.dtype {
            TargetDtype::F32 => FloatDType::F32,
            TargetDtype::Bf16 => FloatDType::BF16,
        };
        Ok(TargetModel::load(folder, dtype, &self.device)?)
    }

    /// Identity of the target, computed when first asked for and remembered in the run folder.
    pub(crate) fn target_fingerprint(&self) -> anyhow::Result<&str> {
        if let Some(fingerprint) = self.fingerprint.get() {
            return Ok(fingerprint);
        }
        let target = &self.run_file.target.path;
        // Commands that only look create no run folder.
        let fingerprint = if self.folder().exists() {
            remembered_fingerprint(target, &self.folder().join("target-fingerprint.json"))?
        } else {
            target_fingerprint(target)?
        };
        Ok(self.fingerprint.get_or_init(|| fingerprint))
    }

    /// Writes `resolved.toml` and `provenance.json` into the run folder.
    pub(crate) fn record(&self) -> anyhow::Result<()> {
        let run_file = &self.run_file;
        let provenance = Provenance {
            target: run_file.target.path.display().to_string(),
            target_fingerprint: self.target_fingerprint()?.to_owned(),
            template_blake3: crate::stages::template(self)?.blake3,
            data: crate::stages::data_hashes(self)?,
            seeds: self.seeds(),
            starts: crate::stages::start::recorded(self)?,
            ..Provenance::new(run_file.run.device.to_string())
        };
        file::write_atomic(
            &self.folder().join("resolved.toml"),
            run_file.to_toml()?.as_bytes(),
        )?;
        file::write_json(&self.folder().join("provenance.json"), &provenance)?;
        Ok(())
    }

    fn seeds(&self) -> BTreeMap<String, u64> {
        let run_file = &self.run_file;
        let mut seeds = BTreeMap::from([("eval".to_owned(), run_file.eval.seed)]);
        if let Some(regenerate) = &run_file.regenerate {
            seeds.insert("regenerate".to_owned(), regenerate.seed);
        }
        for drafter in &run_file.drafter.0 {
            let seed = run_file.train_of(drafter).seed;
            seeds.insert(format!("train {}", drafter.family()), seed);
        }
        seeds
    }
}

/// Replaces mask tokens that the run file names by their text by their ids in the target's tokenizer.
fn look_up_mask_tokens(run_file: &mut RunFile) -> anyhow::Result<()> {
    let folder = &run_file.target.path;
    for run in &mut run_file.drafter.0 {
        let family = run.family();
        let Some(token) = run.config.mask_token() else {
            continue;
        };
        let MaskToken::Text(text) = &*token else {
            continue;
        };
        let tokenizer = ChatTokenizer::load(folder)?;
        let Some(id) = tokenizer.special_id(text) else {
            let known: Vec<&String> = tokenizer.special_tokens().values().collect();
            return Err(CliError::usage(
                format!(
                    "`drafter.{family}.mask_token` is {text:?}, but no special token of `{}` is spelled so",
                    folder.display()
                ),
                format!("its special tokens are {known:?}; choose one that the chat template never writes"),
            )
            .into());
        };
        *token = MaskToken::Id(id);
    }
    Ok(())
}

/// Ctrl-C: the first one asks to finish the piece of work at hand, the second one ends the program.
#[derive(Clone)]
pub(crate) struct Interrupt {
    asked: Arc<AtomicBool>,
    interrupter: Interrupter,
}

impl Interrupt {
    fn on_ctrl_c() -> anyhow::Result<Self> {
        let interrupt = Self {
            asked: Arc::new(AtomicBool::new(false)),
            interrupter: Interrupter::new(),
        };
        let handler = interrupt.clone();
        ctrlc::set_handler(move || handler.ask())?;
        Ok(interrupt)
    }

    fn ask(&self) {
        if self.asked.swap(true, Ordering::SeqCst) {
            std::process::exit(KILLED);
        }
        self.interrupter.stop(Some("Ctrl-C"));
        crate::console::print(
            &mut std::io::stderr(),
            "finishing the step at hand; Ctrl-C again ends at once",
        );
    }

    /// Whether Ctrl-C was pressed.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// What the training loop looks at.
    pub(crate) fn interrupter(&self) -> &Interrupter {
        &self.interrupter
    }

    /// An error once Ctrl-C was pressed; `saved` says what stays.
    pub(crate) fn check(&self, saved: &str) -> Result<(), CliError> {
        if self.is_asked() {
            return Err(CliError::Interrupted(saved.to_owned()));
        }
        Ok(())
    }
}
