//! Recorded problems through every implementation: compiles ahead, schedules, judges.
//!
//! ```text
//! problem file ─▶ problems ─▶ implementations, the next compiled while one runs ─▶ judge ─▶ checks ─▶ summary
//! ```
//!
//! A [`Replay`] is given problem files one by one. Each problem of a file, which is one choice of logits and old
//! log-probabilities, goes through the reference, which is compared with the numbers recorded in the file, and through each
//! implementation on each device count. The result is a [`ReplayOutcome`].
//!
//! A replay of one generated problem by the CPU kernel:
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use assay_core::problem::Dtype;
//! use assay_core::spec::LossSpec;
//! use assay_fixture::write_problem;
//! use assay_judge::generate::{Recipe, Regime};
//! use assay_replay::{Replay, ReplayRequest, ReplayedImplementations};
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
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("small.safetensors");
//! write_problem(&path, &recipe.problem(&spec)?, &BTreeMap::new())?;
//!
//! let implementations = ReplayedImplementations::with_ids(&["native".to_string()], None)?;
//! let request = ReplayRequest { spec: Some(spec), ..ReplayRequest::new(implementations) };
//! let mut replay = Replay::new(request)?;
//! replay.replay(&path)?;
//! let outcome = replay.finish();
//! assert!(outcome.verdicts.pass, "{:?}", outcome.failures);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod ahead;
mod choice;
mod error;
mod recorded;
mod run;

pub use choice::ReplayedImplementations;
pub use error::ReplayError;
pub use run::{Replay, ReplayOutcome, ReplayRequest};
