//! The error of a sum in f32 whose terms are added one after another in lanes, as `torch.log_softmax` on a CPU and plain loops of
//! vector units add them.

use std::collections::HashMap;

use assay_reference::{Reference, SoftmaxColumns, Token};

/// The lanes of vector units: eight f32 of AVX2, sixteen of AVX-512. GPUs have more, with fewer terms each.
const LANES: [usize; 2] = [8, 16];

/// The number of vocabulary entries from which on a sum in lanes may lose more than the roundings that `κ` counts for it.
pub(crate) const LONG_ROW: usize = 4096;

/// The key of terms that a partial sum absorbs: the bits of no exponential.
const ABSORBED: u32 = u32::MAX;

/// Standard deviations of a sum of independent errors that are allowed.
const DEVIATIONS: f64 = 6.0;

/// Bounds the relative error of the sum of a token's exponentials, added in f32 in lanes.
///
/// Adding a term `t` to a partial sum rounds to a multiple of the sum's ulp. Terms that are *equal* are rounded alike as long as the
/// sum stays below the next power of two, so their errors add up, to `D_t` over all places of `t`. Terms of the size of the ulp or below,
/// as all have that come after a peak in its lane, are lost or rounded up by their size alone, and add up to one `D`. Terms that differ
/// otherwise have independent errors. The sum of all is off by at most `Σ |D_t|`, and by more than six times the root of `Σ D_t²` only by
/// a chance of 2e-9; the smaller of the two, and what is absorbed, is the bound.
pub(super) fn lane_sum_error(reference: &Reference, (b, t): (usize, usize), token: &Token) -> f64 {
    let row = reference.row(b, t, token);
    let SoftmaxColumns { probabilities, .. } = row.logp();
    // Kernels add exponentials whose largest is 1.
    let largest = probabilities.iter().copied().fold(0.0, f64::max);
    let terms: Vec<f32> = probabilities.iter().map(|p| (p / largest) as f32).collect();
    LANES.into_iter().map(|lanes| error_in_lanes(&terms, lanes)).fold(0.0, f64::max)
}

fn error_in_lanes(terms: &[f32], lanes: usize) -> f64 {
    let mut sums = vec![0.0_f32; lanes];
    let mut by_term: HashMap<u32, f64> = HashMap::with_capacity(1024);
    for (j, term) in terms.iter().enumerate() {
        let lane = &mut sums[j % lanes];
        let exact = f64::from(*lane) + f64::from(*term);
        *lane += term;
        let ulp = lane.next_up() - *lane;
        let key = if *term <= ulp { ABSORBED } else { term.to_bits() };
        *by_term.entry(key).or_default() += f64::from(*lane) - exact;
    }
    let absorbed = by_term.remove(&ABSORBED).unwrap_or_default().abs();
    let (sizes, squares) =
        by_term.values().fold((0.0, 0.0), |(sizes, squares), error| (sizes + error.abs(), squares + error * error));
    // The lanes' own sums are added in a few more steps, which κ counts.
    let total: f64 = sums.iter().map(|lane| f64::from(*lane)).sum();
    (absorbed + f64::min(sizes, DEVIATIONS * f64::sqrt(squares))) / total
}
