//! The loss of one token as a function of its log-probability, value and derivative side by side.
//!
//! Every objective is smooth between its kinks. [`Branch::at`] says between which kinks a log-probability lies;
//! [`Branch::policy`] and [`Branch::kl`] are the smooth functions there. Kept apart, so that a judge can ask for the
//! other side of a kink that rounding may have crossed.

use crate::spec::{Kl, KlEstimator, LossSpec, Objective, OldLogp, PpoClip};

/// What one token's loss depends on.
#[derive(Clone, Copy, Debug)]
pub struct TokenInputs {
    /// `ℓ`, nats.
    pub logp: f64,
    /// Nats; equal to `logp` under [`OldLogp::Current`].
    pub old_logp: f64,
    /// Nats; `None` without a KL term.
    pub ref_logp: Option<f64>,
    /// `A`.
    pub advantage: f64,
}

impl TokenInputs {
    /// `r = exp(ℓ − old_logp)`.
    pub fn ratio(&self) -> f64 {
        (self.logp - self.old_logp).exp()
    }
}

/// A value and its derivative with respect to `ℓ`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Term {
    /// The value.
    pub value: f64,
    /// Its derivative with respect to `ℓ`.
    pub grad: f64,
}

/// Which smooth piece of the loss a token is on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Branch {
    surrogate: Surrogate,
    /// `sign(ref_logp − ℓ)` for the estimator `|d|`, which has its kink at 0; 0 for the others.
    kl_sign: f64,
}

/// Pieces of a clipped surrogate `−k·A`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Surrogate {
    /// `k = r`.
    Ratio,
    /// `k` is a bound, and the gradient is 0.
    Bound(f64),
}

impl Branch {
    /// The branch at `inputs`. Exactly on a kink the unclipped branch is taken.
    pub fn at(spec: &LossSpec, inputs: &TokenInputs) -> Self {
        let Objective::PpoClip(clip) = &spec.objective;
        Self {
            surrogate: ppo_clip(clip, inputs.ratio(), inputs.advantage),
            kl_sign: match (&spec.kl, inputs.ref_logp) {
                (Some(Kl { estimator: KlEstimator::Abs, .. }), Some(ref_logp)) => sign(ref_logp - inputs.logp),
                _ => 0.0,
            },
        }
    }

    /// The policy term on this branch:
    ///
    /// ```text
    /// ratio:  −r·A,  d/dℓ = −r·A        (dr/dℓ = r)
    /// bound:  −k·A,  d/dℓ = 0
    /// ```
    pub fn policy(&self, inputs: &TokenInputs) -> Term {
        match self.surrogate {
            Surrogate::Ratio => {
                let value = -inputs.ratio() * inputs.advantage;
                Term { value, grad: value }
            }
            Surrogate::Bound(k) => Term { value: -k * inputs.advantage, grad: 0.0 },
        }
    }

    /// The KL estimate on this branch, without `beta`. With `d = ref_logp − ℓ`, `dd/dℓ = −1`:
    ///
    /// ```text
    /// k1:  −d            d/dℓ = 1
    /// k2:  d²/2          d/dℓ = −d
    /// k3:  e^d − d − 1   d/dℓ = 1 − e^d
    /// abs: |d|           d/dℓ = −sign d      (0 at d = 0)
    /// ```
    pub fn kl(&self, kl: &Kl, inputs: &TokenInputs) -> Term {
        let Some(ref_logp) = inputs.ref_logp else { return Term::default() };
        let d = ref_logp - inputs.logp;
        match kl.estimator {
            KlEstimator::K1 => Term { value: -d, grad: 1.0 },
            KlEstimator::K2 => Term { value: d * d / 2.0, grad: -d },
            KlEstimator::K3 => Term { value: d.exp_m1() - d, grad: -d.exp_m1() },
            KlEstimator::Abs => Term { value: self.kl_sign * d, grad: -self.kl_sign },
        }
    }
}

/// Where `−min(min(r, δ)·A, clip(r, 1 − εl, 1 + εh)·A)` lies, and for `A < 0` its cap `−c·A`:
///
/// ```text
/// A > 0:  k = min(r, δ, 1 + εh)
/// A < 0:  k = 1 − εl        for r < 1 − εl
///             r             up to max(δ, 1 + εh), without end if there is no δ
///             that maximum  beyond
///         and k ≤ c
/// A = 0:  k = 0: neither loss nor gradient, even where r overflows
/// ```
///
/// The comparisons are strict, so that a ratio on a bound, and a NaN ratio, stay on the ratio branch.
fn ppo_clip(clip: &PpoClip, ratio: f64, advantage: f64) -> Surrogate {
    let low = 1.0 - clip.epsilon_low;
    let high = 1.0 + clip.epsilon_high;
    if advantage > 0.0 {
        let bound = clip.delta.map_or(high, |delta| delta.min(high));
        if ratio > bound { Surrogate::Bound(bound) } else { Surrogate::Ratio }
    } else if advantage < 0.0 {
        let bound = clip.delta.map_or(f64::INFINITY, |delta| delta.max(high));
        let bound = clip.dual_clip.map_or(bound, |c| c.min(bound));
        if ratio < low {
            Surrogate::Bound(low.min(bound))
        } else if ratio > bound {
            Surrogate::Bound(bound)
        } else {
            Surrogate::Ratio
        }
    } else {
        Surrogate::Bound(0.0)
    }
}

/// Whether a token counts as clipped low, `r < 1 − εl` and `A < 0`, or clipped high, `r > 1 + εh` and `A > 0`.
pub fn clipped(spec: &LossSpec, inputs: &TokenInputs) -> (bool, bool) {
    let Objective::PpoClip(clip) = &spec.objective;
    let ratio = inputs.ratio();
    let low = ratio < 1.0 - clip.epsilon_low && inputs.advantage < 0.0;
    let high = ratio > 1.0 + clip.epsilon_high && inputs.advantage > 0.0;
    (low, high)
}

/// `old_logp` as the spec means it.
pub(super) fn old_logp(spec: &LossSpec, given: Option<f64>, logp: f64) -> f64 {
    match spec.old_logp {
        OldLogp::Given => given.unwrap_or(f64::NAN),
        OldLogp::Current => logp,
    }
}

/// −1, 0 or 1.
fn sign(x: f64) -> f64 {
    if x == 0.0 { 0.0 } else { x.signum() }
}
