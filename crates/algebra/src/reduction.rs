//! Token losses to one number.

use ndarray::{Array2, Axis};

use super::loss::Graded;
use super::rollout::Settled;
use super::structure::Input;
use assay_core::problem::Metrics;
use assay_core::spec::{Averaging, LossSpec, Reduction, Rows};

/// What the terms of tokens are multiplied by.
pub struct Weights {
    /// The policy term of each row's.
    pub policy: Vec<f64>,
    /// Their KL penalty.
    pub kl: Vec<f64>,
    /// The entropy, `[B,T]`: `∂loss/∂H` of an unmasked token.
    pub entropy: Array2<f64>,
}

impl Weights {
    /// Those of `spec` where the mask lets tokens count.
    pub fn of(spec: &LossSpec, settled: &Settled) -> Self {
        let mask = &settled.mask;
        let all_tokens = Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 0.0 };
        let times = |factor: f64, averaging| {
            row_weights(averaging, mask).into_iter().map(|weight| factor * weight).collect::<Vec<f64>>()
        };
        let entropy = if let Some(dentropy) = settled.input(Input::Dentropy) {
            Array2::from_shape_fn(mask.dim(), |at| if mask[at] { spec.scale * dentropy[at] } else { 0.0 })
        } else {
            let averaging = spec.entropy_averaging.unwrap_or(all_tokens);
            by_token(&times(-spec.entropy_coef * spec.scale, averaging), mask.ncols())
        };
        Self { policy: times(spec.scale, spec.averaging()), kl: times(spec.scale, spec.kl_averaging()), entropy }
    }
}

/// What each row has, for each of its tokens.
pub fn by_token(of_rows: &[f64], tokens: usize) -> Array2<f64> {
    Array2::from_shape_fn((of_rows.len(), tokens), |(b, _)| of_rows[b])
}

fn row_weights(averaging: Averaging, mask: &Array2<bool>) -> Vec<f64> {
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
    let epsilon = averaging.denominator_epsilon;
    let denominator = |count: f64| match averaging.reduction {
        Reduction::TokenMean => total + epsilon,
        Reduction::SequenceMean { rows } => (count + epsilon) * rows_of(rows),
        Reduction::SequenceSum { rows } => rows_of(rows),
        Reduction::FixedLength { rows, length } => rows_of(rows) * length.unwrap_or(mask.ncols()) as f64,
        Reduction::Normalizer(value) => value,
    };
    counts.into_iter().map(|count| if count > 0.0 { denominator(count).recip() } else { 0.0 }).collect()
}

/// `Σ weight·token_loss + Σ ∂loss/∂H·H`, in row order.
pub fn loss(tokens: &Array2<Option<Graded>>, weights: &Weights) -> f64 {
    let mut total = 0.0;
    for (b, row) in tokens.axis_iter(Axis(0)).enumerate() {
        for (t, token) in row.iter().enumerate() {
            let Some(token) = token else { continue };
            total += weights.policy[b] * token.token.reduced;
            if weights.entropy[[b, t]] != 0.0 {
                total += weights.entropy[[b, t]] * token.entropy;
            }
        }
    }
    total
}

/// What rows without a token add to an importance-sampled loss: `−A/B` each, for their ratio is `exp(0)`.
pub fn empty_rows(spec: &LossSpec, mask: &Array2<bool>, advantage: impl Fn(usize) -> f64) -> f64 {
    let empty = mask.rows().into_iter().enumerate().filter(|(_, row)| !row.iter().any(|&counts| counts));
    -spec.scale * empty.map(|(b, _)| advantage(b)).sum::<f64>() / mask.nrows() as f64
}

/// Means over unmasked tokens.
pub fn metrics(spec: &LossSpec, tokens: &Array2<Option<Graded>>) -> Metrics {
    let count = tokens.iter().flatten().count();
    let mean = |value: fn(&Graded) -> f64| {
        if count == 0 { 0.0 } else { tokens.iter().flatten().map(value).sum::<f64>() / count as f64 }
    };
    Metrics {
        clip_low: mean(|graded| f64::from(u8::from(graded.token.clipped_low))),
        clip_high: mean(|graded| f64::from(u8::from(graded.token.clipped_high))),
        clip_region: mean(|graded| f64::from(u8::from(graded.token.clipped_low || graded.token.clipped_high))),
        kl_mean: spec.kl.as_ref().map(|_| mean(|graded| graded.token.kl.unwrap_or(0.0))),
        entropy_mean: mean(|graded| graded.entropy),
        ratio_mean: mean(|graded| graded.token.ratio),
    }
}
