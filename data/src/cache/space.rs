//! How much a cache will take, and whether the disk can hold it.

use std::path::Path;

use draftsmith_models::batch::{StateSpec, TokenRow};

use super::format::{TEACHER_BYTES_PER_TOKEN, bytes_per_token};
use crate::error::DataError;

/// Bytes of a row beside its states: the Arrow message around it, key, hash and padding.
const ROW_OVERHEAD: u64 = 1200;

/// Bytes that the states of `rows` will take on disk, a little too much rather than too little.
pub fn forecast(rows: &[TokenRow], spec: &StateSpec, hidden_size: usize) -> u64 {
    let per_token = bytes_per_token(spec.aux_layer_ids.len(), hidden_size);
    rows.iter().map(|row| row_bytes(row.len(), per_token)).sum()
}

/// Bytes that the teacher's figures of `rows` will take on disk, likewise.
pub fn forecast_figures(rows: &[TokenRow]) -> u64 {
    rows.iter()
        .map(|row| row_bytes(row.len(), TEACHER_BYTES_PER_TOKEN))
        .sum()
}

pub(crate) fn row_bytes(num_tokens: usize, bytes_per_token: u64) -> u64 {
    num_tokens as u64 * bytes_per_token + ROW_OVERHEAD
}

/// Refuses work that needs more bytes than the disk under `folder` has free for this user.
///
/// Where the free space cannot be asked for, nothing is refused.
///
/// # Errors
/// [`DataError::DiskSpace`] with both numbers.
pub fn refuse_beyond_free_space(folder: &Path, needed: u64) -> Result<(), DataError> {
    match free_bytes(folder) {
        Some(free) => refuse_beyond(folder, needed, free),
        None => Ok(()),
    }
}

fn refuse_beyond(folder: &Path, needed: u64, free: u64) -> Result<(), DataError> {
    if needed <= free {
        return Ok(());
    }
    Err(DataError::DiskSpace {
        folder: folder.to_owned(),
        needed,
        free,
    })
}

/// Free bytes of the file system that holds `folder` or will hold it.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let absolute = std::path::absolute(folder).ok()?;
    let existing = absolute.ancestors().find(|ancestor| ancestor.exists())?;
    #[cfg(unix)]
    {
        let stat = rustix::fs::statvfs(existing).ok()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _unknown = existing;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_both_numbers() {
        let folder = Path::new("states");
        assert!(refuse_beyond(folder, 20, 20).is_ok());
        assert_eq!(
            refuse_beyond(folder, 21, 20).unwrap_err().to_string(),
            "the states need 21 more bytes in `states`, but 20 are free"
        );
    }

    #[test]
    fn a_folder_that_does_not_exist_yet_has_the_space_of_its_parent() {
        let folder = tempfile::tempdir().unwrap();
        let free = free_bytes(&folder.path().join("a/b")).unwrap();
        assert!(free > 0);
        assert!(refuse_beyond_free_space(folder.path(), u64::MAX).is_err());
    }
}
