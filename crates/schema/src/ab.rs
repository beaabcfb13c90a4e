//! Training with a kernel off and on: `assay ab`.

use serde::{Deserialize, Serialize};

use crate::number::or_nan;

/// Both arms, and what was decided of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Whether every verdict passed.
    pub pass: bool,
    /// The baseline, then the kernel.
    pub arms: [Arm; 2],
    /// What was compared, in the order to be read.
    pub verdicts: Vec<Verdict>,
    /// Arms that are wrong on purpose, where they were run too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub controls: Vec<Control>,
}

/// An arm that is wrong on purpose, instead of the kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Control {
    /// What is wrong.
    pub name: String,
    /// The gates that it fails.
    pub failed: Vec<String>,
    /// What its rewards come to.
    pub learning: Verdict,
}

/// One arm: the same training on every seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    /// `baseline` or `kernel`.
    pub name: String,
    /// What computes the loss: an implementation's id, or the framework's own operations.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// A run for each seed, the same seeds in both arms.
    pub runs: Vec<Run>,
}

/// One training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Of parameters, data and sampling.
    pub seed: u64,
    /// In order.
    pub steps: Vec<Step>,
}

/// What one step of training logs. A value that is no number is `null` in JSON and NaN here.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Counted from 1.
    pub step: u64,
    /// The loss that was differentiated.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// Mean total reward of the step's completions.
    #[serde(deserialize_with = "or_nan")]
    pub reward: f64,
    /// Mean entropy of the policy, in nats a token.
    #[serde(deserialize_with = "or_nan")]
    pub entropy: f64,
    /// L2 norm of the gradient before it is clipped.
    #[serde(deserialize_with = "or_nan")]
    pub grad_norm: f64,
    /// Seconds of the loss step: from logits (or hidden states) to their gradient.
    #[serde(deserialize_with = "or_nan")]
    pub loss_step_s: f64,
    /// Seconds of the whole update: forward, loss step, backward and optimizer.
    #[serde(deserialize_with = "or_nan")]
    pub update_s: f64,
    /// The most bytes that the loss step held beyond what there was; no number where nobody counted.
    #[serde(deserialize_with = "or_nan")]
    pub loss_step_bytes: f64,
}

/// One line of the verdict: a figure of both arms, and how far apart they may be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// What was compared, its unit included.
    pub what: String,
    /// Of the baseline; `None` where there is but a difference.
    pub baseline: Option<f64>,
    /// Of the kernel.
    pub kernel: Option<f64>,
    /// What is held against the limit: a difference, or a ratio.
    pub difference: Option<f64>,
    /// The limit; `None` where the line only informs.
    pub limit: Option<f64>,
    /// The decision; `None` where the line only informs.
    pub pass: Option<bool>,
}
