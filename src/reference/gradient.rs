//! `∂loss / ∂logits` of one row, in closed form.

use super::Token;
use super::log_softmax::Softmax;

/// `dlogits[b,t,:]` of an unmasked token.
///
/// With `x` the row of logits, `y` the sampled id, `G = ∂loss/∂ℓ` and `E = ∂loss/∂H`:
///
/// ```text
/// ∂ℓ/∂x_j = (1[j=y] − p_j) / T        p = softmax(x / T), or softmax(x) when T divides the log-probability
/// ∂H/∂x_j = q_j (a_j − ā) / T         q = softmax(x / T)
/// dx_j    = G · ∂ℓ/∂x_j + E · ∂H/∂x_j
/// ```
///
/// On the target `1 − p_y` is summed over the other columns. A term whose factor is 0 is 0, whatever the other factor:
/// a clipped token has no gradient even where its softmax is not finite.
pub(super) fn dlogits_row(
    logits: &[f64],
    token: &Token,
    temperature: f64,
    grad_logp: f64,
    grad_entropy: f64,
) -> Vec<f64> {
    let logp_grad = |j: usize, x: f64| -> f64 {
        let softmax: &Softmax = &token.logp_softmax.stats;
        let z = x / token.logp_softmax.divisor;
        if j == token.id {
            grad_logp * token.probability_of_others
        } else {
            let p = softmax.probability(z);
            // ∞ · 0 is NaN, but a column of probability 0 has no part in an infinite loss.
            if p == 0.0 { 0.0 } else { -grad_logp * p }
        }
    };
    let entropy_grad = |x: f64| -> f64 {
        let z = x / token.entropy_softmax.divisor;
        grad_entropy * token.entropy_softmax.stats.entropy_gradient(z)
    };
    let mut row = vec![0.0; logits.len()];
    for (j, (dx, &x)) in row.iter_mut().zip(logits).enumerate() {
        if grad_logp != 0.0 {
            *dx += logp_grad(j, x) / temperature;
        }
        if grad_entropy != 0.0 {
            *dx += entropy_grad(x) / temperature;
        }
    }
    row
}
