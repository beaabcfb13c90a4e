//! Token losses to one number.

use ndarray::Array2;

use super::Token;
use super::sum::Sum;
use crate::problem::Metrics;
use crate::spec::{LossSpec, Reduction};

/// `Σ_t m[b,t]` for every row.
fn counts(tokens: &Array2<Option<Token>>) -> Vec<usize> {
    tokens.rows().into_iter().map(|row| row.iter().flatten().count()).collect()
}

/// The weight `w_b` of every unmasked token of row `b`; 0 for a row without one.
pub(super) fn row_weights(reduction: Reduction, tokens: &Array2<Option<Token>>) -> Vec<f64> {
    let counts = counts(tokens);
    let batch = counts.len() as f64;
    let weight = |count: usize| match reduction {
        Reduction::TokenMean => 1.0 / counts.iter().sum::<usize>() as f64,
        Reduction::SequenceMean { count_empty_rows: true } => 1.0 / (batch * count as f64),
        Reduction::SequenceMean { count_empty_rows: false } => {
            1.0 / (counts.iter().filter(|&&n| n > 0).count() as f64 * count as f64)
        }
        Reduction::TokenSum { max_length } => 1.0 / (batch * max_length as f64),
        Reduction::Normalizer(normalizer) => 1.0 / normalizer,
    };
    counts.iter().map(|&count| if count == 0 { 0.0 } else { weight(count) }).collect()
}

/// `Σ_b w_b Σ_t m·token_loss − entropy_coef · mean(H)`.
pub(super) fn loss(spec: &LossSpec, tokens: &Array2<Option<Token>>, entropy_mean: f64) -> f64 {
    let mut total = Sum::default();
    for token in tokens.iter().flatten() {
        total.add(token.weight * token.token_loss);
    }
    if spec.entropy_coef != 0.0 {
        total.add(-spec.entropy_coef * entropy_mean);
    }
    total.value()
}

/// Means over unmasked tokens; 0 where there is none.
pub(super) fn metrics(spec: &LossSpec, tokens: &Array2<Option<Token>>) -> Metrics {
    let count = tokens.iter().flatten().count();
    let mean = |value: &dyn Fn(&Token) -> f64| {
        if count == 0 { 0.0 } else { tokens.iter().flatten().map(value).collect::<Sum>().value() / count as f64 }
    };
    let share = |holds: &dyn Fn(&Token) -> bool| mean(&|token| f64::from(u8::from(holds(token))));
    Metrics {
        clip_low: share(&|token| token.clipped_low),
        clip_high: share(&|token| token.clipped_high),
        clip_region: share(&|token| token.clipped_low || token.clipped_high),
        kl_mean: spec.kl.as_ref().map(|_| mean(&|token| token.kl.value)),
        entropy_mean: mean(&|token| token.entropy),
        ratio_mean: mean(&|token| token.inputs.ratio()),
    }
}
