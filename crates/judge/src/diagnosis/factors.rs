//! Diagnoses of a gradient that is the exact one up to factors or to a second rounding, from the pattern of its errors.

use super::tokens::{LONG_SUM, one_by_one_error};
use super::{Diagnosis, TokenFactor, stored_wider};
use crate::U;
use crate::gate::Output;
use crate::metric::half_ulp;
use assay_core::problem::{Dtype, FloatView};
use assay_reference::Reference;
use ndarray::Ix3;

/// The sums over pairs of an expected and an actual value from which a constant factor follows.
#[derive(Default)]
struct Pairs {
    count: usize,
    product: f64,
    expected2: f64,
    actual2: f64,
    /// The sum of each expected value times half an ulp of it.
    rounding: f64,
}

impl Pairs {
    fn add(&mut self, expected: f64, actual: f64, dtype: Dtype) {
        self.count += 1;
        self.rounding += expected.abs() * half_ulp(expected, dtype);
        self.product += expected * actual;
        self.expected2 += expected * expected;
        self.actual2 += actual * actual;
    }

    /// Returns the factor that fits best in least squares, and the relative size of what remains of the actual values.
    fn factor(&self) -> Option<(f64, f64)> {
        // The least-squares factor is Σxy/Σx², and what remains of Σy² is Σy² − factor·Σxy.
        let factor = self.product / self.expected2;
        let left2 = self.actual2 - factor * self.product;
        (self.count >= 4 && factor.is_finite()).then(|| (factor, (left2.max(0.0) / self.actual2).sqrt()))
    }

    /// Whether a factor differs from 1 by more than what remains can make of it, and than errors of two ulps that all go one way can.
    fn is_off(&self, factor: f64, left: f64) -> bool {
        (factor - 1.0).abs() > f64::max(4.0 * left.max(1e-6), 4.0 * self.rounding / self.expected2)
    }
}

/// The size of what a factor may leave of a gradient, as a share of it.
const LEFT: f64 = 1e-2;

/// The largest difference of two factors that are one, as a share of their distance from 1; and the largest rest of an error that a
/// factor explains, as a share of the error.
const APART: f64 = 0.25;

/// Diagnoses a gradient `output` whose rows are the exact ones, each times a factor. `row` returns a token's exact and actual values.
pub(crate) fn diagnose_factors(
    reference: &Reference,
    output: Output,
    dtype: Dtype,
    row: impl Fn(usize, usize) -> (Vec<f64>, Vec<f64>),
) -> Option<Diagnosis> {
    let factors = token_factors(reference, dtype, row)?;
    let off: Vec<TokenFactor> = factors.iter().filter(|(_, off)| *off).map(|(factor, _)| *factor).collect();
    let is_same = |a: f64, b: f64| (a - b).abs() <= LEFT * a.abs().max(b.abs());
    if off.is_empty() || factors.iter().all(|(other, _)| is_same(other.factor, off[0].factor)) {
        return None;
    }
    // Factors that agree within every sequence are those of sequences, if some sequence has two.
    let owner = |of: &TokenFactor| reference.problem().extra.sequences.owner(of.token);
    let mut sequences: Vec<(TokenFactor, usize)> = Vec::new();
    let mut is_of_sequences = true;
    for (of, _) in &factors {
        match sequences.last_mut().filter(|(first, _)| owner(first) == owner(of)) {
            Some((first, count)) => {
                is_of_sequences &= is_same(first.factor, of.factor);
                *count += 1;
            }
            None => sequences.push((*of, 1)),
        }
    }
    let first = |all: &[TokenFactor]| std::array::from_fn(|i| all.get(i).copied().unwrap_or_default());
    if is_of_sequences && sequences.len() > 1 && sequences.iter().any(|(_, count)| *count > 1) {
        let is_off = |of: &TokenFactor| off.iter().any(|other| owner(other) == owner(of));
        let of_sequences: Vec<TokenFactor> = sequences.iter().map(|(of, _)| *of).filter(is_off).collect();
        let (examples, off, sequences) = (first(&of_sequences), of_sequences.len(), sequences.len());
        return Some(Diagnosis::FactorPerSequence { output, examples, off, sequences });
    }
    Some(Diagnosis::FactorPerToken { output, examples: first(&off), off: off.len(), tokens: factors.len() })
}

