//! Removes events of steps that a resumed run takes again, and records torn by a crash.
//!
//! An event file is a sequence of records: length (u64), its checksum (u32), the event, its checksum
//! (u32), little-endian. Events are protocol buffers whose field 1 is the time (64 bits) and field 2
//! the step (varint; absent means 0); steps never decrease within a file.

use std::path::{Path, PathBuf};

use draftsmith_models::file;

/// Cuts every event file below `root` in front of its first event of a step above `completed`.
///
/// Event files are for people: what cannot be read or cut is reported, never an error.
pub(super) fn forget_after(root: &Path, completed: u64) -> Vec<String> {
    let mut notices = Vec::new();
    for path in event_files(root) {
        let cut = file::read(&path).and_then(|bytes| {
            let keep = kept_len(&bytes, completed);
            if keep == bytes.len() {
                Ok(())
            } else {
                file::write_atomic(&path, &bytes[..keep])
            }
        });
        if let Err(error) = cut {
            notices.push(format!("events of repeated steps stay in the log: {error}"));
        }
    }
    notices
}

fn event_files(root: &Path) -> Vec<PathBuf> {
    let list = |folder: &Path| -> Vec<PathBuf> {
        let entries = fs_err::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let mut files: Vec<PathBuf> = list(root).iter().flat_map(|folder| list(folder)).collect();
    files.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("events.out.tfevents")
    });
    files.sort();
    files
}

/// Length of the whole records in front of the first event above `completed`.
fn kept_len(bytes: &[u8], completed: u64) -> usize {
    let mut offset = 0;
    while let Some(len) = number(bytes, offset, 8) {
        let start = offset + 12;
        let Some(end) = start.checked_add(len as usize) else {
            break;
        };
        match bytes.get(start..end) {
            Some(event) if end + 4 <= bytes.len() && step_of(event) <= completed => {
                offset = end + 4;
            }
            _ => break,
        }
    }
    offset
}

fn number(bytes: &[u8], offset: usize, len: usize) -> Option<u64> {
    let field = bytes.get(offset..offset + len)?;
    Some(
        field
            .iter()
            .rev()
            .fold(0, |sum, &byte| (sum << 8) | u64::from(byte)),
    )
}

const TIME_FIELD: u8 = (1 << 3) | 1;
const STEP_FIELD: u8 = 2 << 3;

fn step_of(event: &[u8]) -> u64 {
    let after_time = match event.first() {
        Some(&TIME_FIELD) => event.get(9..).unwrap_or_default(),
        _ => event,
    };
    match after_time.split_first() {
        Some((&STEP_FIELD, rest)) => varint(rest),
        _ => 0,
    }
}

fn varint(bytes: &[u8]) -> u64 {
    let mut value = 0;
    for (index, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index).min(63);
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tensorboard::TensorBoard;

    #[test]
    fn events_of_later_steps_and_torn_records_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::open(folder.path());
        for step in [1, 2, 200, 300] {
            board.scalar("a", 1.0, step);
        }
        drop(board);
        let path = event_files(folder.path()).remove(0);
        let whole = fs_err::read(&path).unwrap();
        assert_eq!(kept_len(&whole, 300), whole.len());
        let until_200 = kept_len(&whole, 200);
        assert!(until_200 < whole.len());
        assert_eq!(kept_len(&whole[..whole.len() - 3], 300), until_200);
        assert_eq!(forget_after(folder.path(), 250), Vec::<String>::new());
        assert_eq!(fs_err::read(&path).unwrap(), whole[..until_200]);
        // Only the version record is left when no step is.
        assert!(kept_len(&whole, 0) > 0 && kept_len(&whole, 0) < kept_len(&whole, 1));
    }
}
