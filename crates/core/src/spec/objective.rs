//! The policy terms of the loss family, with the numbers of each.
//!
//! ```
//! # use assay_core as assay;
//! use assay::spec::{Cispo, Objective, PpoClip, Sapo, TrustRegion};
//!
//! let decoupled = Objective::PpoClip(PpoClip { epsilon_low: 0.2, epsilon_high: 0.28, ..PpoClip::default() });
//! let cispo = Objective::Cispo(Cispo { lower: None, upper: 5.0 });
//! let sapo = Objective::Sapo(Sapo { tau_positive: 1.0, tau_negative: 1.05 });
//! let ipo: Objective = serde_json::from_str(
//!     r#"{"trust_region": {"divergence": "total_variation", "low": 0.1, "high": 0.1, "two_sided": true}}"#,
//! )?;
//! assert!(matches!(ipo, Objective::TrustRegion(TrustRegion { truncate: None, .. })));
//! assert_eq!(serde_json::to_string(&cispo)?, r#"{"cispo":{"lower":null,"upper":5.0}}"#);
//! # Ok::<(), serde_json::Error>(())
//! ```

use serde::{Deserialize, Serialize};

use super::Distillation;

/// The policy term of one token, with `ρ` its [`Ratio`](super::Ratio), `A` its advantage, `ℓ` its log-probability and
/// `sg` for stop-gradient.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// PPO's clipped surrogate, with the optional bounds that GRPO code adds to it.
    PpoClip(PpoClip),
    /// CISPO, the score function `−sg(clip(ρ, lower, upper))·A·ℓ`.
    Cispo(Cispo),
    /// SAPO, the surrogate with a sigmoid gate instead of a clip.
    Sapo(Sapo),
    /// VESPO, `−φ·A·ℓ` with a gamma weight `φ` of the whole sequence's ratio.
    Vespo(Vespo),
    /// The policy gradient `−A·ℓ`: REINFORCE, GPG, and RLOO without a clip.
    PolicyGradient,
    /// The importance-sampled surrogate `−ρ·A`: Tinker's, and GMPO with the ratio of the sequence.
    ImportanceSampling(ImportanceSampling),
    /// The masked score function `−sg(ρ·1[lower < ρ < upper])·A·ℓ`, or the masked ratio: icepop.
    MaskedRatio(MaskedRatio),
    /// A trust region (DPPO, prime-rl): a token has a policy term while its probability has not moved too far.
    TrustRegion(TrustRegion),
    /// DRO, the quadratic penalty `−(A·ℓ − beta/2·(ln ρ)²)`.
    Dro(Dro),
    /// KL-Cov, `−ρ·A` and in addition `coefficient·|ln ρ|` on the selected tokens.
    KlCov(KlCov),
    /// Clip-Cov, PPO-clip with 0 on the selected tokens.
    ClipCov(ClipCov),
    /// TOPR, `−w₊·A·ℓ` on positive tokens and `−w₋·sg(min(ρ, upper))·A·ℓ` on the others.
    Topr(Topr),
    /// ASPO, PPO-clip with the inverse ratio where `A > 0`.
    Aspo(Aspo),
    /// Cross-entropy `−ℓ`, with label smoothing and z-loss: no advantage, and no ratio.
    CrossEntropy(CrossEntropy),
    /// The divergence of the policy, a student, from a teacher over the vocabulary.
    Distillation(Distillation),
    /// No policy term: the loss is the KL penalty and the entropy bonus alone.
    None,
}

/// PPO-clip: `−min(min(ρ, delta)·A, clip(ρ, 1 − epsilon_low, 1 + epsilon_high)·A)`. With a dual clip `c`, and where
/// `A < 0`, the term is the smaller of that and `−c·A`.
///
/// A ratio exactly at a bound takes the unclipped branch, and so has its gradient.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PpoClip {
    /// The lower clip width, `≥ 0`: the ratio is clipped at `1 − epsilon_low` where `A < 0`.
    pub epsilon_low: f64,
    /// The upper clip width, `≥ 0`: the ratio is clipped at `1 + epsilon_high` where `A > 0`.
    pub epsilon_high: f64,
    /// The upper bound of the unclipped ratio, `> 0`, of a two-sided clip (INTELLECT-2).
    pub delta: Option<f64>,
    /// The bound `c > 1` of dual-clip PPO: where `A < 0` the loss is at most `−c·A`.
    pub dual_clip: Option<f64>,
}

impl Default for PpoClip {
    fn default() -> Self {
        Self { epsilon_low: 0.2, epsilon_high: 0.2, delta: None, dual_clip: None }
    }
}

