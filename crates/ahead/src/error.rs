//! The one error of this crate: why a program was not compiled, or why the compiler's output was not understood.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use assay_core::implementation::Unsupported;
use assay_core::memory::CompiledMemory;
use assay_core::text::{ForeignLines, ForeignText, ShownPath};

/// The reason why a program has no memory, no schedule or no bound.
#[derive(Debug, thiserror::Error)]
pub enum AheadError {
    /// A compiler or one of its tools is not installed.
    #[error(
        "{what}: not found ({}); run `make {setup}`, or give one by {instead}",
        assay_core::project::in_words(looked)
    )]
    Absent {
        /// The missing tool: libtpu, XLA's CUDA plugin, ptxas, nvdisasm or libdevice.
        what: &'static str,
        /// Every path that was tried, in order.
        looked: Vec<PathBuf>,
        /// The target of `make` that installs the tool.
        setup: &'static str,
        /// The option and the environment variable that name another copy.
        instead: &'static str,
    },
    /// The target's text names no known chip, or a number of devices that the chip cannot have.
    #[error("target: got `{given}`, expected one of {expected}, alone or with {devices}")]
    UnknownTarget {
        /// The text as the caller gave it.
        given: ForeignText,
        /// The names of all chips, separated by commas.
        expected: String,
        /// The form of a target with several devices, with a valid example.
        devices: String,
    },
    /// No implementation has this id, or the one that has it does not compile for this kind of target.
    #[error("implementation: got `{given}`, expected {expected}")]
    Implementation {
        /// The id as the caller gave it.
        given: ForeignText,
        /// The kind of implementation wanted, and the ids of that kind.
        expected: String,
    },
    /// The implementation exists and does not compute this loss, shape or dtype.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A kernel of PTX needs more than the chip has.
    #[error("{target}, kernel {kernel}: {what} {given}, expected {expected}")]
    Beyond {
        /// The target as text, `h100:8`.
        target: String,
        /// The name of the kernel's entry.
        kernel: String,
        /// The resource that is exceeded, with its unit.
        what: &'static str,
        /// The amount that the kernel needs.
        given: ForeignText,
        /// The amount that the chip has, and which kernel to use instead.
        expected: String,
    },
    /// A file or a process of this program failed.
    #[error("{path}: cannot {action}: {reason}")]
    Io {
        /// The file or folder concerned.
        path: ShownPath,
        /// The failed action as a verb: `read`, `create`.
        action: &'static str,
        /// The error of the operating system.
        reason: io::Error,
    },
    /// The plugin rejected the program.
    #[error("{target}: {message}")]
    Refused {
        /// The target as text, `v6e:2x4`.
        target: String,
        /// The message of the plugin, unchanged.
        message: ForeignLines,
    },
    /// The plugin has no custom call for kernels of PTX.
    #[error(
        "{target}: this plugin does not know the custom call `{call}`, by which kernels of PTX are called; expected one of XLA of \
         2026 (jax-cuda13-pjrt 0.10.2 or newer, `make setup-gpu`), or use xla, which needs no such call"
    )]
    NoPtx {
        /// The target as text, `h100:8`.
        target: String,
        /// The name of the custom call.
        call: &'static str,
    },
    /// `ptxas` or `nvdisasm` rejected a kernel.
    #[error("{target}, kernel {kernel}: ptxas refused it: {message}")]
    Assembler {
        /// The target as text, `h100:8`.
        target: String,
        /// The name of the kernel's entry.
        kernel: String,
        /// The first error that the tool printed, and how many more lines there are.
        message: ForeignLines,
    },
    /// The compiling process died without an answer.
    #[error("{target}: the compiling process ended with {status} and no answer; the last it wrote:\n{stderr}")]
    Died {
        /// The target as text, `v6e:2x4`.
        target: String,
        /// The exit status or the signal.
        status: String,
        /// The last lines of the process's stderr.
        stderr: ForeignLines,
    },
    /// The compiling process exceeded its time limit and was killed.
    #[error("{target}: no answer within {limit:?}, so the compiling process was ended; the last it wrote:\n{stderr}")]
    TimedOut {
        /// The target as text, `v6e:2x4`.
        target: String,
        /// The time limit that was exceeded.
        limit: Duration,
        /// The last lines of the process's stderr.
        stderr: ForeignLines,
    },
    /// The program compiled, and its memory is known, but the compiler's dumps were not understood.
    #[error(
        "{target}: it compiled, and takes {} bytes at its peak on each device ({memory}); {unknown} are not known: {reason}{writer}",
        memory.peak_bytes()
    )]
    Unread {
        /// The target as text, `v6e:2x4`.
        target: String,
        /// The memory of one run on one device.
        memory: CompiledMemory,
        /// The figures that the dumps would have given.
        unknown: &'static str,
        /// The first line that was not understood.
        reason: Box<AheadError>,
        /// A note on the version whose dumps are understood; empty, or starting with a semicolon.
        writer: &'static str,
    },
    /// A compiler's output does not read as expected.
    #[error("{file}, line {line}: got {given}, expected {expected}")]
    Malformed {
        /// The file's name, or the tool that printed the text.
        file: String,
        /// Line number, from 1; 0 means the whole text.
        line: usize,
        /// The text at that line, at most 80 characters.
        given: ForeignText,
        /// A description of a valid line.
        expected: &'static str,
    },
}

impl AheadError {
    /// Creates an [`AheadError::Malformed`] with the first 80 characters of `given`.
    pub(crate) fn malformed(file: &str, line: usize, given: impl Into<String>, expected: &'static str) -> Self {
        let given: String = given.into().chars().take(80).collect();
        Self::Malformed { file: file.into(), line, given: given.into(), expected }
    }

    /// Creates an [`AheadError::Malformed`] that quotes the first 80 characters of `given`.
    pub(crate) fn quoted(file: &str, line: usize, given: &str, expected: &'static str) -> Self {
        let given: String = given.trim().chars().take(80).collect();
        Self::Malformed { file: file.into(), line, given: format!("`{given}`").into(), expected }
    }
}
