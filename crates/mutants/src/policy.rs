//! The policy term of a token in the specimen, and the inputs of a token's loss.

use crate::bank::Bug;
use crate::launch::{CorrectionFactor, SpecimenLaunch, SpecimenScore};
use assay_core::spec::{Aspo, Cispo, ClipWidths, CrossEntropy, Objective, PositiveTokens, PpoClip, Topr};

/// A term of the loss, with its derivatives by `ℓ` and by the log-ratio of the token's level.
#[derive(Clone, Copy, Default)]
pub(crate) struct SpecimenTerm {
    pub(crate) value: f64,
    pub(crate) by_logp: f64,
    pub(crate) by_log_ratio: f64,
}

impl SpecimenTerm {
    /// Multiplies the term by `factor`; a factor of 0 gives 0, even if the term overflows.
    pub(crate) fn times(self, factor: f64) -> Self {
        if factor == 0.0 {
            return Self::default();
        }
        Self { value: self.value * factor, by_logp: self.by_logp * factor, by_log_ratio: self.by_log_ratio * factor }
    }

    /// Multiplies the term by a weight that a bug may leave out of the gradient.
    pub(crate) fn weighed(self, by: CorrectionFactor) -> Self {
        if by.value == 0.0 {
            return Self::default();
        }
        let CorrectionFactor { value, gradient } = by;
        Self { value: self.value * value, by_logp: self.by_logp * gradient, by_log_ratio: self.by_log_ratio * gradient }
    }
}

/// The inputs of a token's loss, as the kernel has them.
#[derive(Clone, Copy)]
pub(crate) struct SpecimenInputs {
    pub(crate) logp: f64,
    pub(crate) ref_logp: f64,
    pub(crate) old_logp: f64,
    pub(crate) rollout_logp: f64,
    pub(crate) advantage: f64,
    pub(crate) is_selected: bool,
    /// Factors of the policy term and of the penalty.
    pub(crate) factors: [CorrectionFactor; 2],
    /// Difference of `ℓ` and the ratio's denominator.
    pub(crate) moved: f64,
    /// Token's own log-ratio after its clamp and clip, and whether it follows `ℓ`.
    pub(crate) own: (f64, bool),
    /// Log-ratio of the token's level after its cap, and whether it follows the log-ratio that the cap holds.
    pub(crate) level: (f64, bool),
    /// Derivative of the level's log-ratio by the token's own: `1/n` for a mean over `n` tokens.
    pub(crate) share: f64,
    pub(crate) on_policy: bool,
    /// Whether the token's entropy is high enough to keep its policy term.
    pub(crate) is_high: bool,
}

/// Computes the ratio `ρ`, in f32.
pub(crate) fn ratio(launch: &SpecimenLaunch, inputs: &SpecimenInputs) -> f64 {
    if launch.has(Bug::RatioToFirstOrder) {
        return 1.0 + inputs.level.0;
    }
    let log_ratio = if launch.has(Bug::RatioInverted) { -inputs.level.0 } else { inputs.level.0 };
    f64::from((log_ratio as f32).exp())
}

/// Computes the policy term of a token, by the spec's objective.
pub(crate) fn policy(launch: &SpecimenLaunch, inputs: &SpecimenInputs) -> SpecimenTerm {
    if let Objective::CrossEntropy(CrossEntropy { label_smoothing, .. }) = launch.spec.objective {
        let by_logp = if launch.has(Bug::SmoothingKeepsTarget) { -1.0 } else { label_smoothing - 1.0 };
        return SpecimenTerm { value: by_logp * inputs.logp, by_logp, by_log_ratio: 0.0 }.weighed(inputs.factors[0]);
    }
    // A token without an advantage has no term, even where its ratio overflows.
    let idle = inputs.advantage == 0.0 && !launch.has(Bug::ZeroAdvantageTimesRatio);
    if idle || !inputs.on_policy || !inputs.is_high {
        return SpecimenTerm::default();
    }
    let term = match &launch.spec.objective {
        Objective::PpoClip(clip) => ppo_clip(launch, clip, inputs),
        Objective::Cispo(cispo) => cispo_weight(launch, cispo, inputs),
        Objective::PolicyGradient => score(1.0, inputs),
        Objective::Topr(topr) => tapered(launch, topr, inputs),
        Objective::Aspo(aspo) => upside_down(launch, aspo, inputs),
        _ => SpecimenTerm::default(),
    };
    // An inverted ratio falls where the log-ratio rises.
    let sign = if launch.has(Bug::RatioInverted) { -1.0 } else { 1.0 };
    SpecimenTerm { by_log_ratio: sign * term.by_log_ratio, ..term }.weighed(inputs.factors[0])
}

