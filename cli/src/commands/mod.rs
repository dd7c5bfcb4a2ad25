//! One file a command; this one chooses.

mod calibrate;
mod compare;
mod completions;
mod doctor;
mod gradient_check;
mod inspect;
mod lossless;
mod plan;
mod run;
mod target;

use crate::args::{Command, RunArgs};
use crate::console::Console;
use crate::session::{Restart, Session};
use crate::stage::{Stage, run_one};
use crate::stages;

/// Does what the command line asks for.
pub(crate) fn dispatch(command: Command, console: Console) -> anyhow::Result<()> {
    match command {
        Command::Run(args) => run::run(&Session::open(&args, Restart::Continue, console)?),
        Command::Prepare(args) => one(&args, &stages::prepare::Prepare, console),
        Command::Regenerate(args) => one(&args, &stages::regenerate::Regenerate, console),
        Command::Capture(args) => one(&args, &stages::capture::Capture, console),
        Command::Train(args) => {
            let restart = if args.resume {
                Restart::Resume
            } else {
                Restart::Fresh
            };
            let session = Session::open(&args.run, restart, console)?;
            run_one(&stages::train::Train, &session)
        }
        Command::Eval(args) => {
            let session = Session::open(&args, Restart::Fresh, console)?;
            run_one(&stages::eval::Eval, &session)?;
            run::print_report(&session)
        }
        Command::Calibrate(args) => {
            calibrate::calibrate(&Session::open(&args, Restart::Fresh, console)?)
        }
        Command::Export(args) => one(&args, &stages::export::Export, console),
        Command::Plan(args) => plan::plan(&Session::open(&args, Restart::Fresh, console)?),
        Command::Inspect(args) => {
            let rows = args.rows;
            inspect::inspect(&Session::open(&args.run, Restart::Fresh, console)?, rows)
        }
        Command::Doctor(args) => {
            let session = Session::open(&args.run, Restart::Fresh, console)?;
            doctor::doctor(&session, args.lossless)
        }
        Command::Target(command) => target::target(command, &console),
        Command::Compare { first, second } => compare::compare(&first, &second, &console),
        Command::Completions { shell } => {
            completions::completions(shell);
            Ok(())
        }
    }
}

fn one(args: &RunArgs, stage: &dyn Stage, console: Console) -> anyhow::Result<()> {
    let session = Session::open(args, Restart::Fresh, console)?;
    run_one(stage, &session)
}