/// The bounds of CISPO's weight, on the ratio itself: `upper` is `epsilon_high` in TRL and Liger, and
/// `1 + epsilon_high` in verl and SkyRL.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Cispo {
    /// The lower bound of the weight; `None` is no lower bound.
    #[serde(default)]
    pub lower: Option<f64>,
    /// The upper bound of the weight, `> 0`.
    pub upper: f64,
}

/// SAPO: `−(4/τ)·σ(τ(ρ − 1))·A`, with `τ` chosen by the sign of `A`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Sapo {
    /// The temperature `τ > 0` of the gate where `A > 0`.
    pub tau_positive: f64,
    /// The temperature `τ > 0` of the gate where `A ≤ 0`.
    pub tau_negative: f64,
}

impl Default for Sapo {
    fn default() -> Self {
        Self { tau_positive: 1.0, tau_negative: 1.05 }
    }
}

/// VESPO: `−φ·A·ℓ` with `φ = sg(exp(λ + k·ln w − λ·w))`, or 0 where that is NaN or ∞, and
///
/// ```text
/// ln w = Σ_t m·clamp(ℓ_t − old_logp_t, ±20) + Σ_t m·clamp(ln rollout weight, ln 1e-8, 20)
/// ```
///
/// clamped to `[ln 1e-8, 20]`. The sign of `A` chooses `k` and `λ`, with 0 as positive. The rollout weight of a whole
/// sequence is added once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Vespo {
    /// The exponent `k` where `A ≥ 0`.
    pub k_positive: f64,
    /// The rate `λ` where `A ≥ 0`; values below 1e-4 are raised to it.
    pub lambda_positive: f64,
    /// The exponent `k` where `A < 0`.
    pub k_negative: f64,
    /// The rate `λ` where `A < 0`; values below 1e-4 are raised to it.
    pub lambda_negative: f64,
    /// Whether the given rollout weights of masked tokens are summed too (TRL, Liger); computed weights of masked
    /// tokens are 1.
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

/// The surrogate `−ρ·A`, without a clip.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ImportanceSampling {
    /// Whether a sequence without unmasked tokens counts with `−A/B`, since its ratio is `exp(0)` (TRL's GMPO). It
    /// requires one advantage per sequence, the ratio of a sequence and [`Rows::All`](super::Rows::All).
    pub empty_rows: bool,
}

/// The masked score function, or with `surrogate` the masked ratio `−ρ·1[lower < ρ < upper]·A`, differentiated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct MaskedRatio {
    /// The lower end of the interval of ratios that count, itself excluded.
    pub lower: f64,
    /// The upper end of the interval, itself excluded.
    pub upper: f64,
    /// Whether the term is `−ρ·A` inside, with the gradient of the ratio, instead of the score function (icepop).
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub surrogate: bool,
}

/// A trust region around the old policy. With `p = exp(ℓ)` and `p_old = exp(old_logp)` the policy term is
///
/// ```text
/// keep · (−ρ·A)  + penalty·(ln ρ)²                         or, as a score function,
/// keep · (−sg(min(ρ, truncate))·A·ℓ) + penalty·(ln ρ)²
/// ```
///
/// A token is kept unless its probability has moved in the direction of `A` by more than `high` where `A > 0`, or `low`
/// elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TrustRegion {
    /// The divergence between the current and the old probability of the token.
    pub divergence: Divergence,
    /// The largest divergence that keeps a token with `A ≤ 0`, `≥ 0`.
    pub low: f64,
    /// The largest divergence that keeps a token with `A > 0`, `≥ 0`.
    pub high: f64,
    /// Whether a move in either direction removes the token (prime-rl's IPO); otherwise only a move in the direction of
    /// `A` does.
    #[serde(default)]
    pub two_sided: bool,
    /// The upper bound of the score function's ratio, `> 0`; with `None` the gradient goes through the ratio.
    #[serde(default)]
    pub truncate: Option<f64>,
    /// The weight `≥ 0` of the squared log-ratio on every token (prime-rl's `kl_tau`).
    #[serde(default)]
    pub penalty: f64,
}

/// The divergence between the Bernoulli distributions "this token or another" under two policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Divergence {
    /// The distance `|p − p_old|`: at most `high` where `A > 0`, at most `low` elsewhere.
    TotalVariation,
    /// The divergence `p_old·(old_logp − ℓ) + (1 − p_old)·ln((1 − p_old + 1e-8)/(1 − p + 1e-8))`: at most `high` where
    /// `A > 0`, at most `low` elsewhere.
    BinaryKl,
}

/// The number of [`Objective::Dro`], the quadratic penalty.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Dro {
    /// The weight of the squared log-ratio, `> 0`.
    pub beta: f64,
}

/// The numbers of [`Objective::KlCov`], a penalty on the tokens with the largest covariance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct KlCov {
    /// The weight `≥ 0` of `|ln ρ|` on the selected tokens; `ppo_kl_coef` in verl.
    pub coefficient: f64,
    /// The rule that selects tokens; `None` reads the problem's `selected`.
    #[serde(default)]
    pub selection: Option<TopCovariance>,
}

