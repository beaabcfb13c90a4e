//! `tanh` of any number.

use super::simd::Simd;

/// `(tanh(y)/y − 1)/y²` on `|y| ≤ 1`, with which `tanh` is right to `0.93u` of itself, `u = 2⁻²⁴`: a minimax polynomial (Remez).
const NEAR: [f32; 6] = [-0.333_329_86, 0.133_264_1, -0.053_498_708, 0.020_359_758, -0.006_259_338, 0.001_058_264_3];

/// `tanh(y)/y = P(y²)/Q(y²)` as far as 9.01 on either side, where `tanh` is 1 in f32, right to `0.37u` of itself: a minimax
/// quotient (Lawson). Both begin with 1; the coefficients from the first power on.
const NUMERATOR: [f32; 4] = [0.133_833_35, 0.003_498_230_6, 0.000_020_648_526, 1.340_202_7e-8];
const DENOMINATOR: [f32; 4] = [0.467_166_4, 0.025_887_314, 0.000_328_977_5, 7.797_520_4e-7];
const FAR: f32 = 9.01;

/// The bit of a number from 0 on that is set where it is at least 2.
const AT_LEAST_2: u32 = 1 << 30;

/// `y ↦ tanh(y)`, right to `6.5u` of itself, and to `3u` where none that it is taken together with is beyond 1 on either side.
#[derive(Clone, Copy)]
pub(super) struct Tanh<S: Simd> {
    near: [S::Lanes; 6],
    zero: S::Lanes,
    one: S::Lanes,
}

impl<S: Simd> Tanh<S> {
    #[inline(always)]
    pub(super) fn new(simd: S) -> Self {
        let mut near = [simd.splat(0.0); 6];
        for (lanes, coefficient) in near.iter_mut().zip(NEAR) {
            *lanes = simd.splat(coefficient);
        }
        Self { near, zero: simd.splat(0.0), one: simd.splat(1.0) }
    }

    /// NaN stays. The vectors go step by step together, as those of [`Exp::scaled`](super::exp::Exp::scaled).
    #[inline(always)]
    pub(super) fn of<const N: usize>(&self, simd: S, y: [S::Lanes; N]) -> [S::Lanes; N] {
        let (mut square, mut p, mut seen) = (y, [self.near[5]; N], self.zero);
        for i in 0..N {
            square[i] = simd.mul(y[i], y[i]);
            seen = simd.max(seen, square[i]);
        }
        if simd.any_set(simd.add(seen, self.one), AT_LEAST_2) {
            return self.quotient(simd, y);
        }
        for c in [4, 3, 2, 1, 0] {
            for i in 0..N {
                p[i] = simd.mul_add(p[i], square[i], self.near[c]);
            }
        }
        for i in 0..N {
            p[i] = simd.mul_add(simd.mul(p[i], square[i]), y[i], y[i]);
        }
        p
    }

    /// The same of any numbers.
    #[inline(always)]
    fn quotient<const N: usize>(&self, simd: S, mut y: [S::Lanes; N]) -> [S::Lanes; N] {
        let (nearest, farthest) = (simd.splat(-FAR), simd.splat(FAR));
        let [p4, q4] = [simd.splat(NUMERATOR[3]), simd.splat(DENOMINATOR[3])];
        let (mut square, mut p, mut q) = (y, [p4; N], [q4; N]);
        for i in 0..N {
            y[i] = simd.max(nearest, simd.min(farthest, y[i]));
            square[i] = simd.mul(y[i], y[i]);
        }
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

    /// `1 − tanh²` of a `tanh`, at least 0; off by `1.5u` beside what that is off by. NaN stays.
    #[inline(always)]
    pub(super) fn slopes<const N: usize>(&self, simd: S, mut tanh: [S::Lanes; N]) -> [S::Lanes; N] {
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
    use crate::simd::{Isa, LANES, Work};

    /// What `tanh` may be off by, in `u` of itself: the polynomial's 0.93 and its last sum's 1, of a product that is a third of it
    /// at most and was rounded thrice; the quotient's 0.37, and a rounding of each of its four parts and of their products.
    const WORST: f64 = 3.0;
    const WORST_OF_QUOTIENT: f64 = 6.5;

    /// `tanh` of each, and `1 − tanh²`.
    struct Tanhs<'x>(&'x [f32; LANES]);

    impl Work for Tanhs<'_> {
        type Output = [[f32; LANES]; 2];

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> [[f32; LANES]; 2] {
            let tanh = Tanh::new(simd);
            let [t] = tanh.of(simd, [simd.load(self.0)]);
            let [slope] = tanh.slopes(simd, [t]);
            let mut both = [[0.0; LANES]; 2];
            simd.store(t, &mut both[0]);
            simd.store(slope, &mut both[1]);
            both
        }
    }

