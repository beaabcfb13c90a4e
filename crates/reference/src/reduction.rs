//! The reduction of token losses to one number, and the means that trainers log.

use ndarray::Array2;

use super::Token;
use super::sum::Sum;
use assay_core::problem::Metrics;
use assay_core::spec::{Averaging, LossSpec, Objective, Reduction, Rows};

/// Returns the weight `w_b` of the unmasked tokens of each sequence `b`, of which it has `counts[b]`; 0 for a sequence
/// without any.
pub(super) fn row_weights(averaging: Averaging, counts: &[usize], width: usize) -> Vec<f64> {
    // Counts of the batch, or given ones.
    let rows = |rows: Rows| match rows {
        Rows::All => counts.len() as f64,
        Rows::NonEmpty => counts.iter().filter(|&&n| n > 0).count() as f64,
        Rows::Given(count) => count,
    };
    let total: usize = counts.iter().sum();
    let epsilon = averaging.denominator_epsilon;
    let weight = |count: usize| match averaging.reduction {
        Reduction::TokenMean => 1.0 / (total as f64 + epsilon),
        Reduction::SequenceMean { rows: of } => 1.0 / (rows(of) * (count as f64 + epsilon)),
        Reduction::SequenceSum { rows: of } => 1.0 / rows(of),
        Reduction::FixedLength { rows: of, length } => 1.0 / (rows(of) * length.unwrap_or(width) as f64),
        Reduction::Normalizer(normalizer) => 1.0 / normalizer,
    };
    counts.iter().map(|&count| if count == 0 { 0.0 } else { weight(count) }).collect()
}

/// Returns `scale · (Σ w·policy + Σ w_kl·beta·kl) + Σ ∂loss/∂H·H`, with `scale` already in the weights, and the
/// contribution of the sequences without a token, of `rows` in all.
pub(super) fn loss(spec: &LossSpec, tokens: &Array2<Option<Token>>, rows: usize, empty_rows: &[f64]) -> f64 {
    let mut total = Sum::default();
    // The mean cross-entropy of no token is 0/0, as PyTorch has it; the losses of policies are 0.
    let is_mean = spec.averaging() == Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 0.0 };
    if matches!(spec.objective, Objective::CrossEntropy(_)) && is_mean && tokens.iter().flatten().next().is_none() {
        return f64::NAN;
    }
    for token in tokens.iter().flatten() {
        // One product where both terms have the same weight, as in the formula of the token loss.
        if token.kl_weight == token.weight {
            total.add(token.weight * token.token_loss);
        } else {
            total.add(token.weight * token.policy.value);
            total.add(token.kl_weight * spec.kl.as_ref().map_or(0.0, |kl| super::times_beta(kl.beta, token.kl.value)));
        }
        if token.grad_entropy != 0.0 {
            total.add(token.grad_entropy * token.entropy);
        }
    }
    if let Objective::ImportanceSampling(sampling) = &spec.objective
        && sampling.empty_rows
    {
        total.extend(empty_rows.iter().map(|advantage| -spec.scale * advantage / rows as f64));
    }
    total.value()
}

/// Returns the means over unmasked tokens; 0 without any.
pub(super) fn metrics(spec: &LossSpec, tokens: &Array2<Option<Token>>) -> Metrics {
    // Metrics are plain means, whatever the reduction of the loss is.
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
        ratio_mean: mean(&|token| token.inputs.ratio(spec)),
    }
}
