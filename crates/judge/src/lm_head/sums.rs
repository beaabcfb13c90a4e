//! Products and roundings behind the limits of an LM head's gradients.

use std::f64::consts::PI;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, Axis, concatenate};
use rayon::prelude::*;

use crate::metric::half_ulp;
use crate::tolerance::Limits;
use assay_core::problem::Dtype;

/// The columns of a product that a thread takes at once.
const AT_ONCE: usize = 128;

/// The number of sums that describe a rounding: `ρ`, and the real and imaginary part of `r·e^(πi·dx/r)`.
pub(super) const ROUNDING_SUMS: usize = 3;

pub(super) fn square(x: f64) -> f64 {
    x * x
}

/// Adds `a · map(b)` to `sums`, without compensation: the product is a limit, not a value.
pub(super) fn add_product(sums: &mut Array2<f64>, a: &Array2<f64>, b: ArrayView2<f64>, map: fn(f64) -> f64) {
    let parts: Vec<_> = sums.axis_chunks_iter_mut(Axis(1), AT_ONCE).zip(b.axis_chunks_iter(Axis(1), AT_ONCE)).collect();
    parts.into_par_iter().for_each(|(mut sums, b)| general_mat_mul(1.0, a, &b.mapv(map), 1.0, &mut sums));
}

/// Stacks matrices of equal width, the first on top, so that one product serves all of them.
pub(super) fn stacked(parts: &[&Array2<f64>]) -> Array2<f64> {
    let parts: Vec<_> = parts.iter().map(|part| part.view()).collect();
    concatenate(Axis(0), &parts).expect("as many columns each")
}

/// Evaluates the three terms of [`ROUNDING_SUMS`] for each dlogit of `exact`, stacked.
pub(super) fn rounding_terms(exact: &Array2<f64>, dtype: Dtype) -> Array2<f64> {
    let each = exact.iter().map(|&x| {
        // The rounded value is a multiple of the ulp, 2·half, so that e^(πi·moved/half) is the conjugate of
        // e^(πi·x/half): the size of the sum is the same, and the angle is small.
        let (moved, half) = (dtype.round(x) - x, half_ulp(x, dtype));
        let (sin, cos) = f64::sin_cos(PI * moved / half);
        (moved, (half * cos, half * sin))
    });
    let (moved, (cos, sin)): (Vec<_>, (Vec<_>, Vec<_>)) = each.unzip();
    let shape = [ROUNDING_SUMS * exact.nrows(), exact.ncols()];
    Array2::from_shape_vec(shape, [moved, cos, sin].concat()).expect("three of each")
}

/// Combines `R` from `Σ r·|w|`, `Σ r²w²`, and the sums of [`rounding_terms`] times `w`.
pub(super) fn rounding_of_sum(
    by_size: f64,
    by_square: f64,
    [moved, cos, sin]: [f64; ROUNDING_SUMS],
    limits: &Limits,
) -> f64 {
    // A part of the row that rounds alike adds up linearly, the rest like independent errors; no kernel exceeds the sum
    // of all sizes.
    let alike2 = f64::max(square(moved), square(cos) + square(sin));
    by_size.min(f64::sqrt(square(limits.spread()) * by_square + alike2))
}
