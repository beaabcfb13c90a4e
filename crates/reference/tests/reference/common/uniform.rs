//! Batches of equal logits, whose softmax, log-probabilities and gradients are known by hand.

use assay_core::problem::{Advantages, Extra, FloatArray, Problem};
use ndarray::{Array2, Array3};

/// Columns of [`uniform`].
pub(crate) const V: usize = 4;

/// Every logit 0 over `V = 4`: `p = 1/4`, `ℓ = −ln 4`, `H = ln 4`. The sampled id is 0, every token counts, and
/// `old_logp` and `ref_logp` equal `ℓ`. `advantages` is `[B][T]`.
pub(crate) fn uniform<const T: usize>(advantages: &[[f64; T]]) -> Problem {
    let shape = (advantages.len(), T);
    let logp = || Some(Array2::from_elem(shape, -4_f64.ln()));
    Problem {
        logits: FloatArray::F64(Array3::zeros((shape.0, T, V))),
        ids: Array2::zeros(shape),
        mask: Array2::from_elem(shape, true),
        advantages: Advantages::Token(ndarray::arr2(advantages)),
        old_logp: logp(),
        ref_logp: logp(),
        extra: Extra::default(),
    }
}
