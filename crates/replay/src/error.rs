//! [`ReplayError`]: why a replay cannot go on.

use assay_core::implementation::{RunError, Unavailable};
use assay_core::problem::ProblemError;
use assay_core::text::{ForeignText, ShownPath};
use assay_fixture::FixtureError;
use assay_judge::judge::JudgeError;

/// A replay that cannot be made: one line that names the file, the implementation or the field.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A problem file cannot be read.
    #[error(transparent)]
    Fixture(#[from] FixtureError),
    /// The problem in a file does not fit the loss.
    #[error("{path}: {reason}")]
    Problem {
        /// The path of the file.
        path: ShownPath,
        /// The error, which names the field.
        reason: ProblemError,
    },
    /// A problem file lacks a tensor, or its metadata is invalid.
    #[error("{path}: {reason}")]
    Content {
        /// The path of the file.
        path: ShownPath,
        /// The field, its content, and the content that is expected.
        reason: ForeignText,
    },
    /// No implementation has this id; the message lists the ids there are.
    #[error("{0}")]
    Unknown(String),
    /// An implementation that was asked for cannot run here.
    #[error("{id}: {why}")]
    Unavailable {
        /// The id of the implementation.
        id: String,
        /// The reason why it cannot run.
        why: Unavailable,
    },
    /// None of the implementations runs on a device count that was asked for.
    #[error("--devices: got {given}, expected counts that {whose} takes here: {counts}")]
    Devices {
        /// The device count that was asked for.
        given: usize,
        /// The ids of the implementations that were asked for.
        whose: String,
        /// The device counts that they run on.
        counts: String,
    },
    /// The sequences of a problem are packed already.
    #[error("--packed: {path} has packed sequences already")]
    Packed {
        /// The path of the file.
        path: ShownPath,
    },
    /// An implementation returned an error in place of outputs.
    #[error(transparent)]
    Run(#[from] RunError),
    /// An output cannot be judged.
    #[error(transparent)]
    Judge(#[from] JudgeError),
}
