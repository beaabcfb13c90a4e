//! [`SoftmaxErrors`]: the errors that a token's logits and softmax bring to its log-probability and entropy.

use std::sync::Arc;

use ndarray::Array2;

use super::Bands;
use super::bound::{ErrorBound, FLUSHED};
use super::lanes::{EntropyErrors, any_sum_error, entropy_difference_error, entropy_sum_error, lane_sum_error_of};
use crate::U;
use assay_core::problem::Shape;
use assay_core::spec::{LossSpec, SoftmaxRange};
use assay_reference::{Reference, ScaledSoftmax, SoftmaxColumns, Token, TokenColumns};

/// The error of each logit of a token before anything reads it, if logits are a product.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogitErrors {
    /// One entry per logit; empty if logits are given. A bound of a few standard deviations needs no f64.
    pub(crate) each: Arc<[f32]>,
    /// The largest derivative of an exponent by a logit; present if logits are rounded to a dtype, whose steps may be many nats.
    pub(crate) rate: Option<f64>,
}

impl LogitErrors {
    /// Returns the error of column `j`; a step of rounded logits counts as `(e^(2·rate·step) − 1)/rate`.
    ///
    /// A probability becomes `e^a(1 + Σ p_v(e^(a_v) − 1))⁻¹` of itself if logits are off by `a` and `a_v`, times `rate`. That
    /// is at most `1 + (e^2|a| − 1) + Σ p_v(e^2|a_v| − 1)`, the sum of the errors of the columns.
    pub(crate) fn at(&self, j: usize) -> f64 {
        let error = self.each.get(j).map_or(0.0, |error| f64::from(*error));
        match self.rate {
            Some(rate) if error > 0.0 => f64::exp_m1((2.0 * rate * error).min(160.0)) / rate,
            _ => error,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.each.is_empty()
    }
}

/// The bounds that follow from one token's logits alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftmaxErrors {
    pub(super) logp: ErrorBound,
    pub(super) entropy: ErrorBound,
    /// The bound of the log-probability that the KL penalty alone reads; `None` if it reads that of the ratio.
    pub(super) kl_logp: Option<ErrorBound>,
    /// The mean square gap `ā₂` of the softmax that entropy is taken from.
    pub(crate) second_moment: f64,
    /// The part that the logits' own errors add to the entropy's floor.
    pub(crate) spread: f64,
    /// The mean error `Σ p_j ε_j` over the softmax that logp is taken from.
    pub(crate) mean_error: f64,
    /// The offset errors `offset·u·M` of the softmax that logp is taken from, and of the one that entropy is.
    pub(crate) offsets: [f64; 2],
    /// The errors of the softmax over the whole vocabulary; those of logp's unless that is over a kept set.
    pub(crate) vocabulary: RangeErrors,
    /// The relative error of the sum of the exponentials, shared by all probabilities of the row; 0 unless it is forgiven.
    pub(crate) lane_sum: f64,
    /// The error of the entropy that its gradient's columns share, as they have one entropy in common; 0 unless it is forgiven.
    pub(crate) entropy_shift: f64,
}

/// The errors that the columns of a softmax have in common.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RangeErrors {
    /// The mean error `Σ p_j ε_j` of the logits.
    pub(crate) mean_error: f64,
    /// The offset error `offset·u·M` of each exponent.
    pub(crate) offset: f64,
    /// The relative error of the sum of the exponentials, where the sum of logp's softmax is another; 0 unless it is forgiven.
    pub(crate) separate_sum: f64,
}

