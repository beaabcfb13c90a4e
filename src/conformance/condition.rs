//! How strongly f32 rounding shows in each output: the `scale` of every limit.
//!
//! Derived in `docs/tolerances.md`. With the gaps `a_j = m − z_j`, `ā = Σ p_j a_j`, `ā₂ = Σ p_j a_j²`:
//!
//! | output | scale |
//! |---|---|
//! | logp | `C_ℓ = (1 + a_y + ā + |log p_y|)·∂ℓ/∂log p_y` |
//! | entropy | `C_H = 1 + H + ā + ā₂` |
//! | token loss | `|policy| + β(1 + |kl| + |d|) + Δ(token loss)` |
//! | `G = ∂loss/∂ℓ` | `w(|policy′| + β|kl′| + Δ(policy′ + β·kl′))` |
//! | dlogits, `j ≠ y` | `p_j (G_abs(1 + a_j + ā) + ΔG)/T + C_E` |
//! | dlogits, `j = y` | `(G_abs((1−p_y)(1 + ā) + Σ_{j≠y} p_j a_j) + (1−p_y)ΔG)/T + C_E` |
//!
//! `Δ(f)` is how far `f` moves, in units of `u`, when `ℓ` moves by `C·u` with `C = C_ℓ + |old_logp| + |ref_logp|`; and
//! `C_E = |E| q_j ((a_j + ā)(1 + a_j + ā) + ā₂)/T` carries the entropy bonus.

use super::U;
use crate::reference::{Branch, Reference, ScaledSoftmax, Token, TokenInputs, clipped};
use crate::spec::{LossSpec, OldLogp};

/// What is lost of a number below f32's normal ones where the device flushes it to 0.
pub(super) const FLUSHED: f64 = f32::MIN_POSITIVE as f64;

/// The conditions of one unmasked token.
#[derive(Clone, Debug)]
pub struct Condition {
    /// `C_ℓ`.
    pub logp: f64,
    /// `C_H`.
    pub entropy: f64,
    /// Scale of the token loss, the largest over `branches`.
    pub token_loss: f64,
    /// What of the token loss may be lost where f32 flushes numbers below its normal ones: the ratio, times `A`, and the
    /// loss itself.
    pub token_loss_floor: f64,
    /// Scale of the KL estimate.
    pub kl: f64,
    /// Scale of the ratio.
    pub ratio: f64,
    /// The branches that rounding may have put the token on; the reference's own first.
    pub branches: Vec<Branch>,
    /// Whether the token may or may not count as clipped low, and high.
    pub tied: (bool, bool),
    /// Whether f32 arithmetic overflows where f64 does not: any nonfinite value is then an honest answer.
    pub overflows: bool,
    /// `ā₂` of the softmax that entropy is taken from.
    second_moment: f64,
    /// `C`.
    combined: f64,
}

impl Condition {
    /// The conditions of `token`, whose logits are `row`. `kappa_logp` is the class's limit on logp: how near to a kink
    /// the branch is open follows from it.
    pub fn of(reference: &Reference, token: &Token, row: &[f64], kappa_logp: f64) -> Self {
        let spec = reference.spec();
        let softmax = &token.logp_softmax;
        let gap = softmax.stats.max - row[token.id] / softmax.divisor;
        let log_p = softmax.stats.log_probability(row[token.id] / softmax.divisor);
        // ∂ℓ/∂log p_y: 1, or 1/T where the temperature divides the log-probability.
        let factor = softmax.divisor / spec.temperature;
        let logp = (1.0 + gap + softmax.stats.mean_gap + log_p.abs()) * factor;

        let q = &token.entropy_softmax;
        let second_moment = second_moment(q, row);
        let entropy = 1.0 + token.entropy + q.stats.mean_gap + second_moment;

        let old_logp = if spec.old_logp == OldLogp::Given { token.inputs.old_logp.abs() } else { 0.0 };
        let combined = logp + old_logp + token.inputs.ref_logp.map_or(0.0, f64::abs);

        let band = U * (kappa_logp * combined + 4.0);
        let (branches, tied) = branches(spec, token, band);
        let respond = |f: &dyn Fn(&TokenInputs) -> f64| response(spec, &token.inputs, combined, f);
        let beta = spec.kl.as_ref().map_or(0.0, |kl| kl.beta);
        let kl_of =
            |branch: &Branch, inputs: &TokenInputs| spec.kl.as_ref().map_or(0.0, |kl| branch.kl(kl, inputs).value);
        let d = token.inputs.ref_logp.map_or(0.0, |ref_logp| ref_logp - token.inputs.logp);
        let kl_terms = if spec.kl.is_some() { 1.0 + token.kl.value.abs() + d.abs() } else { 0.0 };
        let token_loss = branches.iter().map(|branch| {
            let response = respond(&|inputs| reference.token_loss(inputs, branch));
            branch.policy(&token.inputs).value.abs() + weighted(beta, kl_terms) + response
        });

        let largest = f64::from(f32::MAX) / 2.0;
        let follows_ratio = token.policy.grad != 0.0;
        let overflows =
            [token.policy.value, token.policy.grad, token.kl.value, token.kl.grad].iter().any(|x| x.abs() > largest)
                || (follows_ratio && token.inputs.ratio() > largest);
        // A token whose values are not finite is judged by that alone, and adds no scale to a sum.
        let tame = |scale: f64| if scale.is_finite() { scale } else { 0.0 };
        Self {
            logp: tame(logp),
            entropy: tame(entropy),
            token_loss: token_loss.map(tame).fold(0.0, f64::max),
            token_loss_floor: (1.0 + token.inputs.advantage.abs()) * FLUSHED,
            kl: tame(kl_terms + respond(&|inputs| kl_of(&token.branch, inputs))),
            ratio: tame(token.inputs.ratio() + respond(&TokenInputs::ratio)),
            branches,
            tied,
            overflows,
            second_moment,
            combined,
        }
    }

