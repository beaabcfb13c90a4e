//! The ratio between the current policy and the one that is corrected for.

use serde::{Deserialize, Serialize};

/// The ratio `ρ` of a token, from the log-ratios `x_t = ℓ_t − old_logp_t` of its row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Ratio {
    /// From which log-ratios, and with which gradient.
    pub level: RatioLevel,
    /// `|x_t| ≤ clamp`, of [`RatioLevel::SequenceProduct`] `|Σ m x| ≤ clamp`, without gradient beyond; `> 0`, nats. 20 in
    /// verl, Tunix, SkyRL and OpenRLHF.
    pub clamp: Option<f64>,
    /// GMPO's clip of every token's log-ratio.
    pub clip: Option<LogClip>,
    /// Upper bound of the level's log-ratio, without gradient beyond; nats. 10 in verl's and Tunix's GSPO.
    pub cap: Option<f64>,
    /// Added to the token count of [`RatioLevel::Sequence`] and [`RatioLevel::SequenceToken`], `≥ 0`; 0 of a product, which has
    /// none.
    pub denominator_epsilon: f64,
}

/// Which log-ratios a token's ratio is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// `ρ_t = exp(x_t)`
    #[default]
    Token,
    /// `ρ = exp(Σ m x / Σ m)` for all tokens of the row, with the gradient of the mean (GSPO, GMPO).
    Sequence,
    /// The same value, but `∂ln ρ_t/∂ℓ_u = 1[t=u]` (GSPO-token).
    SequenceToken,
    /// `ρ = exp(Σ m x)` for all tokens of the row, with the gradient of the sum (TRL's RLOO, verl's `bypass_mode`).
    SequenceProduct,
}

impl RatioLevel {
    /// Whether the tokens of a row share a ratio, and what each owes to it.
    pub fn is_shared(self) -> bool {
        matches!(self, Self::Sequence | Self::SequenceProduct)
    }
}

/// GMPO: `x_t` is held to `≤ high` where `A > 0` and to `≥ −low` where `A < 0`, without gradient beyond; 0 where `A = 0`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogClip {
    /// Nats, `≥ 0`.
    pub low: f64,
    /// Nats, `≥ 0`.
    pub high: f64,
}

/// Where the denominator of the ratio comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogp {
    /// The problem's `old_logp`.
    Given,
    /// `stop_gradient(logp)`: the ratio is exactly 1 and keeps its gradient. What TRL does when `old_logps` is `None`.
    Current,
    /// The problem's `rollout_logp`: the policy that sampled is the one that is corrected for.
    Rollout,
}
