//! `∂loss / ∂logits` of one row, in closed form.

use super::Token;
use super::columns::Columns;

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
pub(super) fn dlogits_row(
    columns: &Columns,
    token: &Token,
    temperature: f64,
    grad_logp: f64,
    grad_entropy: f64,
) -> Vec<f64> {
    let logp_grad = |j: usize, p: f64| -> f64 {
        if j == token.id {
            grad_logp * token.probability_of_others
        } else {
            // ∞ · 0 is NaN, but a column of probability 0 has no part in an infinite loss.
            if p == 0.0 { 0.0 } else { -grad_logp * p }
        }
    };
    let entropy_grad = |h: f64, q: f64| -> f64 {
        let z = h / token.entropy_softmax.divisor;
        grad_entropy * token.entropy_softmax.stats.entropy_gradient(z, q)
    };
    let probabilities = columns.probabilities().iter().zip(columns.probabilities_of_entropy());
    let column = |(j, (&h, (&p, &q))): (usize, (&f64, (&f64, &f64)))| {
        let mut dx = 0.0;
        if grad_logp != 0.0 {
            dx += logp_grad(j, p);
        }
        if grad_entropy != 0.0 {
            dx += entropy_grad(h, q);
        }
        if dx == 0.0 { 0.0 } else { dx / temperature * columns.slope(j) }
    };
    (columns.first()..).zip(columns.logits().iter().zip(probabilities)).map(column).collect()
}
