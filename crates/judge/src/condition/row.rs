//! [`RowErrors`]: the errors of what a cross-entropy reads of the whole row, its log-sum-exp and the mean of its logits.

use super::Bands;
use super::bound::ErrorBound;
use super::lanes::{cotangent_sum_error, lane_sum_error_of};
use super::softmax::{LogitErrors, SoftmaxErrors, transform_rounding};
use crate::tolerance::Grade;
use assay_core::spec::{CrossEntropy, Objective};
use assay_reference::{Reference, Token};

/// The bounds of a cross-entropy's terms of the whole row; 0 for other objectives.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowErrors {
    /// The bound of the value of both terms.
    pub(crate) value: ErrorBound,
    /// The bound of their derivative by the log-sum-exp.
    pub(crate) slope: ErrorBound,
    /// The relative error of the sum of the cotangents of all log-probabilities, which all columns share; 0 unless it is forgiven.
    pub(crate) cotangents: f64,
}

impl RowErrors {
    /// Bounds the terms of `token`, whose softmax has the errors `softmax`, and whose logits those of `errors`.
    ///
    /// The log of the sum has the errors of logp but those of its own logit, and the log-sum-exp rounds once more at its own size:
    /// `1 + ā + |ln S|` and `|lse|`. The mean of the gaps rounds at its own size; at [`Grade::Standard`] the mean is of the logits
    /// themselves, and rounds, as the log-sum-exp that it is subtracted from does, at the size of the largest. A sum over a long row may
    /// be added up in lanes, and so may the cotangents of a row's log-probabilities, by which automatic differentiation multiplies every
    /// probability.
    pub(super) fn new(
        reference: &Reference,
        token: &Token,
        softmax: &SoftmaxErrors,
        errors: &LogitErrors,
        bands: Bands,
    ) -> Self {
        let spec = reference.spec();
        let Objective::CrossEntropy(cross_entropy) = &spec.objective else { return Self::default() };
        if !cross_entropy.reads_row() {
            return Self::default();
        }
        let &CrossEntropy { label_smoothing, z_loss } = cross_entropy;
        let stats = &token.logp_softmax.stats;
        let (largest, lse) = (stats.max.abs(), token.row.log_sum_exp);
        let rounded = transform_rounding(spec, stats.max);
        let log_sum = ErrorBound {
            scale: 1.0 + stats.mean_gap + stats.log_sum.abs() + rounded,
            floor: softmax.mean_error / token.logp_softmax.divisor + softmax.offsets[0] + softmax.lane_sum,
        };
        let log_sum_exp = ErrorBound { scale: log_sum.scale + lse.abs(), ..log_sum };

        let (mut mean, mut cotangents) = (ErrorBound::default(), 0.0);
        if label_smoothing != 0.0 {
            // Where the mean is of the logits, both sides of the difference round at the size of the largest.
            let offset = if bands.grade == Grade::Standard { 2.0 * largest } else { 0.0 };
            mean.scale = token.row.mean_gap + rounded + offset;
            if !errors.is_empty() {
                let vocab = reference.shape().vocab;
                let sum: f64 = (0..vocab).map(|j| errors.at(j)).sum();
                mean.floor += spec.logits.scale.abs() * sum / vocab as f64 / token.logp_softmax.divisor;
            }
            if bands.lanes {
                // Each term is at most the gap and the largest logit, or the gap and the log of the sum.
                let (b, t) = token.at;
                let size = largest.max(stats.log_sum);
                let row = reference.row(b, t, token);
                let z = &row.logp().z;
                let sizes: Vec<f64> = z.iter().map(|z| size + (stats.max - z)).collect();
                mean.floor += lane_sum_error_of(&sizes) * (size + token.row.mean_gap);
                cotangents = cotangent_sum_error(label_smoothing, token.id, z.len());
            }
        }
        let smoothing = log_sum.plus(mean).times(label_smoothing);
        let squared = log_sum_exp.times(2.0 * z_loss * lse.abs());
        let size = ErrorBound { scale: token.row_term.value.abs() + z_loss * lse * lse, floor: 0.0 };
        let weight = token.inputs.policy_weight.abs();
        Self {
            value: smoothing.plus(squared).times(weight).plus(size),
            slope: log_sum_exp.times(2.0 * z_loss * weight),
            cotangents,
        }
    }
}
