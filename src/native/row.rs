//! One row: softmax statistics, the token's loss, and dlogits over the logits.
//!
//! ```text
//! pass 1   m  = max x
//! pass 2   a_j = (m − x_j)·(1/T)     e_j = exp(−a_j)     Σ e_j for j ≠ y,  Σ e_j a_j
//! scalar   logp, entropy, loss, G = ∂loss/∂logp, E = ∂loss/∂entropy
//! pass 3   dx_j = e_j · (−G/(S·T))  +  e_j (a_j − ā) · E/(S·T)       and at y the first term is  (Σ_{j≠y} e_j)·G/(S·T)
//! ```
//!
//! The exponentials of pass 2 are kept in scratch for pass 3.

use half::{bf16, f16};

use crate::kernels::arithmetic::Immediate;
use crate::kernels::objective::{Numbers, Token, TokenLoss, token_loss};
use crate::problem::Float;
use crate::spec::{LossSpec, OldLogp, TemperatureDivides};

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

/// What a row is evaluated with.
pub(super) struct TokenInputs {
    pub(super) id: usize,
    pub(super) advantage: f64,
    pub(super) old_logp: Option<f64>,
    pub(super) ref_logp: Option<f64>,
    /// What the reduction multiplies the token's loss by.
    pub(super) weight: f64,
}

/// What is left of a row besides its dlogits.
pub(super) struct RowResult {
    pub(super) logp: f64,
    pub(super) entropy: f64,
    pub(super) token_loss: f64,
    pub(super) ratio: f64,
    pub(super) kl: f64,
    pub(super) clipped_low: bool,
    pub(super) clipped_high: bool,
}

/// The settings that all rows share.
pub(super) struct RowKernel<'s> {
    spec: &'s LossSpec,
    numbers: Numbers<f64>,
    /// `1/T`.
    inverse_temperature: f64,
    /// `∂loss/∂H` of every token.
    grad_entropy: f64,
}

/// Exponentials of one row under each softmax that the spec needs.
pub(super) struct Scratch {
    logp: Vec<f32>,
    /// Empty where `logp` and `entropy` come from the same softmax.
    entropy: Vec<f32>,
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

impl<'s> RowKernel<'s> {
    pub(super) fn new(spec: &'s LossSpec, count: usize) -> Self {
        let grad_entropy = if spec.entropy_coef == 0.0 { 0.0 } else { -spec.entropy_coef / count as f64 };
        Self { spec, numbers: Numbers::of(spec), inverse_temperature: 1.0 / spec.temperature, grad_entropy }
    }

    /// Whether entropy needs a softmax of its own.
    fn two_softmaxes(&self) -> bool {
        self.spec.temperature_divides == TemperatureDivides::Logp && self.spec.temperature != 1.0
    }

    pub(super) fn scratch(&self, vocab: usize) -> Scratch {
        Scratch { logp: vec![0.0; vocab], entropy: vec![0.0; if self.two_softmaxes() { vocab } else { 0 }] }
    }

    /// Evaluates one unmasked token and writes its dlogits over `row`.
    pub(super) fn run<E: Element>(&self, row: &mut [E], token: &TokenInputs, scratch: &mut Scratch) -> RowResult {
        let max = row.iter().map(|x| x.to_f32()).fold(f32::NEG_INFINITY, f32::max);
        let tempered = self.inverse_temperature as f32;
        let (logp_softmax, entropy_softmax, logp_factor) = if self.two_softmaxes() {
            let logp_softmax = softmax(row, token.id, max, 1.0, &mut scratch.logp);
            let entropy_softmax = softmax(row, token.id, max, tempered, &mut scratch.entropy);
            (logp_softmax, entropy_softmax, self.inverse_temperature)
        } else {
            let shared = softmax(row, token.id, max, tempered, &mut scratch.logp);
            (shared, shared, 1.0)
        };
        let logp = -(logp_softmax.target_gap + logp_softmax.log_sum) * logp_factor;
        let entropy = entropy_softmax.log_sum + entropy_softmax.mean_gap;

        let old_logp = match self.spec.old_logp {
            OldLogp::Given => token.old_logp.expect("checked: given"),
            OldLogp::Current => logp,
            OldLogp::Rollout => unreachable!("refused by `beyond_kernels`"),
        };
        let kl = self.spec.kl.as_ref().map(|kl| (kl.estimator, token.ref_logp.expect("checked: given")));
        let token_inputs = Token { logp, old_logp, advantage: token.advantage, kl };
        let TokenLoss { loss, grad, ratio, kl, clipped_low, clipped_high } =
            token_loss(&mut Immediate, &self.numbers, &token_inputs);
        let grad_logp = token.weight * grad;

        let entropy_exps = if self.two_softmaxes() { &scratch.entropy } else { &scratch.logp };
        self.write_dlogits(row, token.id, (&logp_softmax, &scratch.logp, grad_logp), (&entropy_softmax, entropy_exps));
        RowResult { logp, entropy, token_loss: loss, ratio, kl: kl.unwrap_or(0.0), clipped_low, clipped_high }
    }

    /// Pass 3. A factor of 0 leaves its term out, so that nothing multiplies it into a NaN.
    fn write_dlogits<E: Element>(
        &self,
        row: &mut [E],
        id: usize,
        (logp, logp_exps, grad_logp): (&Softmax, &[f32], f64),
        (entropy, entropy_exps): (&Softmax, &[f32]),
    ) {
        let policy_factor = grad_logp * self.inverse_temperature / logp.sum;
        let entropy_factor = self.grad_entropy * self.inverse_temperature / entropy.sum;
        let entropy_term = |x: f32, q: f32| {
            let gap = (entropy.max - x) * entropy.scale;
            if q == 0.0 { 0.0 } else { entropy_factor as f32 * q * (gap - entropy.mean_gap as f32) }
        };
        let target = row[id].to_f32();
        if grad_logp == 0.0 {
            row.iter_mut().zip(entropy_exps).for_each(|(dx, &q)| {
                *dx = E::from_f32(if self.grad_entropy == 0.0 { 0.0 } else { entropy_term(dx.to_f32(), q) });
            });
            return;
        }
        let factor = -policy_factor as f32;
        // A column of probability 0 has no part even in an infinite gradient.
        let policy_term = |e: f32| if e == 0.0 { 0.0 } else { factor * e };
        if self.grad_entropy == 0.0 {
            row.iter_mut().zip(logp_exps).for_each(|(dx, &e)| *dx = E::from_f32(policy_term(e)));
            row[id] = E::from_f32((policy_factor * logp.others) as f32);
        } else {
            for ((dx, &e), &q) in row.iter_mut().zip(logp_exps).zip(entropy_exps) {
                *dx = E::from_f32(policy_term(e) + entropy_term(dx.to_f32(), q));
            }
            let policy = (policy_factor * logp.others) as f32;
            row[id] = E::from_f32(policy + entropy_term(target, entropy_exps[id]));
        }
    }
}

/// Passes 2: fills `exps` with `e_j` and sums them. A NaN logit, or an infinite `max`, makes the sums NaN.
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
