//! `exp` of what lies at or below the maximum of a row.

use super::simd::Simd;

/// Exponentials are made times `2^26`, so that all of them are normal numbers.
pub(super) const SCALE: f64 = (1_u64 << 26) as f64;

/// `1.5·2^23`, so that a sum is rounded to an integer, and the 26 that exponents are raised by.
const MAGIC: f32 = 12_582_912.0 + 26.0;

/// `ln 2`: fifteen bits, so that a product with `k` is exact, and the rest.
const LN_2: [f32; 2] = [0.693_145_75, 1.428_606_8e-6];

/// `(e^r − 1 − r)/r²` on `|r| ≤ ln 2 / 2`, with which `e^r` is right to 3.2e-9 of itself: a minimax polynomial (Remez) whose
/// coefficients were rounded one by one, each before the next was fitted.
const POWERS: [f32; 5] = [0.499_999_94, 0.166_665_17, 0.041_668_102, 0.008_369_192_5, 0.001_383_890_3];

/// Where `e^t` is below half of the smallest `f32`.
pub(super) const FLOOR: f32 = -104.7;

/// `t ↦ e^t` for `t ≤ 0`, within 0.9 ulp.
#[derive(Clone, Copy)]
pub(super) struct Exp<S: Simd> {
    floor: S::Lanes,
    log2_e: S::Lanes,
    magic: S::Lanes,
    minus_ln_2: [S::Lanes; 2],
    powers: [S::Lanes; 5],
    one: S::Lanes,
}

impl<S: Simd> Exp<S> {
    #[inline(always)]
    pub(super) fn new(simd: S) -> Self {
        let [high, low] = LN_2;
        let [c2, c3, c4, c5, c6] = POWERS;
        Self {
            floor: simd.splat(FLOOR),
            log2_e: simd.splat(std::f32::consts::LOG2_E),
            magic: simd.splat(MAGIC),
            minus_ln_2: [simd.splat(-high), simd.splat(-low)],
            powers: [simd.splat(c2), simd.splat(c3), simd.splat(c4), simd.splat(c5), simd.splat(c6)],
            one: simd.splat(1.0),
        }
    }

    /// `t`, or where it is less, the number whose `exp` is 0. NaN stays.
    #[inline(always)]
    pub(super) fn floored(&self, simd: S, t: S::Lanes) -> S::Lanes {
        simd.max(self.floor, t)
    }

    /// `2^26·e^t = 2^(26+k)·e^r` of a floored `t = k·ln 2 + r`. Nothing is said of a NaN.
    #[inline(always)]
    pub(super) fn scaled(&self, simd: S, t: S::Lanes) -> S::Lanes {
        let [minus_high, minus_low] = self.minus_ln_2;
        let [c2, c3, c4, c5, c6] = self.powers;
        let raised = simd.mul_add(t, self.log2_e, self.magic);
        let k = simd.sub(raised, self.magic);
        let r = simd.mul_add(k, minus_low, simd.mul_add(k, minus_high, t));
        let p = simd.mul_add(simd.mul_add(c6, r, c5), r, c4);
        let p = simd.mul_add(simd.mul_add(p, r, c3), r, c2);
        let p = simd.mul_add(simd.mul_add(p, r, self.one), r, self.one);
        simd.scale(p, raised)
    }
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;
    use crate::native::simd::{Isa, UNIT, Work};

    struct Exps<'x>(&'x [f32; UNIT]);

    impl Work for Exps<'_> {
        type Output = [f32; UNIT];

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> [f32; UNIT] {
            let (exp, unscale) = (Exp::new(simd), simd.splat((1.0 / SCALE) as f32));
            let [low, high] = simd.load_f32(self.0);
            let low = exp.scaled(simd, exp.floored(simd, low));
            let high = exp.scaled(simd, exp.floored(simd, high));
            let mut exps = [0.0; UNIT];
            simd.store_f32([simd.mul(low, unscale), simd.mul(high, unscale)], &mut exps);
            exps
        }
    }

    /// The largest error in ulp over every `step`th f32 from −0 down to `lowest`, on every instruction set.
    fn worst_error(step: usize, lowest: f32) -> f64 {
        let all: Vec<u32> = ((-0.0_f32).to_bits()..=lowest.to_bits()).step_by(step).collect();
        let of_unit = |bits: &[u32]| {
            let mut t = [0.0; UNIT];
            t.iter_mut().zip(bits).for_each(|(t, &bits)| *t = f32::from_bits(bits));
            let error = |isa: Isa| {
                let errors = t.iter().zip(isa.run(Exps(&t))).map(|(&t, e)| {
                    let exact = f64::from(t).exp();
                    let ulp = f64::from(f32::EPSILON) * 2.0_f64.powi((exact.log2().floor() as i32).max(-126));
                    (f64::from(e) - exact).abs() / ulp
                });
                errors.fold(0.0, f64::max)
            };
            Isa::available().into_iter().map(error).fold(0.0, f64::max)
        };
        all.par_chunks(UNIT).map(of_unit).reduce(|| 0.0, f64::max)
    }

    #[test]
    fn exp_f32_from_104_below_0_is_within_an_ulp() {
        let worst = worst_error(997, -104.0);
        assert!(worst <= 0.9, "{worst} ulp");
    }

    #[test]
    #[ignore = "a billion numbers, two minutes: `make test-extensive`"]
    fn exp_every_f32_from_104_below_0_is_within_an_ulp() {
        let worst = worst_error(1, -104.0);
        println!("{worst} ulp");
        assert!(worst <= 0.9, "{worst} ulp");
    }

    #[test]
    fn exp_f32_is_1_at_0_and_0_far_below() {
        let mut t = [f32::NEG_INFINITY; UNIT];
        t[..4].copy_from_slice(&[0.0, -0.0, -105.0, f32::MIN]);
        for isa in Isa::available() {
            let exps = isa.run(Exps(&t));
            assert_eq!(exps[..2], [1.0, 1.0], "{isa}");
            assert!(exps[2..].iter().all(|&e| e == 0.0), "{isa}: {exps:?}");
        }
    }
}
