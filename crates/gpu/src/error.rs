//! Why a program was not compiled for a GPU, or what came of it not understood.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use assay_core::implementation::Unsupported;
use assay_core::memory::CompiledMemory;
use assay_tpu::TpuError;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// Something of `make setup-gpu` is not installed.
    #[error(
        "{what}: not found ({}); run `make setup-gpu`, or give one by {instead}",
        looked.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    Absent {
        /// XLA's CUDA plugin, ptxas or nvdisasm.
        what: &'static str,
        /// Where it was looked for.
        looked: Vec<PathBuf>,
        /// What else names one.
        instead: &'static str,
    },
    /// No such target.
    #[error(
        "target: got `{given}`, expected one of {expected}, alone or with a number of devices up to 8 as in h100:8"
    )]
    Target {
        /// As given.
        given: String,
        /// The chips there are.
        expected: String,
    },
    /// No such implementation, or none that compiles for GPUs.
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
    /// The chip lacks what a kernel asks for.
    #[error("{target}, kernel {kernel}: {what} {given}, expected {expected}")]
    Beyond {
        /// The target.
        target: String,
        /// The kernel's name.
        kernel: String,
        /// What it asks for.
        what: &'static str,
        /// How much of it.
        given: String,
        /// How much there is, and what to use instead.
        expected: String,
    },
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
    /// The plugin refused, with a reason.
    #[error("{target}: {message}")]
    Refused {
        /// The target.
        target: String,
        /// The plugin's own words.
        message: String,
    },
    /// The plugin does not know the call that kernels of PTX are made by.
    #[error(
        "{target}: this plugin does not know the custom call `{call}`, by which kernels of PTX are called; expected one of XLA of \
         2026 (jax-cuda13-pjrt 0.10.2 or newer, `make setup-gpu`), or use xla, which needs no such call"
    )]
    NoPtx {
        /// The target.
        target: String,
        /// The call's name.
        call: &'static str,
    },
    /// `ptxas` refused a kernel.
    #[error("{target}, kernel {kernel}: ptxas refused it: {message}")]
    Assembler {
        /// The target.
        target: String,
        /// The kernel's name.
        kernel: String,
        /// Its own words.
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
    /// It compiled, and the HLO that the plugin wrote is not understood: memory is all that is known.
    #[error(
        "{target}: it compiled, and takes {} bytes at its peak on each device ({memory}); HBM bytes are not known: {reason}",
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
    /// What a tool wrote does not read as expected.
    #[error("{from}, line {line}: got `{given}`, expected {expected}")]
    Text {
        /// Who wrote it.
        from: String,
        /// Line, from 1; 0 is the whole of it.
        line: usize,
        /// What stands there.
        given: String,
        /// What should.
        expected: &'static str,
    },
}
