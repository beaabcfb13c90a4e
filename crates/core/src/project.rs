//! Where the project's own files lie, whatever the working directory is.

use std::env;
use std::path::{Path, PathBuf};

/// `name`, a file or folder of the project, as it lies in the working directory or in one of the folders that hold this
/// executable.
///
/// # Errors
/// Where was looked.
pub fn find(name: impl AsRef<Path>) -> Result<PathBuf, Vec<PathBuf>> {
    let executable = env::current_exe().unwrap_or_default();
    // target/release/assay and target/debug/deps/test-…: the project is at most three folders up.
    let folders = executable.ancestors().skip(1).take(4);
    let looked: Vec<PathBuf> = [Path::new("")].into_iter().chain(folders).map(|folder| folder.join(&name)).collect();
    looked.iter().find(|path| path.exists()).cloned().ok_or(looked)
}
