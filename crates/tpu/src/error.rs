//! Why a program was not compiled for a TPU, or what came of it not understood.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use assay_core::implementation::Unsupported;
use assay_core::memory::CompiledMemory;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum TpuError {
    /// The compiler is not installed.
    #[error(
        "libtpu: not found ({}); run `make setup-tpu`, or give one by --libtpu or TPU_LIBRARY_PATH",
        looked.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    Absent {
        /// Where it was looked for.
        looked: Vec<PathBuf>,
    },
    /// No such target.
    #[error("target: got `{given}`, expected one of {expected}, alone or with a topology such as {example}")]
    Target {
        /// As given.
        given: String,
        /// The chips there are.
        expected: String,
        /// A target that works.
        example: String,
    },
    /// No such implementation, or none that compiles for TPUs.
    #[error("implementation: got `{given}`, expected {expected}")]
    Implementation {
        /// The id.
        given: String,
        /// The kind wanted, and the ids there are.
        expected: String,
    },
    /// The implementation does not do this.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A file or process of ours.
    #[error("{path}: cannot {action}: {reason}")]
    Io {
        /// Which.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why not.
        reason: io::Error,
    },
    /// libtpu refused, with a reason.
    #[error("{target}: {message}")]
    Refused {
        /// The target.
        target: String,
        /// libtpu's own words.
        message: String,
    },
    /// The compiling process died without an answer.
    #[error("{target}: the compiling process ended with {status} and no answer; the last it wrote:\n{stderr}")]
    Died {
        /// The target.
        target: String,
        /// How it ended.
        status: String,
        /// The last lines of its stderr.
        stderr: String,
    },
    /// The compiling process took too long and was ended.
    #[error("{target}: no answer within {limit:?}, so the compiling process was ended; the last it wrote:\n{stderr}")]
    TimedOut {
        /// The target.
        target: String,
        /// The limit.
        limit: Duration,
        /// The last lines of its stderr.
        stderr: String,
    },
    /// It compiled, and what this libtpu wrote of its schedule or its HLO is not understood: memory is all that is known.
    #[error(
        "{target}: it compiled, and takes {} bytes at its peak on each device ({memory}); cycles and HBM bytes are not known: {reason}",
        memory.peak_bytes()
    )]
    Unread {
        /// The target.
        target: String,
        /// Of one run, on one device.
        memory: CompiledMemory,
        /// What is not understood.
        reason: Box<TpuError>,
    },
    /// A file of the compiler's does not read as expected.
    #[error("{file}, line {line}: got {given}, expected {expected}; libtpu 0.0.51 writes what this reads")]
    Dump {
        /// The file's name.
        file: String,
        /// Line, from 1; 0 is the whole file.
        line: usize,
        /// What stands there.
        given: String,
        /// What should.
        expected: &'static str,
    },
}
