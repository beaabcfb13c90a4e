//! [`Tally`]: many comparisons of a value with the exact one, each against its limit, of which the worst is kept.
//!
//! ```
//! use assay_core::problem::Dtype;
//! use assay_judge::metric::{Allowance, Position, Tally};
//!
//! // The limit is κ·u·scale = 4·2⁻²⁴·1: an error of 2·2⁻²⁴ is half of it.
//! let u = f64::powi(2.0, -24);
//! let allowance = Allowance { unit: u, scale: 1.0, ..Allowance::default() };
//! let mut tally = Tally::default();
//! tally.compare(Position::token(0, 1), 1.0, 1.0 + 2.0 * u, 4.0, allowance, Dtype::F32);
//! assert!(tally.passes());
//! assert_eq!((tally.badness(), tally.kappa_seen), (0.5, 2.0));
//! ```

use super::error_map::ErrorMap;
use super::gate::Gate;
use assay_core::problem::{Dtype, HeadShape};
use assay_schema::verdicts::Status;

/// The spacing of a dtype's numbers, from which the error of rounding follows.
#[derive(Clone, Copy, Debug)]
pub struct Spacing {
    /// Half of the spacing at 1.
    at_1: f64,
    min_normal: f64,
}

impl Spacing {
    /// Returns the spacing of `dtype`.
    pub fn new(dtype: Dtype) -> Self {
        let at_1 = match dtype {
            Dtype::F64 => f64::EPSILON / 2.0,
            Dtype::F32 => f64::from(f32::EPSILON) / 2.0,
            Dtype::Bf16 => 1.0 / 256.0,
            Dtype::F16 => 1.0 / 2048.0,
        };
        Self { at_1, min_normal: min_normal(dtype) }
    }

    /// Returns half of the spacing at `x`: the largest error of rounding `x` to nearest.
    ///
    /// Below the smallest normal number the spacing is that of the subnormals.
    #[inline]
    pub fn half_ulp(self, x: f64) -> f64 {
        // The exponent's bits alone are the largest power of two up to |x|; for a subnormal f64 they are 0.
        let power_of_two = f64::from_bits(x.to_bits() & f64::INFINITY.to_bits());
        self.at_1 * if power_of_two > self.min_normal { power_of_two } else { self.min_normal }
    }
}

/// Returns [`Spacing::half_ulp`] of `dtype` at `x`.
pub fn half_ulp(x: f64, dtype: Dtype) -> f64 {
    Spacing::new(dtype).half_ulp(x)
}

/// Returns the smallest normal number of `dtype`.
#[inline]
pub fn min_normal(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F64 => f64::MIN_POSITIVE,
        Dtype::F32 | Dtype::Bf16 => f64::from(f32::MIN_POSITIVE),
        Dtype::F16 => f64::from(half::f16::MIN_POSITIVE),
    }
}

/// Formats the bits of `x`, rounded to `dtype`, in hexadecimal.
pub fn hex(x: f64, dtype: Dtype) -> String {
    match dtype {
        Dtype::F64 => format!("{:#018x}", x.to_bits()),
        Dtype::F32 => format!("{:#010x}", (x as f32).to_bits()),
        Dtype::Bf16 => format!("{:#06x}", half::bf16::from_f64(x).to_bits()),
        Dtype::F16 => format!("{:#06x}", half::f16::from_f64(x).to_bits()),
    }
}

/// The place of a value in an output; indices that it does not have are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Position {
    /// The index of the sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b: Option<usize>,
    /// The index of the token in its sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub t: Option<usize>,
    /// The number of one of a token's ids, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub k: Option<usize>,
    /// The index of the hidden unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub h: Option<usize>,
    /// The index of the vocabulary entry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v: Option<usize>,
}

impl Position {
    /// Creates the place of token `[b,t]`.
    pub fn token(b: usize, t: usize) -> Self {
        Self { b: Some(b), t: Some(t), ..Self::default() }
    }

    /// Creates the place of vocabulary entry `[b,t,v]`.
    pub fn column(b: usize, t: usize, v: usize) -> Self {
        Self { v: Some(v), ..Self::token(b, t) }
    }

    /// Creates the place of hidden unit `[b,t,h]`.
    pub fn hidden(b: usize, t: usize, h: usize) -> Self {
        Self { h: Some(h), ..Self::token(b, t) }
    }

    /// Creates the place of weight `[h,v]` of the LM head, whatever its layout.
    pub fn weight(h: usize, v: usize) -> Self {
        Self { h: Some(h), v: Some(v), ..Self::default() }
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let parts: Vec<String> =
            [self.b, self.t, self.k, self.h, self.v].into_iter().flatten().map(|i| i.to_string()).collect();
        if parts.is_empty() { Ok(()) } else { write!(f, "[{}]", parts.join(",")) }
    }
}

