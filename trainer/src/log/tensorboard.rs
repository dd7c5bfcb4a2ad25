//! TensorBoard scalars and pictures; the only file that knows the event-file library.
//!
//! That library panics on i/o errors, in its own thread and in its callers, and overwrites the file of
//! a second writer in the same folder. So every process start gets a folder of its own, and the first
//! failure ends the event file and becomes one warning: it never ends a run.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use tensorboard_rs::summary_writer::SummaryWriter;

/// Event file of one process start.
pub struct TensorBoard {
    folder: PathBuf,
    writer: Option<SummaryWriter>,
    warning: Option<String>,
}

impl std::fmt::Debug for TensorBoard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TensorBoard")
            .field("folder", &self.folder)
            .field("open", &self.writer.is_some())
            .field("warning", &self.warning)
            .finish()
    }
}

impl TensorBoard {
    /// Opens an event file in a new folder `<unix time>-<n>` below `root`.
    pub fn open(root: &Path) -> Self {
        let mut board = Self {
            folder: root.to_owned(),
            writer: None,
            warning: None,
        };
        match new_folder(root) {
            Err(error) => board.warning = Some(format!("no event file is written: {error}")),
            Ok(folder) => {
                let opened = catch_unwind(AssertUnwindSafe(|| SummaryWriter::new(&folder)));
                board.folder = folder;
                match opened {
                    Ok(writer) => board.writer = Some(writer),
                    Err(_) => board.fail(),
                }
            }
        }
        board
    }

    /// Adds a scalar; a value that is not finite is left out.
    pub fn scalar(&mut self, tag: &str, value: f64, step: u64) {
        if value.is_finite() {
            self.attempt(|writer| writer.add_scalar(tag, value as f32, step as usize));
        }
    }

    /// Adds a square picture of red, green and blue bytes, row by row.
    pub fn picture(&mut self, tag: &str, bytes: &[u8], side: usize, step: u64) {
        self.attempt(|writer| writer.add_image(tag, bytes, &[3, side, side], step as usize));
    }

    /// Asks the writer to hand its events to the operating system.
    pub fn flush(&mut self) {
        self.attempt(SummaryWriter::flush);
    }

    /// The warning of the first failure, once.
    pub fn take_warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    fn attempt(&mut self, act: impl FnOnce(&mut SummaryWriter)) {
        let Some(writer) = &mut self.writer else {
            return;
        };
        if catch_unwind(AssertUnwindSafe(|| act(writer))).is_err() {
            self.fail();
        }
    }

    fn fail(&mut self) {
        self.warning = Some(format!(
            "the event file in `{}` failed; training goes on without it",
            self.folder.display()
        ));
        self.close();
    }

    fn close(&mut self) {
        let writer = self.writer.take();
        // Closing joins the writer thread and panics when that has died; there is nobody left to tell.
        let _ignored = catch_unwind(AssertUnwindSafe(|| drop(writer)));
    }
}

impl Drop for TensorBoard {
    fn drop(&mut self) {
        self.close();
    }
}

fn new_folder(root: &Path) -> std::io::Result<PathBuf> {
    fs_err::create_dir_all(root)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = now.map_or(0, |now| now.as_secs());
    let mut attempt = 0;
    loop {
        let folder = root.join(format!("{seconds}-{attempt}"));
        match fs_err::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => attempt += 1,
            Err(error) => return Err(error),
        }
    }
}
