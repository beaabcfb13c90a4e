//! Diagnoses of the softmax, from the errors of log-probabilities and entropies.

use super::rows::{diagnose_held_ratio, diagnose_rows};
use super::{Diagnosis, failed, is_narrow};
use crate::U;
use crate::gate::Output;
use crate::judge::Verdict;
use crate::metric::half_ulp;
use assay_core::problem::{Candidate, Dtype, FloatArray};
use assay_reference::{Reference, Token};
use ndarray::Ix2;

/// The roundings of a probability besides that of `lse`, and of the sum that it goes into.
const ROUNDINGS: f64 = 20.0;

/// Diagnoses the softmax: from the errors of logp, or if that is right, of entropy; and if both are, the ratio from the token losses.
pub(crate) fn diagnose_tokens<G>(
    reference: &Reference,
    candidate: &Candidate<G>,
    verdicts: &[Verdict],
) -> Option<Diagnosis> {
    let of_logp = failed(verdicts, Output::Logp);
    if !of_logp && !failed(verdicts, Output::Entropy) {
        return diagnose_held_ratio(reference, candidate, verdicts);
    }
    let values = if of_logp { &candidate.logp } else { &candidate.entropy }.as_ref()?;
    let (shape, dtype) = (reference.shape(), reference.problem().logits.dtype());
    // The largest error, and the errors that known causes would have at most.
    let (mut error, mut coarse, mut of_sum, mut of_difference) = (0.0, 0.0, 0.0, 0.0);
    let mut difference = None;
    // Roundings go both ways; what is lost of a sum makes every log-probability too large.
    let mut signs = [0, 0];
    let (mut explained_by_sum, mut told_by_sum) = (true, false);
    // Tokens whose values are not finite have no error to look at.
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        let exact = if of_logp { token.inputs.logp } else { token.entropy };
        let signed = values.at(b, t) - exact;
        let own = signed.abs();
        // A value that is not finite has lost what the others might show.
        if !own.is_finite() {
            return None;
        }
        if signed != 0.0 {
            signs[usize::from(signed > 0.0)] += 1;
        }
        // lse − Σ p·z is off by lse's rounding, a few more of each p, and as much of Σ p·z as no p sums up to 1.
        let stats = &token.entropy_softmax.stats;
        let (lse, mean) = (stats.max + stats.log_sum, stats.max - stats.mean_gap);
        if own >= error {
            difference = Some(Diagnosis::EntropyDifference { lse, entropy: token.entropy });
        }
        of_difference = f64::max(of_difference, U * (lse.abs() + ROUNDINGS) * (1.0 + mean.abs()));
        error = f64::max(error, own);
        // A softmax in the logits' own dtype is off by up to four half ulps of its largest logit; a sum of V terms that
        // rounds at each step is off by up to V·u times its size.
        let size = token.logp_softmax.stats.max.abs().max(token.inputs.logp.abs());
        coarse = f64::max(coarse, 4.0 * half_ulp(size, dtype));
        let sum = if of_logp { 1.0 } else { token.entropy };
        let most = U * shape.vocab as f64 * sum;
        of_sum = f64::max(of_sum, most);
        // An error that such a sum could have is looked at closely: the sum is added up, and must have this very error.
        if of_logp && shape.vocab >= LONG_SUM && own <= most {
            let predicted = -one_by_one_error(reference, (b, t), token).ln_1p();
            let (distance, rounding) = ((signed - predicted).abs(), 4.0 * U * (1.0 + token.inputs.logp.abs()));
            explained_by_sum &= distance <= 0.25 * own + rounding;
            told_by_sum |= own > TELLS_SUM && distance <= own / 64.0 + rounding;
        }
    }
    let narrow = matches!(dtype, Dtype::Bf16 | Dtype::F16);
    // Values that are all of the logits' dtype were made in it, whatever the size of their errors.
    if of_logp && matches!(dtype, Dtype::Bf16 | Dtype::F16) && is_narrow(reference, candidate.logp.as_ref(), dtype) {
        return Some(Diagnosis::NotUpcast(dtype));
    }
    if of_logp && let Some(rows) = diagnose_rows(reference, candidate.logp.as_ref()?) {
        return Some(rows);
    }
    // A sum of equal terms may lose as much as some entries at the end would add. An error that is predicted is no chance.
    if explained_by_sum && told_by_sum && error <= of_sum {
        return Some(Diagnosis::NaiveSum(shape.vocab));
    }
    if of_logp && let Some(sums) = diagnose_sums(reference, candidate.logp.as_ref()?) {
        return Some(sums);
    }
    // The size of the largest error alone decides between the two causes: within a factor of 16 of what a narrow
    // softmax would have, or below the worst of a sum one by one.
    match () {
        () if narrow && (coarse / 16.0..=coarse).contains(&error) && go_both_ways(signs) => {
            Some(Diagnosis::NotUpcast(dtype))
        }
        // A difference that may be off by more, as around logits of 10⁴, cannot be recognised by the size of its error.
        () if !of_logp && error <= of_difference && of_difference < 1e-2 => difference,
        // A sum of fewer terms has too small an error to be a cause.
        () if shape.vocab >= LONG_SUM && error <= of_sum && explained_by_sum => Some(Diagnosis::NaiveSum(shape.vocab)),
        () => None,
    }
}

