//! The judge: derived tolerances, comparators, verdicts, and the problems to judge on.
//!
//! It sees the reference, and of kernels what they returned. What each gate allows, and why, is derived in
//! `docs/tolerances.md`; the numbers are in `tolerances.toml`.

mod column_bounds;
mod condition;
pub mod coverage;
pub mod diagnosis;
pub mod gate;
pub mod generate;
pub mod invariance;
pub mod judge;
pub mod judgeable;
mod lm_head;
pub mod metric;
mod objective;
pub mod packed;
mod quantile;
pub mod recorded;
pub mod report;
pub mod summary;
pub mod tolerance;
pub mod trial;
pub mod variants;

/// Unit roundoff of f32, the arithmetic that kernels are expected to work in: 2⁻²⁴.
pub const U: f64 = 1.0 / 16_777_216.0;
