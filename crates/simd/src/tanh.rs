//! Hyperbolic tangent of any f32, as a polynomial near 0 and a quotient elsewhere.

use crate::Simd;
use assay_core::tanh::{DENOMINATOR, FAR, NUMERATOR};

/// `(tanh(y)/y − 1)/y²` on `|y| ≤ 1`, with which `tanh` is right to `0.93u` of itself, `u = 2⁻²⁴`: a minimax polynomial (Remez).
const NEAR: [f64; 6] =
    [-0.333_329_867_7, 0.133_264_088_4, -0.053_498_707_3, 0.020_359_760_9, -0.006_259_342_2, 0.001_058_266_0];

/// Range of factors whose thirteenth power, and every power before it, leaves the coefficients normal numbers of f32.
pub const FACTORS: std::ops::RangeInclusive<f64> = 1.0 / 400.0..=400.0;

/// Bit of a number's pattern that is set if the number is at least 2, or a NaN; the number must not be negative.
const AT_LEAST_2: u32 = 1 << 30;

/// `x ↦ tanh(factor·x)`, right to `8u` of itself, and to `5u` where `|factor·x|` is at most 1 for all that it is taken together
/// with and the factor is one of [`FACTORS`]: the factor is a part of the polynomial's coefficients.
#[derive(Clone, Copy)]
pub struct Tanh<S: Simd> {
    factor: S::Lanes,
    near: [S::Lanes; 6],
    /// Number that makes `x²` at least 2 if the polynomial does not hold for it; NaN if it holds for none.
    to_2: S::Lanes,
    zero: S::Lanes,
    one: S::Lanes,
}

impl<S: Simd> Tanh<S> {
    /// Prepares `x ↦ tanh(factor·x)` for one factor.
    #[inline(always)]
    pub fn new(simd: S, factor: f64) -> Self {
        let square = factor * factor;
        let (mut near, mut power) = ([simd.splat(0.0); 6], factor);
        for (lanes, coefficient) in near.iter_mut().zip(NEAR) {
            power *= square;
            *lanes = simd.splat((coefficient * power) as f32);
        }
        let to_2 = if FACTORS.contains(&factor.abs()) { (2.0 * square) as f32 } else { f32::NAN };
        Self {
            factor: simd.splat(factor.clamp(f32::MIN.into(), f32::MAX.into()) as f32),
            near,
            to_2: simd.splat(to_2),
            zero: simd.splat(0.0),
            one: simd.splat(1.0),
        }
    }

    /// Computes `tanh(factor·x)` of `N` vectors; NaN stays. The vectors take each step together, as in
    /// [`Exp::scaled`](crate::exp::Exp::scaled).
    #[inline(always)]
    pub fn apply<const N: usize>(&self, simd: S, x: [S::Lanes; N]) -> [S::Lanes; N] {
        // One lane beyond the polynomial's range sends all vectors to the quotient: both are right near 0.
        let (mut square, mut p) = (x, [self.near[5]; N]);
        for i in 0..N {
            square[i] = simd.mul(x[i], x[i]);
        }
        let mut seen = square[0];
        for &square in &square[1..] {
            seen = simd.max(square, seen);
        }
        if simd.any_set(simd.mul(seen, self.to_2), AT_LEAST_2) {
            return self.quotient(simd, x);
        }
        // The polynomial in x² by Horner's rule, with the factor in its coefficients, times x.
        for c in [self.near[4], self.near[3], self.near[2], self.near[1], self.near[0], self.factor] {
            for i in 0..N {
                p[i] = simd.mul_add(p[i], square[i], c);
            }
        }
        for i in 0..N {
            p[i] = simd.mul(p[i], x[i]);
        }
        p
    }