/// The terms of a cross-entropy that read the whole row, with their derivatives by the log-sum-exp and by the mean of the logits.
#[derive(Clone, Copy, Default)]
pub(crate) struct SpecimenRowTerm {
    pub(crate) value: f64,
    pub(crate) slopes: [f64; 2],
    /// Derivative by the log-probability of the id, which only a bug has.
    pub(crate) by_logp: f64,
}

/// Computes `ε·(lse − mean z) + ζ·lse²` of a token, times its weight; 0 for other objectives.
pub(crate) fn row_term(launch: &SpecimenLaunch, scored: &SpecimenScore, weight: CorrectionFactor) -> SpecimenRowTerm {
    let Objective::CrossEntropy(CrossEntropy { label_smoothing, z_loss }) = launch.spec.objective else {
        return SpecimenRowTerm::default();
    };
    let softmax = &scored.logp_softmax;
    let log_sum = softmax.sum.ln();
    let mut smoothing = log_sum + scored.mean_gap_of_all;
    let (mut slopes, mut by_logp) = ([label_smoothing, -label_smoothing], 0.0);
    if launch.has(Bug::SmoothingOverOthers) && label_smoothing != 0.0 {
        // The mean of −ln p over the other entries: V times the mean over all, less the target's.
        let vocab = launch.shape.vocab as f64;
        smoothing = (vocab * smoothing + scored.logp) / (vocab - 1.0);
        slopes = slopes.map(|slope| slope * vocab / (vocab - 1.0));
        by_logp = label_smoothing / (vocab - 1.0);
    }
    match () {
        () if launch.has(Bug::SmoothingNotInGradient) => slopes = [0.0; 2],
        () if launch.has(Bug::SmoothingNotDivided) => slopes[1] *= launch.shape.vocab as f64,
        () => {}
    }
    let max = f64::from(softmax.max) * f64::from(softmax.rate);
    let lse = if launch.has(Bug::ZLossOfShiftedSum) { log_sum } else { max + log_sum };
    slopes[0] += match () {
        () if launch.has(Bug::ZLossNotInGradient) => 0.0,
        () if launch.has(Bug::ZLossSlopeHalved) => z_loss * lse,
        () => 2.0 * z_loss * lse,
    };
    let value = weight.value * (label_smoothing * smoothing + z_loss * lse * lse);
    SpecimenRowTerm { value, slopes: slopes.map(|slope| weight.gradient * slope), by_logp: weight.gradient * by_logp }
}

/// Computes the score function `−coefficient·A·ℓ`, with a constant coefficient.
fn score(coefficient: f64, inputs: &SpecimenInputs) -> SpecimenTerm {
    let by_logp = -coefficient * inputs.advantage;
    SpecimenTerm { value: by_logp * inputs.logp, by_logp, by_log_ratio: 0.0 }
}

