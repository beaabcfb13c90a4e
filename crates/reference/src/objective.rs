//! The policy term of one token, with its derivatives.
//!
//! A term depends on the token's log-probability in two ways: directly, and through the log-ratio `w = ln ρ` of its level, which
//! may be that of the whole sequence. Both derivatives are computed here; [`super::Reference::grad_logp`] combines them.
//!
//! Every objective is smooth between its kinks. [`Branch::at`] finds the kinks between which a token is; [`Branch::policy`] and
//! [`Branch::kl`] are the smooth functions there. They are separate so that the judge can ask for the other side of a kink that
//! rounding may have crossed.

use std::ops::RangeInclusive;

use super::kl::KlPiece;
use super::token::{Term, TokenInputs, sign};
use assay_core::spec::{
    Aspo, Cispo, ClipCov, Divergence, Kl, LossSpec, Objective, PositiveTokens, PpoClip, Sapo, TrustRegion, Vespo,
};

/// The smooth piece of the loss that a token is on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Branch {
    /// The coefficient of `A`: the ratio, or a bound.
    coefficient: Coefficient,
    /// Whether the masks leave the token its policy term.
    pub kept: bool,
    /// Whether the token is within the objective's own window.
    pub within: bool,
    /// Whether KL-Cov or Clip-Cov selects the token.
    pub selected: bool,
    /// The derivative of the token's log-ratio by `ℓ`: 1, or 0 beyond a clamp.
    pub slope: f64,
    /// The derivative of `w` by the log-ratio before its cap: 1 or 0; 1 beyond a cap that is passed straight through.
    pub cap_slope: f64,
    /// The sign of `w`, for an objective that contains `|w|`.
    sign: f64,
    pub(super) kl: KlPiece,
}

/// The pieces of a clipped coefficient.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Coefficient {
    /// The ratio `ρ` itself, with its gradient.
    Ratio,
    /// A bound, which has no gradient.
    Bound(f64),
    /// A bound that multiplies the token's log-probability.
    Score(f64),
}

impl Branch {
    /// Returns this branch if PPO's clip bounds a ratio that equals one of its bounds; `None` if neither bound is among
    /// `ratios`. For one sign of the advantage the loss has no kink there, but `min(ρ·A, clip(ρ)·A)` has two equal
    /// arguments, and automatic differentiation takes a part of each.
    #[must_use]
    pub fn held_by_clip(self, spec: &LossSpec, ratios: RangeInclusive<f64>) -> Option<Self> {
        let (Objective::PpoClip(clip) | Objective::ClipCov(ClipCov { clip, .. })) = &spec.objective else {
            return None;
        };
        let bound =
            [1.0 - clip.epsilon_low, 1.0 + clip.epsilon_high].into_iter().find(|bound| ratios.contains(bound))?;
        Some(Self { coefficient: Coefficient::Bound(bound), ..self })
    }

    /// Finds the branch at `inputs`. A value exactly on a kink takes the unclipped branch.
    pub fn at(spec: &LossSpec, inputs: &TokenInputs) -> Self {
        let (ratio, advantage) = (inputs.ratio(spec), inputs.advantage);
        let coefficient = match &spec.objective {
            Objective::PpoClip(clip) => ppo_clip(clip, ratio, advantage),
            Objective::ClipCov(cov) => ppo_clip(&cov.clip, ratio, advantage),
            Objective::Cispo(Cispo { lower, upper }) => between(ratio, lower.unwrap_or(f64::NEG_INFINITY), *upper),
            Objective::TrustRegion(TrustRegion { truncate: Some(most), .. }) => {
                between(ratio, f64::NEG_INFINITY, *most)
            }
            Objective::Topr(topr) => between(ratio, f64::NEG_INFINITY, topr.upper),
            Objective::Aspo(aspo) => upside_down(aspo, inputs.selected.holds, ratio, advantage),
            _ => Coefficient::Ratio,
        };
        // A window removes the whole term, unlike a clip.
        let within = match &spec.objective {
            Objective::MaskedRatio(masked) => ratio > masked.lower && ratio < masked.upper,
            Objective::TrustRegion(region) => in_trust_region(region, inputs),
            _ => true,
        };
        Self {
            coefficient,
            kept: inputs.on_policy.holds && inputs.top_entropy,
            within,
            selected: inputs.selected.holds,
            slope: inputs.log_ratio(spec).slope,
            cap_slope: inputs.level_log_ratio(spec).slope,
            sign: match &spec.objective {
                Objective::KlCov(_) => sign(inputs.level_log_ratio(spec).value),
                _ => 0.0,
            },
            kl: KlPiece::at(spec, inputs),
        }
    }

