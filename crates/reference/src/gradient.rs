//! `∂loss / ∂logits` of one row, in closed form.

use super::Token;
use super::columns::{Columns, SoftmaxColumns};

/// `dlogits[b,t,:]` of an unmasked token, or of some columns of it.
///
/// With `h` the transformed logits, `y` the sampled id, `G = ∂loss/∂ℓ` and `E = ∂loss/∂H`:
///
/// ```text
/// ∂ℓ/∂h_j = (1[j=y] − p_j) / T        p = softmax(h / T), or softmax(h) when T divides the log-probability
/// ∂H/∂h_j = q_j (a_j − ā) / T         q = softmax(h / T)
/// dx_j    = (G · ∂ℓ/∂h_j + E · ∂H/∂h_j) · ∂h_j/∂x_j
/// ```
///
/// On the target `1 − p_y` is summed over the other columns. A term whose factor is 0 is 0, whatever the other factor:
/// a clipped token has no gradient even where its softmax is not finite.
pub(super) fn dlogits_row(columns: &Columns, token: &Token, grad_logp: f64, grad_entropy: f64) -> Vec<f64> {
    // ∞ · 0 is NaN, but a column of probability 0 has no part in an infinite loss.
    let logp_grad = |p: f64| if grad_logp == 0.0 || p == 0.0 { 0.0 } else { -grad_logp * p };
    let logp_grad_of_target = if grad_logp == 0.0 { 0.0 } else { grad_logp * token.probability_of_others };
    let entropy_grad = |z: f64, q: f64| {
        let of_entropy = token.entropy_softmax.stats.entropy_gradient(z, q);
        if grad_entropy == 0.0 { 0.0 } else { grad_entropy * of_entropy }
    };
    let scaled = |dx: f64| if dx == 0.0 { 0.0 } else { dx / token.temperature() };
    let (p, SoftmaxColumns { z, probabilities: q }) = (&columns.of_logp().probabilities, columns.of_entropy());
    let column = |(&p, (&z, &q)): (&f64, (&f64, &f64))| scaled(logp_grad(p) + entropy_grad(z, q));
    let mut dlogits: Vec<f64> = p.iter().zip(z.iter().zip(q)).map(column).collect();
    if let Some(y) = columns.place_of(token.id) {
        dlogits[y] = scaled(logp_grad_of_target + entropy_grad(z[y], q[y]));
    }
    if let Some(slopes) = columns.slopes() {
        for (dx, slope) in dlogits.iter_mut().zip(slopes) {
            *dx = if *dx == 0.0 { 0.0 } else { *dx * slope };
        }
    }
    dlogits
}
