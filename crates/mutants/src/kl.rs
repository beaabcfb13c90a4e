//! KL penalty of the specimen: its estimate, the clamps, and the importance weight.

use crate::bank::Bug;
use crate::launch::SpecimenLaunch;
use crate::policy::{SpecimenInputs, SpecimenTerm, policy, ratio};
use assay_core::spec::{Kl, KlEstimator, KlGradient, KlImportance, LossSpec, Objective};

/// Computes the derivative by `ℓ` of the estimate, or of k2 instead: `−d`, perhaps times `min(exp(ℓ − old_logp),
/// bound)`.
fn kl_gradient(launch: &SpecimenLaunch, kl: &Kl, inputs: &SpecimenInputs, own: f64, follows: bool) -> f64 {
    let d = inputs.ref_logp - inputs.logp;
    let of_k2 = if launch.has(Bug::KlK2SignFlipped) { d } else { -d };
    match kl.gradient {
        KlGradient::Own => own,
        KlGradient::K2 | KlGradient::K2Weighted(_) if launch.has(Bug::KlK2GradientClamped) && !follows => 0.0,
        KlGradient::K2 | KlGradient::K2Weighted(_) if launch.has(Bug::KlK2Ignored) => own,
        KlGradient::K2 => of_k2,
        KlGradient::K2Weighted(_) if launch.has(Bug::KlK2WeightForgotten) => of_k2,
        KlGradient::K2Weighted(bound) => {
            let moved = if launch.has(Bug::KlK2WeightOfSequence) { inputs.level.0 } else { inputs.moved };
            let bound = if launch.has(Bug::KlK2WeightUnbounded) { f64::INFINITY } else { bound };
            of_k2 * moved.exp().min(bound)
        }
    }
}

/// Multiplies the penalty by its importance weight, with its gradient. `is_free` says that no clamp holds the
/// difference.
fn weighed_kl(
    launch: &SpecimenLaunch,
    kl: &Kl,
    inputs: &SpecimenInputs,
    (value, by_logp): (f64, f64),
    is_free: bool,
) -> SpecimenTerm {
    // A ratio of the spec's level may be shared by a sequence, so that its derivative goes by the log-ratio, which the
    // caller distributes over the tokens.
    let of_level = |by: &SpecimenInputs| {
        let ratio = ratio(launch, by);
        let by_log_ratio = match () {
            () if launch.has(Bug::BiasCorrectionDetached) => 0.0,
            () if launch.has(Bug::RatioInverted) => -ratio * value,
            () => ratio * value,
        };
        SpecimenTerm { value: ratio * value, by_logp: ratio * by_logp, by_log_ratio }
    };
    // Of the token's own log-ratio: `follows` is whether the weight has a gradient.
    let own = |log_weight: f64, follows: bool| {
        let weight = log_weight.exp();
        let of_weight = if follows { weight * value } else { 0.0 };
        SpecimenTerm { value: weight * value, by_logp: weight * by_logp + of_weight, by_log_ratio: 0.0 }
    };
    let (own_log_ratio, follows) = inputs.own;
    match kl.importance {
        KlImportance::Ratio if launch.has(Bug::BiasCorrectionIgnored) => {
            SpecimenTerm { value, by_logp, by_log_ratio: 0.0 }
        }
        KlImportance::Ratio if launch.has(Bug::KlRatioOfToken) => own(own_log_ratio, follows),
        KlImportance::Ratio => of_level(inputs),
        KlImportance::TokenRatio if launch.has(Bug::KlTokenRatioOfSequence) => of_level(inputs),
        KlImportance::TokenRatio => own(own_log_ratio, follows && !launch.has(Bug::KlTokenRatioDetached)),
        KlImportance::Rollout => {
            let policy = if launch.has(Bug::KlRolloutOfOldPolicy) { inputs.old_logp } else { inputs.logp };
            let log_weight = policy - inputs.rollout_logp;
            let is_detached = !is_free || launch.has(Bug::KlRolloutDetached) || launch.has(Bug::KlRolloutOfOldPolicy);
            // A token that the sampler did not score has a NaN here, and no penalty; the mutants count it with a weight
            // of 1, or let the NaN through.
            match () {
                () if launch.has(Bug::KlRolloutIgnored) => own(0.0, false),
                () if log_weight.is_nan() && launch.has(Bug::KlUnscoredAsOne) => own(0.0, false),
                () if log_weight.is_nan() && !launch.has(Bug::KlUnscoredNan) => SpecimenTerm::default(),
                () if launch.has(Bug::KlRolloutInverted) => own(-log_weight, !is_detached),
                () => own(log_weight, !is_detached),
            }
        }
        KlImportance::Score => match () {
            () if launch.has(Bug::KlScoreForgotten) => own(0.0, false),
            () if launch.has(Bug::KlScoreAlone) => SpecimenTerm { value, by_logp: value, by_log_ratio: 0.0 },
            () if launch.has(Bug::KlScoreInValue) => SpecimenTerm { value: value * inputs.logp, ..own(0.0, is_free) },
            () => own(0.0, is_free),
        },
        KlImportance::One => SpecimenTerm { value, by_logp, by_log_ratio: 0.0 },
    }
}

