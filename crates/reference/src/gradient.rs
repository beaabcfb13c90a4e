//! The gradient `∂loss / ∂logits` of one token, in closed form.

use super::Token;
use super::columns::{SoftmaxColumns, TokenColumns};
use multiversion::multiversion;

/// One log-probability of a token, and the derivative of the loss with respect to it.
#[derive(Clone, Copy)]
pub(super) struct LogpGradient {
    /// The id `y_k` that is scored.
    pub(super) id: usize,
    /// The probability of the other entries, `1 − p_y`.
    pub(super) probability_of_others: f64,
    /// The derivative `∂loss/∂ℓ_k`.
    pub(super) grad: f64,
}

/// The derivatives of the loss by the row's own values, which the cross-entropy reads.
#[derive(Clone, Copy)]
pub(super) struct RowGradient {
    /// The derivative `∂loss/∂lse`, by the log-sum-exp.
    by_log_sum_exp: f64,
    /// The derivative by the mean of the logits.
    pub(super) by_mean: f64,
}

impl RowGradient {
    /// Takes the derivatives of a token's term, times its weight in the loss; `None` if both are 0.
    pub(super) fn new(token: &Token) -> Option<Self> {
        let weighted = |slope: f64| if slope == 0.0 { 0.0 } else { token.weight * slope };
        let by_log_sum_exp = weighted(token.row_term.by_log_sum_exp);
        let by_mean = weighted(token.row_term.by_mean);
        (by_log_sum_exp != 0.0 || by_mean != 0.0).then_some(Self { by_log_sum_exp, by_mean })
    }

    /// Returns `∂loss/∂z_j` of a column with probability `p`, of `vocab` columns.
    fn at(self, p: f64, vocab: usize) -> f64 {
        let of_sum = if p == 0.0 { 0.0 } else { self.by_log_sum_exp * p };
        of_sum + self.by_mean / vocab as f64
    }
}

/// Returns `dlogits[b,t,:]` of an unmasked token, for all vocabulary entries or a range of them.
///
/// With `h` the transformed logits, `y_k` the token's ids (most often one), `G_k = ∂loss/∂ℓ_k` and `E = ∂loss/∂H`:
///
/// ```text
/// ∂ℓ_k/∂h_j = (1[j=y_k] − p_j) / T    p = softmax(h / T), or softmax(h) when T divides the log-probability
/// ∂H/∂h_j   = q_j (a_j − ā) / T       q = softmax(h / T)
/// dx_j      = (Σ_k G_k · ∂ℓ_k/∂h_j + E · ∂H/∂h_j) · ∂h_j/∂x_j
/// ```
///
/// The cross-entropy's term of the whole row adds `∂loss/∂lse · p_j + ∂loss/∂mean / V` to the sum, over `T`.
///
/// If the KL penalty reads a log-probability of another softmax than the ratio does, that one is a term like the others, with the
/// probabilities of its softmax.
///
/// On an id's own column `1 − p_y` is summed over the other columns. A term whose factor is 0 is 0, whatever the other factor:
/// a clipped token has no gradient even where its softmax is not finite.
#[multiversion(targets("x86_64+avx2"))]
pub(super) fn dlogits_row(
    columns: &TokenColumns,
    token: &Token,
    of_logps: &[LogpGradient],
    of_kl: &LogpGradient,
    grad_entropy: f64,
    vocab: usize,
) -> Vec<f64> {
    // ∞ · 0 is NaN, but a column of probability 0 has no part in an infinite loss.
    let elsewhere = |grad: f64, p: f64| if grad == 0.0 || p == 0.0 { 0.0 } else { -grad * p };
    let on_own = |of: &LogpGradient| if of.grad == 0.0 { 0.0 } else { of.grad * of.probability_of_others };
    // On a column that no id has, every log-probability has the derivative −p_j.
    let sum: f64 = of_logps.iter().map(|of| of.grad).sum();
    let entropy_grad = |z: f64, q: f64| {
        let of_entropy = token.entropy_softmax.stats.entropy_gradient(z, q);
        if grad_entropy == 0.0 { 0.0 } else { grad_entropy * of_entropy }
    };
    let kl = &columns.kl().probabilities;
    let y = columns.place_of(of_kl.id);
    let kl_grad = |j: usize| if y == Some(j) { on_own(of_kl) } else { elsewhere(of_kl.grad, kl[j]) };
    // A quotient by 1 is the number itself, and takes as long as any other.
    let temperature = token.temperature();
    let divided = |dx: f64| if temperature == 1.0 { dx } else { dx / temperature };
    let scaled = |dx: f64| if dx == 0.0 { 0.0 } else { divided(dx) };
    let row = RowGradient::new(token);
    let row_grad = |p: f64| row.map_or(0.0, |row| row.at(p, vocab));
    let (p, SoftmaxColumns { z, probabilities: q }) = (&columns.logp().probabilities, columns.entropy());
    // Term by term, and a term that is 0 everywhere is left out: a loop without a branch is vectorized.
    let mut dlogits: Vec<f64> = p.iter().map(|&p| elsewhere(sum, p)).collect();
    if of_kl.grad != 0.0 {
        dlogits.iter_mut().enumerate().for_each(|(j, dx)| *dx += kl_grad(j));
    }
    if grad_entropy != 0.0 {
        dlogits.iter_mut().zip(z.iter().zip(q)).for_each(|(dx, (&z, &q))| *dx += entropy_grad(z, q));
    }
    if row.is_some() {
        dlogits.iter_mut().zip(p).for_each(|(dx, &p)| *dx += row_grad(p));
    }
    for dx in &mut dlogits {
        *dx = scaled(*dx);
    }
    // On an id's column its own logp has 1 − p_y instead; an id may occur several times.
    for y in of_logps.iter().filter_map(|of| columns.place_of(of.id)) {
        let of_logp =
            |of: &LogpGradient| if columns.place_of(of.id) == Some(y) { on_own(of) } else { elsewhere(of.grad, p[y]) };
        let of_ids = of_logps.iter().map(of_logp).sum::<f64>();
        dlogits[y] = scaled(of_ids + kl_grad(y) + entropy_grad(z[y], q[y]) + row_grad(p[y]));
    }
    // The chain rule through the transform of the logits.
    if let Some(slopes) = columns.slopes() {
        for (dx, slope) in dlogits.iter_mut().zip(slopes) {
            *dx = if *dx == 0.0 { 0.0 } else { *dx * slope };
        }
    }
    dlogits
}