/// Returns the factor of each token that has a gradient, and whether it is off from 1; `None` if some token is not its exact row times a
/// factor. `row` returns a token's exact and actual values.
pub(super) fn token_factors(
    reference: &Reference,
    dtype: Dtype,
    row: impl Fn(usize, usize) -> (Vec<f64>, Vec<f64>),
) -> Option<Vec<(TokenFactor, bool)>> {
    // One token that no factor explains is enough to end it.
    let mut factors: Vec<(TokenFactor, bool)> = Vec::new();
    for token in ndarray::indices((reference.shape().batch, reference.shape().tokens)) {
        let Some(known) = reference.token(token.0, token.1).filter(|known| reference.finite(known)) else { continue };
        let (expected, actual) = row(token.0, token.1);
        let (mut all, mut small) = (Pairs::default(), Pairs::default());
        // The largest value hides what the others are: without it they must have the same factor.
        let largest = expected.iter().map(|x| x.abs()).fold(0.0, f64::max);
        for (x, y) in expected.into_iter().zip(actual) {
            if !y.is_finite() || (largest == 0.0 && y != 0.0) {
                return None;
            }
            if x.abs() < f64::from(f32::MIN_POSITIVE) {
                continue;
            }
            all.add(x, y, dtype);
            if x.abs() < largest {
                small.add(x, y, dtype);
            }
        }
        if !reference.has_gradient(known) || largest < f64::from(f32::MIN_POSITIVE) {
            continue;
        }
        // Two or three values are one number: the sum of a row of dlogits is 0.
        let ((factor, left), (of_small, left_of_small)) = (all.factor()?, small.factor()?);
        // A wrong sum scales all probabilities and not the one-hot: both parts must have one deviation from 1, not only one size.
        let apart = (factor - of_small).abs();
        let rounding = f64::max(all.rounding / all.expected2, small.rounding / small.expected2);
        let is_one = apart < LEFT * factor.abs() && apart <= f64::max(APART * (factor - 1.0).abs(), 4.0 * rounding);
        if !(left.max(left_of_small) < LEFT && is_one) {
            return None;
        }
        factors
            .push((TokenFactor { token, factor }, all.is_off(factor, left) && small.is_off(of_small, left_of_small)));
    }
    Some(factors)
}

/// Diagnoses dlogits from the pattern of their errors over all tokens.
pub(super) fn diagnose_dlogits(reference: &Reference, dlogits: &FloatView<Ix3>, loss: Option<f64>) -> Vec<Diagnosis> {
    let shape = reference.shape();
    let dtype = dlogits.dtype();
    let (mut others, mut targets) = (Pairs::default(), Pairs::default());
    let (mut counted, mut beyond_half, mut toward_zero, mut within_one) = (0, 0, true, true);
    // Targets and other entries are kept apart: a wrong factor on one of them alone is another bug.
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        for (v, (x, y)) in reference.dlogits_row(b, t).into_iter().zip(dlogits.row(b, t)).enumerate() {
            // A flushed value, and one that is not finite, has no pattern.
            if !y.is_finite() || x.abs() < f64::from(f32::MIN_POSITIVE) {
                continue;
            }
            let is_id = v == token.id || reference.others(token).iter().any(|other| other.id == v);
            if is_id { &mut targets } else { &mut others }.add(x, y, dtype);
            // A rounded value is within half an ulp and a truncated one within a whole ulp below it. The 5 % above
            // leave room for the kernel's own f32 errors.
            let half = half_ulp(x, dtype);
            counted += 1;
            if (y - x).abs() > 1.05 * half {
                beyond_half += 1;
                toward_zero &= y.abs() < x.abs();
                within_one &= (y - x).abs() < 2.1 * half;
            }
        }
    }
    let mut all = Vec::new();
    if others.count > 0 && others.actual2 == 0.0 && targets.actual2 > 0.0 {
        all.push(Diagnosis::OnlyTheTarget);
        return all;
    }
    // One factor must fit the targets and the other entries alike, much better than a factor of 1 does.
    if let (Some((factor, left)), Some((of_targets, left_of_targets))) =
        (others.factor(), targets.factor().or(others.factor()))
        && left.max(left_of_targets) < LEFT
        && (factor - of_targets).abs() < LEFT * factor.abs()
        && others.is_off(factor, left)
        && explains_most(reference, dlogits, factor)
    {
        let of_loss = loss.map(|loss| loss / reference.loss()).filter(|of_loss| of_loss.is_finite());
        let loss = of_loss.filter(|of_loss| (of_loss - 1.0).abs() > 1e-2);
        all.push(Diagnosis::ConstantFactor { dlogits: factor, loss });
    }
    if matches!(dtype, Dtype::Bf16 | Dtype::F16) && beyond_half >= 8 && within_one {
        // A second rounding, and one by chance, is beyond half an ulp for a quarter of evenly spread values, and goes both ways.
        match () {
            () if toward_zero => all.push(Diagnosis::Truncated(dtype)),
            () if beyond_half >= 16 && 8 * beyond_half >= counted => all.push(Diagnosis::RoundedTwice(dtype)),
            () => {}
        }
    }
    all.extend(stored_wider(Output::Dlogits, dlogits));
    all
}

