//! The ratio between the current policy and the policy that the loss corrects for.

use serde::{Deserialize, Serialize};

/// The ratio `ρ` of a token, computed from the log-ratios `x_t = ℓ_t − old_logp_t` of its sequence.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Ratio {
    /// The log-ratios that the ratio is made of, one token's or its sequence's, and the path of its gradient.
    pub level: RatioLevel,
    /// Bound of `|x_t|`, or of `|Σ m x|` for [`RatioLevel::SequenceProduct`], with gradient 0 beyond it; `> 0`, nats.
    /// It is 20 in verl, Tunix, SkyRL and OpenRLHF.
    pub clamp: Option<f64>,
    /// GMPO's clip of the log-ratio of every token; `None` leaves them unclipped.
    pub clip: Option<LogClip>,
    /// Upper bound of the level's log-ratio, with gradient 0 beyond it unless `straight_through`; nats. It is 10 in the GSPO of
    /// verl and Tunix.
    pub cap: Option<f64>,
    /// Whether the gradient passes the cap as if there were none: the ratio is `e^cap`, and its derivative by the log-ratio too
    /// (prime-rl's `max_importance_ratio`). It requires a `cap`.
    #[serde(skip_serializing_if = "super::is_false")]
    pub straight_through: bool,
    /// A number `≥ 0` that is added to the token count of [`RatioLevel::Sequence`] and [`RatioLevel::SequenceToken`];
    /// it must be 0 for a product, which has no count.
    pub denominator_epsilon: f64,
}

/// The level of the ratio: one token, or the mean or sum over a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// The token's own ratio, `ρ_t = exp(x_t)`.
    #[default]
    Token,
    /// The geometric mean over the sequence, `ρ = exp(Σ m x / Σ m)`, for all of its tokens, with the gradient of the
    /// mean (GSPO, GMPO).
    Sequence,
    /// The value of [`Sequence`](Self::Sequence) with the gradient of the token alone, `∂ln ρ_t/∂ℓ_u = 1[t=u]`
    /// (GSPO-token).
    SequenceToken,
    /// The product over the sequence, `ρ = exp(Σ m x)`, for all of its tokens, with the gradient of the sum (TRL's
    /// RLOO, verl's `bypass_mode`).
    SequenceProduct,
}

impl RatioLevel {
    /// Whether the tokens of a sequence share one ratio through which each has a gradient.
    pub fn is_shared(self) -> bool {
        matches!(self, Self::Sequence | Self::SequenceProduct)
    }
}

/// Bounds of GMPO's clip: `x_t ≤ high` where `A > 0`, `x_t ≥ −low` where `A < 0`, and `x_t = 0` where `A = 0`, with
/// gradient 0 beyond a bound.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct LogClip {
    /// The bound where `A < 0`, `≥ 0`, nats.
    pub low: f64,
    /// The bound where `A > 0`, `≥ 0`, nats.
    pub high: f64,
}

/// The source of the log-probability that the ratio divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OldLogp {
    /// The problem's `old_logp`, of the policy before this update.
    Given,
    /// The current `logp` without its gradient: the ratio is exactly 1 and keeps its own gradient. TRL does this when
    /// `old_logps` is `None`.
    Current,
    /// The problem's `rollout_logp`: the ratio is taken against the policy that sampled.
    Rollout,
}