/// Computes PPO-clip, `−min(min(ρ, δ)·A, clip(ρ)·A)`, for `A < 0` at most `−c·A`. Its gradient is that of the ratio
/// while the value is.
fn ppo_clip(launch: &SpecimenLaunch, clip: &PpoClip, inputs: &SpecimenInputs) -> SpecimenTerm {
    let (ratio, advantage) = (ratio(launch, inputs), inputs.advantage);
    let (epsilon_low, epsilon_high) = match () {
        () if launch.has(Bug::EpsilonsSwapped) => (clip.epsilon_high, clip.epsilon_low),
        () => (clip.epsilon_low, clip.epsilon_high),
    };
    // ε_low may exceed 1 once it is not itself.
    let (low, high) = (1.0 - epsilon_low, 1.0 + epsilon_high);
    // δ bounds the unclipped ratio, ε the clipped one; the lesser surrogate counts.
    let delta = if launch.has(Bug::DeltaIgnored) { None } else { clip.delta };
    let bounded = delta.map_or(ratio, |delta| ratio.min(delta));
    let clipped = if launch.has(Bug::ClipIgnored) { bounded } else { ratio.clamp(low, high) };
    let smaller = advantage > 0.0 || launch.has(Bug::ClipOnTheWrongSide);
    let mut k = match () {
        () if launch.has(Bug::ClipWithoutMin) => clipped,
        () if smaller => bounded.min(clipped),
        () => bounded.max(clipped),
    };
    let stops = advantage < 0.0 || launch.has(Bug::DualClipForPositive);
    if let Some(most) = clip.dual_clip.filter(|_| stops && !launch.has(Bug::DualClipIgnored)) {
        k = k.min(most);
    }
    if let Some(most) = clip.dual_clip.filter(|_| advantage > 0.0 && launch.has(Bug::DualClipRaisesPositive)) {
        k = k.max(most);
    }
    // The term follows the ratio as long as no bound holds it.
    let mut follows = k == ratio;
    if launch.has(Bug::DeltaStopsGradient) {
        follows &= delta.is_none_or(|delta| ratio <= delta);
    }
    let by_log_ratio = match () {
        () if launch.has(Bug::OverflowingRatioTimesZero) => -ratio * advantage * f64::from(u8::from(follows)),
        () if follows || launch.has(Bug::ClipGradientKept) => -ratio * advantage,
        () => 0.0,
    };
    SpecimenTerm { value: -k * advantage, by_logp: 0.0, by_log_ratio }
}

/// Computes CISPO's term `−sg(clip(ρ))·A·ℓ`, whose weight is constant.
fn cispo_weight(launch: &SpecimenLaunch, cispo: &Cispo, inputs: &SpecimenInputs) -> SpecimenTerm {
    let ratio = ratio(launch, inputs);
    let lower = cispo.lower.filter(|_| !launch.has(Bug::CispoLowerIgnored)).unwrap_or(f64::NEG_INFINITY);
    let upper = if launch.has(Bug::CispoBoundFromOne) { 1.0 + cispo.upper } else { cispo.upper };
    let weight = ratio.clamp(lower, upper);
    let term = score(weight, inputs);
    if launch.has(Bug::CispoGradientClipped) && weight != ratio {
        return SpecimenTerm { by_logp: 0.0, ..term };
    }
    if launch.has(Bug::CispoWithoutLogp) {
        return SpecimenTerm { value: term.value, by_logp: 0.0, by_log_ratio: term.value };
    }
    term
}

/// Computes TOPR: `−w₊·A·ℓ` for a positive token, `−w₋·sg(min(ρ, upper))·A·ℓ` for any other.
fn tapered(launch: &SpecimenLaunch, topr: &Topr, inputs: &SpecimenInputs) -> SpecimenTerm {
    let ratio = ratio(launch, inputs);
    // The ratio of a token that is not positive is held from above only.
    let k = match () {
        () if launch.has(Bug::ToprClipIgnored) => ratio,
        () if launch.has(Bug::ToprClipFromBelow) => ratio.max(topr.upper),
        () => ratio.min(topr.upper),
    };
    let given = topr.positive == PositiveTokens::Selected && !launch.has(Bug::ToprSelectedIgnored);
    let is_positive = if given { inputs.is_selected } else { inputs.advantage > 0.0 };
    let (of_positive, of_others) = match () {
        () if launch.has(Bug::ToprWeightsSwapped) => (topr.negative_weight, topr.positive_weight),
        () if launch.has(Bug::ToprNegativeWeightForgotten) => (topr.positive_weight, 1.0),
        () => (topr.positive_weight, topr.negative_weight),
    };
    if is_positive {
        return score(if launch.has(Bug::ToprRatioForPositive) { of_positive * k } else { of_positive }, inputs);
    }
    let term = score(of_others * k, inputs);
    // The ratio is detached. One with a gradient would add the term's own value as derivative by the log-ratio, as
    // `∂ρ/∂ln ρ = ρ`.
    match () {
        () if launch.has(Bug::ToprRatioNotDetached) && k == ratio => SpecimenTerm { by_log_ratio: term.value, ..term },
        () if launch.has(Bug::ToprGradientClipped) && k != ratio => SpecimenTerm { by_logp: 0.0, ..term },
        () => term,
    }
}

