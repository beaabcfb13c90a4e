//! How far one number is from another, and a tally of many such comparisons.

use std::ops::Range;

use assay_core::problem::Dtype;
use assay_schema::verdicts::Status;

/// The spacing of a dtype's numbers.
#[derive(Clone, Copy, Debug)]
pub struct Spacing {
    /// Half of it at 1.
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

    /// Half of it at `x`: the error of rounding `x` to nearest. Below the smallest normal number the spacing stays that of the
    /// subnormals.
    #[inline]
    pub fn half_ulp(self, x: f64) -> f64 {
        // The exponent's bits alone: the largest power of two that is no more than |x|; of a subnormal f64 they are 0.
        let power_of_two = f64::from_bits(x.to_bits() & f64::INFINITY.to_bits());
        self.at_1 * if power_of_two > self.min_normal { power_of_two } else { self.min_normal }
    }
}

/// [`Spacing::half_ulp`] of `dtype` at `x`.
pub fn half_ulp(x: f64, dtype: Dtype) -> f64 {
    Spacing::new(dtype).half_ulp(x)
}

/// The smallest normal number of `dtype`.
#[inline]
pub fn min_normal(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F64 => f64::MIN_POSITIVE,
        Dtype::F32 | Dtype::Bf16 => f64::from(f32::MIN_POSITIVE),
        Dtype::F16 => f64::from(half::f16::MIN_POSITIVE),
    }
}

/// The bits of `x` rounded to `dtype`, in hexadecimal.
pub fn hex(x: f64, dtype: Dtype) -> String {
    match dtype {
        Dtype::F64 => format!("{:#018x}", x.to_bits()),
        Dtype::F32 => format!("{:#010x}", (x as f32).to_bits()),
        Dtype::Bf16 => format!("{:#06x}", half::bf16::from_f64(x).to_bits()),
        Dtype::F16 => format!("{:#06x}", half::f16::from_f64(x).to_bits()),
    }
}

/// Where a value stands in an output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Position {
    /// Sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b: Option<usize>,
    /// Token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub t: Option<usize>,
    /// Which of a token's ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub k: Option<usize>,
    /// Hidden unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub h: Option<usize>,
    /// Column.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v: Option<usize>,
}

impl Position {
    /// Token `[b,t]`.
    pub fn token(b: usize, t: usize) -> Self {
        Self { b: Some(b), t: Some(t), ..Self::default() }
    }

    /// Column `[b,t,v]`.
    pub fn column(b: usize, t: usize, v: usize) -> Self {
        Self { v: Some(v), ..Self::token(b, t) }
    }

    /// Hidden unit `[b,t,h]`.
    pub fn hidden(b: usize, t: usize, h: usize) -> Self {
        Self { h: Some(h), ..Self::token(b, t) }
    }

    /// Weight `[h,v]` of the LM head, whatever its layout.
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

/// What an error is measured against: `limit = rounding + κ·u·scale + floor`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allowance {
    /// Error of rounding the exact value to the output's dtype.
    pub rounding: f64,
    /// Unit roundoff of the arithmetic.
    pub unit: f64,
    /// The value's own condition.
    pub scale: f64,
    /// Errors that no multiple of the scale covers, such as underflow to zero.
    pub floor: f64,
}

/// What many errors are measured against, an [`Allowance`] each.
#[derive(Clone, Debug, Default)]
pub struct Allowances {
    /// Of each.
    pub rounding: Vec<f64>,
    /// Of all.
    pub unit: f64,
    /// Of each.
    pub scale: Vec<f64>,
    /// Of each.
    pub floor: Vec<f64>,
}

/// Some of them.
struct AllowanceSlices<'a> {
    rounding: &'a [f64],
    unit: f64,
    scale: &'a [f64],
    floor: &'a [f64],
}

impl Allowances {
    /// Of one.
    pub fn at(&self, v: usize) -> Allowance {
        Allowance { rounding: self.rounding[v], unit: self.unit, scale: self.scale[v], floor: self.floor[v] }
    }

