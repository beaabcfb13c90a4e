//! The terms of the cross-entropy that are of a whole row: label smoothing and z-loss.

use super::log_softmax::Softmax;
use super::sum::Sum;
use assay_core::spec::{CrossEntropy, LossSpec, Objective};

/// The row `z[0..V]` of one token's scaled logits, as far as its cross-entropy reads it.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowLogits {
    /// The log-sum-exp `lse = ln Σ_j exp(z_j)`.
    pub log_sum_exp: f64,
    /// The mean gap `Σ_j (m − z_j) / V` of the logits below their maximum `m`, nats; 0 without label smoothing.
    pub mean_gap: f64,
}

impl RowLogits {
    /// Reads the row, as far as the objective of `spec` does.
    pub(super) fn new(spec: &LossSpec, softmax: &Softmax, z: &[f64]) -> Self {
        let Objective::CrossEntropy(cross_entropy) = &spec.objective else { return Self::default() };
        let smooths = cross_entropy.label_smoothing != 0.0;
        // Gaps are not negative, so that nothing cancels in their sum.
        let sum_of_gaps = z.iter().map(|z| softmax.max - z).collect::<Sum>().value();
        Self {
            log_sum_exp: softmax.max + softmax.log_sum,
            mean_gap: if smooths { sum_of_gaps / z.len() as f64 } else { 0.0 },
        }
    }
}

/// The term `r = ε·(lse − Σ_j z_j / V) + ζ·lse²` of a token, with its derivatives.
///
/// ```text
/// ∂r/∂z_j = (ε + 2·ζ·lse)·p_j − ε/V
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct RowTerm {
    /// The value of the term.
    pub value: f64,
    /// The derivative `ε + 2·ζ·lse` by the log-sum-exp, the factor of each `p_j`.
    pub by_log_sum_exp: f64,
    /// The derivative `−ε` by the mean of the logits, of which each logit has the share `1/V`.
    pub by_mean: f64,
}

impl RowTerm {
    /// Evaluates the term of a row, times the token's own weight.
    pub(super) fn new(spec: &LossSpec, row: RowLogits, softmax: &Softmax, weight: f64) -> Self {
        let Objective::CrossEntropy(CrossEntropy { label_smoothing, z_loss }) = spec.objective else {
            return Self::default();
        };
        // A token of weight 0 has no term, and a term of weight 0 is left out, even where the row's values are infinite.
        let weighted = |factor: f64, x: f64| if factor == 0.0 { 0.0 } else { factor * x };
        // lse − Σ z/V = ln S + Σ (m − z)/V: two terms that are not negative.
        let smoothing = weighted(label_smoothing, softmax.log_sum + row.mean_gap);
        let lse = row.log_sum_exp;
        Self {
            value: weighted(weight, smoothing + weighted(z_loss, lse * lse)),
            by_log_sum_exp: weighted(weight, label_smoothing + weighted(z_loss, 2.0 * lse)),
            by_mean: weighted(weight, -label_smoothing),
        }
    }
}
