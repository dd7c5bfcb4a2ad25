//! `draftsmith completions`: a script for a shell.

use clap::CommandFactory;

/// Prints the completion script.
pub(crate) fn completions(shell: clap_complete::Shell) {
    let mut command = crate::args::CommandLine::command();
    clap_complete::generate(shell, &mut command, "draftsmith", &mut std::io::stdout());
}
