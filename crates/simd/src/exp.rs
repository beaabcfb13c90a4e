//! Exponentials of logits at or below the maximum of a row.

use crate::Simd;

/// Exponentials are made times `2^64`, so that all of them are normal numbers.
pub const SCALE: f64 = (1_u128 << 64) as f64;

/// The number `1.5·2^23`: a sum with it is rounded to an integer, which is then in the sum's low bits.
const MAGIC: f32 = 12_582_912.0;

/// `(2^f − 1)/f` on `|f| ≤ ½`, with which `2^f` is right to 5.3e-9 of itself: a minimax polynomial (Remez) whose
/// coefficients were rounded one by one, each before the next was fitted.
const POWERS: [f32; 6] = [0.693_147_24, 0.240_226_55, 0.055_502_724, 0.009_617_063, 0.001_341_815_2, 0.000_158_215_87];

/// Largest gap `a/T` below the maximum, in nats, whose exponential times [`SCALE`] is a normal number.
pub const FAR: f64 = 131.0;

/// Largest gap `a/T`, in nats, of a column that is near: its exponential is `2^-92` at least, and factors that
/// [keep](crate::ExpFactor::keeps_near) such ones give a normal number.
pub const NEAR: f64 = 92.0 * std::f64::consts::LN_2;

/// The exponential of [`NEAR`], times [`SCALE`].
pub const LEAST_NEAR: f64 = 1.0 / (1_u64 << 28) as f64;

/// Returns the unit, in logits, in which gaps `a = m − x ≥ 0` below the maximum are counted: the largest power of two
/// of which two are within [`FAR`], so that a nearer gap has neither of its two highest bits set.
pub fn step(inverse_temperature: f64) -> f64 {
    (FAR / 2.0 / inverse_temperature).log2().floor().clamp(-126.0, 126.0).exp2()
}

/// The function `a ↦ e^(−a/T)` of gaps in steps, with a relative error of at most `1.56u`, `u = 2⁻²⁴`; the factor `log₂ e / T` is
/// itself off by 2⁻⁴⁸.
///
/// ```
/// use assay_simd::exp::{Exp, SCALE};
/// use assay_simd::{Isa, LANES, Simd, SimdTask};
///
/// /// Exponentials of logits below a maximum of 0, at temperature 1.
/// struct Exponentials([f32; LANES]);
///
/// impl SimdTask for Exponentials {
///     type Output = [f32; LANES];
///
///     #[inline(always)]
///     fn on<S: Simd>(self, simd: S) -> [f32; LANES] {
///         let exp = Exp::new(simd, 1.0);
///         let gaps = exp.gap(simd, simd.splat(0.0), simd.load(&self.0));
///         let [scaled] = exp.scaled(simd, [gaps]);
///         let mut lanes = [0.0; LANES];
///         simd.store(scaled, &mut lanes);
///         lanes
///     }
/// }
///
/// let logits: [f32; LANES] = std::array::from_fn(|i| -0.37 * i as f32);
/// for (x, scaled) in logits.into_iter().zip(Isa::fastest().run(Exponentials(logits))) {
///     // Results are 2⁶⁴ times as large, so that none is below the normal numbers.
///     let (found, exact) = (f64::from(scaled) / SCALE, f64::from(x).exp());
///     assert!((found - exact).abs() <= 1.56 * 2.0_f64.powi(-24) * exact);
/// }
/// ```
#[derive(Clone, Copy)]
pub struct Exp<S: Simd> {
    steps_a_unit: S::Lanes,
    far: S::Lanes,
    magic: S::Lanes,
    /// `−log₂ e · step / T`, rounded, and what rounding took from it.
    rate: [S::Lanes; 2],
    /// Coefficients [`POWERS`] of the polynomial, times [`SCALE`].
    powers: [S::Lanes; 6],
    one: S::Lanes,
}

impl<S: Simd> Exp<S> {
    /// Prepares exponentials of gaps times `1/T`.
    #[inline(always)]
    pub fn new(simd: S, inverse_temperature: f64) -> Self {
        let step = step(inverse_temperature);
        let rate = -std::f64::consts::LOG2_E * inverse_temperature * step;
        let scaled = |x: f32| simd.splat(x * SCALE as f32);
        let [c1, c2, c3, c4, c5, c6] = POWERS;
        Self {
            steps_a_unit: simd.splat((1.0 / step) as f32),
            far: simd.splat((FAR / inverse_temperature / step) as f32),
            magic: simd.splat(MAGIC),
            rate: [simd.splat(rate as f32), simd.splat((rate - f64::from(rate as f32)) as f32)],
            powers: [scaled(c1), scaled(c2), scaled(c3), scaled(c4), scaled(c5), scaled(c6)],
            one: scaled(1.0),
        }
    }

    /// Computes the gap of `x` below `max` in steps, at most one whose exponential is 0. NaN stays.
    #[inline(always)]
    pub fn gap(&self, simd: S, max: S::Lanes, x: S::Lanes) -> S::Lanes {
        self.at_most_far(simd, self.distance(simd, max, x))
    }

    /// Computes the gap of `x` below `max` in steps, as large as it is.
    #[inline(always)]
    pub fn distance(&self, simd: S, max: S::Lanes, x: S::Lanes) -> S::Lanes {
        simd.mul(simd.sub(max, x), self.steps_a_unit)
    }

