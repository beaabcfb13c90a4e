//! Importance weights of the old policy against the sampler's, and weights that the trainer gives.

use serde::{Deserialize, Serialize};

/// Importance weights of the trainer's old policy against the sampler's: constants that multiply terms of the loss.
///
/// [`Vespo`] takes their logarithms into its own weight instead of multiplying its policy term.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutWeights {
    /// What they are made of.
    pub source: RolloutSource,
    /// One weight a token or a sequence.
    #[serde(default)]
    pub level: RolloutLevel,
    /// What becomes of a weight out of bounds.
    #[serde(default)]
    pub outside: OutOfBounds,
    /// Lower bound of a computed weight, `≥ 0`.
    #[serde(default)]
    pub min: Option<f64>,
    /// Upper bound of a computed weight, `> 0`.
    #[serde(default)]
    pub max: Option<f64>,
    /// `|log weight| ≤ clamp` of a computed weight, before `exp`; 20 in verl.
    #[serde(default)]
    pub clamp: Option<f64>,
    /// Divides every weight by their mean, unless that is 1e-8 or less: `Σ m·weight / (Σ m + 1e-8)` over the batch's
    /// tokens, or for the sequence levels the mean of the same over each row that has any, as in verl.
    #[serde(default)]
    pub normalize: bool,
    /// What a token that the sampler did not score adds.
    #[serde(default)]
    pub unscored: UnscoredWeight,
    /// What they multiply.
    #[serde(default)]
    pub applies_to: LossTerms,
}

/// Where rollout weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutSource {
    /// The problem's `rollout_weights`, `[B,T]` or `[B,1]`, taken as they are but for `level: geometric`: bounds and a
    /// clamp are refused.
    Given,
    /// `exp(old_logp − rollout_logp)`; a NaN `rollout_logp` is a token that was not scored: see [`UnscoredWeight`].
    Logp,
}

/// Of what a rollout weight is the `exp`, with `y_t = old_logp_t − rollout_logp_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutLevel {
    /// `y_t`
    #[default]
    Token,
    /// `Σ m y`
    Sequence,
    /// `Σ m y / Σ m`; of given weights `y = ln(weight + 1e-10)` and the count is `Σ m + 1e-8`, as in verl's `geo_mean`.
    Geometric,
    /// `y_t`, or 0 for the weight where the geometric mean is out of bounds (NeMo's `seq-mask-tis`).
    TokenGatedByGeometric,
}

/// What becomes of a rollout weight out of bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutOfBounds {
    /// It is set to the bound.
    #[default]
    Truncate,
    /// It is set to 0.
    Mask,
}

/// What a token with a NaN `rollout_logp` adds to computed rollout weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnscoredWeight {
    /// `y = 0`: nothing (TRL, Unsloth).
    #[default]
    One,
    /// The weight that it has a part in is 0, before bounds: its own, or its sequence's. A gate by the geometric mean takes
    /// `y = 0` (NeMo).
    Zero,
}

/// Which terms of a token's loss a factor multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossTerms {
    /// The policy term alone.
    #[default]
    Policy,
    /// The policy term and the KL penalty.
    PolicyAndKl,
}

/// What the problem's `token_weights` multiply, before the reduction. A weight of 0 leaves its token out, as if masked;
/// [`RolloutWeights`] and rejections are made of all unmasked tokens, this one too.
///
/// Over [`Reduction::Normalizer`] of 1 they are the reduction: `1/(P · Σ n_b)`, the sum over a prompt's rows, is the mean over
/// `P` prompts of their token means (SkyRL's `prompt_mean`); a row's own weight is Unsloth's `sample_weight`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TokenWeights {
    /// Which terms.
    pub applies_to: LossTerms,
}