    /// Computes `tanh(factor·x)` of any numbers, by the quotient `P(y²)/Q(y²)`.
    #[inline(always)]
    fn quotient<const N: usize>(&self, simd: S, x: [S::Lanes; N]) -> [S::Lanes; N] {
        let (nearest, farthest) = (simd.splat(-FAR), simd.splat(FAR));
        let [p4, q4] = [simd.splat(NUMERATOR[3]), simd.splat(DENOMINATOR[3])];
        // tanh is ±1 in f32 beyond FAR, to which y is held: its square does not overflow.
        let (mut y, mut square, mut p, mut q) = (x, x, [p4; N], [q4; N]);
        for i in 0..N {
            y[i] = simd.max(nearest, simd.min(farthest, simd.mul(x[i], self.factor)));
            square[i] = simd.mul(y[i], y[i]);
        }
        // Both polynomials in y² by Horner's rule; the constant term of each is 1.
        for c in [2, 1, 0] {
            for i in 0..N {
                p[i] = simd.mul_add(p[i], square[i], simd.splat(NUMERATOR[c]));
                q[i] = simd.mul_add(q[i], square[i], simd.splat(DENOMINATOR[c]));
            }
        }
        for i in 0..N {
            p[i] = simd.mul(y[i], simd.mul_add(p[i], square[i], self.one));
            p[i] = simd.div(p[i], simd.mul_add(q[i], square[i], self.one));
        }
        p
    }

    /// Computes the slopes `1 − tanh²` of values of `tanh`, at least 0; they are off by `1.5u` in addition to the error
    /// of the `tanh`. NaN stays.
    #[inline(always)]
    pub fn slopes<const N: usize>(&self, simd: S, mut tanh: [S::Lanes; N]) -> [S::Lanes; N] {
        for x in &mut tanh {
            *x = simd.max(self.zero, simd.sub(self.one, simd.mul(*x, *x)));
        }
        tanh
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rayon::prelude::*;

    use super::*;
    use crate::{Isa, LANES, SimdTask};

    /// Largest error of `tanh`, in `u` of itself: the polynomial has its own 0.93, the rounding of the factor, up to
    /// 1.3 of the smaller sum, 1 of that sum, 1 of the product, and half of 1 of the part that is added to the factor,
    /// at most a quarter of it. The quotient has its own 0.37, the factor and its product, and a rounding of each of
    /// its four parts and of their products.
    const WORST: f64 = 5.0;
    const WORST_OF_QUOTIENT: f64 = 8.0;

    /// Factors of the tests: that of a cap of 30, none, a power of 2, and the ends of [`FACTORS`]; then two beyond
    /// them.
    const SOME: [f64; 7] = [1.0 / 30.0, 1.0, -4.0, 1.0 / 400.0, 400.0, 1e-6, 1e6];

    /// `tanh` of each number times the factor, and `1 − tanh²` of it.
    struct Tanhs<'x>(f64, &'x [f32; LANES]);