/// Computes ASPO: `−A·u/sg(u²)` with `u = min(ρ, 1 + εh)` for `A > 0`, `−A·v` with `v = max(ρ, 1 − εl)` for `A < 0`;
/// and `−sg(c)·A·ℓ` if `1/u`, or `v`, is above `c`.
fn upside_down(launch: &SpecimenLaunch, aspo: &Aspo, inputs: &SpecimenInputs) -> SpecimenTerm {
    let (ratio, advantage) = (ratio(launch, inputs), inputs.advantage);
    // Selected tokens may have other widths.
    let own = ClipWidths { epsilon_low: aspo.epsilon_low, epsilon_high: aspo.epsilon_high };
    let is_selected = match () {
        () if launch.has(Bug::AspoSelectedIgnored) => false,
        () => inputs.is_selected != launch.has(Bug::AspoSelectedReversed),
    };
    let ClipWidths { epsilon_low, epsilon_high } = aspo.selected.filter(|_| is_selected).unwrap_or(own);
    let (epsilon_low, epsilon_high) = match () {
        () if launch.has(Bug::AspoEpsilonsSwapped) => (epsilon_high, epsilon_low),
        () => (epsilon_low, epsilon_high),
    };
    let (of_positive, of_negative) = match () {
        () if launch.has(Bug::AspoDualClipsSwapped) => (aspo.dual_clip_negative, aspo.dual_clip_positive),
        () => (aspo.dual_clip_positive, aspo.dual_clip_negative),
    };
    let is_inverted =
        if advantage > 0.0 { !launch.has(Bug::AspoRatioNotInverted) } else { launch.has(Bug::AspoInvertedForAll) };
    // 1/u of the clipped ratio where A > 0.
    let (clipped, compared, most) = if advantage > 0.0 {
        let clipped = ratio.min(1.0 + epsilon_high);
        let compared = if launch.has(Bug::AspoDualClipOfRatio) { ratio } else { clipped.recip() };
        (clipped, compared, of_positive)
    } else {
        let clipped = ratio.max(1.0 - epsilon_low);
        (clipped, clipped, of_negative)
    };
    // Beyond the dual clip the coefficient is constant.
    if compared > most && !launch.has(Bug::AspoDualClipIgnored) {
        let value = -most * advantage;
        let without_logp = SpecimenTerm { value, by_logp: 0.0, by_log_ratio: 0.0 };
        return if launch.has(Bug::AspoDualClipWithoutLogp) { without_logp } else { score(most, inputs) };
    }
    let mut k = if is_inverted { clipped.recip() } else { clipped };
    let mut follows = clipped == ratio;
    if launch.has(Bug::AspoClipAfterInverting) && advantage > 0.0 {
        k = ratio.recip().min(1.0 + epsilon_high);
        follows = k == ratio.recip();
    }
    let value = -k * advantage;
    let by_log_ratio = match () {
        () if !follows && !launch.has(Bug::AspoGradientKept) => 0.0,
        () if is_inverted && launch.has(Bug::AspoGradientOfInverse) => -value,
        () => value,
    };
    SpecimenTerm { value, by_logp: 0.0, by_log_ratio }
}
