//! Token losses to one number.

use ndarray::Array2;

use super::row::RowResult;
use crate::problem::Metrics;
use crate::spec::{LossSpec, Reduction, Rows};

/// What each row's tokens are multiplied by.
pub(super) fn row_weights(reduction: Reduction, mask: &Array2<bool>) -> Vec<f64> {
    let counts: Vec<f64> =
        mask.rows().into_iter().map(|row| row.iter().filter(|&&counts| counts).count() as f64).collect();
    let rows = counts.len() as f64;
    let filled_rows = counts.iter().filter(|&&n| n > 0.0).count() as f64;
    let total: f64 = counts.iter().sum();
    let rows_of = |of: Rows| match of {
        Rows::All => rows,
        Rows::NonEmpty => filled_rows,
        Rows::Given(count) => count,
    };
    let denominator = |count: f64| match reduction {
        Reduction::TokenMean => total,
        Reduction::SequenceMean { rows } => count * rows_of(rows),
        Reduction::SequenceSum { rows } => rows_of(rows),
        Reduction::FixedLength { rows, length } => rows_of(rows) * length.unwrap_or(mask.ncols()) as f64,
        Reduction::Normalizer(value) => value,
    };
    counts.into_iter().map(|count| if count > 0.0 { denominator(count).recip() } else { 0.0 }).collect()
}

/// `Σ weight·token_loss − entropy_coef · mean(H)`, in row order.
pub(super) fn loss(
    spec: &LossSpec,
    results: &[Option<RowResult>],
    weights: &[f64],
    tokens: usize,
    entropy_mean: f64,
) -> f64 {
    let weighted =
        results.iter().enumerate().filter_map(|(i, result)| Some(weights[i / tokens] * result.as_ref()?.token_loss));
    let policy: f64 = weighted.sum();
    if spec.entropy_coef == 0.0 { policy } else { policy - spec.entropy_coef * entropy_mean }
}

/// Means over unmasked tokens.
pub(super) fn metrics(spec: &LossSpec, results: &[Option<RowResult>], count: usize) -> Metrics {
    let mean = |value: fn(&RowResult) -> f64| {
        if count == 0 { 0.0 } else { results.iter().flatten().map(value).sum::<f64>() / count as f64 }
    };
    Metrics {
        clip_low: mean(|row| f64::from(u8::from(row.clipped_low))),
        clip_high: mean(|row| f64::from(u8::from(row.clipped_high))),
        clip_region: mean(|row| f64::from(u8::from(row.clipped_low || row.clipped_high))),
        kl_mean: spec.kl.as_ref().map(|_| mean(|row| row.kl)),
        entropy_mean: mean(|row| row.entropy),
        ratio_mean: mean(|row| row.ratio),
    }
}
