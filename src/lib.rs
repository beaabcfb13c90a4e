//! The answer key and the bench for GRPO loss kernels.
//!
//! One road runs through the crate:
//!
//! ```text
//! fixture file ─┐
//! generator  ───┼─▶ Problem ─▶ Implementation::run(LossSpec, Problem) ─▶ Candidate ─▶ judge ─▶ Verdict ─▶ report
//! YAML config ──┘                        ▲                                     ▲
//!                                    registry()                     Reference + tolerances.toml
//! ```
//!
//! The feature `cli`, on by default, is the command `assay` with `report` and `suites`; a program that uses the library alone leaves it
//! out by `default-features = false`. `pjrt` runs programs through PJRT plugins, `mutants` has the bank of wrong kernels, `train` trains.
//!
//! Notation, everywhere: `B` sequences of `T` tokens over a vocabulary of `V`; `ℓ = logp`; `r = exp(ℓ − old_logp)`;
//! `A` the advantage; `m` the mask; `u` a dtype's unit roundoff (2⁻²⁴ for f32). Logarithms are natural.

pub use assay_ahead as ahead;
pub use assay_ahead::{gpu, tpu};
pub use assay_algebra::parts;
pub use assay_campaign as campaign;
pub use assay_campaign::worker;
pub use assay_core::{device_dtype, files, implementation, memory, problem, spec, text};
#[cfg(feature = "cli")]
use assay_core::{project, temporary};
pub use assay_cuda as cuda;
pub use assay_fixture as fixture;
pub use assay_judge as judge;
pub use assay_native as native;
pub use assay_native::{bandwidth, products};
#[cfg(feature = "pjrt")]
pub use assay_pjrt::{compile_worker, exported, runtime, xla};
pub use assay_programs as programs;
pub use assay_reference as reference;
pub use assay_registry as registry;
pub use assay_replay as replay;
#[cfg(feature = "cli")]
pub use assay_report as report;
pub use assay_schema as schema;
#[cfg(feature = "cli")]
pub use assay_suites as suites;
pub use assay_tile::stablehlo;
#[cfg(feature = "train")]
pub use assay_train::{record, train};

pub mod bench;
pub mod case;
#[cfg(feature = "cli")]
pub mod cli;
pub mod config;

/// The README's example is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
