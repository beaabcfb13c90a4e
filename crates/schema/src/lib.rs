//! The JSON that commands write and the page reads, with each result as one type.
//!
//! A command fills one of these types and writes it after its own command line ([`CommandOutput`]); the page reads the same type. The JSON
//! has every field, in the order of the declaration. Reading is lenient: fields that the page can do without have a default, unknown fields
//! are skipped, and the error names a field that is missing.
//!
//! JSON has no NaN and no ∞. Both are written `null`; a number that may be either is NaN when it is read again.

pub mod ab;
pub mod agreement;
pub mod bench;
pub mod campaign;
pub mod compile;
pub mod gpu;
pub mod invariance;
pub mod mutants;
pub mod number;
pub mod peers;
pub mod picture;
pub mod programs;
pub mod verdicts;

use serde::{Deserialize, Serialize};

/// A result, and the command that wrote it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CommandOutput<R> {
    /// The command line, as a shell takes it.
    pub command: String,
    /// The result that the command writes.
    #[serde(flatten)]
    pub result: R,
    /// The libraries and toolkits that the command has loaded or run, by path: a PJRT plugin, libtpu, CUDA's tools.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub plugins: Vec<String>,
}
