//! The KL penalty against a reference policy.

use serde::{Deserialize, Serialize};

use super::Averaging;

/// The KL penalty `beta · kl(d)` with `d = ref_logp − logp`.
///
/// ```text
/// d   = clamp(ref_logp − ℓ, ±difference_clamp)
/// kl  = estimator(d) · importance            clamped to ±value_clamp after the estimator, or after the product
/// ```
///
/// The gradient is 0 beyond a clamp.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Kl {
    /// The factor of the penalty in the loss, `≥ 0`.
    pub beta: f64,
    /// The estimator of the divergence from one sampled token.
    #[serde(default)]
    pub estimator: KlEstimator,
    /// The gradient of the penalty: the estimator's own, or that of `k2`.
    #[serde(default)]
    pub gradient: KlGradient,
    /// The importance weight that multiplies the estimate.
    #[serde(default)]
    pub importance: KlImportance,
    /// The bound of `|d|`, `> 0`, nats; 20 in verl.
    #[serde(default)]
    pub difference_clamp: Option<f64>,
    /// The bound of `|kl|`, `> 0`, nats; 10 in verl.
    #[serde(default)]
    pub value_clamp: Option<f64>,
    /// Whether `value_clamp` bounds the product with the importance weight (Unsloth) instead of the estimate before it.
    #[serde(default)]
    pub clamp_after_importance: bool,
    /// The reduction of the penalty; `None` is that of the policy term.
    #[serde(default)]
    pub averaging: Option<Averaging>,
}

impl Kl {
    /// Returns the penalty `beta · estimator(ref_logp − ℓ)`, without clamps, importance weight or a separate reduction.
    pub fn plain(beta: f64, estimator: KlEstimator) -> Self {
        Self {
            beta,
            estimator,
            gradient: KlGradient::Own,
            importance: KlImportance::One,
            difference_clamp: None,
            value_clamp: None,
            clamp_after_importance: false,
            averaging: None,
        }
    }
}

/// The estimator of `KL(policy ‖ reference)` from one sampled token, with `d = ref_logp − logp`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// The log-ratio itself, `−d`: unbiased, of any sign.
    K1,
    /// Half its square, `d² / 2`: biased, never negative.
    K2,
    /// The difference `exp(d) − d − 1`: unbiased, never negative.
    #[default]
    K3,
    /// The absolute value `|d|`, with gradient 0 at 0.
    Abs,
}

/// The gradient of the KL estimate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum KlGradient {
    /// The derivative of the estimate as it is.
    #[default]
    Own,
    /// The derivative of `k2` without clamps, `−(ref_logp − ℓ)`: unbiased, whatever the value is (verl's `k1+`, `k3+`).
    K2,
    /// The gradient of [`K2`](Self::K2) times the token's `sg(min(exp(ℓ − old_logp), bound))`, with the given bound
    /// `> 0`: 10 in OpenRLHF.
    K2Weighted(f64),
}

/// The factor of the KL estimate, differentiated along with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum KlImportance {
    /// No factor: the estimate alone.
    #[default]
    One,
    /// The ratio `ρ` of the token's level, before any clip: DeepSeek-V3.2's bias correction.
    Ratio,
    /// The factor `exp(x)` of the token's own log-ratio after its clamp and clip, at any level (slime's GSPO).
    TokenRatio,
    /// The factor `exp(ℓ − rollout_logp)`, constant where `difference_clamp` bounds the difference, and 0 where
    /// `rollout_logp` is NaN (NeMo's `use_on_policy_kl_approximation`).
    Rollout,
    /// The factor `exp(ℓ − stop_gradient(ℓ))`, which is 1 and has the derivative 1, or 0 where `difference_clamp`
    /// bounds the difference (NeMo).
    Score,
}
