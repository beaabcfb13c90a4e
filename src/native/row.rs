//! One row of logits: softmax statistics, and dlogits over the logits.
//!
//! ```text
//! pass 1   m  = max x
//! pass 2   a_j = (m − x_j)·(1/T)     e_j = exp(−a_j)     Σ e_j for j ≠ y,  Σ e_j a_j
//! between  logp, entropy, loss, G = ∂loss/∂logp, E = ∂loss/∂entropy
//! pass 3   dx_j = e_j · (−G/(S·T))  +  e_j (a_j − ā) · E/(S·T)       and at y the first term is  (Σ_{j≠y} e_j)·G/(S·T)
//! ```
//!
//! The exponentials of pass 2 are kept in scratch for pass 3; where other tokens come between, they are computed anew.

use half::{bf16, f16};

use crate::problem::Float;
use crate::spec::{LossSpec, TemperatureDivides};

/// A logits element: widened to f32 exactly, narrowed to nearest even.
pub(super) trait Element: Float {
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

impl Element for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
}

/// The settings that all rows share.
#[derive(Clone, Copy)]
pub(super) struct Softmaxes {
    /// `1/T`.
    inverse_temperature: f64,
    /// Whether entropy needs a softmax of its own.
    two: bool,
}

/// Exponentials of one row under each softmax that the spec needs.
pub(super) struct Scratch {
    logp: Vec<f32>,
    /// Empty where `logp` and `entropy` come from the same softmax.
    entropy: Vec<f32>,
}

/// What a row's softmaxes come to.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    logp_softmax: Softmax,
    entropy_softmax: Softmax,
    pub(super) logp: f64,
    pub(super) entropy: f64,
}

/// Sums over one row of exponentials.
#[derive(Clone, Copy)]
struct Softmax {
    /// `m`, of the unscaled logits.
    max: f32,
    /// What the gaps `m − x_j` were multiplied by.
    scale: f32,
    /// `a_y`.
    target_gap: f64,
    /// `Σ_{j≠y} e_j`.
    others: f64,
    /// `S`.
    sum: f64,
    /// `ln S`.
    log_sum: f64,
    /// `ā = Σ e_j a_j / S`.
    mean_gap: f64,
}

/// The derivatives of the loss that a row's dlogits are made of.
#[derive(Clone, Copy)]
pub(super) struct Gradients {
    pub(super) logp: f64,
    pub(super) entropy: f64,
}

impl Softmaxes {
    pub(super) fn of(spec: &LossSpec) -> Self {
        Self {
            inverse_temperature: 1.0 / spec.temperature,
            two: spec.temperature_divides == TemperatureDivides::Logp && spec.temperature != 1.0,
        }
    }

    pub(super) fn scratch(self, vocab: usize) -> Scratch {
        Scratch { logp: vec![0.0; vocab], entropy: vec![0.0; if self.two { vocab } else { 0 }] }
    }

    /// Passes 1 and 2 of the row of an unmasked token.
    pub(super) fn score<E: Element>(self, row: &[E], id: usize, scratch: &mut Scratch) -> Scores {
        let max = row.iter().map(|x| x.to_f32()).fold(f32::NEG_INFINITY, f32::max);
        let tempered = self.inverse_temperature as f32;
        let (logp_softmax, entropy_softmax, logp_factor) = if self.two {
            let logp_softmax = softmax(row, id, max, 1.0, &mut scratch.logp);
            let entropy_softmax = softmax(row, id, max, tempered, &mut scratch.entropy);
            (logp_softmax, entropy_softmax, self.inverse_temperature)
        } else {
            let shared = softmax(row, id, max, tempered, &mut scratch.logp);
            (shared, shared, 1.0)
        };
        Scores {
            logp_softmax,
            entropy_softmax,
            logp: -(logp_softmax.target_gap + logp_softmax.log_sum) * logp_factor,
            entropy: entropy_softmax.log_sum + entropy_softmax.mean_gap,
        }
    }

    /// The exponentials of pass 2 once more.
    pub(super) fn exponentials<E: Element>(self, row: &[E], scores: &Scores, scratch: &mut Scratch) {
        let both = [(&scores.logp_softmax, &mut scratch.logp), (&scores.entropy_softmax, &mut scratch.entropy)];
        for (softmax, exps) in both.into_iter().take(if self.two { 2 } else { 1 }) {
            exps.iter_mut().zip(row).for_each(|(e, x)| *e = (-(softmax.max - x.to_f32()) * softmax.scale).exp());
        }
    }

    /// Pass 3. A derivative of 0 leaves its term out, so that nothing multiplies it into a NaN.
    pub(super) fn write_dlogits<E: Element>(
        self,
        row: &mut [E],
        id: usize,
        scores: &Scores,
        scratch: &Scratch,
        grad: Gradients,
    ) {
        let (logp, entropy) = (&scores.logp_softmax, &scores.entropy_softmax);
        let entropy_exps = if self.two { &scratch.entropy } else { &scratch.logp };
        let policy_factor = grad.logp * self.inverse_temperature / logp.sum;
        let entropy_factor = grad.entropy * self.inverse_temperature / entropy.sum;
        let entropy_term = |x: f32, q: f32| {
            let gap = (entropy.max - x) * entropy.scale;
            if q == 0.0 { 0.0 } else { entropy_factor as f32 * q * (gap - entropy.mean_gap as f32) }
        };
        let target = row[id].to_f32();
        if grad.logp == 0.0 {
            row.iter_mut().zip(entropy_exps).for_each(|(dx, &q)| {
                *dx = E::from_f32(if grad.entropy == 0.0 { 0.0 } else { entropy_term(dx.to_f32(), q) });
            });
            return;
        }
        let factor = -policy_factor as f32;
        // A column of probability 0 has no part even in an infinite gradient.
        let policy_term = |e: f32| if e == 0.0 { 0.0 } else { factor * e };
        if grad.entropy == 0.0 {
            row.iter_mut().zip(&scratch.logp).for_each(|(dx, &e)| *dx = E::from_f32(policy_term(e)));
            row[id] = E::from_f32((policy_factor * logp.others) as f32);
        } else {
            for ((dx, &e), &q) in row.iter_mut().zip(&scratch.logp).zip(entropy_exps) {
                *dx = E::from_f32(policy_term(e) + entropy_term(dx.to_f32(), q));
            }
            let policy = (policy_factor * logp.others) as f32;
            row[id] = E::from_f32(policy + entropy_term(target, entropy_exps[id]));
        }
    }
}

/// Pass 2: fills `exps` with `e_j` and sums them. A NaN logit, or an infinite `max`, makes the sums NaN.
fn softmax<E: Element>(row: &[E], id: usize, max: f32, scale: f32, exps: &mut [f32]) -> Softmax {
    let mut others = 0.0_f64;
    let mut weighted_gaps = 0.0_f64;
    for (j, (e, x)) in exps.iter_mut().zip(row).enumerate() {
        let gap = (max - x.to_f32()) * scale;
        *e = (-gap).exp();
        if j != id {
            others += f64::from(*e);
        }
        // A logit of −∞ has an infinite gap and no weight.
        if *e != 0.0 {
            weighted_gaps += f64::from(*e * gap);
        }
    }
    let target = f64::from(exps[id]);
    let sum = others + target;
    Softmax {
        max,
        scale,
        target_gap: f64::from((max - row[id].to_f32()) * scale),
        others,
        sum,
        // sum − 1, with nothing lost where the target is the maximum and the others are tiny.
        log_sum: (others + (target - 1.0)).ln_1p(),
        mean_gap: weighted_gaps / sum,
    }
}
