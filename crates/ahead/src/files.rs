//! Bounded reading of the text files that compilers leave in a folder.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::slice;

use assay_core::guardian::Guardian;

use crate::error::AheadError;

/// The size above which a dump is refused. The longest seen has 1 MB.
const MOST_BYTES: u64 = 64 << 20;

/// Returns a closure that turns an I/O error into an [`AheadError::Io`] of `path`.
pub(crate) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AheadError {
    let path = path.to_path_buf();
    move |reason| AheadError::Io { path: path.into(), action, reason }
}

/// Creates a temporary folder that is removed when it is dropped or this process ends.
///
/// # Errors
/// [`AheadError::Io`].
pub(crate) fn guarded_folder(prefix: &str) -> Result<Guardian, AheadError> {
    let parent = env::temp_dir();
    Guardian::start(slice::from_ref(&parent), prefix).map_err(failed("write to", &parent))
}

/// Returns the names of all files in `folder`, sorted.
///
/// # Errors
/// [`AheadError::Io`].
pub(crate) fn sorted_names(folder: &Path) -> Result<Vec<String>, AheadError> {
    let entries = fs::read_dir(folder).map_err(failed("list", folder))?;
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names =
        entries.map(|entry| entry.map(name)).collect::<Result<Vec<_>, _>>().map_err(failed("list", folder))?;
    names.sort();
    Ok(names)
}

/// Reads a whole file of at most [`MOST_BYTES`] bytes, with replacement characters for bytes that are not UTF-8.
///
/// # Errors
/// [`AheadError::Io`].
pub(crate) fn read_text(path: &Path) -> Result<String, AheadError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed("open", path))?;
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(failed("read", path))?;
    if bytes.len() as u64 > MOST_BYTES {
        let reason = io::Error::other(format!("it has more than {MOST_BYTES} bytes"));
        return Err(failed("read", path)(reason));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