    /// Returns the policy term on this branch, times the rollout weight. With `k` the coefficient and `dρ/dw = ρ`:
    ///
    /// ```text
    /// ppo_clip             −k·A                        d/dw = −ρ·A on the ratio, 0 on a bound
    /// cispo                −k·A·ℓ                      d/dℓ = −k·A
    /// sapo                 −(4/τ)·σ(τ(ρ−1))·A          d/dw = −4·σ(1−σ)·ρ·A
    /// vespo                −φ·A·ℓ                      d/dℓ = −φ·A
    /// policy_gradient      −A·ℓ                        d/dℓ = −A
    /// importance_sampling  −ρ·A                        d/dw = −ρ·A
    /// masked_ratio         −ρ·A·ℓ inside, else 0       d/dℓ = −ρ·A inside
    ///   with surrogate     −ρ·A inside, else 0         d/dw = −ρ·A inside
    /// trust_region         −ρ·A kept + penalty·w²      d/dw = −ρ·A kept + 2·penalty·w
    ///   with truncate      −k·A·ℓ kept + penalty·w²    d/dℓ = −k·A kept,   d/dw = 2·penalty·w
    /// dro                  −A·ℓ + beta/2·w²            d/dℓ = −A,          d/dw = beta·w
    /// kl_cov               −ρ·A + coefficient·|w|      d/dw = −ρ·A + coefficient·sign w    the second if selected
    /// clip_cov             as ppo_clip, 0 if selected
    /// topr                 −w₊·A·ℓ positive, −w₋·k·A·ℓ elsewhere              d/dℓ = the factor of ℓ
    /// distillation         the divergence from the teacher, which has no sampled token
    /// aspo                 A > 0: −A/k, A < 0: −k·A    d/dw = the value on the ratio, 0 on a bound; on c  −c·A·ℓ
    /// cross_entropy        −(1 − label_smoothing)·ℓ    d/dℓ = −(1 − label_smoothing)      its other terms are of the row
    /// ```
    ///
    /// Where `A = 0` only penalties are left, even if the ratio overflows. A cross-entropy has no advantage.
    pub fn policy(&self, spec: &LossSpec, inputs: &TokenInputs) -> Term {
        let w = inputs.level_log_ratio(spec).value;
        let penalty = |weight: f64| Term::from_ratio(weight * w * w, 2.0 * weight * w);
        if !self.kept {
            return Term::default();
        }
        // A token without advantage has no surrogate, even if its ratio overflows.
        let surrogate =
            if self.within && inputs.advantage != 0.0 { self.surrogate(spec, inputs) } else { Term::default() };
        let term = match &spec.objective {
            Objective::TrustRegion(region) => surrogate.plus(penalty(region.penalty)),
            Objective::Dro(dro) => surrogate.plus(penalty(dro.beta / 2.0)),
            Objective::KlCov(cov) if self.selected => {
                surrogate.plus(Term::from_ratio(cov.coefficient * self.sign * w, cov.coefficient * self.sign))
            }
            Objective::ClipCov(_) if self.selected => Term::default(),
            Objective::CrossEntropy(cross_entropy) => Term::linear(cross_entropy.label_smoothing - 1.0, inputs),
            // A divergence has a gradient by each logit, and none by a log-probability.
            Objective::Distillation(_) => Term::from_ratio(inputs.divergence, 0.0),
            _ => surrogate,
        };
        term.times(inputs.policy_weight)
    }

