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
/// Beyond a clamp the gradient is 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kl {
    /// Weight, `≥ 0`.
    pub beta: f64,
    /// The estimator.
    #[serde(default)]
    pub estimator: KlEstimator,
    /// Whose gradient it has.
    #[serde(default)]
    pub gradient: KlGradient,
    /// What it is multiplied by.
    #[serde(default)]
    pub importance: KlImportance,
    /// Bound of `|d|`, `> 0`, nats. 20 in verl.
    #[serde(default)]
    pub difference_clamp: Option<f64>,
    /// Bound of `|kl|`, `> 0`, nats. 10 in verl.
    #[serde(default)]
    pub value_clamp: Option<f64>,
    /// Whether `value_clamp` bounds the product with the importance (unsloth), or the estimate before it.
    #[serde(default)]
    pub clamp_after_importance: bool,
    /// How it becomes one number; `None`: with the weights of the policy term.
    #[serde(default)]
    pub averaging: Option<Averaging>,
}

impl Kl {
    /// `beta · estimator`, and nothing more.
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

/// Estimators of `KL(policy ‖ reference)` from one sampled token, with `d = ref_logp − logp`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `−d`
    K1,
    /// `d² / 2`
    K2,
    /// `exp(d) − d − 1`
    #[default]
    K3,
    /// `|d|`
    Abs,
}

/// Whose gradient the KL estimate has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlGradient {
    /// Its own.
    #[default]
    Own,
    /// That of `k2` without clamps, `−(ref_logp − ℓ)`: unbiased, whatever the value (verl's `k1+`, `k3+`).
    K2,
    /// The same times `sg(min(exp(ℓ − old_logp), bound))` of the token, the bound given, `> 0`: 10 in OpenRLHF.
    K2Weighted(f64),
}

/// What the KL estimate is multiplied by, with its gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlImportance {
    /// Nothing.
    #[default]
    One,
    /// The ratio `ρ` of the token's level, before any clip: DeepSeek-V3.2's bias correction.
    Ratio,
    /// `exp(x)` of the token's own log-ratio after its clamp and clip, whatever the level (slime's GSPO).
    TokenRatio,
    /// `exp(ℓ − rollout_logp)`, without gradient where `difference_clamp` holds the difference; 0 where `rollout_logp` is NaN
    /// (NeMo's `use_on_policy_kl_approximation`).
    Rollout,
    /// `exp(ℓ − stop_gradient(ℓ))`: 1, whose derivative is 1, or 0 where `difference_clamp` holds the difference (NeMo).
    Score,
}
