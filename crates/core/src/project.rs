//! The search for files of the project and for code that this process loads or runs.
//!
//! A folder from a stranger may be the working directory, so code is never searched there: see [`find_code`].

use crate::text::ShownPath;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the project's tree into which `make setup` puts libraries and programs.
const INSTALLED: &str = ".plugins";

/// Finds `name`, data of the project such as its recorded problems, in the working directory or in the project's tree.
///
/// # Errors
/// The paths that were tried.
pub fn find(name: impl AsRef<Path>) -> Result<PathBuf, Vec<PathBuf>> {
    let folders = [PathBuf::new()].into_iter().chain(tree_of(&own_file()));
    first_that_exists(folders.map(|folder| folder.join(&name)).collect())
}

/// Finds `name`, a library that this process loads or a folder with programs that it runs, in the folders of [`code_folders`].
///
/// # Errors
/// The paths that were tried.
pub fn find_code(name: impl AsRef<Path>) -> Result<PathBuf, Vec<PathBuf>> {
    first_that_exists(code_folders(&own_file()).into_iter().map(|folder| folder.join(&name)).collect())
}

/// Returns the folders in which code is searched on behalf of the executable or Python extension `own`, in order.
///
/// 1. `.plugins` of the project's tree, if `own` is in the `target` folder of a tree, which has a `Cargo.toml`.
/// 2. The installed package's data folder: `PREFIX/share/grpo-assay` of an executable in `PREFIX/bin`, and `data` next to the Python
///    extension.
pub fn code_folders(own: &Path) -> Vec<PathBuf> {
    let tree = tree_of(own).map(|tree| tree.join(INSTALLED));
    let data = own.parent().and_then(|folder| match folder.file_name() {
        Some(name) if name == "bin" => Some(folder.parent()?.join("share/grpo-assay")),
        _ if own.file_name()?.to_str()?.starts_with("_native.") => Some(folder.join("data")),
        _ => None,
    });
    // A relative path would be one of the working directory.
    [tree, data].into_iter().flatten().filter(|folder| folder.is_absolute()).collect()
}

/// Joins the paths that a search has tried, for its error message.
pub fn in_words(looked: &[PathBuf]) -> String {
    if looked.is_empty() {
        return "nowhere: this program is in no project's `target` folder and in no `bin` folder".into();
    }
    looked.iter().map(|path| ShownPath(path).to_string()).collect::<Vec<_>>().join(", ")
}

/// Returns the project's tree, if `own` is in its `target` folder.
fn tree_of(own: &Path) -> Option<PathBuf> {
    let target = own.ancestors().skip(1).find(|folder| folder.ends_with("target"))?;
    let tree = target.parent()?;
    tree.join("Cargo.toml").is_file().then(|| tree.to_path_buf())
}

fn first_that_exists(looked: Vec<PathBuf>) -> Result<PathBuf, Vec<PathBuf>> {
    looked.iter().find(|path| path.exists()).cloned().ok_or(looked)
}

/// Returns the file that contains this function: the executable, or the extension within a Python interpreter.
fn own_file() -> PathBuf {
    // Only Linux lists the files that a process has mapped; its paths are absolute, with links followed.
    let mapped =
        fs::read_to_string("/proc/self/maps").ok().and_then(|maps| mapped_at(&maps, own_file as *const () as usize));
    mapped.or_else(|| env::current_exe().ok()).unwrap_or_default()
}

/// Returns the file that is mapped at `address`, from the lines of `/proc/self/maps`: `7f00-7f80 r-xp 00000000 08:01 42  /path`.
fn mapped_at(maps: &str, address: usize) -> Option<PathBuf> {
    let line = maps.lines().find(|line| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let bound = |text: &str| usize::from_str_radix(text, 16).ok();
        let bounds = range.and_then(|(start, end)| Some((bound(start)?, bound(end)?)));
        bounds.is_some_and(|(start, end)| (start..end).contains(&address))
    })?;
    Some(PathBuf::from(&line[line.find('/')?..]))
}
