//! [`Arm`]: what a loss arm brings to the conditions beside its value and derivatives, which are the reference's own. A new arm is
//! added here.

use assay_core::spec::{Divergence, LossSpec, Objective, Sapo, TrustRegion, Vespo};
use assay_reference::{Branch, TokenInputs};

use super::tolerance::Grade;

/// The policy term of one token, on one branch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arm {
    /// `Σ |terms|` of its value: those that cancel in it are counted apart.
    pub(super) value: f64,
    /// The same of its derivative by `ℓ` at first hand.
    pub(super) by_logp: f64,
    /// And by `w`.
    pub(super) by_log_ratio: f64,
    /// Whether it is a constant times `A·ℓ`.
    pub(super) is_score: bool,
    /// What of it, or of a derivative, may be flushed on the way: its coefficient, that times `A`, and that times the sampler's
    /// weight.
    pub(super) flushed: f64,
}

impl Arm {
    pub(super) fn of(spec: &LossSpec, inputs: &TokenInputs, branch: &Branch, grade: Grade) -> Self {
        let term = branch.policy(spec, inputs);
        let (advantage, weight) = (inputs.advantage.abs(), inputs.policy_weight);
        let plain = Self {
            value: term.value.abs(),
            by_logp: term.by_logp.abs(),
            by_log_ratio: term.by_log_ratio.abs(),
            is_score: false,
            flushed: (1.0 + advantage) * (1.0 + weight),
        };
        // A term in ℓ and one in w.
        let w = inputs.level_log_ratio(spec).value;
        let in_parts = plain.value.max((term.by_logp * inputs.logp).abs() + (term.by_log_ratio * w).abs());
        match &spec.objective {
            Objective::PpoClip(_) => Self { flushed: advantage, ..plain },
            Objective::Cispo(_) | Objective::PolicyGradient | Objective::MaskedRatio(_) => {
                Self { is_score: true, ..plain }
            }
            Objective::Topr(topr) => {
                let most = topr.positive_weight.max(topr.negative_weight);
                Self { is_score: true, flushed: plain.flushed * (1.0 + most), ..plain }
            }
            Objective::Aspo(_) => Self { is_score: true, ..plain },
            Objective::Dro(_) => Self { value: in_parts, is_score: true, ..plain },
            Objective::TrustRegion(region) => Self { value: in_parts, is_score: region.truncate.is_some(), ..plain },
            // The penalty's slope changes its sign, and what it is added to has its own.
            Objective::KlCov(cov) => {
                let by_log_ratio = plain.by_log_ratio + 2.0 * cov.coefficient * weight;
                Self { value: in_parts, by_log_ratio, ..plain }
            }
            Objective::Sapo(sapo) => match grade {
                Grade::Exact => plain,
                Grade::Standard => {
                    Self { by_log_ratio: plain.by_log_ratio.max(weight * of_gate(sapo, spec, inputs)), ..plain }
                }
            },
            Objective::Vespo(vespo) => {
                let exponent = of_exponent(vespo, inputs);
                Self { value: plain.value * exponent, by_logp: plain.by_logp * exponent, is_score: true, ..plain }
            }
            Objective::ClipCov(_) | Objective::ImportanceSampling(_) | Objective::None => plain,
        }
    }
}

/// `4ρ|A|·σ(2σ − 1)`: how far SAPO's `4ρA·σ(1 − σ)` moves, in units of `u`, where `σ` is rounded before it is subtracted from 1.
fn of_gate(sapo: &Sapo, spec: &LossSpec, inputs: &TokenInputs) -> f64 {
    let ratio = inputs.ratio(spec);
    if ratio == f64::INFINITY {
        return 0.0;
    }
    let gate = gate(sapo, ratio, inputs.advantage);
    4.0 * ratio * inputs.advantage.abs() * gate * (2.0 * gate - 1.0)
}

/// `σ(τ(ρ − 1))`.
pub(super) fn gate(sapo: &Sapo, ratio: f64, advantage: f64) -> f64 {
    let tau = if advantage > 0.0 { sapo.tau_positive } else { sapo.tau_negative };
    1.0 / (1.0 + (-tau * (ratio - 1.0)).exp())
}

/// By how much the rounding of the terms of VESPO's `λ + k·ln w − λ·w` is larger than that of an exponential.
fn of_exponent(vespo: &Vespo, inputs: &TokenInputs) -> f64 {
    let log_weight = inputs.row_log_weight.clamp(1e-8_f64.ln(), 20.0);
    let (k, lambda) = if inputs.advantage >= 0.0 {
        (vespo.k_positive, vespo.lambda_positive)
    } else {
        (vespo.k_negative, vespo.lambda_negative)
    };
    1.0 + lambda.abs() + (k * log_weight).abs() + lambda.abs() * log_weight.exp()
}

/// By how many `u` rounding moves a trust region's divergence, with `ℓ` moved by `moved·u`.
pub(super) fn of_divergence(region: &TrustRegion, inputs: &TokenInputs, moved: f64) -> f64 {
    let (p, p_old) = (inputs.logp.exp(), inputs.old_logp.exp());
    match region.divergence {
        Divergence::TotalVariation => p * moved + 2.0 * (1.0 + p_old) + region.low.max(region.high),
        Divergence::BinaryKl => {
            let others = 2.0 / (1.0 - p_old + 1e-8) + (2.0 + p * moved) / (1.0 - p + 1e-8);
            p_old * (moved + (inputs.old_logp - inputs.logp).abs()) + (1.0 - p_old).abs() * others + 4.0
        }
    }
}
