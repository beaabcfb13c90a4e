//! How far one number is from another, and a tally of many such comparisons.

use assay_core::problem::Dtype;
use assay_schema::verdicts::Status;

/// Half the spacing of `dtype` at `x`: the error of rounding `x` to nearest. Below the smallest normal number the
/// spacing stays that of the subnormals.
#[inline]
pub fn half_ulp(x: f64, dtype: Dtype) -> f64 {
    let (precision, min_exponent) = match dtype {
        Dtype::F64 => (53, -1022),
        Dtype::F32 => (24, -126),
        Dtype::Bf16 => (8, -126),
        Dtype::F16 => (11, -14),
    };
    // For a subnormal f64 the biased exponent is 0, below every `min_exponent`.
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    power_of_two(exponent.max(min_exponent) - precision)
}

/// `2^exponent`, through the subnormals of f64, by its bits.
#[inline]
fn power_of_two(exponent: i32) -> f64 {
    let bits = match exponent {
        -1022.. => u64::from((exponent + 1023).unsigned_abs()) << 52,
        -1074.. => 1 << (exponent + 1074),
        _ => 0,
    };
    f64::from_bits(bits)
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
            [self.b, self.t, self.h, self.v].into_iter().flatten().map(|i| i.to_string()).collect();
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
    pub fn share(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.limit }
    }
}

/// Upper edges of the histogram's buckets, in ulp of the output's dtype; the last bucket is open.
pub const ULP_EDGES: [f64; 8] = [0.5, 1.0, 2.0, 4.0, 16.0, 256.0, 65536.0, f64::INFINITY];

/// The bucket of an error, where an ulp is `ulp`: how many edges it is beyond. All are asked, as no branch foretells the answer.
#[inline]
fn bucket(error: f64, ulp: f64) -> usize {
    ULP_EDGES.iter().map(|&edge| usize::from(error > edge * ulp)).sum()
}

/// The worst of many comparisons.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// The comparison with the largest share of its limit.
    pub worst: Option<Comparison>,
    /// That share.
    worst_share: f64,
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
        if error > self.worst_share * limit || self.worst.is_none() {
            let comparison = Comparison { at, expected, actual, error, limit };
            (self.worst, self.worst_share) = (Some(comparison), comparison.share());
        }
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
        self.worst.map_or(0.0, |worst| worst.share())
    }

    /// Joins a later part of the same output.
    pub fn absorb(&mut self, later: Tally) {
        if later.worst_share > self.worst_share || self.worst.is_none() {
            (self.worst, self.worst_share) = (later.worst, later.worst_share);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_without_a_finite_limit_is_not_compared_and_nan_is_found() {
        let mut tally = Tally::default();
        for scale in [f64::INFINITY, f64::NAN] {
            let allowance = Allowance { scale, unit: 1.0, ..Allowance::default() };
            tally.compare(Position::default(), 1.0, 1e30, 1.0, allowance, Dtype::F32);
        }
        assert_eq!((tally.status(), tally.not_compared), (Status::NotCompared, 2));
        let allowance = Allowance { scale: f64::NAN, unit: 1.0, ..Allowance::default() };
        tally.compare(Position::default(), 1.0, f64::NAN, 1.0, allowance, Dtype::F32);
        assert_eq!(tally.status(), Status::Nonfinite);
    }
}
