//! Training with a kernel off and on: `assay ab`.

use serde::{Deserialize, Serialize};

use crate::number::or_nan;

/// The trainings with both losses, and the verdicts on their differences.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbComparison {
    /// Whether every verdict of the comparison passed.
    pub pass: bool,
    /// The trainings of the baseline, then those of the kernel.
    pub arms: [AbArm; 2],
    /// The figures that were compared, in the order in which they are read.
    pub verdicts: Vec<AbVerdict>,
    /// The trainings with kernels that are wrong on purpose, if they were run too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub controls: Vec<WrongKernelArm>,
}

/// A training with a kernel that is wrong on purpose, in place of the kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WrongKernelArm {
    /// The name of the bug.
    pub name: String,
    /// The gates that its losses and gradients fail.
    pub failed: Vec<String>,
    /// The verdict on its rewards.
    pub learning: AbVerdict,
}

/// The same training on every seed, with one way of computing the loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbArm {
    /// The name of the arm: `baseline` or `kernel`.
    pub name: String,
    /// The implementation's id, or the name of the framework's own operations, that compute the loss.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// The trainings, one per seed, with the same seeds in both arms.
    pub runs: Vec<TrainingRun>,
}

/// One training, from one seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingRun {
    /// The seed of parameters, data and sampling.
    pub seed: u64,
    /// The steps of the training, in order.
    pub steps: Vec<TrainingStep>,
}

/// The log of one step of training. A value that is not finite is `null` in JSON and NaN here.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingStep {
    /// The number of the step, from 1.
    pub step: u64,
    /// The loss whose gradient was taken.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// The mean total reward of the step's completions.
    #[serde(deserialize_with = "or_nan")]
    pub reward: f64,
    /// The mean entropy of the policy, in nats per token.
    #[serde(deserialize_with = "or_nan")]
    pub entropy: f64,
    /// The L2 norm of the gradient before it is clipped.
    #[serde(deserialize_with = "or_nan")]
    pub grad_norm: f64,
    /// The seconds of the loss step: from logits (or hidden states) to their gradient.
    #[serde(deserialize_with = "or_nan")]
    pub loss_step_s: f64,
    /// The seconds of the whole update: forward, loss step, backward and optimizer.
    #[serde(deserialize_with = "or_nan")]
    pub update_s: f64,
    /// The most bytes that the loss step held in addition to its inputs; NaN if they were not counted.
    #[serde(deserialize_with = "or_nan")]
    pub loss_step_bytes: f64,
}

/// One figure of both arms, with the limit of its difference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbVerdict {
    /// The name of the figure, with its unit.
    pub what: String,
    /// The figure of the baseline; `None` if there is only a difference.
    pub baseline: Option<f64>,
    /// The figure of the kernel.
    pub kernel: Option<f64>,
    /// The difference, or the ratio, that is held against the limit.
    pub difference: Option<f64>,
    /// The limit of the difference; `None` if the line only informs.
    pub limit: Option<f64>,
    /// The decision; `None` if the line only informs.
    pub pass: Option<bool>,
}
