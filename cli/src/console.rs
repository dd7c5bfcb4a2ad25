//! [`Console`]: results on standard output, everything else on standard error.

use std::io::{IsTerminal, Write};

use crate::args::OutputArgs;

/// Where and how much to print.
#[derive(Clone, Debug)]
pub(crate) struct Console {
    json: bool,
    volume: Volume,
    interactive: bool,
}

/// How much to say beside results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Volume {
    Quiet,
    Normal,
    Verbose,
}

impl Console {
    /// The console that the flags ask for.
    pub(crate) fn new(args: &OutputArgs) -> Self {
        Self {
            json: args.json,
            volume: match (args.quiet, args.verbose) {
                (true, _) => Volume::Quiet,
                (false, true) => Volume::Verbose,
                (false, false) => Volume::Normal,
            },
            interactive: std::io::stderr().is_terminal(),
        }
    }

    /// Whether results are to be JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Whether a moving progress bar makes sense.
    pub(crate) fn is_interactive(&self) -> bool {
        self.interactive && self.volume != Volume::Quiet
    }

    /// Prints a result.
    #[expect(clippy::unused_self, reason = "whoever prints holds the console")]
    pub(crate) fn result(&self, text: &str) {
        print(&mut std::io::stdout(), text);
    }

    /// Prints a result as text or as JSON, whichever was asked for.
    pub(crate) fn value<T: serde::Serialize>(
        &self,
        value: &T,
        text: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        if self.json {
            self.result(&serde_json::to_string_pretty(value)?);
        } else {
            self.result(&text());
        }
        Ok(())
    }

    /// Prints what is going on, unless `--quiet`.
    pub(crate) fn say(&self, text: &str) {
        if self.volume != Volume::Quiet {
            print(&mut std::io::stderr(), text);
        }
    }

    /// Prints a detail, with `--verbose` only.
    pub(crate) fn detail(&self, text: &str) {
        if self.volume == Volume::Verbose {
            print(&mut std::io::stderr(), text);
        }
    }

    /// Prints a warning; `--quiet` does not hide it.
    #[expect(clippy::unused_self, reason = "whoever prints holds the console")]
    pub(crate) fn warn(&self, text: &str) {
        print(&mut std::io::stderr(), &format!("warning: {text}"));
    }
}

/// Writes one line and ignores a reader that went away, as in `draftsmith ... | head`.
pub(crate) fn print(to: &mut impl Write, text: &str) {
    let _reader_may_be_gone = writeln!(to, "{text}");
}
