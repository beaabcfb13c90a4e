//! [`ObjectiveTerms`]: what each objective adds to the conditions, besides its value and derivatives, which are the reference's own.
//!
//! A new objective needs an entry here only if parts of its term cancel.

use assay_core::spec::{Divergence, LossSpec, Objective, Sapo, TrustRegion, Vespo};
use assay_reference::{Branch, TokenInputs};

use super::tolerance::Grade;

/// The sizes of the terms of one token's policy term, on one branch.
#[derive(Clone, Copy, Debug)]
pub(super) struct ObjectiveTerms {
    /// The sum of the sizes of the terms of its value.
    pub(super) value: f64,
    /// The sum of the sizes of the terms of its derivative by `ℓ` at first hand.
    pub(super) by_logp: f64,
    /// The sum of the sizes of the terms of its derivative by the log-ratio `w`.
    pub(super) by_log_ratio: f64,
    /// Whether the policy term is a constant times `A·ℓ`.
    pub(super) is_score: bool,
    /// The factors of the term, or of a derivative, that may be flushed on the way: its coefficient, that times `A`, and that times the
    /// sampler's weight.
    pub(super) flushed: f64,
}

impl ObjectiveTerms {
    pub(super) fn new(spec: &LossSpec, inputs: &TokenInputs, branch: &Branch, grade: Grade) -> Self {
        let term = branch.policy(spec, inputs);
        let (advantage, weight) = (inputs.advantage.abs(), inputs.policy_weight);
        let plain = Self {
            value: term.value.abs(),
            by_logp: term.by_logp.abs(),
            by_log_ratio: term.by_log_ratio.abs(),
            is_score: false,
            flushed: (1.0 + advantage) * (1.0 + weight),
        };
        // The size of the value as a term in ℓ and one in w, which may cancel though each was rounded at its own size.
        let w = inputs.level_log_ratio(spec).value;
        let in_parts = plain.value.max((term.by_logp * inputs.logp).abs() + (term.by_log_ratio * w).abs());
        match &spec.objective {
            // PPO's clip has no coefficient in front of ℓ: the ratio may be flushed, which A then multiplies.
            Objective::PpoClip(_) => Self { flushed: advantage, ..plain },
            Objective::MaskedRatio(masked) => Self { is_score: !masked.surrogate, ..plain },
            Objective::Cispo(_) | Objective::PolicyGradient | Objective::Aspo(_) | Objective::CrossEntropy(_) => {
                Self { is_score: true, ..plain }
            }
            // TOPR multiplies by a weight of the token's sign after the coefficient, which may be flushed once more.
            Objective::Topr(topr) => {
                let most = topr.positive_weight.max(topr.negative_weight);
                Self { is_score: true, flushed: plain.flushed * (1.0 + most), ..plain }
            }
            Objective::Dro(_) => Self { value: in_parts, is_score: true, ..plain },
            Objective::TrustRegion(region) => Self { value: in_parts, is_score: region.truncate.is_some(), ..plain },
            // The penalty's slope changes its sign, and the term it is added to has a sign of its own.
            Objective::KlCov(cov) => {
                let by_log_ratio = plain.by_log_ratio + 2.0 * cov.coefficient * weight;
                Self { value: in_parts, by_log_ratio, ..plain }
            }
            Objective::Sapo(sapo) => match grade {
                Grade::Exact => plain,
                // The sigmoid's slope is `σ(x)·σ(−x)` in a careful kernel, and `σ·(1 − σ)` in a textbook's, which
                // rounds at the size of σ.
                Grade::Standard => {
                    let slope = weight * sapo_slope_rounding(sapo, spec, inputs);
                    Self { by_log_ratio: plain.by_log_ratio.max(slope), ..plain }
                }
            },
            Objective::Vespo(vespo) => {
                // VESPO's `λ + k·ln w − λ·w` is an exponent: its terms round at their own sizes, and the exponential
                // takes these errors as relative ones.
                let exponent = vespo_exponent_rounding(vespo, inputs);
                Self { value: plain.value * exponent, by_logp: plain.by_logp * exponent, is_score: true, ..plain }
            }
            // The bounds of a divergence are those of `distillation.rs`.
            Objective::ClipCov(_) | Objective::ImportanceSampling(_) | Objective::Distillation(_) | Objective::None => {
                plain
            }
        }
    }
}

/// Returns `4ρ|A|·σ(2σ − 1)`: how far SAPO's `4ρA·σ(1 − σ)` moves, in units of `u`, if `σ` is rounded before it is subtracted from 1.
fn sapo_slope_rounding(sapo: &Sapo, spec: &LossSpec, inputs: &TokenInputs) -> f64 {
    let ratio = inputs.ratio(spec);
    if ratio == f64::INFINITY {
        return 0.0;
    }
    let gate = sapo_gate(sapo, ratio, inputs.advantage);
    4.0 * ratio * inputs.advantage.abs() * gate * (2.0 * gate - 1.0)
}

/// Evaluates SAPO's gate `σ(τ(ρ − 1))`.
pub(super) fn sapo_gate(sapo: &Sapo, ratio: f64, advantage: f64) -> f64 {
    let tau = if advantage > 0.0 { sapo.tau_positive } else { sapo.tau_negative };
    1.0 / (1.0 + (-tau * (ratio - 1.0)).exp())
}

/// Returns the factor by which the rounding of the terms of VESPO's `λ + k·ln w − λ·w` is larger than that of an exponential.
fn vespo_exponent_rounding(vespo: &Vespo, inputs: &TokenInputs) -> f64 {
    // The bounds are the objective's own clamp of the log-weight, so that no exponent beyond it counts.
    let log_weight = inputs.row_log_weight.clamp(1e-8_f64.ln(), 20.0);
    let (k, lambda) = if inputs.advantage >= 0.0 {
        (vespo.k_positive, vespo.lambda_positive)
    } else {
        (vespo.k_negative, vespo.lambda_negative)
    };
    1.0 + lambda.abs() + (k * log_weight).abs() + lambda.abs() * log_weight.exp()
}

/// Bounds the rounding error of a trust region's divergence, in units of `u`, if `ℓ` is off by `moved·u`.
pub(super) fn divergence_error(region: &TrustRegion, inputs: &TokenInputs, moved: f64) -> f64 {
    let (p, p_old) = (inputs.logp.exp(), inputs.old_logp.exp());
    // The divergence of a sampled id: |p − p_old| of the total variation, and of the binary KL between (p, 1 − p) and
    // (p_old, 1 − p_old) two logarithms, of which that of the complements is ill-conditioned near 1.
    match region.divergence {
        Divergence::TotalVariation => p * moved + 2.0 * (1.0 + p_old) + region.low.max(region.high),
        Divergence::BinaryKl => {
            let others = 2.0 / (1.0 - p_old + 1e-8) + (2.0 + p * moved) / (1.0 - p + 1e-8);
            p_old * (moved + (inputs.old_logp - inputs.logp).abs()) + (1.0 - p_old).abs() * others + 4.0
        }
    }
}