/// Computes `ref_logp − ℓ` after its clamp, and whether it still follows `ℓ`.
fn difference(launch: &SpecimenLaunch, kl: &Kl, inputs: &SpecimenInputs) -> (f64, bool) {
    let compared = if launch.has(Bug::KlAgainstOldPolicy) { inputs.old_logp } else { inputs.ref_logp };
    let d = compared - inputs.logp;
    let is_unclamped = launch.has(Bug::KlDifferenceClampIgnored) || launch.has(Bug::KlDifferenceClampOfExp);
    match kl.difference_clamp.filter(|_| !is_unclamped) {
        Some(clamp) if launch.has(Bug::KlDifferenceClampFromAbove) => (d.min(clamp), d <= clamp),
        Some(clamp) => (d.clamp(-clamp, clamp), d.abs() <= clamp || launch.has(Bug::KlDifferenceClampGradientKept)),
        None => (d, true),
    }
}

/// Computes the estimate of a difference, and its derivative by `ℓ` if the difference follows it.
fn estimate(launch: &SpecimenLaunch, kl: &Kl, d: f64) -> (f64, f64) {
    // K1 equals `|d|` where `d < 0`, and K2 and K3 agree to second order at 0: such a mistake shows only elsewhere.
    let estimator = match kl.estimator {
        KlEstimator::K2 if launch.has(Bug::KlEstimatorsSwapped) => KlEstimator::K3,
        KlEstimator::K3 if launch.has(Bug::KlEstimatorsSwapped) => KlEstimator::K2,
        KlEstimator::Abs if launch.has(Bug::K1ForAbs) => KlEstimator::K1,
        _ if kl.gradient != KlGradient::Own && launch.has(Bug::KlK2InValue) => KlEstimator::K2,
        other => other,
    };
    // Each pair is a value and its derivative by `ℓ`, whose sign is turned as `d = ref − ℓ`.
    match (estimator, kl.difference_clamp) {
        (KlEstimator::K3, Some(clamp)) if launch.has(Bug::KlDifferenceClampOfExp) => {
            let held = d.clamp(-clamp, clamp);
            (held.exp_m1() - d, if held == d { -d.exp_m1() } else { 1.0 })
        }
        (KlEstimator::K1, _) => (-d, 1.0),
        (KlEstimator::K2, _) => (d * d / 2.0, -d),
        (KlEstimator::K3, _) if launch.has(Bug::K3SignFlipped) => ((-d).exp_m1() + d, (-d).exp_m1()),
        (KlEstimator::K3, _) if launch.has(Bug::K3GradientOfK1) => (d.exp_m1() - d, 1.0),
        (KlEstimator::K3, _) => (d.exp_m1() - d, -d.exp_m1()),
        (KlEstimator::Abs, _) => (d.abs(), if d == 0.0 { 0.0 } else { -d.signum() }),
    }
}

/// Returns the bound that a value exceeds, if any.
fn bound(launch: &SpecimenLaunch, kl: &Kl, value: f64) -> Option<f64> {
    let clamp = kl.value_clamp.filter(|_| !launch.has(Bug::KlValueClampIgnored))?;
    let clamp = if launch.has(Bug::KlValueClampOfPenalty) { clamp / kl.beta } else { clamp };
    match () {
        () if value > clamp => Some(clamp),
        () if value < -clamp && !launch.has(Bug::KlValueClampFromAbove) => Some(-clamp),
        () => None,
    }
}

/// Computes the penalty `beta · kl` of a token.
pub(crate) fn kl(launch: &SpecimenLaunch, inputs: &SpecimenInputs) -> SpecimenTerm {
    let spec: &LossSpec = launch.spec;
    let Some(kl) = &spec.kl else { return SpecimenTerm::default() };
    if launch.has(Bug::KlMaskedByOffPolicyMask) && !inputs.on_policy {
        return SpecimenTerm::default();
    }
    if launch.has(Bug::TopEntropyTakesKl) && !inputs.is_high {
        return SpecimenTerm::default();
    }
    // Importance weight and value clamp are applied in the order that the spec gives. A clamped value has no gradient.
    let is_kept = launch.has(Bug::KlValueClampGradientKept);
    let after_importance = kl.clamp_after_importance != launch.has(Bug::KlValueClampOnTheWrongSide);
    let (d, is_free) = difference(launch, kl, inputs);
    let (mut value, mut by_logp) = estimate(launch, kl, d);
    if !is_free {
        by_logp = 0.0;
    }
    if let Some(bound) = bound(launch, kl, value).filter(|_| !after_importance) {
        (value, by_logp) = (bound, if is_kept { by_logp } else { 0.0 });
    }
    let by_logp = kl_gradient(launch, kl, inputs, by_logp, is_free);
    let mut term = weighed_kl(launch, kl, inputs, (value, by_logp), is_free);
    if let Some(bound) = bound(launch, kl, term.value).filter(|_| after_importance) {
        term = if is_kept {
            SpecimenTerm { value: bound, ..term }
        } else {
            SpecimenTerm { value: bound, ..SpecimenTerm::default() }
        };
    }
    // The factors of the corrections come last: no clamp applies to them.
    let beta = if launch.has(Bug::KlSubtracted) { -kl.beta } else { kl.beta };
    let mut term = term.times(beta).weighed(inputs.factors[1]);
    if launch.has(Bug::BetaTwiceInGradient) {
        term.by_logp *= kl.beta;
    }
    let clipped = || matches!(spec.objective, Objective::PpoClip(_)) && policy(launch, inputs).by_log_ratio == 0.0;
    if launch.has(Bug::KlDetached) || (launch.has(Bug::KlClipped) && clipped()) {
        (term.by_logp, term.by_log_ratio) = (0.0, 0.0);
    }
    term
}