/// The `max(1, ⌊fraction · Σ m⌋)` unmasked tokens with the largest covariance `(A − mean A)·(ℓ − mean ℓ)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TopCovariance {
    /// The fraction of unmasked tokens that are selected, above 0 and at most 1.
    pub fraction: f64,
}

/// The numbers of [`Objective::ClipCov`], which drops tokens by their covariance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ClipCov {
    /// The clip of the tokens that are not selected.
    #[serde(default)]
    pub clip: PpoClip,
    /// The rule that selects tokens; `None` reads the problem's `selected`.
    #[serde(default)]
    pub selection: Option<CovarianceBand>,
}

/// The unmasked, unclipped tokens whose covariance `(A − mean A)·(ℓ − mean ℓ)` is strictly between `lower` and `upper`,
/// with means over `Σ m + 1e-8`. Projects draw `max(1, ⌊fraction · Σ m⌋)` of them at random; if there are more, the
/// selection is not determined and must be given.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CovarianceBand {
    /// The fraction of unmasked tokens that may be selected, `> 0`.
    pub fraction: f64,
    /// The lower end of the band, itself excluded.
    pub lower: f64,
    /// The upper end of the band, itself excluded.
    pub upper: f64,
}

/// The numbers of [`Objective::Topr`], which weights positive and other tokens separately.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Topr {
    /// The weight `w₊ ≥ 0` of positive tokens.
    pub positive_weight: f64,
    /// The weight `w₋ ≥ 0` of the other tokens.
    pub negative_weight: f64,
    /// The upper bound `> 0` of the ratio of the other tokens.
    pub upper: f64,
    /// The rule that calls a token positive.
    pub positive: PositiveTokens,
}

impl Default for Topr {
    fn default() -> Self {
        Self { positive_weight: 1.0, negative_weight: 1.0, upper: 1.0, positive: PositiveTokens::Advantage }
    }
}

/// The rule by which TOPR calls a token positive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PositiveTokens {
    /// Tokens with an advantage `A > 0`.
    #[default]
    Advantage,
    /// The problem's `selected`, such as the tokens of a reward above 0 (ROLL).
    Selected,
}

/// ASPO (Archer2.0), with `sg` for stop-gradient:
///
/// ```text
/// A > 0   u = min(ρ, 1 + epsilon_high)   −A·u/sg(u²)          −sg(c₊)·A·ℓ  where 1/u > c₊
/// A < 0   v = max(ρ, 1 − epsilon_low)    −A·v                 −sg(c₋)·A·ℓ  where v > c₋
/// ```
///
/// A ratio exactly at a bound takes the unclipped branch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Aspo {
    /// The lower clip width, `≥ 0`.
    pub epsilon_low: f64,
    /// The upper clip width, `≥ 0`.
    pub epsilon_high: f64,
    /// The clip widths of the problem's `selected` tokens, if they differ: in Archer2.0 the tokens with the lower
    /// entropies of their sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selected: Option<ClipWidths>,
    /// The bound `c₊ > 1` of the inverse ratio where `A > 0`.
    pub dual_clip_positive: f64,
    /// The bound `c₋ > 1` of the ratio where `A < 0`.
    pub dual_clip_negative: f64,
}

impl Default for Aspo {
    fn default() -> Self {
        Self { epsilon_low: 0.2, epsilon_high: 0.2, selected: None, dual_clip_positive: 3.0, dual_clip_negative: 3.0 }
    }
}

/// The largest distances of a ratio from 1 before it is clipped.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ClipWidths {
    /// The lower clip width, `≥ 0`.
    pub epsilon_low: f64,
    /// The upper clip width, `≥ 0`.
    pub epsilon_high: f64,
}

/// Cross-entropy. With `z` the transformed logits over the temperature, `V` the size of the vocabulary and
/// `lse = ln Σ_j exp(z_j)` the policy term is
///
/// ```text
/// −(1 − label_smoothing)·ℓ + label_smoothing·(lse − Σ_j z_j / V) + z_loss·lse²
/// ```
///
/// The factor of `label_smoothing` is the mean of `−ln p_j` over the vocabulary: the target is the uniform distribution in so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CrossEntropy {
    /// The share `ε`, from 0 to 1, of the target distribution that is uniform over the vocabulary.
    pub label_smoothing: f64,
    /// The weight `≥ 0` of the squared log-sum-exp of the row (the z-loss; Liger's `lse_square_scale`).
    pub z_loss: f64,
}

impl CrossEntropy {
    /// Whether a term reads the whole row, besides the log-probability of the id.
    pub fn reads_row(&self) -> bool {
        self.label_smoothing != 0.0 || self.z_loss != 0.0
    }
}
