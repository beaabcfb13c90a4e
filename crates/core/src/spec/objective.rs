//! The policy terms.

use serde::{Deserialize, Serialize};

/// The policy term of one token, with `ρ` its [`Ratio`](super::Ratio) and `sg` for stop-gradient.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// PPO's clipped surrogate, with the optional bounds that GRPO code adds to it.
    PpoClip(PpoClip),
    /// CISPO: `−sg(clip(ρ, lower, upper))·A·ℓ`.
    Cispo(Cispo),
    /// SAPO: a soft gate instead of a clip.
    Sapo(Sapo),
    /// VESPO: `−φ·A·ℓ` with a gamma weight `φ` of the whole row's ratio.
    Vespo(Vespo),
    /// `−A·ℓ`: REINFORCE, GPG, RLOO without a clip.
    PolicyGradient,
    /// `−ρ·A`: Tinker's importance sampling; GMPO on the sequence's ratio.
    ImportanceSampling(ImportanceSampling),
    /// `−sg(ρ·1[lower < ρ < upper])·A·ℓ`: SkyRL's `rollout_is`.
    MaskedRatio(MaskedRatio),
    /// DPPO, and prime-rl's losses: a token has a policy term while its probability has not moved too far.
    TrustRegion(TrustRegion),
    /// DRO: `−(A·ℓ − beta/2·(ln ρ)²)`.
    Dro(Dro),
    /// KL-Cov: `−ρ·A`, plus `coefficient·|ln ρ|` on the tokens selected.
    KlCov(KlCov),
    /// Clip-Cov: PPO-clip, but 0 on the tokens selected.
    ClipCov(ClipCov),
    /// TOPR: `−w₊·A·ℓ` where the token is positive, `−w₋·sg(min(ρ, upper))·A·ℓ` elsewhere.
    Topr(Topr),
    /// ASPO: the ratio upside down where `A > 0`.
    Aspo(Aspo),
    /// No policy term: the loss is the KL penalty and the entropy bonus alone.
    None,
}

/// PPO-clip: `−min(min(ρ, delta)·A, clip(ρ, 1 − epsilon_low, 1 + epsilon_high)·A)`, and for `A < 0` with a dual clip
/// `c` the smaller of that and `−c·A`.
///
/// Exactly at a bound the unclipped branch, and so its gradient, is taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PpoClip {
    /// Lower clip width, `≥ 0`: the ratio is clipped at `1 − epsilon_low` where `A < 0`.
    pub epsilon_low: f64,
    /// Upper clip width, `≥ 0`: the ratio is clipped at `1 + epsilon_high` where `A > 0`.
    pub epsilon_high: f64,
    /// Two-sided clip (INTELLECT-2): an upper bound on the unclipped ratio, `> 0`.
    pub delta: Option<f64>,
    /// Dual-clip PPO: for `A < 0` the loss stops at `−c·A`, `c > 1`.
    pub dual_clip: Option<f64>,
}

impl Default for PpoClip {
    fn default() -> Self {
        Self { epsilon_low: 0.2, epsilon_high: 0.2, delta: None, dual_clip: None }
    }
}

/// The bounds of CISPO's weight, on the ratio itself: TRL's and Liger's `epsilon_high` is `upper`, verl's and SkyRL's is
/// `upper − 1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cispo {
    /// `None`: no lower bound.
    #[serde(default)]
    pub lower: Option<f64>,
    /// `> 0`.
    pub upper: f64,
}

/// SAPO: `−(4/τ)·σ(τ(ρ − 1))·A`, with `τ` by the sign of `A`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sapo {
    /// `τ` where `A > 0`; `> 0`.
    pub tau_positive: f64,
    /// `τ` where `A ≤ 0`; `> 0`.
    pub tau_negative: f64,
}

impl Default for Sapo {
    fn default() -> Self {
        Self { tau_positive: 1.0, tau_negative: 1.05 }
    }
}

/// VESPO: `−φ·A·ℓ`, `φ = sg(exp(λ + k·ln w − λ·w))`, NaN and ∞ read as 0, with
///
/// ```text
/// ln w = Σ_t m·clamp(ℓ_t − old_logp_t, ±20) + Σ_t m·clamp(ln rollout weight, ln 1e-8, 20)
/// ```
///
/// clamped to `[ln 1e-8, 20]`; `k` and `λ` by the sign of `A`, 0 counting as positive. The rollout weight of a whole
/// sequence is added once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Vespo {
    /// `k` where `A ≥ 0`.
    pub k_positive: f64,
    /// `λ` where `A ≥ 0`; raised to 1e-4.
    pub lambda_positive: f64,
    /// `k` where `A < 0`.
    pub k_negative: f64,
    /// `λ` where `A < 0`; raised to 1e-4.
    pub lambda_negative: f64,
    /// Whether the given rollout weights of masked tokens are summed too (TRL, Liger); those computed are 1.
    pub weights_of_masked_tokens: bool,
}

impl Default for Vespo {
    fn default() -> Self {
        Self {
            k_positive: 2.0,
            lambda_positive: 3.0,
            k_negative: 3.0,
            lambda_negative: 2.0,
            weights_of_masked_tokens: false,
        }
    }
}

/// `−ρ·A`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImportanceSampling {
    /// Whether a row without tokens counts with `−A/B`, as its ratio is `exp(0)` (TRL's GMPO). Asks for one advantage a
    /// sequence, the ratio of a sequence and [`Rows::All`](super::Rows::All).
    pub empty_rows: bool,
}

