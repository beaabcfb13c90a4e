//! Natural logarithms, and `e^d − 1 − d` near 0.

use crate::Simd;

/// `(ln(1 + f) − f + f²/2)/f³` from `√½ − 1` to `√2 − 1`, with which `ln(1 + f)` is right to `0.013u` of itself, `u = 2⁻²⁴`: a minimax
/// polynomial whose coefficients were rounded one by one, each before the next was fitted.
const CUBIC: [f32; 9] = [
    0.333_333_13,
    -0.250_000_1,
    0.200_020_72,
    -0.166_679_86,
    0.142_203_54,
    -0.124_063_24,
    0.118_837_14,
    -0.116_694_53,
    0.067_479_126,
];

/// `(e^d − 1 − d)/d²` on `|d| ≤ ½`, right to `0.013u` of itself: made as [`CUBIC`] was.
const EXCESS: [f32; 7] =
    [0.5, 0.166_666_67, 0.041_666_668, 0.008_333_182, 0.001_388_873_6, 0.000_199_617_47, 0.000_024_908_31];

/// `ln 2` in nine bits, whose product with an exponent is exact, and the rest.
const LN_2: [f32; 2] = [0.693_359_4, -0.000_212_194_44];

/// The function `x ↦ ln x` of positive normal numbers, with an error of at most `3u` of itself.
///
/// ```
/// use assay_simd::log::Logarithm;
/// use assay_simd::{Isa, LANES, Simd, SimdTask};
///
/// /// Logarithms of positive numbers.
/// struct Logs([f32; LANES]);
///
/// impl SimdTask for Logs {
///     type Output = [f32; LANES];
///
///     #[inline(always)]
///     fn on<S: Simd>(self, simd: S) -> [f32; LANES] {
///         let [logs] = Logarithm::new(simd).log(simd, [simd.load(&self.0)]);
///         let mut lanes = [0.0; LANES];
///         simd.store(logs, &mut lanes);
///         lanes
///     }
/// }
///
/// let x: [f32; LANES] = std::array::from_fn(|i| 0.37 * (i + 1) as f32);
/// for (x, found) in x.into_iter().zip(Isa::fastest().run(Logs(x))) {
///     let exact = f64::from(x).ln();
///     assert!((f64::from(found) - exact).abs() <= 3.0 * 2.0_f64.powi(-24) * exact.abs());
/// }
/// ```
#[derive(Clone, Copy)]
pub struct Logarithm<S: Simd> {
    cubic: [S::Lanes; 9],
    half: S::Lanes,
    one: S::Lanes,
    ln_2: [S::Lanes; 2],
}

impl<S: Simd> Logarithm<S> {
    /// Loads the coefficients into vectors.
    #[inline(always)]
    pub fn new(simd: S) -> Self {
        let mut cubic = [simd.splat(0.0); 9];
        for (lanes, coefficient) in cubic.iter_mut().zip(CUBIC) {
            *lanes = simd.splat(coefficient);
        }
        let [high, low] = LN_2;
        Self { cubic, half: simd.splat(0.5), one: simd.splat(1.0), ln_2: [simd.splat(high), simd.splat(low)] }
    }

    /// Computes `ln(1 + f)` of numbers from `√½ − 1` to `√2 − 1`, with an error of at most `2u` of itself. The vectors take each step
    /// together, as in [`Exp::scaled`](crate::exp::Exp::scaled).
    #[inline(always)]
    fn near_1<const N: usize>(&self, simd: S, f: [S::Lanes; N]) -> [S::Lanes; N] {
        // f − f²/2 + f³·P(f), as f + f²·(f·P(f) − ½).
        let mut p = [self.cubic[8]; N];
        for k in (0..8).rev() {
            for i in 0..N {
                p[i] = simd.mul_add(p[i], f[i], self.cubic[k]);
            }
        }
        for i in 0..N {
            p[i] = simd.mul_sub(p[i], f[i], self.half);
        }
        for i in 0..N {
            p[i] = simd.mul_add(simd.mul(f[i], f[i]), p[i], f[i]);
        }
        p
    }

    /// Computes the logarithms of positive normal numbers; those of others are unspecified.
    #[inline(always)]
    pub fn log<const N: usize>(&self, simd: S, x: [S::Lanes; N]) -> [S::Lanes; N] {
        let [high, low] = self.ln_2;
        let (mut f, mut n) = (x, x);
        for i in 0..N {
            let [mantissa, exponent] = simd.split(x[i]);
            // The difference is exact.
            (f[i], n[i]) = (simd.sub(mantissa, self.one), exponent);
        }
        let mut log = self.near_1(simd, f);
        for i in 0..N {
            log[i] = simd.mul_add(n[i], high, simd.mul_add(n[i], low, log[i]));
        }
        log
    }

