//! The steps of compiling with a PJRT plugin that do not depend on the kind of chip.

use std::env;
use std::path::{Path, PathBuf};

use assay_pjrt::compile_worker::CompileWorkerError;
use assay_pjrt::runtime::find_installed;
use assay_ptx::PtxKernel;

use crate::error::AheadError;

/// A program to compile, as text, with the number of its copies.
#[derive(Clone, Copy, Debug)]
pub struct StableHloModule<'m> {
    /// The program as StableHLO text, in MLIR's syntax.
    pub code: &'m str,
    /// The kernels of PTX that the text calls; empty for a TPU.
    pub kernels: &'m [PtxKernel],
    /// The number of copies joined by collectives, one on each device.
    pub replicas: usize,
    /// The number of copies of a program that counts its devices as partitions; 1 for every other program.
    pub partitions: usize,
}

impl<'m> StableHloModule<'m> {
    /// Creates a module of `devices` replicas that calls no kernel of PTX.
    pub fn replicated(code: &'m str, devices: usize) -> Self {
        Self { code, kernels: &[], replicas: devices, partitions: 1 }
    }
}

/// Returns the plugin `given`, else the one that the environment's `variable` names, else the installed `file`.
///
/// # Errors
/// The error that `absent` makes of all paths that were tried.
pub(crate) fn locate(
    given: Option<&Path>,
    variable: &str,
    file: &str,
    absent: impl Fn(Vec<PathBuf>) -> AheadError,
) -> Result<PathBuf, AheadError> {
    let named = || env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from);
    match given.map(Path::to_path_buf).or_else(named) {
        Some(path) if path.is_file() => Ok(path),
        Some(path) => Err(absent(vec![path])),
        None => find_installed(file).map_err(absent),
    }
}

/// Adds `target` to an error of the worker.
pub(crate) fn worker_error(target: String, error: CompileWorkerError) -> AheadError {
    match error {
        CompileWorkerError::Io { path, action, reason } => AheadError::Io { path, action, reason },
        CompileWorkerError::Refused(message) => AheadError::Refused { target, message },
        CompileWorkerError::Died { status, stderr } => AheadError::Died { target, status, stderr },
        CompileWorkerError::TimedOut { limit, stderr } => AheadError::TimedOut { target, limit, stderr },
        CompileWorkerError::Malformed { file, line, given, expected } => {
            AheadError::Malformed { file: file.into(), line, given, expected }
        }
    }
}
