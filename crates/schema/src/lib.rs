//! The JSON that commands write and the page reads: each result once, as a type.
//!
//! A command fills one of these and writes it after its own command line ([`Made`]); the page reads the same type. What is
//! written has every field, in the order in which they stand here. A reader takes less: what the page can do without has a
//! default, fields that nobody knows are passed over, and a field that is lacking is named by the error.
//!
//! JSON has no NaN and no ∞. Both are written `null`; a number that may be either is NaN when it is read again.

pub mod ab;
pub mod bench;
pub mod campaign;
pub mod compile;
pub mod gpu;
pub mod mutants;
mod number;
pub mod peers;
pub mod verdicts;

use serde::{Deserialize, Serialize};

/// A result and the command that made it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Made<R> {
    /// As a shell takes it.
    pub command: String,
    /// What the command writes.
    #[serde(flatten)]
    pub result: R,
}
