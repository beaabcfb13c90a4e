//! The loss of one token, value and derivative side by side: the kernels' own arm, apart from the reference's.

use crate::spec::{Kl, KlEstimator, LossSpec, Objective as ObjectiveSpec, PpoClip};

/// A term of the token loss and its derivative with respect to `logp`.
#[derive(Clone, Copy, Default)]
pub(super) struct Objective {
    pub(super) loss: f64,
    pub(super) grad: f64,
}

impl Objective {
    /// The policy term at ratio `r` and advantage `a`.
    pub(super) fn policy(spec: &LossSpec, r: f64, a: f64) -> Self {
        let ObjectiveSpec::PpoClip(clip) = &spec.objective;
        // Without an advantage there is nothing to learn, even where r overflows; and min and max would hide a NaN.
        if a == 0.0 {
            return Self::default();
        }
        if r.is_nan() {
            return Self { loss: r, grad: r };
        }
        ppo_clip(clip, r, a)
    }

    /// The KL estimate at `d = ref_logp − logp`, without `beta`.
    pub(super) fn kl(kl: &Kl, d: f64) -> Self {
        match kl.estimator {
            KlEstimator::K1 => Self { loss: -d, grad: 1.0 },
            KlEstimator::K2 => Self { loss: 0.5 * d * d, grad: -d },
            KlEstimator::K3 => Self { loss: d.exp_m1() - d, grad: -d.exp_m1() },
            KlEstimator::Abs if d == 0.0 => Self::default(),
            KlEstimator::Abs => Self { loss: d.abs(), grad: -d.signum() },
        }
    }
}

/// `−min(min(r, δ)·a, clip(r)·a)`, capped at `−c·a` for `a < 0`. The gradient is that of the operand which the `min`
/// picks: `−r·a` where that operand still follows `r`, else 0.
fn ppo_clip(clip: &PpoClip, r: f64, a: f64) -> Objective {
    let (low, high) = (1.0 - clip.epsilon_low, 1.0 + clip.epsilon_high);
    let delta = clip.delta.unwrap_or(f64::INFINITY);
    let unclipped = r.min(delta) * a;
    let clipped = r.clamp(low, high) * a;
    let follows_ratio = if unclipped <= clipped { r <= delta } else { (low..=high).contains(&r) };
    let loss = -unclipped.min(clipped);
    match clip.dual_clip {
        Some(c) if a < 0.0 && loss > -c * a => Objective { loss: -c * a, grad: 0.0 },
        _ => Objective { loss, grad: if follows_ratio { -r * a } else { 0.0 } },
    }
}

/// Whether the ratio is beyond the lower bound with `a < 0`, and beyond the upper one with `a > 0`.
pub(super) fn clipped(spec: &LossSpec, r: f64, a: f64) -> (bool, bool) {
    let ObjectiveSpec::PpoClip(clip) = &spec.objective;
    (a < 0.0 && r < 1.0 - clip.epsilon_low, a > 0.0 && r > 1.0 + clip.epsilon_high)
}
