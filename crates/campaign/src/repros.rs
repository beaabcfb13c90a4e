//! Reads and writes the problems that failed in earlier campaigns.

use std::path::{Path, PathBuf};

use assay_core::problem::Shape;
use assay_core::spec::LossSpec;
use assay_fixture::{FixtureError, SPEC_KEY, write_problem};

use crate::campaign::CampaignError;
use crate::subject::Subject;

/// The metadata key under which a problem's file carries the way of calling in which the kernel failed, if that is not the plain one.
pub(crate) const CALLED_KEY: &str = "called";

/// The metadata key under which a problem's file carries the name of the cause.
pub(crate) const CAUSE_KEY: &str = "cause";

/// Writes a problem that failed, `called` in a way that may not be the plain one. The name of the file depends on the cause, the way and
/// the extents only, so that a later campaign overwrites it.
pub(crate) fn keep<P: Subject>(
    folder: &Path,
    name: &str,
    called: Option<&str>,
    spec: &LossSpec,
    problem: &P,
) -> Result<PathBuf, CampaignError> {
    let io = |reason| FixtureError::io(folder, "write", reason);
    std::fs::create_dir_all(folder).map_err(io)?;
    let word = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let spec = serde_json::to_string(spec).expect("plain data has a JSON form");
    let shape: Shape = problem.shape().into();
    let stem: String = [name].into_iter().chain(called).collect::<Vec<_>>().join(" ").chars().map(word).collect();
    let packed = if problem.batch().extra.sequences.packed().is_some() { "-packed" } else { "" };
    let path = folder.join(format!("{stem}-{shape}-{}{packed}.safetensors", problem.dtype()));
    let called = called.map(|words| (CALLED_KEY.into(), words.into()));
    let metadata = [(SPEC_KEY.into(), spec), (CAUSE_KEY.into(), name.into())];
    write_problem(&path, problem, &metadata.into_iter().chain(called).collect())?;
    Ok(path)
}

/// Returns the problem files of a folder in order of name, and nothing if the folder does not exist.
pub(crate) fn files(folder: &Path) -> Result<Vec<PathBuf>, CampaignError> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(reason) => return Err(FixtureError::io(folder, "read", reason).into()),
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
    paths.sort();
    Ok(paths)
}
