//! The `draftsmith` program: run files in, trained and measured drafters out.
//!
//! Only this crate parses arguments, prints, chooses a device and decides exit statuses.

mod args;
mod commands;
mod console;
mod device;
mod errors;
mod progress;
mod provenance;
mod run_file;
mod session;
mod stage;
mod stages;

use std::process::ExitCode;

use clap::Parser;

use crate::args::CommandLine;
use crate::console::Console;

/// Element-wise tensor work on a CPU allocates and frees large buffers in every operation. The system
/// allocator hands such buffers back to the kernel each time and page faults dominate; a pooling
/// allocator keeps them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let line = CommandLine::parse();
    let console = Console::new(&line.output);
    match commands::dispatch(line.command, console) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::print(&mut std::io::stderr(), &errors::render(&error));
            errors::exit_code(&error)
        }
    }
}