    impl SimdTask for Tanhs<'_> {
        type Output = [[f32; LANES]; 2];

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> [[f32; LANES]; 2] {
            let tanh = Tanh::new(simd, self.0);
            let [t] = tanh.apply(simd, [simd.load(self.1)]);
            let [slope] = tanh.slopes(simd, [t]);
            let mut both = [[0.0; LANES]; 2];
            simd.store(t, &mut both[0]);
            simd.store(slope, &mut both[1]);
            both
        }
    }

    /// Measures the largest error of the `tanh` of these numbers times the factor, in `u` of itself, on every
    /// instruction set.
    fn error(factor: f64, x: &[f32; LANES]) -> f64 {
        let of_isa = |isa: Isa| {
            let errors = x.iter().zip(isa.run(Tanhs(factor, x))[0]).map(|(&x, t)| {
                let exact = (factor * f64::from(x)).tanh();
                if exact == f64::from(t) {
                    0.0
                } else {
                    ((f64::from(t) - exact) / exact).abs() / (f64::from(f32::EPSILON) / 2.0)
                }
            });
            errors.fold(0.0, f64::max)
        };
        Isa::available().into_iter().map(of_isa).fold(0.0, f64::max)
    }

    /// Measures the largest error over every `step`th f32 whose product with the factor is from 1e-15, the square of
    /// which is a normal number with any of [`SOME`], to `far`; in the neighbouring lane is a number whose product is
    /// `beside`.
    fn worst_error(factor: f64, step: usize, far: f64, beside: f64) -> f64 {
        let x = |y: f64| (y / factor.abs()) as f32;
        let all: Vec<u32> = (x(1e-15).to_bits()..=x(far).to_bits()).step_by(step).collect();
        let of_lanes = |bits: &[u32]| {
            let mut lanes = [x(beside); LANES];
            lanes.iter_mut().zip(bits).for_each(|(lane, &bits)| *lane = f32::from_bits(bits));
            error(factor, &lanes)
        };
        all.par_chunks(LANES - 1).map(of_lanes).reduce(|| 0.0, f64::max)
    }

    /// The largest errors of the polynomial and of the quotient.
    fn worst_errors(factor: f64, step: usize) -> [f64; 2] {
        let near = if FACTORS.contains(&factor.abs()) { worst_error(factor, step, 0.999_999_9, 0.0) } else { 0.0 };
        [near, worst_error(factor, step, 12.0, 5.0)]
    }

    #[test]
    fn tanh_f32_is_off_by_its_roundings() {
        for factor in SOME {
            let worst = worst_errors(factor, if cfg!(miri) { 9_970_007 } else { 4_997 });
            assert!(worst[0] <= WORST && worst[1] <= WORST_OF_QUOTIENT, "{factor}: {worst:?} u");
        }
    }

    #[test]
    #[ignore = "billions of numbers, minutes: `make test-extensive`"]
    fn tanh_every_f32_is_off_by_its_roundings() {
        for factor in &SOME[..2] {
            let worst = worst_errors(*factor, 1);
            println!("{factor}: {worst:?} u");
            assert!(worst[0] <= WORST && worst[1] <= WORST_OF_QUOTIENT, "{factor}: {worst:?} u");
        }
    }

    proptest! {
        #[test]
        fn tanh_is_odd_within_its_error_and_has_its_slopes(bits in any::<[u32; LANES]>(), i in 0..SOME.len()) {
            let x = bits.map(f32::from_bits).map(|x| if x.is_nan() || x.abs() < 1e-8 { 0.5 } else { x });
            prop_assert!(error(SOME[i], &x) <= WORST_OF_QUOTIENT);
            for isa in Isa::available() {
                let [t, slope] = isa.run(Tanhs(SOME[i], &x));
                prop_assert_eq!(t, isa.run(Tanhs(SOME[i], &x.map(|x| -x)))[0].map(|t| -t), "{}", isa);
                for (t, slope) in t.into_iter().zip(slope) {
                    let exact = (1.0 - f64::from(t).powi(2)).max(0.0);
                    prop_assert!(slope >= 0.0 && (f64::from(slope) - exact).abs() <= 1.5 * f64::from(f32::EPSILON / 2.0));
                }
            }
        }
    }

    /// A NaN does not hide a large number in another lane.
    #[test]
    fn tanh_beside_nan_is_right() {
        struct Together([f32; 3]);
        impl SimdTask for Together {
            type Output = [f32; 3];

            #[inline(always)]
            fn on<S: Simd>(self, simd: S) -> [f32; 3] {
                let t = Tanh::new(simd, 1.0).apply(simd, self.0.map(|x| simd.splat(x)));
                t.map(|t| {
                    let mut lanes = [0.0; LANES];
                    simd.store(t, &mut lanes);
                    lanes[0]
                })
            }
        }
        for isa in Isa::available() {
            for [large, nan, small] in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
                let mut x = [0.0; 3];
                (x[large], x[nan], x[small]) = (3.0, f32::NAN, 0.1);
                let t = isa.run(Together(x));
                assert!((t[large] - 0.995_054_7).abs() < 1e-6, "{isa}: {t:?} of {x:?}");
                assert!(t[nan].is_nan() && (t[small] - 0.099_668).abs() < 1e-6, "{isa}: {t:?} of {x:?}");
            }
        }
    }

    #[test]
    fn tanh_at_its_edges_is_right() {
        let mut y = [0.0; LANES];
        for (edges, expected) in [
            ([0.0, -0.0, 1e-40, -1e-40], [0.0, -0.0, 1e-40, -1e-40]),
            ([f32::INFINITY, -12.0, 1e-40, 0.0], [1.0, -1.0, 1e-40, 0.0]),
        ] {
            y[..4].copy_from_slice(&edges);
            for isa in Isa::available() {
                for (t, expected) in isa.run(Tanhs(1.0, &y))[0].into_iter().zip(expected) {
                    assert!((t - expected).abs() <= f32::EPSILON, "{isa}: {t} for {expected}");
                }
            }
        }
        y[1] = f32::NAN;
        for isa in Isa::available() {
            let [t, slope] = isa.run(Tanhs(1.0, &y));
            assert!(t[1].is_nan() && slope[1].is_nan(), "{isa}");
        }
    }
}