    /// Returns the part of [`policy`](Self::policy) that `A` multiplies.
    fn surrogate(&self, spec: &LossSpec, inputs: &TokenInputs) -> Term {
        let (ratio, advantage) = (inputs.ratio(spec), inputs.advantage);
        // The coefficient is constant on a bound, and then has no gradient through the ratio.
        let k = match self.coefficient {
            Coefficient::Ratio => ratio,
            Coefficient::Bound(bound) | Coefficient::Score(bound) => bound,
        };
        let following = |on_ratio: bool| if on_ratio { -ratio * advantage } else { 0.0 };
        match &spec.objective {
            Objective::PpoClip(_) | Objective::ClipCov(_) => {
                Term::from_ratio(-k * advantage, following(self.coefficient == Coefficient::Ratio))
            }
            Objective::Cispo(_) => Term::score(k, inputs),
            Objective::Sapo(sapo) => soft_gate(sapo, ratio, advantage),
            Objective::Vespo(vespo) => Term::score(gamma_weight(vespo, inputs.row_log_weight, advantage), inputs),
            Objective::PolicyGradient | Objective::Dro(_) => Term::score(1.0, inputs),
            Objective::ImportanceSampling(_) | Objective::KlCov(_) => {
                Term::from_ratio(-ratio * advantage, following(true))
            }
            Objective::MaskedRatio(masked) if masked.surrogate => Term::from_ratio(-ratio * advantage, following(true)),
            Objective::MaskedRatio(_) => Term::score(ratio, inputs),
            Objective::TrustRegion(region) if region.truncate.is_some() => Term::score(k, inputs),
            Objective::TrustRegion(_) => Term::from_ratio(-ratio * advantage, following(true)),
            Objective::Topr(topr) => {
                let positive = match topr.positive {
                    PositiveTokens::Advantage => advantage > 0.0,
                    PositiveTokens::Selected => self.selected,
                };
                Term::score(if positive { topr.positive_weight } else { topr.negative_weight * k }, inputs)
            }
            Objective::Aspo(_) => {
                let value = if advantage > 0.0 { -advantage / k } else { -k * advantage };
                match self.coefficient {
                    Coefficient::Ratio => Term::from_ratio(value, value),
                    Coefficient::Bound(_) => Term::from_ratio(value, 0.0),
                    Coefficient::Score(_) => Term::score(k, inputs),
                }
            }
            Objective::CrossEntropy(_) | Objective::Distillation(_) | Objective::None => Term::default(),
        }
    }

    /// Returns the KL estimate on this branch, without `beta`, as `KlPiece::term` defines it.
    pub fn kl(&self, spec: &LossSpec, kl: &Kl, inputs: &TokenInputs) -> Term {
        self.kl.term(spec, kl, inputs).times(inputs.kl_weight)
    }
}

/// Finds the piece of `−min(min(ρ, δ)·A, clip(ρ, 1 − εl, 1 + εh)·A)`, and for `A < 0` of its cap `−c·A`:
///
/// ```text
/// A > 0:  k = min(ρ, δ, 1 + εh)
/// A < 0:  k = 1 − εl        for ρ < 1 − εl
///             ρ             up to max(δ, 1 + εh), without end if there is no δ
///             that maximum  beyond
///         and k ≤ c
/// A = 0:  k = 0: neither loss nor gradient, even where ρ overflows
/// ```
///
/// The comparisons are strict, so that a ratio on a bound, and a NaN ratio, stay on the ratio branch.
fn ppo_clip(clip: &PpoClip, ratio: f64, advantage: f64) -> Coefficient {
    let low = 1.0 - clip.epsilon_low;
    let high = 1.0 + clip.epsilon_high;
    if advantage > 0.0 {
        // The ratio is bounded from above only.
        let bound = clip.delta.map_or(high, |delta| delta.min(high));
        if ratio > bound { Coefficient::Bound(bound) } else { Coefficient::Ratio }
    } else if advantage < 0.0 {
        // The ratio is bounded from below by the clip, and from above by the two-sided and the dual clip.
        let bound = clip.delta.map_or(f64::INFINITY, |delta| delta.max(high));
        let bound = clip.dual_clip.map_or(bound, |c| c.min(bound));
        if ratio < low {
            Coefficient::Bound(low.min(bound))
        } else if ratio > bound {
            Coefficient::Bound(bound)
        } else {
            Coefficient::Ratio
        }
    } else {
        Coefficient::Bound(0.0)
    }
}

/// Finds the piece of ASPO: for `A > 0` it is `u = min(ρ, 1 + εh)`, or `c₊` if `1/u` exceeds it; for `A < 0` it is
/// `v = max(ρ, 1 − εl)`, or `c₋` if `v` exceeds it. Selected tokens may have their own `εl` and `εh`.
fn upside_down(aspo: &Aspo, selected: bool, ratio: f64, advantage: f64) -> Coefficient {
    let (epsilon_low, epsilon_high) = match aspo.selected {
        Some(widths) if selected => (widths.epsilon_low, widths.epsilon_high),
        _ => (aspo.epsilon_low, aspo.epsilon_high),
    };
    let (low, high) = (1.0 - epsilon_low, 1.0 + epsilon_high);
    if advantage > 0.0 {
        match () {
            () if ratio > high => Coefficient::Bound(high),
            () if 1.0 / ratio > aspo.dual_clip_positive => Coefficient::Score(aspo.dual_clip_positive),
            () => Coefficient::Ratio,
        }
    } else {
        match () {
            () if ratio < low => Coefficient::Bound(low),
            () if ratio > aspo.dual_clip_negative => Coefficient::Score(aspo.dual_clip_negative),
            () => Coefficient::Ratio,
        }
    }
}

