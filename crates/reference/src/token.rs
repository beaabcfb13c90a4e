//! The inputs of one token's loss, and a term of the loss with its derivatives.

use super::ratio::{self, BoundedValue};
use super::selection::Choice;
use assay_core::spec::LossSpec;

/// The values that the loss of one token depends on.
#[derive(Clone, Copy, Debug)]
pub struct TokenInputs {
    /// The current log-probability `ℓ`, nats.
    pub logp: f64,
    /// The current log-probability that the KL penalty reads, nats; equal to `logp` unless the penalty has a softmax of its own.
    pub kl_logp: f64,
    /// The old log-probability, nats; equal to `logp` under [`OldLogp::Current`](assay_core::spec::OldLogp::Current).
    pub old_logp: f64,
    /// The log-probability under the reference policy, nats; `None` without a KL term.
    pub ref_logp: Option<f64>,
    /// The sampler's log-probability, nats; `None` if the KL term does not read it, NaN if the token was not scored.
    pub rollout_logp: Option<f64>,
    /// The advantage `A` of the token, dimensionless.
    pub advantage: f64,
    /// The log-ratio of the sequence, its mean or its sum, if the ratio is that of a sequence.
    pub row_log_ratio: Option<f64>,
    /// VESPO's `ln w` of the sequence, before it is clamped; 0 for other objectives.
    pub row_log_weight: f64,
    /// The factor of the policy term from rejections, rollout weights and token weights.
    pub policy_weight: f64,
    /// The factor of the KL estimate from rejections, rollout weights and token weights.
    pub kl_weight: f64,
    /// The choice of the off-policy mask: whether the sequence is near enough to the policy that acted.
    pub on_policy: Choice,
    /// Whether the token's entropy is among the highest.
    pub top_entropy: bool,
    /// The choice of KL-Cov or Clip-Cov about the token.
    pub selected: Choice,
    /// The divergence from the teacher; 0 for other objectives.
    pub divergence: f64,
}

impl TokenInputs {
    /// Returns `x = ℓ − old_logp` after its clamp and clip.
    pub fn log_ratio(&self, spec: &LossSpec) -> BoundedValue {
        ratio::log_ratio(&spec.ratio, self.logp - self.old_logp, self.advantage)
    }

    /// Returns `w = ln ρ`, of the token or of its sequence.
    pub fn level_log_ratio(&self, spec: &LossSpec) -> BoundedValue {
        ratio::capped(&spec.ratio, self.row_log_ratio.unwrap_or_else(|| self.log_ratio(spec).value))
    }

    /// Returns the ratio `ρ` that the objective reads.
    pub fn ratio(&self, spec: &LossSpec) -> f64 {
        self.level_log_ratio(spec).value.exp()
    }
}

/// A term of the loss, with its two derivatives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Term {
    /// The value of the term.
    pub value: f64,
    /// The derivative with respect to `ℓ`, with the log-ratio held constant.
    pub by_logp: f64,
    /// The derivative with respect to `w = ln ρ`.
    pub by_log_ratio: f64,
}

impl Term {
    /// Returns a term that depends on the ratio only.
    pub(super) fn from_ratio(value: f64, by_log_ratio: f64) -> Self {
        Self { value, by_logp: 0.0, by_log_ratio }
    }

    /// Returns the score function `−coefficient·A·ℓ`, with the coefficient held constant.
    pub(super) fn score(coefficient: f64, inputs: &TokenInputs) -> Self {
        Self::linear(-coefficient * inputs.advantage, inputs)
    }

    /// Returns the term `factor·ℓ`; 0 if the factor is 0, even if `ℓ` is −∞.
    pub(super) fn linear(factor: f64, inputs: &TokenInputs) -> Self {
        let value = if factor == 0.0 { 0.0 } else { factor * inputs.logp };
        Self { value, by_logp: factor, by_log_ratio: 0.0 }
    }

    pub(super) fn times(self, factor: f64) -> Self {
        // A masked token has no term, even if the term overflows.
        if factor == 0.0 {
            return Self::default();
        }
        Self { value: self.value * factor, by_logp: self.by_logp * factor, by_log_ratio: self.by_log_ratio * factor }
    }

    pub(super) fn plus(self, other: Term) -> Term {
        Term {
            value: self.value + other.value,
            by_logp: self.by_logp + other.by_logp,
            by_log_ratio: self.by_log_ratio + other.by_log_ratio,
        }
    }
}

/// Returns the sign of `x`: −1, 0 or 1.
pub(super) fn sign(x: f64) -> f64 {
    if x == 0.0 { 0.0 } else { x.signum() }
}