    /// Holds a gap to one whose exponential is 0. NaN stays.
    #[inline(always)]
    pub fn at_most_far(&self, simd: S, distance: S::Lanes) -> S::Lanes {
        simd.min(self.far, distance)
    }

    /// Computes `2^64·e^(−a/T) = 2^k·(2^64·2^f)` of gaps that are not above [`FAR`], with `k + f = −a·log₂ e / T`; the
    /// result for a NaN is unspecified. All vectors take each step together: a step waits for the one before it, and no
    /// processor looks far enough ahead to find other work meanwhile.
    #[inline(always)]
    pub fn scaled<const N: usize>(&self, simd: S, a: [S::Lanes; N]) -> [S::Lanes; N] {
        let [high, low] = self.rate;
        let [c1, c2, c3, c4, c5, c6] = self.powers;
        let (mut raised, mut k, mut f, mut p) = (a, a, a, [c6; N]);
        // k is the exponent rounded to an integer: adding 1.5·2²³ leaves no bits for a fraction.
        for i in 0..N {
            raised[i] = simd.mul_add(a[i], high, self.magic);
        }
        for i in 0..N {
            k[i] = simd.sub(raised[i], self.magic);
        }
        // f is the rest, in [−½, ½]. The exponent's factor is a sum of two f32, and fused products lose nothing of it.
        for i in 0..N {
            f[i] = simd.mul_add(a[i], low, simd.mul_sub(a[i], high, k[i]));
        }
        // 2^64·2^f by Horner's rule: the scale is a part of the coefficients.
        for c in [c5, c4, c3, c2, c1, self.one] {
            for i in 0..N {
                p[i] = simd.mul_add(p[i], f[i], c);
            }
        }
        // 2^k by the bits of the exponent.
        for i in 0..N {
            p[i] = simd.scale(p[i], k[i], raised[i]);
        }
        p
    }
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;
    use crate::{Isa, LANES, SimdTask};

    /// Largest error of an exponential, in `u` of itself. Roundings add up where `2^f` is smallest, `f = −½`: in `u`
    /// they are ½ of the last sum, ¼ of its factor of `f`, ¼ of `f`, 0.03 of the next coefficients and 0.07 of the
    /// polynomial, over `√½`.
    const WORST: f64 = 1.1 * std::f64::consts::SQRT_2;

    /// Exponentials `e^(d/T)` of each `d ≤ 0`, for a given `1/T`.
    struct ExpTask<'x>(&'x [f32; LANES], f64);

    impl SimdTask for ExpTask<'_> {
        type Output = [f64; LANES];

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> [f64; LANES] {
            let exp = Exp::new(simd, self.1);
            let [e] = exp.scaled(simd, [exp.gap(simd, simd.splat(0.0), simd.load(self.0))]);
            let mut exps = [0.0; LANES];
            simd.store(e, &mut exps);
            exps.map(|e: f32| f64::from(e) / SCALE)
        }
    }

    /// The largest error, in `u` of the exponential, over every `step`th f32 from −0 down to `-104·T`, on every instruction set.
    fn worst_error(step: usize, temperature: f32) -> f64 {
        let rate = 1.0 / f64::from(temperature);
        let all: Vec<u32> = ((-0.0_f32).to_bits()..=(-104.0 * temperature).to_bits()).step_by(step).collect();
        let of_lanes = |bits: &[u32]| {
            let mut d = [0.0; LANES];
            d.iter_mut().zip(bits).for_each(|(d, &bits)| *d = f32::from_bits(bits));
            let error = |isa: Isa| {
                let errors = d.iter().zip(isa.run(ExpTask(&d, rate))).map(|(&d, e)| {
                    let exact = (f64::from(d) * rate).exp();
                    (e - exact).abs() / exact / (f64::from(f32::EPSILON) / 2.0)
                });
                errors.fold(0.0, f64::max)
            };
            Isa::available().into_iter().map(error).fold(0.0, f64::max)
        };
        all.par_chunks(LANES).map(of_lanes).reduce(|| 0.0, f64::max)
    }

    #[test]
    fn exp_f32_is_off_by_its_roundings() {
        for temperature in [1.0, 0.3, 0.7, 1.9, 1e-20, 1e20] {
            let worst = worst_error(if cfg!(miri) { 9_970_007 } else { 997 }, temperature);
            assert!(worst <= WORST, "T = {temperature}: {worst} u");
        }
    }

    #[test]
    #[ignore = "a billion numbers, two minutes: `make test-extensive`"]
    fn exp_every_f32_is_off_by_its_roundings() {
        let worst = worst_error(1, 1.0);
        println!("{worst} u");
        assert!(worst <= WORST, "{worst} u");
    }

    #[test]
    fn exp_f32_is_1_at_0_and_0_far_below() {
        let mut t = [f32::NEG_INFINITY; LANES];
        t[..4].copy_from_slice(&[0.0, -0.0, -105.0, f32::MIN]);
        for isa in Isa::available() {
            let exps = isa.run(ExpTask(&t, 1.0));
            assert_eq!(exps[..2], [1.0, 1.0], "{isa}");
            assert!(exps[2..].iter().all(|&e| e as f32 == 0.0), "{isa}: {exps:?}");
        }
    }
}
