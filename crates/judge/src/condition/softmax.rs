//! [`SoftmaxErrors`]: the errors that a token's logits and softmax bring to its log-probability and entropy.

use std::sync::Arc;

use ndarray::Array2;

use super::Bands;
use super::bound::{ErrorBound, FLUSHED};
use super::lanes::{EntropyErrors, any_sum_error, entropy_difference_error, entropy_sum_error, lane_sum_error};
use crate::U;
use assay_core::problem::Shape;
use assay_core::spec::LossSpec;
use assay_reference::{Reference, ScaledSoftmax, SoftmaxColumns, Token};

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
    /// The mean square gap `ā₂` of the softmax that entropy is taken from.
    pub(crate) second_moment: f64,
    /// The part that the logits' own errors add to the entropy's floor.
    pub(crate) spread: f64,
    /// The mean error `Σ p_j ε_j` over the softmax that logp is taken from.
    pub(crate) mean_error: f64,
    /// The offset errors `offset·u·M` of the softmax that logp is taken from, and of the one that entropy is.
    pub(crate) offsets: [f64; 2],
    /// The relative error of the sum of the exponentials, shared by all probabilities of the row; 0 unless it is forgiven.
    pub(crate) lane_sum: f64,
    /// The error of the entropy that its gradient's columns share, as they have one entropy in common; 0 unless it is forgiven.
    pub(crate) entropy_shift: f64,
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
        let rounded = exponent_rounding(reference, token, exponent_of_id(reference, token, token.id));
        let q = &token.entropy_softmax;
        // ∂H/∂z_j = q_j (a_j − ā), which is 0 if all gaps are equal: the squares of the errors count too.
        let (mut mean_error, mut spread) = (0.0, 0.0);
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
        }
        let offsets = [softmax, q].map(|softmax| offset_error(softmax, bands));
        let second_moment = q.stats.mean_square_gap;
        let in_lanes = bands.lanes && softmax.stats.max.is_finite();
        let lane_sum = match (in_lanes, bands.differences) {
            (true, true) => any_sum_error(reference, (b, t), token),
            (true, false) => lane_sum_error(reference, (b, t), token),
            (false, _) => 0.0,
        };
        // The textbook's −Σ p ln p has the errors of two sums. The other form has them at the size of its logits: an exponential, its
        // product and the quotient are rounded as for logp, and the product once more.
        let of_entropy = if bands.entropy_difference && q.stats.max.is_finite() {
            entropy_difference_error(reference, (b, t), token, bands.logp + 1.0)
        } else if in_lanes {
            entropy_sum_error(reference, (b, t), token, lane_sum)
        } else {
            EntropyErrors::default()
        };
        // A token whose values are not finite is judged by that alone.
        let finite = |x: f64| if x.is_finite() { x } else { 0.0 };
        let entropy_sum = finite(of_entropy.value);
        Self {
            logp: logp_bound(reference, token, token.id, (errors, mean_error, lane_sum), bands),
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
            lane_sum,
            entropy_shift: finite(of_entropy.gradient),
        }
    }
}

/// Returns the exponent `z` of a token's column in the softmax that logp is taken from.
fn exponent_of_id(reference: &Reference, token: &Token, id: usize) -> f64 {
    let (b, t) = token.at;
    reference.columns(b, t, token, id..id + 1).logp().z[0]
}

/// Bounds what rounding transformed logits adds to the exponents of a token's largest column and of the one with exponent `z`.
fn exponent_rounding(reference: &Reference, token: &Token, z: f64) -> f64 {
    // A logit of −∞ is not rounded.
    let both = [token.logp_softmax.stats.max, z].into_iter().filter(|z| z.is_finite());
    transform_rounding(reference.spec(), both.fold(0.0, |most, z| z.abs().max(most)))
}

/// Returns the offset error `offset·u·M` of a softmax.
fn offset_error(softmax: &ScaledSoftmax, bands: Bands) -> f64 {
    let largest = softmax.stats.max.abs();
    if largest.is_finite() { bands.offset * U * largest } else { 0.0 }
}

/// Bounds logp of one id of a token, whose logits have `errors` with the mean `Σ p_j ε_j` and whose sum is off by `lane_sum` of itself;
/// the scale is `C_ℓ`.
pub(super) fn logp_bound(
    reference: &Reference,
    token: &Token,
    id: usize,
    (errors, mean_error, lane_sum): (&LogitErrors, f64, f64),
    bands: Bands,
) -> ErrorBound {
    let (spec, softmax) = (reference.spec(), &token.logp_softmax);
    let z = exponent_of_id(reference, token, id);
    let (gap, log_p) = (softmax.stats.max - z, softmax.stats.log_probability(z));
    let rounded = exponent_rounding(reference, token, z);
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
