//! [`ErrorSums`]: the sums of a row's errors and of the parts of their limits, and the walk that compares many values and adds them up.
//!
//! Most of the judge's work on a row is here. Four values at a time are read once, and sums and counts stay in registers. Values that are
//! not finite or worse than all before are few: a second walk over the 64 around them finds them.

use crate::metric::{Allowance, Position, Spacing, Tally, ULP_EDGES};
use assay_core::problem::Dtype;

/// The values that are compared and added side by side, so that no addition waits for the one before it.
const LANES: usize = 4;

/// The number of values that are compared before those that are worse than all before are looked for.
const AT_ONCE: usize = 64;

/// The edges of the histogram that every value is compared with: beyond them are few errors of a right kernel.
const EDGES_AT_ONCE: usize = 4;

/// The error of a value and the parts of its limit, or sums of them: error, rounding with floor, scale.
///
/// Rounding and floor are added up as one, as the norm of their sum is at most the sum of their norms: a tighter limit.
pub type ErrorParts = [f64; 3];

/// Values with the exact ones and the bounds of their errors, each of the same length.
#[derive(Clone, Copy, Debug)]
pub struct BoundedValues<'v> {
    /// The exact values, from the reference.
    pub exact: &'v [f64],
    /// The values that are judged.
    pub actual: &'v [f64],
    /// The conditions of the values.
    pub scale: &'v [f64],
    /// The errors that no multiple of the scale covers.
    pub floor: &'v [f64],
}

impl BoundedValues<'_> {
    /// Returns the values of a range.
    pub(crate) fn range(&self, range: std::ops::Range<usize>) -> Self {
        Self {
            exact: &self.exact[range.clone()],
            actual: &self.actual[range.clone()],
            scale: &self.scale[range.clone()],
            floor: &self.floor[range],
        }
    }
}

/// The sums over some values of errors, roundings with floors, and scales, and of their squares.
#[derive(Clone, Debug, Default)]
pub struct ErrorSums {
    plain: [[f64; LANES]; 3],
    squares: [[f64; LANES]; 3],
}

impl ErrorSums {
    /// Adds one value, with its square.
    pub fn add(&mut self, exact: f64, actual: f64, allowance: Allowance) {
        self.add_without_square(exact, actual, allowance);
        for (squares, part) in self.squares.iter_mut().zip(parts(exact, actual, allowance)) {
            squares[0] += part * part;
        }
    }

    /// Adds one value that has no part in the sums of squares.
    pub(crate) fn add_without_square(&mut self, exact: f64, actual: f64, allowance: Allowance) {
        for (plain, part) in self.plain.iter_mut().zip(parts(exact, actual, allowance)) {
            plain[0] += part;
        }
    }

    /// Returns the sum of each part.
    pub fn plain(&self) -> ErrorParts {
        self.plain.map(|lanes| lanes.iter().sum())
    }

    /// Returns the root of the sum of squares of each part.
    pub fn norms(&self) -> ErrorParts {
        self.squares.map(|lanes| lanes.iter().sum::<f64>().sqrt())
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "the loop is compiled for the vector unit of its caller")]
fn parts(exact: f64, actual: f64, allowance: Allowance) -> ErrorParts {
    [actual - exact, allowance.rounding + allowance.floor, allowance.scale]
}

impl Tally {
    /// Compares many values, as [`compare`](Self::compare) does one, and adds them to `sums`. `allowance` makes a limit's parts of an exact
    /// value, its scale and its floor; `at` is the place of a value.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the loop is compiled for the vector unit of its caller")]
    pub fn compare_all(
        &mut self,
        sums: &mut ErrorSums,
        at: impl Fn(usize) -> Position,
        values: BoundedValues,
        kappa: f64,
        allowance: impl Fn(f64, f64, f64) -> Allowance,
        dtype: Dtype,
    ) {
        let (places, spacing) = (values.exact.len(), Spacing::new(dtype));
        for start in (0..places).step_by(AT_ONCE) {
            let range = start..places.min(start + AT_ONCE);
            let (unremarkable, histogram) = self.survey(sums, values.range(range.clone()), kappa, &allowance, spacing);
            let bounded = |v: usize| {
                let (exact, actual) = (values.exact[v], values.actual[v]);
                (exact, actual, allowance(exact, values.scale[v], values.floor[v]))
            };
            let is_finite = |v: usize| {
                let (exact, actual, allowance) = bounded(v);
                (actual - exact).abs() + allowance.limit(kappa) < f64::INFINITY
            };
            if !self.maps.is_empty() || !(unremarkable || range.clone().all(is_finite)) {
                for v in range {
                    let (exact, actual, allowance) = bounded(v);
                    self.compare(at(v), exact, actual, kappa, allowance, dtype);
                }
                continue;
            }
            // Almost always nothing but the histogram changes.
            self.histogram.iter_mut().zip(histogram).for_each(|(all, more)| *all += more);
            if !unremarkable {
                for v in range {
                    let (exact, actual, allowance) = bounded(v);
                    self.keep_if_worst(at(v), exact, actual, kappa, allowance);
                }
            }
        }
    }

