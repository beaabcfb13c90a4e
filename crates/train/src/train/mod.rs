//! Training with the losses, on [candle](https://docs.rs/candle-core) (feature `train`).
//!
//! [`GrpoLoss`] is a loss that candle differentiates, for a training loop of one's own. [`Trainer`] is a whole loop on one
//! machine: a [`Qwen2`] policy answers [questions with exact answers](task), completions are [rewarded](reward) and compared
//! within their group, and the loss of [`LossSpec`](assay_core::spec::LossSpec) changes the policy, by a kernel or by candle's own
//! operations ([`LossArm`]), as the [`TrainConfig`] says; [`complete`] makes all its steps, and [`ab`] the same run by either.
//!
//! Everything that is drawn is a function of the seed and the step, and every sum has an order of its own, so that with one
//! thread a run gives the same bits again, killed and resumed or not.

pub mod ab;
mod arm;
mod baseline;
mod checkpoint;
mod complete;
pub mod config;
pub mod disk;
mod fingerprint;
mod loss;
mod loss_step;
mod meter;
pub mod metrics;
pub mod optimizer;
pub mod qwen2;
pub mod reward;
pub mod rollout;
mod scores;
mod sequences;
mod summary;
pub mod task;
mod tokenizer;
mod trainer;
mod warm;

use std::io;
use std::path::Path;

use candle_core::Error as CandleError;

pub use arm::LossArm;
pub use baseline::Baseline;
/// The crate of the tensors that [`GrpoLoss`] takes.
pub use candle_core;
/// Layers and optimizers of the same version.
pub use candle_nn;
pub use complete::{RunProgress, TrainedRun, complete, complete_by};
pub use config::TrainConfig;
pub use loss::{GrpoLoss, LossEvaluation, TrainBatch};
pub use loss_step::{LossStep, NoObserver, Observer};
pub use qwen2::Qwen2;
pub use scores::OffPolicy;
pub use summary::RunSummary;
pub use tokenizer::Tokenizer;
pub use trainer::Trainer;

pub use crate::checkpoint::{Misfit, Qwen2Config};
use assay_core::implementation::RunError;
use assay_core::memory::Shortage;
use assay_core::problem::ProblemError;
use assay_core::text::{ForeignLines, ForeignText, ShownPath};
use assay_fixture::FixtureError;
use assay_judge::judge::JudgeError;

/// The reason why training cannot go on: one line that names the file or field.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The implementation of a loss failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A batch does not fit its logits or its spec.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// An operation of candle failed.
    #[error("candle: {0}")]
    Candle(#[from] CandleError),
    /// There is no such implementation, or it does not run here.
    #[error("kernel `{id}`: {reason}")]
    Kernel {
        /// The implementation that was asked for.
        id: String,
        /// The reason why it is not available.
        reason: ForeignLines,
    },
    /// An implementation of the LM head was given logits.
    #[error("kernel `{id}`: got logits, expected hidden states and an LM head (`GrpoLoss::on_hidden`)")]
    NeedsHead {
        /// The id of the implementation.
        id: String,
    },
    /// The baseline has no such loss.
    #[error(
        "`{field}`: candle's own operations compute PPO-clip (`epsilon_low`, `epsilon_high`) over the token mean or a \
         `normalizer` only"
    )]
    Baseline {
        /// The field of the spec that the baseline does not compute.
        field: &'static str,
    },
    /// A tensor lies on a device that kernels here do not see.
    #[error("`{field}`: got a tensor on a device, expected one on the CPU")]
    Device {
        /// The name of the tensor.
        field: &'static str,
    },
    /// A tensor has a dtype that no kernel takes.
    #[error("`{field}`: got dtype {given}, expected f32, bf16 or f16")]
    Dtype {
        /// The name of the tensor.
        field: &'static str,
        /// The dtype of the tensor.
        given: ForeignText,
    },
    /// A tensor has the wrong shape.
    #[error("`{field}`: got shape {given:?}, expected {expected}")]
    Shape {
        /// The name of the tensor.
        field: String,
        /// The shape of the tensor.
        given: Vec<usize>,
        /// The shape wanted, in words.
        expected: String,
    },
    /// A setting is out of range.
    #[error("`{field}`: got {given}, expected {expected}")]
    Setting {
        /// The name of the setting.
        field: &'static str,
        /// The value of the setting.
        given: ForeignText,
        /// The values that are allowed, in words.
        expected: String,
    },
    /// An array of the run does not fit into memory.
    #[error(transparent)]
    Memory(#[from] Shortage),
    /// The extents of a policy do not fit each other.
    #[error("model: {0}")]
    Model(#[from] Misfit),
    /// A checkpoint cannot be read or believed.
    #[error(transparent)]
    Checkpoint(#[from] FixtureError),
    /// A tokenizer has ids that the policy has no logits for.
    #[error("`vocab_size`: got {given}, expected at least {needed}, the ids of the tokenizer")]
    Vocabulary {
        /// The vocabulary of the policy.
        given: usize,
        /// One more than the largest id of the tokenizer.
        needed: usize,
    },
    /// The tokenizer failed on a text.
    #[error("tokenizer: {0}")]
    Tokenizer(ForeignText),
    /// A number of the run is infinite or NaN.
    #[error("{what} is {given}: training diverged")]
    Diverged {
        /// The number that diverged, in words.
        what: &'static str,
        /// The value, infinite or NaN.
        given: f64,
    },
    /// The loss of a first update is not of the policy that was sampled.
    #[error(transparent)]
    OffPolicy(#[from] OffPolicy),
    /// An implementation does not return log-probabilities, by which a first update is seen to be of the policy that was sampled.
    #[error(
        "kernel: got a loss without log-probabilities, expected them: the ratio of a rollout's first update must be 1"
    )]
    NoLogp,
    /// The sampler draws from another distribution than the loss scores.
    #[error(
        "step {step}: the sampler's log-probabilities are {gap:e} nats from those of the loss in the mean, expected at most \
         {limit:e}: it samples what the loss does not score"
    )]
    Sampler {
        /// The step, from 1 on.
        step: usize,
        /// The mean distance of the log-probabilities, nats.
        gap: f64,
        /// The largest that rounding explains.
        limit: f64,
    },
    /// A step cannot be judged.
    #[error(transparent)]
    Judge(#[from] JudgeError),
    /// The threads asked for cannot be had.
    #[error("threads: {0}")]
    Threads(String),
    /// The stop flag was set, by Ctrl-C.
    #[error("interrupted {done}")]
    Interrupted {
        /// The part of the run that was done, in words.
        done: String,
    },
    /// The system refused an operation on a file.
    #[error("{path}: cannot {action}: {reason}")]
    Io {
        /// The path of the file.
        path: ShownPath,
        /// The operation that was tried, a verb.
        action: &'static str,
        /// The error of the system.
        reason: io::Error,
    },
    /// A file has content that is not valid there.
    #[error("{path}: {reason}")]
    File {
        /// The path of the file.
        path: ShownPath,
        /// The finding and the expectation, in words.
        reason: ForeignText,
    },
}

impl TrainError {
    fn setting(field: &'static str, given: impl ToString, expected: &str) -> Self {
        TrainError::Setting { field, given: given.to_string().into(), expected: expected.into() }
    }

    fn io(path: &Path, action: &'static str, reason: io::Error) -> Self {
        TrainError::Io { path: path.into(), action, reason }
    }

    fn file(path: &Path, reason: String) -> Self {
        TrainError::File { path: path.into(), reason: reason.into() }
    }
}
