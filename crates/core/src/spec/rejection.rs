//! Rules that leave tokens out of the loss or of one of its terms.

use serde::{Deserialize, Serialize};

use super::{LossTerms, OldLogp};

/// Leaves tokens out where a statistic of `y_t = old_logp_t − rollout_logp_t` is not within bounds. A token that was not
/// scored has `y = 0`, and both probabilities its old one. [`RolloutWeights`] are made of all unmasked tokens, those that are
/// rejected too.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rejection {
    /// Of one token.
    pub estimator: RejectionEstimator,
    /// Over which tokens.
    pub level: RejectionLevel,
    /// Smallest value that stays.
    #[serde(default)]
    pub min: Option<f64>,
    /// Largest value that stays.
    pub max: f64,
    /// Whether a rejected token only loses the terms of `drops_from`, and still counts in denominators, in the row's ratio
    /// and in the entropy bonus (SkyRL; Unsloth but for the bonus), or is as if masked (verl).
    #[serde(default)]
    pub counts: bool,
    /// What a rejected token that counts has no part in.
    #[serde(default = "both_terms")]
    pub drops_from: LossTerms,
}

fn both_terms() -> LossTerms {
    LossTerms::PolicyAndKl
}

/// Divergence of one token between old and sampler's policy, with `p = exp(rollout_logp)` and `q = exp(old_logp)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectionEstimator {
    /// `−y`, with `|y| ≤ 20`.
    K1,
    /// `y²/2`, with `|y| ≤ 20`.
    K2,
    /// `e^y − 1 − y`, with `|y| ≤ 20`.
    K3,
    /// `p·ln(p/q) + (1−p)·ln((1−p)/(1−q))`, both held to `[1e-6, 1 − 1e-6]` (OpenRLHF).
    BinaryKl,
    /// `|p − q|`, both so held (OpenRLHF's `tv`).
    TotalVariation,
    /// `q − p` (ROLL).
    Probability,
    /// `e^|y|` (NeMo's `seq_logprob_error_threshold`, as a row's mean).
    AbsoluteRatio,
}

/// Over which tokens of a row a rejection looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectionLevel {
    /// Each by itself.
    Token,
    /// Their sum.
    SequenceSum,
    /// Their mean.
    SequenceMean,
    /// The largest.
    SequenceMax,
    /// The smallest: of K1 with a minimum alone, the other end of [`SequenceMax`](Self::SequenceMax) (SkyRL's outliers).
    SequenceMin,
    /// The mean of `y²` over the batch, `y` as it is: the fewest of the largest leave that bring the mean of the rest below
    /// `max`, the earlier of equal ones first; one token stays (M2PO). Asks for [`RejectionEstimator::K2`], no `min` and
    /// `counts: false`.
    SecondMoment,
}

/// DeepSeek-V3.2's off-policy sequence mask: a token keeps its policy term where `A ≥ 0` or
/// `Σ m (behaviour − ℓ) / Σ m ≤ threshold`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OffPolicyMask {
    /// Nats.
    pub threshold: f64,
    /// Whose log-probabilities are `behaviour`: `given` for `old_logp`, `rollout` for `rollout_logp`. A NaN
    /// `rollout_logp` adds 0.
    pub behaviour: OldLogp,
}

/// A token keeps its policy term where its entropy is at least the `1 − fraction` quantile of the batch's unmasked
/// tokens, interpolated linearly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopEntropy {
    /// The share of tokens that stay, above 0 and below 1.
    pub fraction: f64,
    /// What the others are left out of.
    #[serde(default)]
    pub drops: DroppedTerm,
    /// What is rounded to f32 on the way, which shows where the quantile is a token's own entropy.
    #[serde(default)]
    pub precision: QuantilePrecision,
}

/// What of [`TopEntropy`] is rounded to f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuantilePrecision {
    /// Nothing.
    #[default]
    Exact,
    /// The share, the entropies that the quantile is taken of, and the quantile; not the entropies that are compared with
    /// it: TRL in f64.
    F32Threshold,
    /// Those too: TRL as it usually runs.
    F32,
}

/// What a token of low entropy is left out of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DroppedTerm {
    /// The policy loss; denominators and the row's ratio keep it.
    #[default]
    PolicyTerm,
    /// The row's mean log-ratio; the policy loss keeps it (TRL's GMPO).
    Ratio,
}