    /// Adds at most [`AT_ONCE`] values to `sums`. Returns whether all are finite and none is worse than all before, and the histogram of
    /// their errors, which counts only if all are finite.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the loop is compiled for the vector unit of its caller")]
    fn survey(
        &self,
        sums: &mut ErrorSums,
        values: BoundedValues,
        kappa: f64,
        allowance: &impl Fn(f64, f64, f64) -> Allowance,
        spacing: Spacing,
    ) -> (bool, [u64; ULP_EDGES.len()]) {
        // Every sum and count has a register of its own, and is written out once the loop is done.
        let [mut errors, mut roundings, mut scales] = sums.plain;
        let [mut errors2, mut roundings2, mut scales2] = sums.squares;
        let mut unremarkable = [u64::from(self.worst.is_some()); LANES];
        let mut beyond = [[0; LANES]; EDGES_AT_ONCE];
        let (exact, exact_rest) = values.exact.as_chunks::<LANES>();
        let (actual, actual_rest) = values.actual.as_chunks::<LANES>();
        let (scale, scale_rest) = values.scale.as_chunks::<LANES>();
        let (floor, floor_rest) = values.floor.as_chunks::<LANES>();
        for (((exact, actual), scale), floor) in exact.iter().zip(actual).zip(scale).zip(floor) {
            for lane in 0..LANES {
                let allowed = allowance(exact[lane], scale[lane], floor[lane]);
                let [error, rounding, scale] = parts(exact[lane], actual[lane], allowed);
                unremarkable[lane] &= u64::from(self.is_unremarkable(error.abs(), allowed, kappa));
                let ulp = 2.0 * spacing.half_ulp(exact[lane]);
                for edge in 0..EDGES_AT_ONCE {
                    beyond[edge][lane] += u64::from(error.abs() > ULP_EDGES[edge] * ulp);
                }
                errors[lane] += error;
                roundings[lane] += rounding;
                scales[lane] += scale;
                errors2[lane] += error * error;
                roundings2[lane] += rounding * rounding;
                scales2[lane] += scale * scale;
            }
        }
        *sums = ErrorSums { plain: [errors, roundings, scales], squares: [errors2, roundings2, scales2] };
        let mut unremarkable = unremarkable.iter().all(|all| *all == 1);
        let mut beyond = beyond.map(|lanes| lanes.iter().sum::<u64>());
        // The last values, fewer than the lanes.
        for (((&exact, &actual), &scale), &floor) in exact_rest.iter().zip(actual_rest).zip(scale_rest).zip(floor_rest)
        {
            let (allowed, error) = (allowance(exact, scale, floor), (actual - exact).abs());
            unremarkable &= self.is_unremarkable(error, allowed, kappa);
            let ulp = 2.0 * spacing.half_ulp(exact);
            beyond.iter_mut().zip(ULP_EDGES).for_each(|(beyond, edge)| *beyond += u64::from(error > edge * ulp));
            sums.add(exact, actual, allowed);
        }
        // A value beyond one edge is beyond all lower ones, so the counts of the buckets are differences of such numbers.
        let mut histogram = [0; ULP_EDGES.len()];
        let mut left = values.exact.len() as u64;
        for (bucket, count) in histogram.iter_mut().enumerate() {
            let more = || -> u64 {
                let errors = values.exact.iter().zip(values.actual);
                let is_beyond = |(x, y): (&f64, &f64)| (y - x).abs() > ULP_EDGES[bucket] * 2.0 * spacing.half_ulp(*x);
                errors.map(|error| u64::from(is_beyond(error))).sum()
            };
            let beyond = match beyond.get(bucket) {
                Some(beyond) => *beyond,
                None if left > 0 => more(),
                None => 0,
            };
            *count = left - beyond;
            left = beyond;
        }
        (unremarkable, histogram)
    }
}