/// Diagnoses a sum of exponentials that is added up one by one, where log-probabilities are right: a sum that has lost a share of its terms
/// makes all probabilities of its row too large by one factor.
pub(super) fn diagnose_sum_of_gradient(reference: &Reference, dlogits: &FloatView<Ix3>) -> Option<Diagnosis> {
    let (shape, dtype) = (reference.shape(), dlogits.dtype());
    if shape.vocab < LONG_SUM {
        return None;
    }
    let mut is_told = false;
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        if !reference.has_gradient(token) {
            continue;
        }
        // The target's dlogit has 1 − p instead of p.
        let mut others = Pairs::default();
        for (v, (x, y)) in reference.dlogits_row(b, t).into_iter().zip(dlogits.row(b, t)).enumerate() {
            if v != token.id && y.is_finite() && x.abs() >= f64::from(f32::MIN_POSITIVE) {
                others.add(x, y, dtype);
            }
        }
        let (factor, _) = others.factor()?;
        let predicted = 1.0 / (1.0 + one_by_one_error(reference, (b, t), token));
        let made = (predicted - 1.0).abs();
        if (factor - predicted).abs() > made / 4.0 + 4.0 * U {
            return None;
        }
        is_told |= made > 16.0 * U;
    }
    is_told.then_some(Diagnosis::NaiveSum(shape.vocab))
}

/// Whether a factor of dlogits leaves little of the errors: of nine in ten targets and of nine in ten other values that it is seen on, in
/// three of four tokens. One large value, or one token, would have a factor of its own.
fn explains_most(reference: &Reference, dlogits: &FloatView<Ix3>, factor: f64) -> bool {
    let (shape, dtype) = (reference.shape(), dlogits.dtype());
    // For targets, other values and tokens how many the factor is seen on, and how many it explains.
    let (mut targets, mut others, mut tokens) = ([0_usize; 2], [0_usize; 2], [0_usize; 2]);
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        let mut of_token = [0; 2];
        for (v, (x, y)) in reference.dlogits_row(b, t).into_iter().zip(dlogits.row(b, t)).enumerate() {
            let half = half_ulp(x, dtype);
            let (error, made) = ((y - x).abs(), ((factor - 1.0) * x).abs());
            if x.abs() < f64::from(f32::MIN_POSITIVE) || (error <= 4.0 * half && made <= 8.0 * half) {
                continue;
            }
            let is_explained = (y - factor * x).abs() <= APART * error.max(made) + 2.0 * half;
            for counts in [&mut of_token, if v == token.id { &mut targets } else { &mut others }] {
                counts[0] += 1;
                counts[1] += usize::from(is_explained);
            }
        }
        if of_token[0] > 0 {
            tokens[0] += 1;
            tokens[1] += usize::from(4 * of_token[1] >= 3 * of_token[0]);
        }
    }
    [targets, others].iter().all(|[seen, explained]| 10 * explained >= 9 * seen) && 4 * tokens[1] >= 3 * tokens[0]
}
