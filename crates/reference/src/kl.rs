//! The KL estimate of one token, with its derivatives.

use super::ratio::held;
use super::token::{Term, TokenInputs, sign};
use assay_core::spec::{Kl, KlEstimator, KlGradient, KlImportance, LossSpec};

/// The smooth piece of its KL estimate that a token is on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct KlPiece {
    /// The derivative of the clamped difference by the difference: 1 or 0.
    slope: f64,
    /// The sign of `d` for the estimator `|d|`, which has its kink at 0; 0 for the other estimators.
    sign: f64,
    /// The bound that the estimate exceeds, if it does.
    bound: Option<f64>,
    /// The derivative of the token's own log-ratio by `ℓ`: 1 or 0.
    own_slope: f64,
}

/// Returns the clamped difference `d = clamp(ref_logp − ℓ, ±difference_clamp)`.
fn difference(kl: &Kl, inputs: &TokenInputs) -> super::ratio::BoundedValue {
    let clamp = kl.difference_clamp.unwrap_or(f64::INFINITY);
    held(inputs.ref_logp.unwrap_or(f64::NAN) - inputs.kl_logp, -clamp, clamp)
}

impl KlPiece {
    pub(super) fn at(spec: &LossSpec, inputs: &TokenInputs) -> Self {
        let (Some(kl), Some(_)) = (&spec.kl, inputs.ref_logp) else { return Self::default() };
        // The piece has a slope for each clamp, and the bound that the value exceeds, if it does.
        let d = difference(kl, inputs);
        let own_slope = inputs.log_ratio(spec).slope;
        let mut piece = Self { slope: d.slope, sign: 0.0, bound: None, own_slope };
        if kl.estimator == KlEstimator::Abs {
            piece.sign = sign(d.value);
        }
        if let Some(clamp) = kl.value_clamp {
            let value = if kl.clamp_after_importance {
                piece.times_importance(spec, kl, inputs).value
            } else {
                piece.estimate(kl, inputs).value
            };
            // The clamp is of the estimate, or of its product with the importance weight.
            let clamped = held(value, -clamp, clamp);
            piece.bound = (clamped.slope == 0.0).then_some(clamped.value);
        }
        piece
    }

    /// Returns value and derivatives of the estimate on this piece. With `d = ref_logp − ℓ`, `dd/dℓ = −1`, or 0 beyond
    /// its clamp:
    ///
    /// ```text
    /// k1:  −d            d/dℓ = 1
    /// k2:  d²/2          d/dℓ = −d
    /// k3:  e^d − d − 1   d/dℓ = 1 − e^d
    /// abs: |d|           d/dℓ = −sign d      (0 at d = 0)
    /// ```
    ///
    /// `gradient: k2` puts `−(ref_logp − ℓ)` in the place of the derivative, `k2_weighted` that times
    /// `min(exp(ℓ − old_logp), bound)`. A value beyond `value_clamp` is that bound, without gradient. Then, with the importance,
    ///
    /// ```text
    /// one:          kl                    d/dℓ = kl′
    /// ratio:        ρ·kl                  d/dℓ = ρ·kl′,      d/dw = ρ·kl
    /// token_ratio:  e^x·kl                d/dℓ = e^x·(kl′ + x′·kl)
    /// rollout:      q·kl, q = exp(ℓ − rollout_logp)
    ///                                     d/dℓ = q·(kl′ + kl)    q·kl′ alone beyond the clamp of the difference
    /// score:        kl                    d/dℓ = kl′ + kl        kl′ alone beyond the clamp of the difference
    /// ```
    ///
    /// Here `ℓ` is the penalty's own log-probability; `ρ`, `x` and the weight of `k2_weighted` are of the ratio's.
    pub(super) fn term(self, spec: &LossSpec, kl: &Kl, inputs: &TokenInputs) -> Term {
        if inputs.ref_logp.is_none() {
            return Term::default();
        }
        match self.bound {
            Some(bound) if kl.clamp_after_importance => Term { value: bound, by_logp: 0.0, by_log_ratio: 0.0 },
            _ => self.times_importance(spec, kl, inputs),
        }
    }

    fn times_importance(self, spec: &LossSpec, kl: &Kl, inputs: &TokenInputs) -> Term {
        let Term { value, by_logp, .. } = self.estimate(kl, inputs);
        match kl.importance {
            KlImportance::One => Term { value, by_logp, by_log_ratio: 0.0 },
            KlImportance::Ratio => {
                let ratio = inputs.ratio(spec);
                Term { value: ratio * value, by_logp: ratio * by_logp, by_log_ratio: ratio * value }
            }
            KlImportance::TokenRatio => {
                let ratio = inputs.log_ratio(spec).value.exp();
                let by_logp = ratio * (by_logp + self.own_slope * value);
                Term { value: ratio * value, by_logp, by_log_ratio: 0.0 }
            }
            KlImportance::Rollout => match inputs.rollout_logp.filter(|logp| !logp.is_nan()) {
                Some(rollout_logp) => {
                    let q = (inputs.kl_logp - rollout_logp).exp();
                    let by_logp = q * (by_logp + self.slope * value);
                    Term { value: q * value, by_logp, by_log_ratio: 0.0 }
                }
                None => Term::default(),
            },
            KlImportance::Score => Term { value, by_logp: by_logp + self.slope * value, by_log_ratio: 0.0 },
        }
    }

    fn estimate(self, kl: &Kl, inputs: &TokenInputs) -> Term {
        let d = difference(kl, inputs).value;
        let (value, by_difference) = match kl.estimator {
            KlEstimator::K1 => (-d, -1.0),
            KlEstimator::K2 => (d * d / 2.0, d),
            KlEstimator::K3 => (d.exp_m1() - d, d.exp_m1()),
            KlEstimator::Abs => (self.sign * d, self.sign),
        };
        // A bound on the estimate replaces its value and removes its own gradient.
        let bound = if kl.clamp_after_importance { None } else { self.bound };
        let own = if bound.is_some() { 0.0 } else { -self.slope * by_difference };
        // A straight-through gradient replaces the derivative, whatever the clamps.
        let by_logp = match kl.gradient {
            KlGradient::Own => own,
            KlGradient::K2 => inputs.kl_logp - inputs.ref_logp.unwrap_or(f64::NAN),
            KlGradient::K2Weighted(bound) => {
                let weight = (inputs.logp - inputs.old_logp).exp().min(bound);
                weight * (inputs.kl_logp - inputs.ref_logp.unwrap_or(f64::NAN))
            }
        };
        Term { value: bound.unwrap_or(value), by_logp, by_log_ratio: 0.0 }
    }
}