/// Finds the piece of `clip(ρ, lower, upper)`.
fn between(ratio: f64, lower: f64, upper: f64) -> Coefficient {
    if ratio > upper {
        Coefficient::Bound(upper)
    } else if ratio < lower {
        Coefficient::Bound(lower)
    } else {
        Coefficient::Ratio
    }
}

/// Returns SAPO's term `f = −(4/τ)·σ(u)·A` with `u = τ(ρ − 1)`; `df/dw = −4·σ(u)·σ(−u)·ρ·A`, or 0 if ρ overflows f64.
fn soft_gate(sapo: &Sapo, ratio: f64, advantage: f64) -> Term {
    let tau = if advantage > 0.0 { sapo.tau_positive } else { sapo.tau_negative };
    let u = tau * (ratio - 1.0);
    let sigmoid = |u: f64| 1.0 / (1.0 + (-u).exp());
    let gate = 4.0 / tau * sigmoid(u);
    let by_log_ratio = if ratio == f64::INFINITY { 0.0 } else { 4.0 * sigmoid(u) * sigmoid(-u) * ratio };
    Term::from_ratio(-gate * advantage, -by_log_ratio * advantage)
}

/// Returns VESPO's weight `φ = exp(λ + k·ln w − λ·w)` with `ln w` in `[ln 1e-8, 20]`; 0 if that is NaN or ∞.
pub(super) fn gamma_weight(vespo: &Vespo, row_log_weight: f64, advantage: f64) -> f64 {
    // The sign of the advantage chooses the parameters, with 0 as positive.
    let log_weight = row_log_weight.clamp(1e-8_f64.ln(), 20.0);
    let (k, lambda) = if advantage >= 0.0 {
        (vespo.k_positive, vespo.lambda_positive)
    } else {
        (vespo.k_negative, vespo.lambda_negative)
    };
    let lambda = lambda.max(1e-4);
    let phi = (lambda + k * log_weight - lambda * log_weight.exp()).exp();
    if phi.is_finite() { phi } else { 0.0 }
}

/// Whether the token's probability is near enough to the old one.
fn in_trust_region(region: &TrustRegion, inputs: &TokenInputs) -> bool {
    let (p, p_old) = (inputs.logp.exp(), inputs.old_logp.exp());
    let rise = p - p_old;
    let (limit, with_advantage) =
        if inputs.advantage > 0.0 { (region.high, rise > 0.0) } else { (region.low, rise < 0.0) };
    // The limit and the direction depend on the sign of the advantage.
    let divergence = match region.divergence {
        Divergence::TotalVariation => rise.abs(),
        Divergence::BinaryKl => {
            let others = ((1.0 - p_old + 1e-8) / (1.0 - p + 1e-8)).ln();
            p_old * (inputs.old_logp - inputs.logp) + (1.0 - p_old) * others
        }
    };
    divergence <= limit || !(with_advantage || region.two_sided)
}

/// Returns whether a token counts as clipped low and as clipped high: TRL logs them as `clip_ratio/low_mean` and
/// `high_mean`.
///
/// ```text
/// ppo_clip, clip_cov   ρ < 1 − εl and A < 0          ρ > 1 + εh and A > 0
/// a clip in log space  x < −low and A < 0            x > high and A > 0
/// cispo                ρ < lower and A < 0           ρ > upper and A > 0
/// others               never
/// ```
pub fn clipped(spec: &LossSpec, inputs: &TokenInputs) -> (bool, bool) {
    let (negative, positive) = (inputs.advantage < 0.0, inputs.advantage > 0.0);
    if let Some(clip) = spec.ratio.clip {
        let x = inputs.logp - inputs.old_logp;
        return (x < -clip.low && negative, x > clip.high && positive);
    }
    let ratio = inputs.ratio(spec);
    let (low, high) = match &spec.objective {
        Objective::PpoClip(clip) | Objective::ClipCov(ClipCov { clip, .. }) => {
            (1.0 - clip.epsilon_low, 1.0 + clip.epsilon_high)
        }
        Objective::Cispo(cispo) => (cispo.lower.unwrap_or(f64::NEG_INFINITY), cispo.upper),
        _ => return (false, false),
    };
    (ratio < low && negative, ratio > high && positive)
}

/// Whether PPO's clip raises a token's loss above that of the ratio; Clip-Cov does not select such a token.
pub(super) fn held_by_clip(clip: &PpoClip, ratio: f64, advantage: f64) -> bool {
    let clamped = ratio.clamp(1.0 - clip.epsilon_low, 1.0 + clip.epsilon_high);
    -advantage * clamped > -advantage * ratio
}
