//! [`RunSummary`]: a run in a few numbers, under the names that MLLM-JAX logs.

use serde::{Deserialize, Serialize};

use super::metrics::{GreedyEvaluation, StepRecord};

/// The number of last steps over which times are averaged.
const LAST: usize = 10;

/// A run in a few numbers. Times are seconds, means over the last ten steps; the rest is of the last step, unless its name
/// says otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names that they are written under say it")]
pub struct RunSummary {
    pub steps: usize,
    /// The number of steps without a record: the curve of a run that resumed from its checkpoint had been shortened.
    pub steps_missing: usize,
    #[serde(rename = "time/train/step_avg_last10_s")]
    pub step_s: f64,
    #[serde(rename = "time/train/rollout_generate_s")]
    pub rollout_s: f64,
    #[serde(rename = "time/train/update_s")]
    pub update_s: f64,
    #[serde(rename = "time/train/loss_step_s")]
    pub loss_step_s: f64,
    #[serde(rename = "throughput/train/valid_tokens_per_s_update")]
    pub tokens_per_s: f64,
    #[serde(rename = "train-other/total_valid_token_count")]
    pub total_tokens: usize,
    #[serde(rename = "bytes/train/loss_step")]
    pub loss_step_bytes: Option<usize>,
    #[serde(rename = "bytes/train/update")]
    pub update_bytes: Option<usize>,
    #[serde(rename = "eval/step_0")]
    pub before: Option<GreedyEvaluation>,
    #[serde(flatten)]
    pub evaluation: Option<GreedyEvaluation>,
    pub loss: f64,
    pub entropy: f64,
    pub clip_low: f64,
    pub clip_high: f64,
    pub clip_region: f64,
    pub grad_norm: f64,
}

impl RunSummary {
    /// Summarises a run's steps; `None` if there are no records.
    pub fn from_records(records: &[StepRecord]) -> Option<Self> {
        let last = records.last()?;
        let timed = &records[records.len().saturating_sub(LAST)..];
        let mean = |of: fn(&StepRecord) -> f64| timed.iter().map(of).sum::<f64>() / timed.len() as f64;
        let tokens = timed.iter().map(|record| record.valid_tokens).sum::<usize>() as f64;
        let most = |of: fn(&StepRecord) -> Option<usize>| timed.iter().filter_map(of).max();
        Some(Self {
            steps: last.step,
            steps_missing: last.step - records.len(),
            step_s: mean(|record| record.step_s),
            rollout_s: mean(|record| record.rollout_s),
            update_s: mean(|record| record.update_s),
            loss_step_s: mean(|record| record.loss_step_s),
            tokens_per_s: tokens / timed.iter().map(|record| record.update_s).sum::<f64>(),
            total_tokens: records.iter().map(|record| record.valid_tokens).sum(),
            loss_step_bytes: most(|record| record.loss_step_bytes),
            update_bytes: most(|record| record.update_bytes),
            before: records.first().and_then(|record| record.before),
            evaluation: records.iter().rev().find_map(|record| record.evaluation),
            loss: last.loss,
            entropy: last.entropy,
            clip_low: last.clip_low,
            clip_high: last.clip_high,
            clip_region: last.clip_region,
            grad_norm: last.grad_norm,
        })
    }
}
