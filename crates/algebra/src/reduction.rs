//! Reduction of token losses to one number, and the means that are logged.

use ndarray::Array2;

use super::loss::{TokenEvaluation, WeightedToken};
use super::rollout::KernelInputs;
use super::structure::TokenInput;
use assay_core::problem::{Metrics, Sequence, Sequences};
use assay_core::spec::{Averaging, LossSpec, Reduction, Rows};

/// Factors of the terms of each token in the loss, `[B,T]`.
pub struct ReductionWeights {
    /// Factor of the policy term, the same for all tokens of a sequence.
    pub policy: Array2<f64>,
    /// Factor of the KL penalty, the same for all tokens of a sequence.
    pub kl: Array2<f64>,
    /// Derivative `∂loss/∂H` of the loss by the entropy of an unmasked token.
    pub entropy: Array2<f64>,
}

impl ReductionWeights {
    /// Computes the factors of `spec` from the tokens that count.
    pub fn new(spec: &LossSpec, inputs: &KernelInputs, sequences: &Sequences) -> Self {
        let mask = &inputs.mask;
        // One factor per sequence, in the places of its tokens.
        let counts = counts(mask, sequences);
        let all_tokens = Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 0.0 };
        let times = |factor: f64, averaging| {
            let of_rows = row_weights(averaging, &counts, mask.ncols());
            let weights: Vec<f64> = of_rows.into_iter().map(|weight| factor * weight).collect();
            sequences.spread(mask.dim(), &weights)
        };
        // Cotangents of entropies are factors of their own; a bonus has the factor of its mean.
        let entropy = if let Some(dentropy) = inputs.input(TokenInput::Dentropy) {
            Array2::from_shape_fn(mask.dim(), |at| if mask[at] { spec.scale * dentropy[at] } else { 0.0 })
        } else {
            let averaging = spec.entropy_averaging.unwrap_or(all_tokens);
            times(-spec.entropy_coef * spec.scale, averaging)
        };
        Self { policy: times(spec.scale, spec.averaging()), kl: times(spec.scale, spec.kl_averaging()), entropy }
    }

    /// Gives the token at `[b,t]` its weights.
    pub fn token(&self, advantage: f64, at: (usize, usize)) -> WeightedToken {
        let (weight, kl) = (self.policy[at], self.kl[at]);
        WeightedToken { advantage, weight, kl_share: kl / weight, at }
    }
}

/// Counts the unmasked tokens of each sequence.
fn counts(mask: &Array2<bool>, sequences: &Sequences) -> Vec<f64> {
    let count = |sequence: Sequence| sequence.places().filter(|&at| mask[at]).count() as f64;
    sequences.places(mask.dim()).into_iter().map(count).collect()
}

/// Computes the factor of each sequence's tokens under `averaging`. A fixed length over the padded width never meets
/// packed sequences.
fn row_weights(averaging: Averaging, counts: &[f64], width: usize) -> Vec<f64> {
    // Counts of the batch that denominators may use.
    let rows = counts.len() as f64;
    let filled_rows = counts.iter().filter(|&&n| n > 0.0).count() as f64;
    let total: f64 = counts.iter().sum();
    let rows_of = |of: Rows| match of {
        Rows::All => rows,
        Rows::NonEmpty => filled_rows,
        Rows::Given(count) => count,
    };
    // Sequences without an unmasked token have no factor: their denominator may be 0.
    let epsilon = averaging.denominator_epsilon;
    let denominator = |count: f64| match averaging.reduction {
        Reduction::TokenMean => total + epsilon,
        Reduction::SequenceMean { rows } => (count + epsilon) * rows_of(rows),
        Reduction::SequenceSum { rows } => rows_of(rows),
        Reduction::FixedLength { rows, length } => rows_of(rows) * length.unwrap_or(width) as f64,
        Reduction::Normalizer(value) => value,
    };
    counts.iter().map(|&count| if count > 0.0 { denominator(count).recip() } else { 0.0 }).collect()
}

/// Adds up the loss, `Σ weight·token_loss + Σ ∂loss/∂H·H`, in the order of tokens.
pub fn loss(tokens: &Array2<Option<TokenEvaluation>>, weights: &ReductionWeights) -> f64 {
    // A factor of 0 leaves the entropy out, which may be NaN.
    let mut total = 0.0;
    for (at, token) in tokens.indexed_iter() {
        let Some(token) = token else { continue };
        total += weights.policy[at] * token.token.reduced;
        if weights.entropy[at] != 0.0 {
            total += weights.entropy[at] * token.entropy;
        }
    }
    total
}

/// Computes the part of an importance-sampled loss that sequences without a token have: `−A/B` each, because their
/// ratio is `exp(0)`.
pub fn empty_rows(
    spec: &LossSpec,
    mask: &Array2<bool>,
    sequences: &[Sequence],
    advantage: impl Fn(&Sequence) -> f64,
) -> f64 {
    let empty = sequences.iter().filter(|sequence| !sequence.places().any(|at| mask[at]));
    -spec.scale * empty.map(advantage).sum::<f64>() / sequences.len() as f64
}

/// Averages the logged values over unmasked tokens.
pub fn metrics(spec: &LossSpec, tokens: &Array2<Option<TokenEvaluation>>) -> Metrics {
    let count = tokens.iter().flatten().count();
    let mean = |value: fn(&TokenEvaluation) -> f64| {
        if count == 0 { 0.0 } else { tokens.iter().flatten().map(value).sum::<f64>() / count as f64 }
    };
    Metrics {
        clip_low: mean(|evaluated| f64::from(u8::from(evaluated.token.clipped_low))),
        clip_high: mean(|evaluated| f64::from(u8::from(evaluated.token.clipped_high))),
        clip_region: mean(|evaluated| f64::from(u8::from(evaluated.token.clipped_low || evaluated.token.clipped_high))),
        kl_mean: spec.kl.as_ref().map(|_| mean(|evaluated| evaluated.token.kl.unwrap_or(0.0))),
        entropy_mean: mean(|evaluated| evaluated.entropy),
        ratio_mean: mean(|evaluated| evaluated.token.ratio),
    }
}