/// The open interval that a ratio counts in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaskedRatio {
    /// Lower end.
    pub lower: f64,
    /// Upper end.
    pub upper: f64,
}

/// With `p = exp(ℓ)` and `p_old = exp(old_logp)`, the policy term is
///
/// ```text
/// keep · (−ρ·A)  + penalty·(ln ρ)²                         or, as a score function,
/// keep · (−sg(min(ρ, truncate))·A·ℓ) + penalty·(ln ρ)²
/// ```
///
/// where a token is kept while its probability has not moved, in the direction that `A` asks for, further than `high`
/// where `A > 0` and `low` elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrustRegion {
    /// How far.
    pub divergence: Divergence,
    /// `≥ 0`
    pub low: f64,
    /// `≥ 0`
    pub high: f64,
    /// Whether it may not have moved further in either direction (prime-rl's IPO), or only in that of `A`.
    #[serde(default)]
    pub two_sided: bool,
    /// Upper bound of a score function's ratio, `> 0`; `None`: the gradient goes through the ratio.
    #[serde(default)]
    pub truncate: Option<f64>,
    /// Weight of the squared log-ratio, `≥ 0`, on every token (prime-rl's `kl_tau`).
    #[serde(default)]
    pub penalty: f64,
}

/// Distance of the Bernoulli distributions of "this token" under two policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Divergence {
    /// `p − p_old ≤ high` where `A > 0`, `p_old − p ≤ low` elsewhere.
    TotalVariation,
    /// `p_old·(old_logp − ℓ) + (1 − p_old)·ln((1 − p_old + 1e-8)/(1 − p + 1e-8))` at most `high` or `low`, asked only
    /// where `p` has moved in the direction of `A`.
    BinaryKl,
}

/// See [`Objective::Dro`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dro {
    /// `> 0`
    pub beta: f64,
}

/// See [`Objective::KlCov`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlCov {
    /// `≥ 0`; `ppo_kl_coef` in verl.
    pub coefficient: f64,
    /// Which tokens; `None`: the problem's `selected`.
    #[serde(default)]
    pub selection: Option<TopCovariance>,
}

/// The `max(1, ⌊fraction · Σ m⌋)` unmasked tokens with the largest `(A − mean A)·(ℓ − mean ℓ)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopCovariance {
    /// Above 0, at most 1.
    pub fraction: f64,
}

/// See [`Objective::ClipCov`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClipCov {
    /// The surrogate of the other tokens.
    #[serde(default)]
    pub clip: PpoClip,
    /// Which tokens; `None`: the problem's `selected`.
    #[serde(default)]
    pub selection: Option<CovarianceBand>,
}

/// The unmasked, unclipped tokens whose covariance `(A − mean A)·(ℓ − mean ℓ)` lies strictly between `lower` and
/// `upper`; the means are over `Σ m + 1e-8`. Projects draw `max(1, ⌊fraction · Σ m⌋)` of them at random: where there are
/// more, the selection is not determined, and must be given.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CovarianceBand {
    /// `> 0`
    pub fraction: f64,
    /// Lower end.
    pub lower: f64,
    /// Upper end.
    pub upper: f64,
}

/// See [`Objective::Topr`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Topr {
    /// `w₊ ≥ 0`.
    pub positive_weight: f64,
    /// `w₋ ≥ 0`.
    pub negative_weight: f64,
    /// Upper bound of the ratio elsewhere, `> 0`.
    pub upper: f64,
    /// Which tokens are positive.
    pub positive: PositiveTokens,
}

impl Default for Topr {
    fn default() -> Self {
        Self { positive_weight: 1.0, negative_weight: 1.0, upper: 1.0, positive: PositiveTokens::Advantage }
    }
}

/// Which tokens TOPR learns from as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositiveTokens {
    /// Those with `A > 0`.
    #[default]
    Advantage,
    /// The problem's `selected`: those of a reward above 0 (ROLL).
    Selected,
}

/// ASPO (Archer2.0), with `sg` for stop-gradient:
///
/// ```text
/// A > 0   u = min(ρ, 1 + epsilon_high)   −A·u/sg(u²)          −sg(c₊)·A·ℓ  where 1/u > c₊
/// A < 0   v = max(ρ, 1 − epsilon_low)    −A·v                 −sg(c₋)·A·ℓ  where v > c₋
/// ```
///
/// Exactly at a bound the unclipped branch is taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Aspo {
    /// `≥ 0`
    pub epsilon_low: f64,
    /// `≥ 0`
    pub epsilon_high: f64,
    /// Those of the problem's `selected`, where they differ: in Archer2.0 the tokens of the lower entropies of their row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selected: Option<ClipWidths>,
    /// `c₊ > 1`
    pub dual_clip_positive: f64,
    /// `c₋ > 1`
    pub dual_clip_negative: f64,
}

impl Default for Aspo {
    fn default() -> Self {
        Self { epsilon_low: 0.2, epsilon_high: 0.2, selected: None, dual_clip_positive: 3.0, dual_clip_negative: 3.0 }
    }
}

/// How far a ratio may go from 1 before it is clipped.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClipWidths {
    /// `≥ 0`
    pub epsilon_low: f64,
    /// `≥ 0`
    pub epsilon_high: f64,
}
