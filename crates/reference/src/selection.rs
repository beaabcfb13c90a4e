//! The choice of tokens that keep their policy term, or are selected, by looking at a sequence or at the whole batch.

#![allow(clippy::cast_sign_loss, reason = "indices and counts are made of numbers that are ≥ 0")]

use ndarray::Array2;

use super::sum::Sum;
use assay_core::problem::ProblemError;
use assay_core::spec::{CovarianceBand, QuantilePrecision, TopCovariance, TopEntropy};

/// A choice about one token, and its distance from the other choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Whether the choice was made.
    pub holds: bool,
    /// The distance `≥ 0` of the compared values, in their unit; ∞ if the choice could not be otherwise.
    pub margin: f64,
}

impl Choice {
    /// Returns a choice that could not be otherwise.
    pub const fn fixed(holds: bool) -> Self {
        Self { holds, margin: f64::INFINITY }
    }
}

/// Returns the tokens with `entropy ≥ threshold`. The threshold is the linearly interpolated quantile
/// `q = 1 − fraction`: with the entropies ascending, `i = q·(n−1)` and `f = i − ⌊i⌋`, it is
/// `H[⌊i⌋] + f·(H[⌊i⌋+1] − H[⌊i⌋])`.
pub(super) fn top_entropy(top: &TopEntropy, entropies: &Array2<Option<f64>>) -> Array2<bool> {
    // The quantile is over all unmasked tokens of the batch.
    let mut ascending: Vec<f64> = entropies.iter().flatten().copied().collect();
    ascending.sort_by(f64::total_cmp);
    if ascending.is_empty() {
        return entropies.mapv(|_| true);
    }
    let index = quantile_index(top, ascending.len());
    let threshold = match top.precision {
        QuantilePrecision::Exact => quantile_of(&ascending, index),
        QuantilePrecision::F32Threshold | QuantilePrecision::F32 => f32_quantile(&ascending, index),
    };
    // Rounding matters only where the threshold is the entropy of a token.
    let rounded = |entropy: f64| match top.precision {
        QuantilePrecision::F32 => f64::from(entropy as f32),
        QuantilePrecision::Exact | QuantilePrecision::F32Threshold => entropy,
    };
    entropies.mapv(|entropy| entropy.is_none_or(|entropy| rounded(entropy) >= threshold))
}

/// Returns the index `i = q·(n−1)` of the quantile, which depends on given numbers only. In f32 `q` is rounded, and not
/// the product.
pub fn quantile_index(top: &TopEntropy, count: usize) -> f64 {
    let quantile = 1.0 - top.fraction;
    let quantile = match top.precision {
        QuantilePrecision::Exact => quantile,
        QuantilePrecision::F32Threshold | QuantilePrecision::F32 => f64::from(quantile as f32),
    };
    quantile * count.saturating_sub(1) as f64
}

fn quantile_of(ascending: &[f64], index: f64) -> f64 {
    let last = ascending.len() - 1;
    let (below, above) = (ascending[index.floor() as usize], ascending[(index.ceil() as usize).min(last)]);
    below + index.fract() * (above - below)
}

/// Returns the quantile as torch computes it in f32: both values are rounded, and from the middle on the interpolation
/// counts from above.
fn f32_quantile(ascending: &[f64], index: f64) -> f64 {
    let last = ascending.len() - 1;
    let at = |index: f64| ascending[(index as usize).min(last)] as f32;
    let (below, above, fraction) = (at(index.floor()), at(index.ceil()), index.fract() as f32);
    let between =
        if fraction < 0.5 { below + fraction * (above - below) } else { above - (above - below) * (1.0 - fraction) };
    f64::from(between)
}

/// Makes the choice of DeepSeek-V3.2's mask: a token is kept where `A ≥ 0` or the mean of `behaviour − ℓ` is at most
/// the threshold.
pub(super) fn on_policy(advantage: f64, mean_divergence: f64, threshold: f64) -> Choice {
    if advantage >= 0.0 {
        return Choice::fixed(true);
    }
    Choice { holds: mean_divergence <= threshold, margin: (mean_divergence - threshold).abs() }
}

/// The values of one token that a covariance reads.
#[derive(Clone, Copy)]
pub(super) struct Sample {
    pub(super) advantage: f64,
    pub(super) logp: f64,
    /// Whether PPO's clip bounds the token's loss.
    pub(super) clipped: bool,
}

/// Returns the covariances `(A − mean A)·(ℓ − mean ℓ)`, with `n + epsilon` as the number of tokens in both means.
fn covariances(samples: &[Sample], epsilon: f64) -> Vec<f64> {
    let count = samples.len() as f64 + epsilon;
    let mean = |value: fn(&Sample) -> f64| samples.iter().map(value).collect::<Sum>().value() / count;
    let (advantage, logp) = (mean(|sample| sample.advantage), mean(|sample| sample.logp));
    // Adding 0 turns −0 into 0, so that sorting treats them as equal.
    samples.iter().map(|sample| (sample.advantage - advantage) * (sample.logp - logp) + 0.0).collect()
}

/// Selects the `max(1, ⌊fraction·n⌋)` samples with the largest covariance; of equal ones the first.
pub(super) fn top_covariance(top: TopCovariance, samples: &[Sample]) -> Vec<Choice> {
    let covariances = covariances(samples, 0.0);
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by(|&i, &j| covariances[j].total_cmp(&covariances[i]));
    // A margin is the distance to the first sample on the other side.
    let taken = ((samples.len() as f64 * top.fraction) as usize).max(1).min(samples.len());
    let last_in = order[..taken].last().map_or(f64::NAN, |&i| covariances[i]);
    let first_out = order.get(taken).map_or(f64::NEG_INFINITY, |&i| covariances[i]);
    let mut choices: Vec<Choice> =
        covariances.iter().map(|covariance| Choice { holds: false, margin: last_in - covariance }).collect();
    for &i in &order[..taken] {
        choices[i] = Choice { holds: true, margin: covariances[i] - first_out };
    }
    choices
}

/// Selects the samples that Clip-Cov drops.
///
/// # Errors
/// [`ProblemError::Undetermined`] where there are more in the band than are taken.
pub(super) fn covariance_band(band: CovarianceBand, samples: &[Sample]) -> Result<Vec<Choice>, ProblemError> {
    let covariances = covariances(samples, 1e-8);
    let choice = |(sample, covariance): (&Sample, f64)| {
        let within = covariance > band.lower && covariance < band.upper;
        let margin = (covariance - band.lower).abs().min((covariance - band.upper).abs());
        if sample.clipped { Choice::fixed(false) } else { Choice { holds: within, margin } }
    };
    let choices: Vec<Choice> = samples.iter().zip(covariances).map(choice).collect();
    // A project draws at random if there are too many; that has no reference.
    let candidates = choices.iter().filter(|choice| choice.holds).count();
    let taken = ((samples.len() as f64 * band.fraction) as usize).max(1);
    if candidates > taken { Err(ProblemError::Undetermined { candidates, taken }) } else { Ok(choices) }
}