/// The parts of the limit of one value: `limit = rounding + κ·unit·scale + floor`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allowance {
    /// The error of rounding the exact value to the output's dtype.
    pub rounding: f64,
    /// The unit roundoff `u` of the arithmetic.
    pub unit: f64,
    /// The condition of the value: how strongly rounding shows in it.
    pub scale: f64,
    /// The errors that no multiple of the scale covers, such as flushing to 0.
    pub floor: f64,
}

impl Allowance {
    /// Returns the limit with this `κ`.
    #[inline]
    pub(crate) fn limit(&self, kappa: f64) -> f64 {
        self.rounding + kappa * self.unit * self.scale + self.floor
    }
}

/// The comparison of one value with the exact one.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// The place of the value.
    pub at: Position,
    /// The exact value, from the reference.
    pub expected: f64,
    /// The value that is judged.
    pub actual: f64,
    /// The error `|actual − expected|`.
    pub error: f64,
    /// The largest error allowed.
    pub limit: f64,
}

impl Comparison {
    /// Returns error / limit; 0 if both are 0. Above 1 the comparison fails.
    pub fn error_over_limit(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.limit }
    }
}

/// The upper edges of the histogram's buckets, in ulp of the output's dtype; the last bucket is open.
pub const ULP_EDGES: [f64; 8] = [0.5, 1.0, 2.0, 4.0, 16.0, 256.0, 65536.0, f64::INFINITY];

/// Returns the bucket of an error: the number of edges, in units of `ulp`, that it exceeds.
fn bucket(error: f64, ulp: f64) -> usize {
    ULP_EDGES.iter().map(|&edge| usize::from(error > edge * ulp)).sum()
}

/// A tally of many comparisons, of which the worst is kept.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// The comparison with the largest error / limit.
    pub worst: Option<Comparison>,
    /// The error / limit of that comparison.
    worst_quotient: f64,
    /// The first value that is NaN or ∞ though the exact one is finite.
    pub nonfinite: Option<(Position, f64)>,
    /// The first value that is finite though the exact one is not.
    pub silent: Option<(Position, f64)>,
    /// The first value that is NaN or ∞ as it may be: as the exact one is, or because f32 overflows.
    pub reported: Option<Position>,
    /// The number of values without a finite limit, and of rows with such a value or one that is not finite: they were not compared.
    pub not_compared: u64,
    /// The `κ` that would have been needed: the largest `(error − rounding − floor)⁺ / (u·scale)`.
    pub kappa_seen: f64,
    /// The number of errors in each bucket of [`ULP_EDGES`], in ulp.
    pub histogram: [u64; ULP_EDGES.len()],
    /// The errors by their place; empty unless they are asked for.
    pub maps: Vec<ErrorMap>,
}

impl Tally {
    /// Returns an empty tally of `gate`, with maps of errors if `mapped` gives their extents.
    pub(crate) fn with_maps(gate: Gate, mapped: Option<HeadShape>) -> Self {
        Self { maps: mapped.map_or_else(Vec::new, |shape| ErrorMap::for_gate(gate, shape)), ..Self::default() }
    }

    /// Compares `actual` with `expected`.
    ///
    /// A value that is not finite is right only if the exact one is not finite either, or rounds to the same ∞.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would pass its arguments through memory, once a weight of a head")]
    pub fn compare(
        &mut self,
        at: Position,
        expected: f64,
        actual: f64,
        kappa: f64,
        allowance: Allowance,
        dtype: Dtype,
    ) {
        // NaN fails every comparison, and would pass a test of `error > limit`; so all three numbers are asked for
        // first.
        let limit = allowance.limit(kappa);
        if !(expected.is_finite() && actual.is_finite() && limit.is_finite()) {
            return self.compare_nonfinite(at, expected, actual, limit, dtype);
        }
        let error = (actual - expected).abs();
        self.histogram[bucket(error, 2.0 * half_ulp(expected, dtype))] += 1;
        if !self.maps.is_empty() {
            self.add_to_maps(at, if error == 0.0 { 0.0 } else { error / limit });
        }
        self.keep_if_worst(at, expected, actual, kappa, allowance);
    }

    /// Keeps a comparison of finite numbers, and its `κ`, if they are worse than all before.
    #[inline]
    pub(crate) fn keep_if_worst(&mut self, at: Position, expected: f64, actual: f64, kappa: f64, allowance: Allowance) {
        let (error, limit) = ((actual - expected).abs(), allowance.limit(kappa));
        // Products replace quotients here: there are millions of elements, and few are worse than all before.
        let (excess, of_one_kappa) = (error - allowance.rounding - allowance.floor, allowance.unit * allowance.scale);
        if excess > self.kappa_seen * of_one_kappa {
            self.kappa_seen = excess / of_one_kappa;
        }
        if error > self.worst_quotient * limit || self.worst.is_none() {
            let comparison = Comparison { at, expected, actual, error, limit };
            (self.worst, self.worst_quotient) = (Some(comparison), comparison.error_over_limit());
        }
    }