    /// Computes `ln x` of positive normal numbers up to `2^60` that are `1 + f` rounded, with an error of at most `4u` of itself: where
    /// `x` is near 1, what rounding took from `f` is given back.
    #[inline(always)]
    pub fn log_of_sum<const N: usize>(&self, simd: S, x: [S::Lanes; N], f: [S::Lanes; N]) -> [S::Lanes; N] {
        let mut log = self.log(simd, x);
        for i in 0..N {
            // x − 1 is exact from ½ to 2; below, ln x is not near 0, and above, the rest is less than a rounding.
            let rest = simd.sub(f[i], simd.sub(x[i], self.one));
            let near = simd.at_least(x[i], self.half);
            log[i] = simd.add(log[i], simd.div(simd.mul(near, rest), simd.mul(x[i], x[i])));
        }
        log
    }
}

/// The function `d ↦ e^d − 1 − d ≥ 0` of numbers from −½ to ½, with an error of at most `3u` of itself.
#[derive(Clone, Copy)]
pub struct Excess<S: Simd>([S::Lanes; 7]);

impl<S: Simd> Excess<S> {
    /// Loads the coefficients into vectors.
    #[inline(always)]
    pub fn new(simd: S) -> Self {
        let mut coefficients = [simd.splat(0.0); 7];
        for (lanes, coefficient) in coefficients.iter_mut().zip(EXCESS) {
            *lanes = simd.splat(coefficient);
        }
        Self(coefficients)
    }

    /// Computes `e^d − 1 − d`; the result for numbers beyond ±½ is unspecified.
    #[inline(always)]
    pub fn apply<const N: usize>(&self, simd: S, d: [S::Lanes; N]) -> [S::Lanes; N] {
        let mut p = [self.0[6]; N];
        for k in (0..6).rev() {
            for i in 0..N {
                p[i] = simd.mul_add(p[i], d[i], self.0[k]);
            }
        }
        for i in 0..N {
            p[i] = simd.mul(simd.mul(d[i], d[i]), p[i]);
        }
        p
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, LANES, SimdTask};

    const U: f64 = f32::EPSILON as f64 / 2.0;

    /// `ln x`, and of `d` both `ln(1 + d)` and `e^d − 1 − d`.
    struct LogTask<'x>(&'x [f32; LANES], &'x [f32; LANES]);

    impl SimdTask for LogTask<'_> {
        type Output = [[f32; LANES]; 3];

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> [[f32; LANES]; 3] {
            let (x, d) = (simd.load(self.0), simd.load(self.1));
            let log = Logarithm::new(simd);
            let [of_x] = log.log(simd, [x]);
            let [near] = log.log_of_sum(simd, [simd.add(simd.splat(1.0), d)], [d]);
            let [excess] = Excess::new(simd).apply(simd, [d]);
            let mut all = [[0.0; LANES]; 3];
            for (lanes, to) in [of_x, near, excess].into_iter().zip(&mut all) {
                simd.store(lanes, to);
            }
            all
        }
    }

    /// `e^d − 1 − d`, whose series ends below 1e-18 of it.
    fn excess(d: f64) -> f64 {
        d * d / 2.0 * (3..=18).rev().fold(1.0, |sum, n| 1.0 + d / f64::from(n) * sum)
    }

    #[test]
    fn log_and_excess_are_off_by_their_roundings() {
        let step = if cfg!(miri) { 99_700_007 } else { 9_973 };
        let (first, last) = (f32::MIN_POSITIVE.to_bits(), f32::MAX.to_bits());
        let mut worst = [0.0_f64; 3];
        for (i, bits) in (first..last).step_by(step).enumerate() {
            let x: [f32; LANES] = std::array::from_fn(|j| f32::from_bits((bits + j as u32 * 599).min(last)));
            // From −½ to ½, every other one near 0.
            let d = |j: usize| ((i * LANES + j) as f32 * 0.618_034).fract() - 0.5;
            let d: [f32; LANES] = std::array::from_fn(|j| if j % 2 == 0 { d(j) } else { d(j).powi(3) });
            for isa in Isa::available() {
                let found = isa.run(LogTask(&x, &d));
                for j in 0..LANES {
                    let (x, d) = (f64::from(x[j]), f64::from(d[j]));
                    let exact = [x.ln(), d.ln_1p(), excess(d)];
                    for ((found, exact), worst) in found.iter().zip(exact).zip(&mut worst) {
                        let error = (f64::from(found[j]) - exact).abs();
                        *worst = worst.max(if error == 0.0 { 0.0 } else { error / exact.abs() / U });
                    }
                }
            }
        }
        assert!(worst.into_iter().zip([3.0, 4.0, 3.0]).all(|(worst, most)| worst <= most), "{worst:?} u");
    }

    #[test]
    fn log_of_1_and_excess_of_0_are_0() {
        for isa in Isa::available() {
            let [log, near, excess] = isa.run(LogTask(&[1.0; LANES], &[0.0; LANES]));
            assert_eq!([log, near, excess], [[0.0; LANES]; 3], "{isa}");
        }
    }
}
