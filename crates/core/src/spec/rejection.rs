//! Rules that leave tokens out of the loss or of one of its terms.

use serde::{Deserialize, Serialize};

use super::{LossTerms, OldLogp};

/// A rule that rejects tokens where a statistic of `y_t = old_logp_t − rollout_logp_t` is out of bounds. A token that
/// the sampler did not score has `y = 0`, and its old probability for both. [`RolloutWeights`](super::RolloutWeights)
/// are computed from all unmasked tokens, rejected ones included.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Rejection {
    /// The estimator of one token's divergence.
    pub estimator: RejectionEstimator,
    /// The tokens that the statistic is taken over.
    pub level: RejectionLevel,
    /// The smallest value that is accepted; `None` is no lower bound.
    #[serde(default)]
    pub min: Option<f64>,
    /// The largest value that is accepted.
    pub max: f64,
    /// Whether a rejected token loses only the terms of `drops_from` and still counts in denominators, in its
    /// sequence's ratio and in the entropy bonus (SkyRL; Unsloth except for the bonus). Otherwise it is treated as
    /// masked (verl).
    #[serde(default)]
    pub counts: bool,
    /// The terms that a rejected token loses if it still counts.
    #[serde(default = "both_terms")]
    pub drops_from: LossTerms,
}

fn both_terms() -> LossTerms {
    LossTerms::PolicyAndKl
}

/// The estimator of one token's divergence between the old policy and the sampler's, with `p = exp(rollout_logp)` and
/// `q = exp(old_logp)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RejectionEstimator {
    /// The log-ratio `−y`, with `|y| ≤ 20`.
    K1,
    /// Half its square `y²/2`, with `|y| ≤ 20`.
    K2,
    /// The difference `e^y − 1 − y`, with `|y| ≤ 20`.
    K3,
    /// The divergence `p·ln(p/q) + (1−p)·ln((1−p)/(1−q))`, both probabilities clamped to `[1e-6, 1 − 1e-6]` (OpenRLHF).
    BinaryKl,
    /// The distance `|p − q|`, both probabilities clamped to `[1e-6, 1 − 1e-6]` (OpenRLHF's `tv`).
    TotalVariation,
    /// The difference of probabilities, `q − p` (ROLL).
    Probability,
    /// The larger of ratio and inverse ratio, `e^|y|` (NeMo's `seq_logprob_error_threshold`, as a sequence's mean).
    AbsoluteRatio,
}

/// The statistic that a rejection compares with its bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RejectionLevel {
    /// The estimate of each token, for this token alone.
    Token,
    /// The sum of the estimates over the sequence.
    SequenceSum,
    /// The mean of the estimates over the sequence.
    SequenceMean,
    /// The largest estimate of the sequence.
    SequenceMax,
    /// The smallest estimate of the sequence: with K1 and a minimum alone it is the other end of
    /// [`SequenceMax`](Self::SequenceMax) (SkyRL's outliers).
    SequenceMin,
    /// The mean of unclamped `y²` over the batch (M2PO): the tokens with the largest values are rejected, as few as
    /// bring the mean of the remaining ones below `max`, the earlier of equal ones first; at least one token remains.
    /// It requires [`RejectionEstimator::K2`], no `min` and `counts: false`.
    SecondMoment,
}

/// DeepSeek-V3.2's off-policy sequence mask: a token keeps its policy term where `A ≥ 0` or
/// `Σ m (behaviour − ℓ) / Σ m ≤ threshold`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct OffPolicyMask {
    /// The largest mean divergence that is kept, nats.
    pub threshold: f64,
    /// The source of the log-probabilities `behaviour`: `given` for `old_logp`, `rollout` for `rollout_logp`. A NaN in
    /// `rollout_logp` adds 0.
    pub behaviour: OldLogp,
}

/// A mask that keeps the policy term of tokens whose entropy is at least the `1 − fraction` quantile of the batch's
/// unmasked tokens, interpolated linearly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TopEntropy {
    /// The fraction of tokens that keep their policy term, above 0 and at most 1.
    pub fraction: f64,
    /// The quantity from which the other tokens are dropped.
    #[serde(default)]
    pub drops: DroppedTerm,
    /// The values that are rounded to f32 on the way; it matters where the quantile is the entropy of a token.
    #[serde(default)]
    pub precision: QuantilePrecision,
}

/// The values of [`TopEntropy`] that are rounded to f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum QuantilePrecision {
    /// No value is rounded: all are f64.
    #[default]
    Exact,
    /// The fraction, the entropies that the quantile is taken of, and the quantile; not the entropies that are compared
    /// with it. This is TRL in f64.
    F32Threshold,
    /// The entropies that are compared with the quantile as well: TRL as it usually runs.
    F32,
}

/// The quantity from which a token of low entropy is dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum DroppedTerm {
    /// The policy loss; the token still counts in denominators and in its sequence's ratio.
    #[default]
    PolicyTerm,
    /// The mean log-ratio of the sequence; the token keeps its policy loss (TRL's GMPO).
    Ratio,
}