    fn range(&self, range: Range<usize>) -> AllowanceSlices<'_> {
        AllowanceSlices {
            rounding: &self.rounding[range.clone()],
            unit: self.unit,
            scale: &self.scale[range.clone()],
            floor: &self.floor[range],
        }
    }
}

/// How many are compared before the worst of them is asked for.
const AT_ONCE: usize = 64;

/// One comparison.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// Where.
    pub at: Position,
    /// The exact value.
    pub expected: f64,
    /// The value judged.
    pub actual: f64,
    /// `|actual − expected|`.
    pub error: f64,
    /// The largest error allowed.
    pub limit: f64,
}

impl Comparison {
    /// `error / limit`; 0 where both are 0.
    pub fn error_over_limit(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.limit }
    }
}

/// Upper edges of the histogram's buckets, in ulp of the output's dtype; the last bucket is open.
pub const ULP_EDGES: [f64; 8] = [0.5, 1.0, 2.0, 4.0, 16.0, 256.0, 65536.0, f64::INFINITY];

/// The bucket of an error, where an ulp is `ulp`: how many edges it is beyond.
fn bucket(error: f64, ulp: f64) -> usize {
    ULP_EDGES.iter().map(|&edge| usize::from(error > edge * ulp)).sum()
}

/// The worst of many comparisons.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// The comparison with the largest share of its limit.
    pub worst: Option<Comparison>,
    /// That share.
    worst_quotient: f64,
    /// The first value that is NaN or ∞ where the exact one is not.
    pub nonfinite: Option<(Position, f64)>,
    /// The first value that is finite where the exact one is not.
    pub silent: Option<(Position, f64)>,
    /// The first value that is NaN or ∞ as the exact one is, or as f32 may make of it.
    pub reported: Option<Position>,
    /// Values for which there is no limit, as what they depend on may be off by more than f64 can say, and rows with such a value
    /// or one that is not finite: they were not compared.
    pub not_compared: u64,
    /// The largest `(error − rounding − floor)⁺ / (u·scale)`: the `κ` that would have been needed.
    pub kappa_seen: f64,
    /// Errors in ulp, counted by [`ULP_EDGES`].
    pub histogram: [u64; ULP_EDGES.len()],
}

