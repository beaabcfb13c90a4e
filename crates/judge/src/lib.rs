//! Judges kernels: derived limits, verdicts, and the problems to judge on.
//!
//! ```
//! use assay_core::problem::{Candidate, Dtype};
//! use assay_core::spec::LossSpec;
//! use assay_judge::generate::{Recipe, Regime};
//! use assay_judge::judgeable::Judgeable;
//! use assay_judge::tolerance::Limits;
//!
//! let spec = LossSpec::default();
//! let recipe = Recipe {
//!     shape: [2, 3, 32],
//!     dtype: Dtype::F32,
//!     regime: Regime::Normal,
//!     seed: 0,
//!     old_logp_noise_scale: 0.3,
//!     masked_garbage: false,
//! };
//! let problem = recipe.problem(&spec)?;
//! let reference = problem.evaluate(&spec)?;
//! // The reference's own values in place of a kernel's: every gate passes.
//! let candidate: Candidate = reference.outcome().into();
//! let verdicts = problem.judge(&reference, &candidate.lend(), &Limits::for_class("external")?)?;
//! assert!(verdicts.iter().all(|verdict| verdict.passed()));
//! // A kernel that returns no loss is refused.
//! let without_loss = Candidate { loss: None, ..candidate };
//! assert!(problem.judge(&reference, &without_loss.lend(), &Limits::for_class("external")?).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The judge sees the reference, and of a kernel only what it returned. What each gate allows, and why, is derived in
//! `docs/tolerances.md`; the numbers are in `tolerances.toml`.

pub mod agreement;
mod column_bounds;
mod condition;
pub mod coverage;
pub mod diagnosis;
mod distillation;
pub mod error_map;
pub mod error_sums;
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
pub mod standards;
pub mod summary;
pub mod tolerance;
pub mod trial;
pub mod variants;

/// Unit roundoff of f32, the arithmetic that kernels are expected to work in: 2⁻²⁴.
pub const U: f64 = 1.0 / 16_777_216.0;