    /// Scales and underflow floors of a row of dlogits, were the token on `branch`.
    pub fn dlogits(&self, reference: &Reference, token: &Token, row: &[f64], branch: &Branch) -> Vec<(f64, f64)> {
        let spec = reference.spec();
        let on_branch = |inputs: &TokenInputs| reference.grad_logp(&Token { inputs: *inputs, ..*token }, branch);
        let beta = spec.kl.as_ref().map_or(0.0, |kl| kl.beta);
        let kl_grad = spec.kl.as_ref().map_or(0.0, |kl| branch.kl(kl, &token.inputs).grad);
        let grad = token.weight * (branch.policy(&token.inputs).grad.abs() + weighted(beta, kl_grad.abs()));
        let grad_response = response(spec, &token.inputs, self.combined, &on_branch);
        let grad_entropy = reference.grad_entropy().abs();

        let (logp, entropy) = (&token.logp_softmax, &token.entropy_softmax);
        let others = token.probability_of_others;
        let mean_gap = logp.stats.mean_gap;
        let column = |(j, &x): (usize, &f64)| {
            let (p, gap) = probability_and_gap(logp, x);
            let policy = if j == token.id {
                let gaps_of_others = (mean_gap - p * gap).max(0.0);
                grad * (others * (1.0 + mean_gap) + gaps_of_others) + others * grad_response
            } else {
                p * (grad * (1.0 + gap + mean_gap) + grad_response)
            };
            // f32 flushes exp below its smallest normal number: once a column, and V times on the target.
            let flushed = if j == token.id { row.len() as f64 } else { 1.0 };
            let mut scale = if grad == 0.0 { 0.0 } else { policy };
            let mut floor = 1.0 + grad * flushed + token.weight * token.inputs.advantage.abs();
            if grad_entropy > 0.0 {
                let (q, gap) = probability_and_gap(entropy, x);
                let span = gap + entropy.stats.mean_gap;
                scale += grad_entropy * q * (span * (1.0 + span) + self.second_moment);
                // ā may lose e·a of every column, at most where e is the smallest number that stays.
                let lost_of_mean_gap = row.len() as f64 * -FLUSHED.ln();
                floor += 1.0 + grad_entropy * (1.0 + span + q * lost_of_mean_gap);
            }
            (scale / spec.temperature, floor / spec.temperature.min(1.0) * FLUSHED)
        };
        row.iter().enumerate().map(column).collect()
    }
}

/// `beta · term`; 0 where `beta` is, even if the term overflows.
fn weighted(beta: f64, term: f64) -> f64 {
    if beta == 0.0 { 0.0 } else { beta * term }
}

/// `p_j` and `a_j`; a column of probability 0 has no gap worth speaking of.
fn probability_and_gap(softmax: &ScaledSoftmax, x: f64) -> (f64, f64) {
    let z = x / softmax.divisor;
    let p = softmax.stats.probability(z);
    if p == 0.0 { (0.0, 0.0) } else { (p, softmax.stats.max - z) }
}

/// `Σ p_j a_j²`.
fn second_moment(softmax: &ScaledSoftmax, row: &[f64]) -> f64 {
    row.iter().map(|&x| probability_and_gap(softmax, x)).map(|(p, gap)| p * gap * gap).sum()
}

/// How far `f` moves, in units of `u`, when `ℓ` moves by `condition·u`. Under [`OldLogp::Current`] the ratio stays 1.
fn response(spec: &LossSpec, inputs: &TokenInputs, condition: f64, f: &dyn Fn(&TokenInputs) -> f64) -> f64 {
    let here = f(inputs);
    let moved = |by: f64| (f(&shift(spec, inputs, by)) - here).abs();
    moved(condition * U).max(moved(-condition * U)) / U
}

fn shift(spec: &LossSpec, inputs: &TokenInputs, by: f64) -> TokenInputs {
    let old_logp = if spec.old_logp == OldLogp::Current { inputs.old_logp + by } else { inputs.old_logp };
    TokenInputs { logp: inputs.logp + by, old_logp, ..*inputs }
}

/// The branches within `band` of the token, its own first, and which clip counts are open.
///
/// The kink of `|d|` is itself within the band when both its sides are: a kernel may find `d = 0` exactly.
fn branches(spec: &LossSpec, token: &Token, band: f64) -> (Vec<Branch>, (bool, bool)) {
    let here = &token.inputs;
    let kink = here.ref_logp.filter(|ref_logp| (ref_logp - here.logp).abs() <= band);
    let on_kink = kink.map(|ref_logp| TokenInputs { logp: ref_logp, ..*here });
    let nearby = [shift(spec, here, -band), shift(spec, here, band)];

    let mut branches = vec![token.branch];
    let mut tied = (false, false);
    for inputs in nearby.iter().chain(&on_kink) {
        let branch = Branch::at(spec, inputs);
        if !branches.contains(&branch) {
            branches.push(branch);
        }
        let (low, high) = clipped(spec, inputs);
        tied.0 |= low != token.clipped_low;
        tied.1 |= high != token.clipped_high;
    }
    (branches, tied)
}