impl Tally {
    /// Compares `actual` with `expected`.
    ///
    /// A value that is not finite is right only where the exact one is not finite either, or rounds to the same ∞.
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
        let limit = allowance.rounding + kappa * allowance.unit * allowance.scale + allowance.floor;
        if !(expected.is_finite() && actual.is_finite() && limit.is_finite()) {
            return self.compare_nonfinite(at, expected, actual, limit, dtype);
        }
        let error = (actual - expected).abs();
        // Products in place of quotients: there are millions of elements, and few are worse than all before.
        let excess = (error - allowance.rounding - allowance.floor).max(0.0);
        let of_one_kappa = allowance.unit * allowance.scale;
        if excess > self.kappa_seen * of_one_kappa {
            self.kappa_seen = excess / of_one_kappa;
        }
        self.histogram[bucket(error, 2.0 * half_ulp(expected, dtype))] += 1;
        if error > self.worst_quotient * limit || self.worst.is_none() {
            let comparison = Comparison { at, expected, actual, error, limit };
            (self.worst, self.worst_quotient) = (Some(comparison), comparison.error_over_limit());
        }
    }

    /// Compares many: `exact` and `actual` of each place, and what its error is measured against.
    #[inline]
    pub fn compare_all(
        &mut self,
        at: impl Fn(usize) -> Position,
        exact: &[f64],
        actual: &[f64],
        kappa: f64,
        against: &Allowances,
        dtype: Dtype,
    ) {
        let (places, spacing) = (exact.len(), Spacing::new(dtype));
        for start in (0..places).step_by(AT_ONCE) {
            let range = start..places.min(start + AT_ONCE);
            let (of_exact, of_actual) = (&exact[range.clone()], &actual[range.clone()]);
            if self.none_stands_out(of_exact, of_actual, kappa, &against.range(range.clone())) {
                self.count(of_exact, of_actual, spacing);
            } else {
                for v in range {
                    self.compare(at(v), exact[v], actual[v], kappa, against.at(v), dtype);
                }
            }
        }
    }

    /// Sorts at most [`AT_ONCE`] errors into their buckets: how many are beyond an edge, until none is.
    #[inline]
    fn count(&mut self, exact: &[f64], actual: &[f64], spacing: Spacing) {
        let mut in_ulp = [0.0; AT_ONCE];
        let in_ulp = &mut in_ulp[..exact.len()];
        for (in_ulp, (x, y)) in in_ulp.iter_mut().zip(exact.iter().zip(actual)) {
            *in_ulp = (y - x).abs() / (2.0 * spacing.half_ulp(*x));
        }
        let mut left = in_ulp.len() as u64;
        for (count, edge) in self.histogram.iter_mut().zip(ULP_EDGES) {
            let beyond = in_ulp.iter().map(|&error| u64::from(error > edge)).sum();
            *count += left - beyond;
            left = beyond;
            if left == 0 {
                break;
            }
        }
    }

    /// Whether none of these comparisons is worse than all before, nor one of what is not finite: then only the histogram learns from
    /// them. That holds of almost all, and is asked without a branch.
    #[inline]
    fn none_stands_out(&self, exact: &[f64], actual: &[f64], kappa: f64, against: &AllowanceSlices) -> bool {
        let (unit, worst, kappa_seen) = (against.unit, self.worst_quotient, self.kappa_seen);
        let mut none = self.worst.is_some();
        let allowances = against.rounding.iter().zip(against.scale).zip(against.floor);
        for ((x, y), ((rounding, scale), floor)) in exact.iter().zip(actual).zip(allowances) {
            let limit = rounding + kappa * unit * scale + floor;
            let error = (y - x).abs();
            // With a NaN none of them holds. Where a limit was 0, `worst` may be infinite itself.
            none &= error <= worst * limit;
            none &= error < f64::INFINITY;
            none &= limit < f64::INFINITY;
            none &= error - rounding - floor <= kappa_seen * (unit * scale);
        }
        none
    }

    /// The same where one of them is not finite.
    #[cold]
    fn compare_nonfinite(&mut self, at: Position, expected: f64, actual: f64, limit: f64, dtype: Dtype) {
        if !expected.is_finite() {
            let slot = if actual.is_finite() { &mut self.silent } else { return self.report(at) };
            slot.get_or_insert((at, actual));
        } else if !actual.is_finite() {
            // What is within the limit may be beyond the dtype.
            if dtype.round(expected + actual.signum() * limit) != actual {
                self.nonfinite.get_or_insert((at, actual));
            }
        } else {
            self.not_compared += 1;
        }
    }

    /// Whether it has seen nothing.
    pub fn is_empty(&self) -> bool {
        let Self { worst, nonfinite, silent, reported, not_compared, .. } = self;
        worst.is_none() && nonfinite.is_none() && silent.is_none() && reported.is_none() && *not_compared == 0
    }

    /// Notes a value that is rightly not finite.
    pub fn report(&mut self, at: Position) {
        self.reported.get_or_insert(at);
    }

    /// Whether every comparison was within its limit.
    pub fn passes(&self) -> bool {
        self.nonfinite.is_none() && self.silent.is_none() && self.worst.is_none_or(|worst| worst.error <= worst.limit)
    }

    /// What they come to.
    pub fn status(&self) -> Status {
        match () {
            () if self.nonfinite.is_some() => Status::Nonfinite,
            () if !self.passes() => Status::Fail,
            () if self.worst.is_none() => Status::NotCompared,
            () => Status::Pass,
        }
    }

    /// How badly the worst comparison did: above 1 is a failure.
    pub fn badness(&self) -> f64 {
        if self.nonfinite.is_some() || self.silent.is_some() {
            return f64::INFINITY;
        }
        self.worst.map_or(0.0, |worst| worst.error_over_limit())
    }

    /// Joins a later part of the same output.
    pub fn absorb(&mut self, later: Tally) {
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