/// The error of a log-probability, in units of `u·(1 + |logp|)`, up to which f32 alone may be off.
const OF_F32: f64 = 16.0;

/// The relative error of a sum from which on a log-probability tells the sum: finer ones are hidden by the rounding of f32.
const TELLS_SUM: f64 = 1e-4;

/// Diagnoses the sums of exponentials that wrong log-probabilities tell: each is a number of a narrow dtype, or all are off by what the
/// same vocabulary entries add to them.
fn diagnose_sums(reference: &Reference, logp: &FloatArray<Ix2>) -> Option<Diagnosis> {
    let shape = reference.shape();
    let mut told = 0;
    let mut narrow = vec![Dtype::Bf16, Dtype::F16];
    // For entries at the end and at the beginning the boundaries that explain all tokens so far.
    let mut boundaries = [(0, shape.vocab); 2];
    let mut twice = None;
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        let signed = logp.at(b, t) - token.inputs.logp;
        let rounding = OF_F32 * U * (1.0 + token.inputs.logp.abs());
        if signed.abs() <= rounding {
            continue;
        }
        // ln Σ' = ln Σ − (logp' − logp): the sum's relative error.
        let error = (-signed).exp_m1();
        if error.abs() < TELLS_SUM || rounding > error.abs() / 8.0 {
            continue;
        }
        if *twice.get_or_insert(error > 0.0) != (error > 0.0) {
            boundaries = [(1, 0); 2];
        }
        told += 1;
        let sum = token.logp_softmax.stats.log_sum.exp() * (1.0 + error);
        narrow.retain(|dtype| (dtype.round(sum) / sum - 1.0).abs() < rounding);
        if narrow.is_empty() && boundaries.iter().all(|(first, last)| first > last) {
            return None;
        }
        let row = reference.row(b, t, token);
        let p = &row.logp().probabilities;
        let missing = error.abs();
        // Boundaries v for which the entries from v on, and those before v, add what is missing.
        let (mut after, mut before): (f64, f64) = (p.iter().sum(), 0.0);
        let mut fits = [(usize::MAX, 0); 2];
        for (v, own) in p.iter().copied().chain([0.0]).enumerate() {
            for (fit, sum) in fits.iter_mut().zip([after, before]) {
                if (sum - missing).abs() <= rounding {
                    *fit = (fit.0.min(v), fit.1.max(v));
                }
            }
            (after, before) = (after - own, before + own);
        }
        for (boundary, fit) in boundaries.iter_mut().zip(fits) {
            *boundary = (boundary.0.max(fit.0), boundary.1.min(fit.1));
        }
    }
    // One token's sum agrees with some boundary by chance.
    let (vocab, is_told) =
        (shape.vocab, |(first, last): (usize, usize)| first <= last && last - first <= shape.vocab / 8);
    let roundest = |(first, last): (usize, usize)| (first..=last).max_by_key(|v| v.trailing_zeros());
    match (boundaries.map(is_told), twice) {
        ([true, _], Some(twice)) if told >= 2 => {
            let first = roundest(boundaries[0])?;
            (0 < first && first < vocab).then_some(Diagnosis::SumOfColumns { first, last: vocab - 1, vocab, twice })
        }
        ([_, true], Some(twice)) if told >= 2 => {
            let end = roundest(boundaries[1])?;
            (0 < end && end < vocab).then(|| Diagnosis::SumOfColumns { first: 0, last: end - 1, vocab, twice })
        }
        _ if told > 0 => narrow.first().copied().map(Diagnosis::NarrowSum),
        _ => None,
    }
}

/// The number of terms from which on the error of a sum one by one may be a cause.
pub(super) const LONG_SUM: usize = 1 << 10;

/// The number of errors from which on a single sign of all is no chance.
const SIGNS: usize = 6;

/// Whether errors may be roundings, which go both ways: of few errors nothing is known, of more each sign has an eighth at least.
fn go_both_ways(signs: [usize; 2]) -> bool {
    let count = signs[0] + signs[1];
    count < SIGNS || signs.into_iter().all(|sign| 8 * sign >= count)
}

/// Returns the relative error of a token's sum of exponentials that is added up one by one in f32.
pub(super) fn one_by_one_error(reference: &Reference, (b, t): (usize, usize), token: &Token) -> f64 {
    let row = reference.row(b, t, token);
    let probabilities = &row.logp().probabilities;
    let largest = probabilities.iter().copied().fold(0.0, f64::max);
    let exact: f64 = probabilities.iter().map(|p| p / largest).sum();
    let one_by_one = probabilities.iter().fold(0.0_f32, |sum, p| sum + (p / largest) as f32);
    f64::from(one_by_one) / exact - 1.0
}