    /// Whether a comparison of finite numbers would leave both the worst one and `kappa_seen` as they are; false if a number is not
    /// finite.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the loop is compiled for the vector unit of its caller")]
    pub(crate) fn is_unremarkable(&self, error: f64, allowance: Allowance, kappa: f64) -> bool {
        let (limit, excess) = (allowance.limit(kappa), error - allowance.rounding - allowance.floor);
        // Each test is false for NaN, and a sum of numbers ≥ 0 is finite only if both are. No test is skipped: that would be a branch.
        let mut unremarkable = error + limit < f64::INFINITY;
        unremarkable &= error <= self.worst_quotient * limit;
        unremarkable &= excess <= self.kappa_seen * (allowance.unit * allowance.scale);
        unremarkable
    }

    /// Compares a value if it, the exact one or the limit is not finite.
    #[cold]
    fn compare_nonfinite(&mut self, at: Position, expected: f64, actual: f64, limit: f64, dtype: Dtype) {
        if !expected.is_finite() {
            let slot = if actual.is_finite() { &mut self.silent } else { return self.report(at) };
            slot.get_or_insert((at, actual));
            self.add_to_maps(at, f64::INFINITY);
        } else if !actual.is_finite() {
            // A value within the limit may be beyond the dtype's largest number, and then ∞ is right.
            if dtype.round(expected + actual.signum() * limit) != actual {
                self.nonfinite.get_or_insert((at, actual));
                self.add_to_maps(at, f64::INFINITY);
            }
        } else {
            self.not_compared += 1;
        }
    }

    /// Adds one error / limit to the maps, if there are any.
    #[cold]
    fn add_to_maps(&mut self, at: Position, error_over_limit: f64) {
        self.maps.iter_mut().for_each(|map| map.add(at, error_over_limit));
    }

    /// Whether nothing was compared, reported or left out.
    pub fn is_empty(&self) -> bool {
        let Self { worst, nonfinite, silent, reported, not_compared, .. } = self;
        worst.is_none() && nonfinite.is_none() && silent.is_none() && reported.is_none() && *not_compared == 0
    }

    /// Records a value that is not finite, as it may be.
    pub fn report(&mut self, at: Position) {
        self.reported.get_or_insert(at);
    }

    /// Whether every comparison is within its limit.
    pub fn passes(&self) -> bool {
        self.nonfinite.is_none() && self.silent.is_none() && self.worst.is_none_or(|worst| worst.error <= worst.limit)
    }

    /// Decides the gate that the comparisons are of.
    pub fn status(&self) -> Status {
        match () {
            () if self.nonfinite.is_some() => Status::Nonfinite,
            () if !self.passes() => Status::Fail,
            () if self.worst.is_none() => Status::NotCompared,
            () => Status::Pass,
        }
    }

    /// Returns error / limit of the worst comparison, ∞ for values that are wrongly finite or not; above 1 is a failure.
    pub fn badness(&self) -> f64 {
        if self.nonfinite.is_some() || self.silent.is_some() {
            return f64::INFINITY;
        }
        self.worst.map_or(0.0, |worst| worst.error_over_limit())
    }

    /// Adds the tally of a later part of the same output.
    pub fn absorb(&mut self, later: Tally) {
        if later.maps.is_empty() {
            // A part without maps of its own is one value: that of a token, or of a row.
            let odd = later.nonfinite.or(later.silent).map(|(at, _)| (at, f64::INFINITY));
            let value = odd.or(later.worst.map(|worst| (worst.at, worst.error_over_limit())));
            if let Some((at, error_over_limit)) = value {
                self.add_to_maps(at, error_over_limit);
            }
        }
        for (map, later) in self.maps.iter_mut().zip(&later.maps) {
            map.absorb(later);
        }
        if later.worst_quotient > self.worst_quotient || self.worst.is_none() {
            (self.worst, self.worst_quotient) = (later.worst, later.worst_quotient);
        }
        self.nonfinite = self.nonfinite.or(later.nonfinite);
        self.silent = self.silent.or(later.silent);
        self.reported = self.reported.or(later.reported);
        self.not_compared += later.not_compared;
        self.kappa_seen = self.kappa_seen.max(later.kappa_seen);
        for (ours, theirs) in self.histogram.iter_mut().zip(later.histogram) {
            *ours += theirs;
        }
    }
}
