//! The sizes of a loss's terms before they cancel, and what f32 may flush of them.

use crate::objective::ObjectiveTerms;
use crate::tolerance::Grade;
use assay_core::spec::{Kl, KlEstimator, KlGradient, KlImportance, LossSpec};
use assay_reference::{Branch, Token, TokenInputs};

/// The sizes of the terms of a token's derivatives before they cancel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradTerms {
    /// The terms of `∂loss/∂ℓ` at first hand.
    pub(crate) logp: f64,
    /// The terms of `∂loss/∂ℓ` of the KL penalty's own log-probability; 0 if that is `ℓ`.
    pub(crate) kl_logp: f64,
    /// The terms of `∂loss/∂w`, by the log-ratio of the level.
    pub(crate) log_ratio: f64,
}

/// Sums the sizes of the terms of a token's derivatives.
pub(crate) fn grad_terms(spec: &LossSpec, token: &Token, branch: &Branch, grade: Grade) -> GradTerms {
    let inputs = &token.inputs;
    let policy = ObjectiveTerms::new(spec, inputs, branch, grade);
    let (mut by_logp, mut by_log_ratio) = (token.weight * policy.by_logp, token.weight * policy.by_log_ratio);
    let mut by_kl_logp = 0.0;
    if let Some(kl) = &spec.kl {
        let term = branch.kl(spec, kl, inputs);
        let rounded = clamp_rounding(spec, kl, inputs);
        let [own, of_ratio] = match kl.importance {
            KlImportance::One => [0.0, 0.0],
            KlImportance::Score | KlImportance::TokenRatio | KlImportance::Rollout => [term.value.abs() + rounded, 0.0],
            KlImportance::Ratio => [0.0, rounded],
        };
        let of_kl = token.kl_weight * weighted(kl.beta, term.by_logp.abs() + own);
        *(if token.has_separate_kl() { &mut by_kl_logp } else { &mut by_logp }) += of_kl;
        by_log_ratio += token.kl_weight * weighted(kl.beta, term.by_log_ratio.abs() + of_ratio);
    }
    GradTerms { logp: by_logp, kl_logp: by_kl_logp, log_ratio: branch.cap_slope * by_log_ratio }
}

/// Returns the factor that a KL estimate is multiplied by.
pub(super) fn importance(spec: &LossSpec, kl: &Kl, inputs: &TokenInputs) -> f64 {
    match kl.importance {
        KlImportance::One | KlImportance::Score => 1.0,
        KlImportance::Ratio => inputs.ratio(spec),
        KlImportance::TokenRatio => inputs.log_ratio(spec).value.exp(),
        KlImportance::Rollout => {
            let scored = inputs.rollout_logp.filter(|logp| !logp.is_nan());
            scored.map_or(0.0, |rollout_logp| (inputs.kl_logp - rollout_logp).exp())
        }
    }
}

/// Returns what rounding `difference_clamp` adds to an estimate that is held by it: `|d·e^d|` of k3, times the importance.
pub(super) fn clamp_rounding(spec: &LossSpec, kl: &Kl, inputs: &TokenInputs) -> f64 {
    let (Some(clamp), Some(ref_logp)) = (kl.difference_clamp, inputs.ref_logp) else { return 0.0 };
    let d = ref_logp - inputs.kl_logp;
    if kl.estimator != KlEstimator::K3 || d.abs() <= clamp {
        return 0.0;
    }
    importance(spec, kl, inputs) * inputs.kl_weight * clamp * (clamp * d.signum()).exp()
}

/// Returns the part of a KL estimate that may be flushed with the ratio it is multiplied by, and the same of its derivatives by `ℓ`
/// and `w`; both in units of [`FLUSHED`](super::FLUSHED).
pub(super) fn kl_flushed(spec: &LossSpec, inputs: &TokenInputs, branch: &Branch) -> [f64; 2] {
    let weighed = |kl: &&Kl| {
        matches!(kl.importance, KlImportance::Ratio | KlImportance::TokenRatio | KlImportance::Rollout)
            || matches!(kl.gradient, KlGradient::K2Weighted(_))
    };
    let Some(kl) = spec.kl.as_ref().filter(weighed) else { return [0.0; 2] };
    // The estimate at a ratio of 1 is the factor by which a flushed ratio shows.
    let ratio_of_1 = TokenInputs {
        old_logp: inputs.logp,
        rollout_logp: inputs.rollout_logp.map(|_| inputs.kl_logp),
        row_log_ratio: inputs.row_log_ratio.map(|_| 0.0),
        ..*inputs
    };
    let estimate = branch.kl(spec, kl, &ratio_of_1);
    let [value, derivatives] = [estimate.value.abs(), estimate.value.abs() + estimate.by_logp.abs()];
    [value, derivatives].map(|lost| if lost.is_finite() { lost } else { 0.0 })
}

/// Returns the part of `∂loss/∂ℓ` that may be flushed on the way, in units of [`FLUSHED`](super::FLUSHED).
pub(crate) fn grad_flushed(spec: &LossSpec, token: &Token, branch: &Branch, grade: Grade) -> f64 {
    let beta = spec.kl.as_ref().map_or(0.0, |kl| kl.beta);
    let of_kl = weighted(beta, kl_flushed(spec, &token.inputs, branch)[1]);
    token.weight * ObjectiveTerms::new(spec, &token.inputs, branch, grade).flushed + token.kl_weight * of_kl
}

/// Multiplies `term` by `beta`; 0 if `beta` is 0, even if the term overflows.
pub(super) fn weighted(beta: f64, term: f64) -> f64 {
    if beta == 0.0 { 0.0 } else { beta * term }
}
