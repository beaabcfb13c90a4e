//! What one token's loss depends on, and a term of it with its derivatives.

use super::ratio::{self, BoundedValue};
use super::selection::Choice;
use assay_core::spec::LossSpec;

/// What one token's loss depends on.
#[derive(Clone, Copy, Debug)]
pub struct TokenInputs {
    /// `ℓ`, nats.
    pub logp: f64,
    /// Nats; equal to `logp` under [`OldLogp::Current`](assay_core::spec::OldLogp::Current).
    pub old_logp: f64,
    /// Nats; `None` without a KL term.
    pub ref_logp: Option<f64>,
    /// Nats, of the sampler; `None` where the KL term does not read it, NaN where the token was not scored.
    pub rollout_logp: Option<f64>,
    /// `A`.
    pub advantage: f64,
    /// The log-ratio of the row, its mean or its sum, where the ratio is that of a sequence.
    pub row_log_ratio: Option<f64>,
    /// VESPO's `ln w` of the row, before it is clamped; 0 for the others.
    pub row_log_weight: f64,
    /// What the sampler's correction multiplies the policy term by.
    pub policy_weight: f64,
    /// And the KL estimate.
    pub kl_weight: f64,
    /// Whether the row is near enough to the policy that acted.
    pub on_policy: Choice,
    /// Whether the entropy is among the highest.
    pub top_entropy: bool,
    /// Whether KL-Cov or Clip-Cov selects the token.
    pub selected: Choice,
}

impl TokenInputs {
    /// `x = ℓ − old_logp` after its clamp and clip.
    pub fn log_ratio(&self, spec: &LossSpec) -> BoundedValue {
        ratio::log_ratio(&spec.ratio, self.logp - self.old_logp, self.advantage)
    }

    /// `w = ln ρ`, of the token or of its row.
    pub fn level_log_ratio(&self, spec: &LossSpec) -> BoundedValue {
        ratio::capped(&spec.ratio, self.row_log_ratio.unwrap_or_else(|| self.log_ratio(spec).value))
    }

    /// `ρ`.
    pub fn ratio(&self, spec: &LossSpec) -> f64 {
        self.level_log_ratio(spec).value.exp()
    }
}

/// A value and its two derivatives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Term {
    /// The value.
    pub value: f64,
    /// Its derivative with respect to `ℓ`, the log-ratio held.
    pub by_logp: f64,
    /// Its derivative with respect to `w = ln ρ`.
    pub by_log_ratio: f64,
}

impl Term {
    /// A term that only depends on the ratio.
    pub(super) fn from_ratio(value: f64, by_log_ratio: f64) -> Self {
        Self { value, by_logp: 0.0, by_log_ratio }
    }

    /// `−coefficient·A·ℓ` with the coefficient held constant.
    pub(super) fn score(coefficient: f64, inputs: &TokenInputs) -> Self {
        let by_logp = -coefficient * inputs.advantage;
        Self { value: by_logp * inputs.logp, by_logp, by_log_ratio: 0.0 }
    }

    pub(super) fn times(self, factor: f64) -> Self {
        // A token that a mask leaves out has no term, even where it overflows.
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

/// −1, 0 or 1.
pub(super) fn sign(x: f64) -> f64 {
    if x == 0.0 { 0.0 } else { x.signum() }
}