impl SoftmaxErrors {
    pub(super) fn new(
        reference: &Reference,
        (b, t): (usize, usize),
        token: &Token,
        errors: &LogitErrors,
        bands: Bands,
    ) -> Self {
        let spec = reference.spec();
        let error = |j: usize| spec.logits.scale.abs() * errors.at(j);
        let softmax = &token.logp_softmax;
        let z = exponent_of_id(reference, token, LogpSoftmax::Ratio, token.id);
        let q = &token.entropy_softmax;
        // The largest logit of the vocabulary may be outside a kept set.
        let widest = if q.range == SoftmaxRange::Vocabulary { q } else { softmax };
        let rounded = exponent_rounding(reference, widest, z);
        // ∂H/∂z_j = q_j (a_j − ā), which is 0 if all gaps are equal: the squares of the errors count too.
        let (mut mean_error, mut spread) = (0.0, 0.0);
        // A softmax over the vocabulary next to one over a kept set: that of the entropy or of the KL penalty, or of both.
        let ranges = [q, &token.kl_softmax];
        let second = ranges.into_iter().find(|softmax| softmax.range == SoftmaxRange::Vocabulary);
        let second_columns = |row: &'_ TokenColumns| -> Vec<f64> {
            let columns = if q.range == SoftmaxRange::Vocabulary { row.entropy() } else { row.kl() };
            columns.probabilities.clone()
        };
        let mut mean_of_second = 0.0;
        // A logit's own error reaches logp by the mean Σ p_j ε_j, and entropy by its first derivative and the squares.
        // Only logits that are a product have such errors, and only then the whole row is read again.
        if !errors.is_empty() {
            let row = reference.row(b, t, token);
            let SoftmaxColumns { z, probabilities } = row.entropy();
            let of_entropy = z.iter().zip(probabilities);
            for (j, (p_j, (z_j, &q_j))) in row.logp().probabilities.iter().zip(of_entropy).enumerate() {
                mean_error += p_j * error(j);
                // A column of probability 0 has a gap of ∞, whose product with 0 would be NaN.
                let (gap, error) = (if q_j == 0.0 { 0.0 } else { q.stats.max - z_j }, error(j) / q.divisor);
                spread += q_j * ((gap - q.stats.mean_gap).abs() + error) * error;
            }
            if second.is_some() {
                mean_of_second = second_columns(&row).iter().enumerate().map(|(j, p)| p * error(j)).sum();
            }
        }
        let offsets = [softmax, q].map(|softmax| offset_error(softmax, bands));
        let second_moment = q.stats.mean_square_gap;
        let in_lanes = bands.lanes && softmax.stats.max.is_finite();
        let sum_in_lanes = if bands.differences { any_sum_error } else { lane_sum_error_of };
        let (mut lane_sum, mut separate_sum) = (0.0, 0.0);
        if in_lanes {
            let row = reference.row(b, t, token);
            lane_sum = sum_in_lanes(&row.logp().probabilities);
            if second.is_some_and(|second| second.stats.max.is_finite()) {
                separate_sum = sum_in_lanes(&second_columns(&row));
            }
        }
        let vocabulary = match second {
            Some(second) => {
                RangeErrors { mean_error: mean_of_second, offset: offset_error(second, bands), separate_sum }
            }
            None => RangeErrors { mean_error, offset: offsets[0], separate_sum: 0.0 },
        };
        let entropy_lane_sum = if q.range == SoftmaxRange::Vocabulary { separate_sum } else { lane_sum };
        // The textbook's −Σ p ln p has the errors of two sums. The other form has them at the size of its logits: an exponential, its
        // product and the quotient are rounded as for logp, and the product once more.
        let of_entropy = if bands.entropy_difference && q.stats.max.is_finite() {
            entropy_difference_error(reference, (b, t), token, bands.logp + 1.0)
        } else if in_lanes {
            entropy_sum_error(reference, (b, t), token, entropy_lane_sum)
        } else {
            EntropyErrors::default()
        };
        // A token whose values are not finite is judged by that alone.
        let finite = |x: f64| if x.is_finite() { x } else { 0.0 };
        let entropy_sum = finite(of_entropy.value);
        let mut all = Self {
            logp: ErrorBound::default(),
            kl_logp: None,
            // Entropy is `ln S + ā`: its condition is 1 + H + ā + ā₂ (docs/tolerances.md), and the rounding of
            // transformed logits counts 1 + H times.
            entropy: ErrorBound {
                scale: 1.0 + token.entropy + q.stats.mean_gap + second_moment + rounded * (1.0 + token.entropy),
                floor: spread + offsets[1] * (1.0 + token.entropy) + entropy_sum,
            },
            second_moment,
            spread,
            mean_error,
            offsets,
            vocabulary,
            lane_sum,
            entropy_shift: finite(of_entropy.gradient),
        };
        all.logp = logp_bound(reference, token, token.id, LogpSoftmax::Ratio, (errors, &all), bands);
        all.kl_logp = token
            .has_separate_kl()
            .then(|| logp_bound(reference, token, token.id, LogpSoftmax::Kl, (errors, &all), bands));
        all
    }
}

/// The softmax that a log-probability of a token is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogpSoftmax {
    /// The one of `ℓ`, which the ratio reads.
    Ratio,
    /// The one that the KL penalty reads, if that is another.
    Kl,
}

impl LogpSoftmax {
    fn in_token(self, token: &Token) -> &ScaledSoftmax {
        match self {
            LogpSoftmax::Ratio => &token.logp_softmax,
            LogpSoftmax::Kl => &token.kl_softmax,
        }
    }
}

/// Returns the exponent `z` of a token's column in a softmax.
fn exponent_of_id(reference: &Reference, token: &Token, of: LogpSoftmax, id: usize) -> f64 {
    let (b, t) = token.at;
    let columns = reference.columns(b, t, token, id..id + 1);
    match of {
        LogpSoftmax::Ratio => columns.logp().z[0],
        LogpSoftmax::Kl => columns.kl().z[0],
    }
}