    /// The largest error of the `tanh` of these, in `u` of itself, on every instruction set.
    fn error(y: &[f32; LANES]) -> f64 {
        let of_isa = |isa: Isa| {
            let errors = y.iter().zip(isa.run(Tanhs(y))[0]).map(|(&y, t)| {
                let exact = f64::from(y).tanh();
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

    /// The same over every `step`th f32 of those from 1e-18, whose squares are normal numbers, to `far`; beside one that is
    /// `beside`.
    fn worst_error(step: usize, far: f32, beside: f32) -> f64 {
        let all: Vec<u32> = (1e-18_f32.to_bits()..=far.to_bits()).step_by(step).collect();
        let of_lanes = |bits: &[u32]| {
            let mut y = [beside; LANES];
            y.iter_mut().zip(bits).for_each(|(y, &bits)| *y = f32::from_bits(bits));
            error(&y)
        };
        all.par_chunks(LANES - 1).map(of_lanes).reduce(|| 0.0, f64::max)
    }

    #[test]
    fn tanh_f32_is_off_by_its_roundings() {
        let step = if cfg!(miri) { 9_970_007 } else { 997 };
        let worst = worst_error(step, 0.999_999_9, 0.0);
        assert!(worst <= WORST, "{worst} u");
        let worst = worst_error(step, 12.0, 5.0);
        assert!(worst <= WORST_OF_QUOTIENT, "{worst} u");
    }

    #[test]
    #[ignore = "a billion numbers, a minute: `make test-extensive`"]
    fn tanh_every_f32_is_off_by_its_roundings() {
        let (worst, of_quotient) = (worst_error(1, 0.999_999_9, 0.0), worst_error(1, 12.0, 5.0));
        println!("{worst} u, as a quotient {of_quotient} u");
        assert!(worst <= WORST, "{worst} u");
        assert!(of_quotient <= WORST_OF_QUOTIENT, "{of_quotient} u");
    }

    proptest! {
        #[test]
        fn tanh_any_f32_is_odd_and_within_its_error_and_slopes_are_of_it(bits in any::<[u32; LANES]>()) {
            let y = bits.map(f32::from_bits).map(|y| if y.is_nan() || y.abs() < 1e-18 { 0.5 } else { y });
            prop_assert!(error(&y) <= WORST_OF_QUOTIENT);
            for isa in Isa::available() {
                let [t, slope] = isa.run(Tanhs(&y));
                prop_assert_eq!(t, isa.run(Tanhs(&y.map(|y| -y)))[0].map(|t| -t), "{}", isa);
                for (t, slope) in t.into_iter().zip(slope) {
                    let exact = (1.0 - f64::from(t).powi(2)).max(0.0);
                    prop_assert!(slope >= 0.0 && (f64::from(slope) - exact).abs() <= 1.5 * f64::from(f32::EPSILON / 2.0));
                }
            }
        }
    }

    #[test]
    fn tanh_at_its_edges() {
        let mut y = [0.0; LANES];
        for (edges, expected) in [
            ([0.0, -0.0, 1e-40, -1e-40], [0.0, -0.0, 1e-40, -1e-40]),
            ([f32::INFINITY, -12.0, 1e-40, 0.0], [1.0, -1.0, 1e-40, 0.0]),
        ] {
            y[..4].copy_from_slice(&edges);
            for isa in Isa::available() {
                for (t, expected) in isa.run(Tanhs(&y))[0].into_iter().zip(expected) {
                    assert!((t - expected).abs() <= f32::EPSILON, "{isa}: {t} for {expected}");
                }
            }
        }
        y[1] = f32::NAN;
        for isa in Isa::available() {
            let [t, slope] = isa.run(Tanhs(&y));
            assert!(t[1].is_nan() && slope[1].is_nan(), "{isa}");
        }
    }
}
