//! The search for the project's own files, whatever the working directory is.

use std::env;
use std::path::{Path, PathBuf};

/// Finds `name`, a file or folder of the project, in the working directory or in a folder that contains this
/// executable.
///
/// # Errors
/// The paths that were tried.
pub fn find(name: impl AsRef<Path>) -> Result<PathBuf, Vec<PathBuf>> {
    let executable = env::current_exe().unwrap_or_default();
    // target/release/assay and target/debug/deps/test-…: the project is at most three folders up.
    let folders = executable.ancestors().skip(1).take(4);
    let looked: Vec<PathBuf> = [Path::new("")].into_iter().chain(folders).map(|folder| folder.join(&name)).collect();
    looked.iter().find(|path| path.exists()).cloned().ok_or(looked)
}
