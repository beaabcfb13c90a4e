//! The terms of a cross-entropy that read the whole row: label smoothing and z-loss.
//!
//! With `m` the maximum of the row's logits over `T`, `ln S` the logarithm of the sum of `exp(z_j − m)`, `g` the mean of the gaps
//! `m − z_j` over the vocabulary, the share `ε` of the target that is uniform, and the factor `ζ` of the squared log-sum-exp:
//!
//! ```text
//! value     ε·(ln S + g) + ζ·(m + ln S)²
//! ∂/∂z_j    (ε + 2·ζ·(m + ln S))·p_j − ε/V
//! ```

use super::arithmetic::Arithmetic;
use super::structure::{SpecNumber, SpecNumbers, Structure};

/// A token's whole row, as far as a cross-entropy reads it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WholeRow<V> {
    /// Maximum `m` of the logits of the softmax, over `T`.
    pub max: V,
    /// Logarithm `ln S` of the sum of exponentials.
    pub log_sum: V,
    /// Mean gap `g` over the vocabulary; not read without label smoothing.
    pub mean_gap: V,
}

/// The value of a token's row terms, and their derivatives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WholeRowTerm<V> {
    /// The sum of label smoothing and z-loss.
    pub value: V,
    /// Derivative by the log-sum-exp, the factor of each `p_j`.
    pub by_log_sum_exp: V,
    /// Derivative `−ε` by the mean of all logits.
    pub by_mean: V,
}

/// Writes the row terms of a token; the structure has one of them.
pub fn row_term<A: Arithmetic>(
    on: &mut A,
    structure: Structure,
    numbers: &SpecNumbers<A::Value>,
    WholeRow { max, log_sum, mean_gap }: WholeRow<A::Value>,
) -> WholeRowTerm<A::Value> {
    let zero = on.constant(0.0);
    let mut term = WholeRowTerm { value: zero, by_log_sum_exp: zero, by_mean: zero };
    if structure.row_terms.smoothing {
        let share = numbers.get(SpecNumber::LabelSmoothing);
        let mean = on.add(log_sum, mean_gap);
        term = WholeRowTerm { value: on.mul(share, mean), by_log_sum_exp: share, by_mean: on.neg(share) };
    }
    if structure.row_terms.z_loss {
        let factor = numbers.get(SpecNumber::ZLoss);
        let log_sum_exp = on.add(max, log_sum);
        let half_slope = on.mul(factor, log_sum_exp);
        let square = on.mul(half_slope, log_sum_exp);
        let slope = on.add(half_slope, half_slope);
        term.value = on.add(term.value, square);
        term.by_log_sum_exp = on.add(term.by_log_sum_exp, slope);
    }
    term
}
