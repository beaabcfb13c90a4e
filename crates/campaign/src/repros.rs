//! Reads and writes the problems that failed in earlier campaigns.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use assay_core::problem::Shape;
use assay_core::spec::LossSpec;
use assay_fixture::{FixtureError, SPEC_KEY, write_problem};

use crate::campaign::CampaignError;
use crate::subject::Subject;

/// Writes a problem that failed. The name of the file depends on the cause and the extents only, so that a later
/// campaign overwrites it.
pub(crate) fn keep<P: Subject>(
    folder: &Path,
    name: &str,
    spec: &LossSpec,
    problem: &P,
) -> Result<PathBuf, CampaignError> {
    let io = |reason| FixtureError::io(folder, "write", reason);
    std::fs::create_dir_all(folder).map_err(io)?;
    let word = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let spec = serde_json::to_string(spec).expect("plain data has a JSON form");
    let shape: Shape = problem.shape().into();
    let stem: String = name.chars().map(word).collect();
    let packed = if problem.batch().extra.sequences.packed().is_some() { "-packed" } else { "" };
    let path = folder.join(format!("{stem}-{shape}-{}{packed}.safetensors", problem.dtype()));
    write_problem(&path, problem, &BTreeMap::from([(SPEC_KEY.into(), spec)]))?;
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
