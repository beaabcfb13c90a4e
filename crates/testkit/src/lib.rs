//! The parts that all integration tests share. Nothing below the registry may depend on it: the trial itself
//! ([`JudgedProblem`], [`hindrance`]) is the judge's.

pub mod arms;
#[cfg(feature = "pjrt")]
pub mod plugins;
pub mod slowest;

pub use assay_judge::trial::{JudgedOutcome, JudgedProblem, NoVerdictReason, hindrance};
