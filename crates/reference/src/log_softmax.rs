//! The softmax of one row of logits, its log-probabilities and its entropy.

use std::array::from_fn;

use super::exponential::{exponential, exponentiate};
use super::sum::SumInLanes;
use multiversion::multiversion;

/// Softmax statistics of a row `z[0..V]` of scaled logits.
///
/// With `m = max z` and the *gaps* `a_j = m − z_j ≥ 0`:
///
/// ```text
/// e_j = exp(−a_j)          S = Σ_j e_j          p_j = e_j / S          ā = Σ_j p_j a_j          ā₂ = Σ_j p_j a_j²
/// ```
///
/// A logit of −∞ has `e_j = 0` and contributes nothing. A NaN or +∞ logit, or a row of −∞ only, makes every statistic NaN.
///
/// ```
/// # use assay_reference as reference;
/// let softmax = reference::Softmax::new(&[0.0, 3_f64.ln()]);
/// assert!((softmax.log_probability(0.0) - 0.25_f64.ln()).abs() < 1e-15);
/// assert!((softmax.entropy() - (4_f64.ln() - 0.75 * 3_f64.ln())).abs() < 1e-15);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    /// The largest logit `m`, nats.
    pub max: f64,
    /// The sum of exponentials `S`, between 1 and `V`.
    pub sum: f64,
    /// The sum without one maximal entry, `S − 1`.
    rest: f64,
    /// The logarithm of the sum, `ln S`, nats.
    pub log_sum: f64,
    /// The mean gap `ā`, nats.
    pub mean_gap: f64,
    /// The mean square gap `ā₂`, nats².
    pub mean_square_gap: f64,
}

/// The number of exponentials that are computed before they are added: few enough to stay in a cache.
const AT_ONCE: usize = 512;

/// The terms that are added side by side.
const LANES: usize = 4;

/// Returns the largest logit of a row; NaN if one of them is.
#[multiversion(targets("x86_64+avx2"))]
fn largest(z: &[f64]) -> f64 {
    let any_nan = z.iter().fold(false, |any, x| any | x.is_nan());
    let largest = |of: &[f64]| of.iter().copied().fold(f64::NEG_INFINITY, |m, x| if x > m { x } else { m });
    // A maximum of chunks has no chain of comparisons through the whole row.
    let max = largest(&z.chunks(32).map(largest).collect::<Vec<_>>());
    if any_nan { f64::NAN } else { max }
}

/// Returns `Σ e_j`, `Σ e_j·a_j` and `Σ e_j·a_j²` over the row `z` but for the entry `peak`, whose gap is 0.
#[multiversion(targets("x86_64+avx2"))]
fn sums_beside(peak: usize, z: &[f64]) -> [f64; 3] {
    let mut sums = [SumInLanes::<LANES>::default(); 2];
    // Used for limits only and not for a value: a plain sum suffices.
    let mut weighted_squares = [0.0; LANES];
    let [mut gaps, mut exponentials] = [[0.0; AT_ONCE]; 2];
    for (chunk, part) in z.chunks(AT_ONCE).enumerate() {
        for (gap, x) in gaps.iter_mut().zip(part) {
            *gap = z[peak] - x;
        }
        for (e, gap) in exponentials.iter_mut().zip(&gaps) {
            *e = -gap;
        }
        exponentiate(&mut exponentials[..part.len()], |e| e);
        exponentials[part.len()..].fill(0.0);
        if let Some(e) = peak.checked_sub(chunk * AT_ONCE).and_then(|peak| exponentials.get_mut(peak)) {
            *e = 0.0;
        }
        for (gaps, exponentials) in gaps.as_chunks::<LANES>().0.iter().zip(exponentials.as_chunks::<LANES>().0) {
            // The gap of a logit of −∞ is ∞, whose product with 0 would be NaN.
            let gaps: [f64; LANES] = from_fn(|lane| if exponentials[lane] > 0.0 { gaps[lane] } else { 0.0 });
            let weighted: [f64; LANES] = from_fn(|lane| exponentials[lane] * gaps[lane]);
            weighted_squares = from_fn(|lane| weighted_squares[lane] + weighted[lane] * gaps[lane]);
            sums[0].add(*exponentials);
            sums[1].add(weighted);
        }
    }
    [sums[0].value(), sums[1].value(), weighted_squares.iter().sum()]
}

/// Returns `exp(z_j − max) / sum` of each of the logits `z`.
#[multiversion(targets("x86_64+avx2"))]
fn probabilities(z: &[f64], max: f64, sum: f64) -> Vec<f64> {
    let mut probabilities: Vec<f64> = z.iter().map(|z| z - max).collect();
    for part in probabilities.chunks_mut(AT_ONCE) {
        exponentiate(part, |e| e / sum);
    }
    probabilities
}

impl Softmax {
    /// Computes the statistics of the row `z`.
    pub fn new(z: &[f64]) -> Self {
        let (max, nan) = (largest(z), f64::NAN);
        // One maximal term is exactly 1. Kept out of the sum it leaves ln S = ln(1 + rest), which is exact however
        // small the rest is.
        let Some(peak) = z.iter().position(|&x| x == max).filter(|_| max.is_finite()) else {
            return Self { max, sum: nan, rest: nan, log_sum: nan, mean_gap: nan, mean_square_gap: nan };
        };
        let [rest, weighted_gaps, weighted_squares] = sums_beside(peak, z);
        let sum = 1.0 + rest;
        Self {
            max,
            sum,
            rest,
            log_sum: rest.ln_1p(),
            mean_gap: weighted_gaps / sum,
            mean_square_gap: weighted_squares / sum,
        }
    }

    /// Returns the probability `p = exp(z − m) / S` of the logit `z`.
    pub fn probability(&self, z: f64) -> f64 {
        exponential(z - self.max) / self.sum
    }

    /// Returns [`probability`](Self::probability) of each of the logits `z`.
    pub(super) fn probabilities(&self, z: &[f64]) -> Vec<f64> {
        probabilities(z, self.max, self.sum)
    }

    /// Returns the log-probability `log p = −a − ln S` of the logit `z`, nats.
    pub fn log_probability(&self, z: f64) -> f64 {
        (z - self.max) - self.log_sum
    }

    /// Returns `1 − p_y = (S − e_y)/S` for the logit `z` of `y`, as the sum of the other probabilities, which is
    /// correct to the last bits even if `p_y` rounds to 1. `S` is 1, from one maximal entry, plus the rest. If `y` is
    /// maximal, the rest is the sum of the others; if not, `rest − e_y` subtracts nothing from the 1.
    pub fn probability_of_others(&self, z: f64) -> f64 {
        let others = if z == self.max { self.rest } else { 1.0 + (self.rest - exponential(z - self.max)) };
        others / self.sum
    }

    /// Returns the entropy `H = −Σ p_j log p_j = ln S + ā`, nats: two non-negative terms, so nothing cancels.
    pub fn entropy(&self) -> f64 {
        self.log_sum + self.mean_gap
    }

    /// Returns `∂H/∂z_j = −p_j (log p_j + H) = p_j (a_j − ā)` for a logit and its probability; 0 if the probability is
    /// 0.
    pub fn entropy_gradient(&self, z: f64, p: f64) -> f64 {
        if p == 0.0 { 0.0 } else { p * ((self.max - z) - self.mean_gap) }
    }
}
