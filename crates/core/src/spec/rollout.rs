//! Importance weights of the old policy against the sampler's, and weights of tokens that the trainer gives.

use serde::{Deserialize, Serialize};

/// Importance weights of the trainer's old policy against the sampler's: constants that multiply terms of the loss.
///
/// [`Vespo`](super::Vespo) takes their logarithms into its own weight instead of multiplying its policy term.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RolloutWeights {
    /// The source of the weights: given with the problem, or computed from two log-probabilities.
    pub source: RolloutSource,
    /// The level of a weight: one token or a whole sequence.
    #[serde(default)]
    pub level: RolloutLevel,
    /// The treatment of a weight that is out of bounds.
    #[serde(default)]
    pub outside: OutOfBounds,
    /// The smallest computed weight that is within bounds, `≥ 0`.
    #[serde(default)]
    pub min: Option<f64>,
    /// The largest computed weight that is within bounds, `> 0`.
    #[serde(default)]
    pub max: Option<f64>,
    /// The bound of `|log weight|` of a computed weight, applied before `exp`; 20 in verl.
    #[serde(default)]
    pub clamp: Option<f64>,
    /// Whether every weight is divided by their mean, unless that is 1e-8 or less. The mean is
    /// `Σ m·weight / (Σ m + 1e-8)` over the tokens of the batch; for the sequence levels it is the mean of these over
    /// the sequences that have a token, as in verl.
    #[serde(default)]
    pub normalize: bool,
    /// The contribution of a token that the sampler did not score.
    #[serde(default)]
    pub unscored: UnscoredWeight,
    /// The terms of the loss that the weights multiply.
    #[serde(default)]
    pub applies_to: LossTerms,
}

/// The source of rollout weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RolloutSource {
    /// The problem's `rollout_weights`, `[B,T]` or `[B,1]`, used unchanged except by `level: geometric`. Bounds and a
    /// clamp are refused.
    Given,
    /// Weights `exp(old_logp − rollout_logp)`. A NaN in `rollout_logp` is a token that the sampler did not score: see
    /// [`UnscoredWeight`].
    Logp,
}

/// The logarithm of a rollout weight, with `y_t = old_logp_t − rollout_logp_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RolloutLevel {
    /// The token's own log-ratio `y_t`.
    #[default]
    Token,
    /// The sum `Σ m y` over the sequence, for each of its tokens.
    Sequence,
    /// The mean `Σ m y / Σ m` over the sequence. For given weights `y = ln(weight + 1e-10)` and the count is
    /// `Σ m + 1e-8`, as in verl's `geo_mean`.
    Geometric,
    /// The token's own `y_t`; the weight is 0 where the geometric mean of the sequence is out of bounds (NeMo's
    /// `seq-mask-tis`).
    TokenGatedByGeometric,
}

/// The treatment of a rollout weight that is out of bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OutOfBounds {
    /// Sets the weight to the bound that it exceeds.
    #[default]
    Truncate,
    /// Sets the weight to 0, so that the token loses the weighted terms.
    Mask,
}

/// The contribution of a token with a NaN `rollout_logp` to computed rollout weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum UnscoredWeight {
    /// No contribution: the token counts with `y = 0` (TRL, Unsloth).
    #[default]
    One,
    /// Weight 0 for the token, or for its whole sequence at a sequence level, before bounds are applied. The gate by
    /// the geometric mean uses `y = 0` (NeMo).
    Zero,
}

/// The terms of a token's loss that a factor multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum LossTerms {
    /// The policy term alone, without the KL penalty.
    #[default]
    Policy,
    /// The policy term and the KL penalty.
    PolicyAndKl,
}

/// Weights of tokens that the trainer gives, the problem's `token_weights`, applied before the reduction. A weight of 0
/// removes its token, as if masked; [`RolloutWeights`] and rejections are nevertheless computed from all unmasked
/// tokens.
///
/// With [`Reduction::Normalizer(1.0)`](super::Reduction::Normalizer) the weights are the reduction: `1/(P · Σ n_b)`, with the
/// sum over the sequences of a prompt, is the mean over `P` prompts of their token means (SkyRL's `prompt_mean`); one weight per
/// sequence is Unsloth's `sample_weight`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct TokenWeights {
    /// The terms of the loss that the weights multiply.
    pub applies_to: LossTerms,
}