/// Bounds what rounding transformed logits adds to the exponents of a softmax's largest column and of the one with exponent `z`.
fn exponent_rounding(reference: &Reference, softmax: &ScaledSoftmax, z: f64) -> f64 {
    // A logit of −∞ is not rounded.
    let both = [softmax.stats.max, z].into_iter().filter(|z| z.is_finite());
    transform_rounding(reference.spec(), both.fold(0.0, |most, z| z.abs().max(most)))
}

/// Returns the offset error `offset·u·M` of a softmax.
fn offset_error(softmax: &ScaledSoftmax, bands: Bands) -> f64 {
    let largest = softmax.stats.max.abs();
    if largest.is_finite() { bands.offset * U * largest } else { 0.0 }
}

/// Bounds logp of one id of a token in one of its softmaxes, whose logits have `errors` and which has the common errors `known`; the
/// scale is `C_ℓ`.
pub(super) fn logp_bound(
    reference: &Reference,
    token: &Token,
    id: usize,
    of: LogpSoftmax,
    (errors, known): (&LogitErrors, &SoftmaxErrors),
    bands: Bands,
) -> ErrorBound {
    let (spec, softmax) = (reference.spec(), of.in_token(token));
    let (mean_error, lane_sum) = match of {
        LogpSoftmax::Ratio => (known.mean_error, known.lane_sum),
        LogpSoftmax::Kl => (known.vocabulary.mean_error, known.vocabulary.separate_sum),
    };
    let z = exponent_of_id(reference, token, of, id);
    let (gap, log_p) = (softmax.stats.max - z, softmax.stats.log_probability(z));
    let rounded = exponent_rounding(reference, softmax, z);
    let own = spec.logits.scale.abs() * errors.at(id);
    // The difference z_y − ln Σ e^z moves by at most the id's own error and the mean Σ p_j ε_j.
    let product = if errors.is_empty() { 0.0 } else { (own + mean_error) / softmax.divisor };
    // ∂ℓ/∂log p_y: 1, or 1/T if the temperature divides the log-probability.
    let factor = softmax.divisor / token.temperature();
    ErrorBound {
        scale: (1.0 + gap + softmax.stats.mean_gap + log_p.abs() + 2.0 * rounded) * factor,
        floor: (product + offset_error(softmax, bands) + lane_sum) * factor,
    }
}

/// Bounds the relative error of a sum of `terms` terms, added up in any order, by the sum of their sizes.
pub(crate) fn sum_error(terms: usize) -> f64 {
    terms.saturating_sub(1) as f64 * U
}

/// Bounds `Σ dlogp_k · ℓ_k` over a token's other ids, whose logp is off by `bounds`, and its sum with the term of the first id.
pub(super) fn others_bound(reference: &Reference, token: &Token, bounds: &[ErrorBound]) -> ErrorBound {
    let others = reference.others(token);
    let mut all = ErrorBound { scale: 0.0, floor: others.len() as f64 * FLUSHED };
    let mut sizes = token.policy.value.abs();
    for (other, bound) in others.iter().zip(bounds) {
        // Each term has the error of its product and, times the cotangent, that of its logp; the sum of the terms then
        // rounds at the sum of their sizes.
        let (size, factor) = ((other.grad_logp * other.logp).abs(), other.grad_logp.abs());
        all = all.plus(ErrorBound { scale: size + factor * bound.scale, floor: factor * bound.floor });
        sizes += size;
    }
    all.plus_floor(sum_error(others.len() + 1) * sizes)
}

/// Returns what rounding transformed logits adds to an exponent, in units of `u`: their own size, or 0 if nothing transforms them.
pub(crate) fn transform_rounding(spec: &LossSpec, largest: f64) -> f64 {
    let identity = spec.logits.scale == 1.0 && spec.logits.softcap.is_none() && !spec.logits.bias;
    if identity { 0.0 } else { largest.abs() }
}

/// Bounds the error of each token's entropy in f32, `[B,T]`; `None` for masked tokens.
pub(crate) fn entropy_errors(reference: &Reference, bands: Bands, errors: &[LogitErrors]) -> Array2<Option<f64>> {
    let Shape { batch, tokens, .. } = reference.shape();
    Array2::from_shape_fn((batch, tokens), |(b, t)| {
        let token = reference.token(b, t)?;
        let errors = errors.get(b * tokens + t).cloned().unwrap_or_default();
        Some(entropy_error(token, SoftmaxErrors::new(reference, (b, t), token, &errors, bands), bands))
    })
}

pub(super) fn entropy_error(token: &Token, softmax: SoftmaxErrors, bands: Bands) -> f64 {
    U * (token.entropy.abs() + bands.entropy * softmax.entropy.scale) + softmax.entropy.floor
}
