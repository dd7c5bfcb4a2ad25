//! Memory-mapped files as Arrow buffers: the one place of the workspace with unsafe code.
#![expect(
    unsafe_code,
    reason = "mapping a file is unsafe by nature: see the safety comments below"
)]

use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use arrow::buffer::Buffer;
use memmap2::Mmap;

use crate::error::DataError;

/// Maps `path` read-only; pages are read when they are first touched.
///
/// # Errors
/// [`DataError`] when the file cannot be opened or mapped.
pub(crate) fn map(path: &Path) -> Result<Buffer, DataError> {
    let file = fs_err::File::open(path).map_err(|e| DataError::io(path, e))?;
    // SAFETY: the content must not change while it is mapped. Files mapped here are written under a
    // temporary name, renamed and never modified in place by this program; a file that is replaced or
    // removed meanwhile stays alive through the mapping.
    let mapping = unsafe { Mmap::map(file.file()) }.map_err(|e| DataError::io(path, e))?;
    let len = mapping.len();
    let Some(start) = NonNull::new(mapping.as_ptr().cast_mut()) else {
        return Ok(Buffer::from_vec(Vec::<u8>::new()));
    };
    // SAFETY: `start` and `len` describe the mapping, which the buffer owns and keeps mapped; an Arrow
    // buffer made from a custom allocation is never written to nor freed by the global allocator.
    Ok(unsafe { Buffer::from_custom_allocation(start, len, Arc::new(mapping)) })
}
