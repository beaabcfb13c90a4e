//! Per-token arithmetic in f32.

use std::f32::consts::LOG2_E;

use crate::build::PtxBuilder;
use crate::value::PtxValue;
use assay_algebra::arithmetic::Arithmetic;

/// `ln 2`, and what rounding it leaves.
const LN_2: [f32; 2] = [std::f32::consts::LN_2, (std::f64::consts::LN_2 - std::f32::consts::LN_2 as f64) as f32];

/// Added to a small number it leaves the nearest whole number in the last bits.
const WHOLE: f32 = 12_582_912.0;

/// Bits of an f32 after which its exponent begins.
const FRACTION: u32 = 23;

impl Arithmetic for PtxBuilder {
    type Value = PtxValue<f32>;
    type Truth = PtxValue<bool>;

    fn constant(&mut self, x: f64) -> PtxValue<f32> {
        (x as f32).into()
    }
    fn add(&mut self, a: PtxValue<f32>, b: PtxValue<f32>) -> PtxValue<f32> {
        PtxBuilder::add(self, a, b)
    }
    fn sub(&mut self, a: PtxValue<f32>, b: PtxValue<f32>) -> PtxValue<f32> {
        PtxBuilder::sub(self, a, b)
    }
    fn mul(&mut self, a: PtxValue<f32>, b: PtxValue<f32>) -> PtxValue<f32> {
        PtxBuilder::mul(self, a, b)
    }
    fn div(&mut self, a: PtxValue<f32>, b: PtxValue<f32>) -> PtxValue<f32> {
        PtxBuilder::div(self, a, b)
    }
    fn neg(&mut self, a: PtxValue<f32>) -> PtxValue<f32> {
        PtxBuilder::neg(self, a)
    }
    /// Within 3 ulp: with `n` the whole number nearest to `a·log₂e`, `2^((a − n·ln 2)·log₂e) · 2^n`, the last in two factors,
    /// as it may be beyond f32 where the product is not.
    fn exp(&mut self, a: PtxValue<f32>) -> PtxValue<f32> {
        // 0 and ∞ begin before.
        let a = self.max(a, -104.0);
        let a = self.min(a, 104.0);
        let exponent = self.mul_add(a, LOG2_E, WHOLE);
        let whole = PtxBuilder::sub(self, exponent, WHOLE);
        let minus = PtxBuilder::neg(self, whole);
        let rest = self.mul_add(minus, LN_2[0], a);
        let rest = self.mul_add(minus, LN_2[1], rest);
        let rest = PtxBuilder::mul(self, rest, LOG2_E);
        let value = self.exp2(rest);
        let shifted_half = self.mul_add(whole, 0.5, WHOLE);
        let half = PtxBuilder::sub(self, shifted_half, WHOLE);
        let other = PtxBuilder::sub(self, whole, half);
        let shifted_other = PtxBuilder::add(self, other, WHOLE);
        [shifted_half, shifted_other].into_iter().fold(value, |value, shifted| {
            let bits = self.bits(shifted);
            let exponent = self.shift_left(bits, FRACTION);
            let power = PtxBuilder::add(self, exponent, 1_f32.to_bits());
            let power = self.float_from_bits(power);
            PtxBuilder::mul(self, value, power)
        })
    }
    /// Within 3 ulp, near 1 too, where `lg2.approx` is not: `a = 2^k·m` with m in [2/3, 4/3), and with `s = (m − 1)/(m + 1)`
    /// `k·ln 2 + 2s·(1 + s²/3 + s⁴/5 + s⁶/7 + s⁸/9)`, of which the next term is below 2⁻²⁶.
    fn ln(&mut self, a: PtxValue<f32>) -> PtxValue<f32> {
        let tiny = PtxBuilder::less(self, a, f32::MIN_POSITIVE);
        let lifted = PtxBuilder::mul(self, a, (1_u32 << FRACTION) as f32);
        let lifted = PtxBuilder::select(self, tiny, lifted, a);
        let drop: PtxValue<f32> = PtxBuilder::select(self, tiny, -(FRACTION as f32), 0.0);
        let bits = self.bits(lifted);
        let above = PtxBuilder::sub(self, bits, (2.0_f32 / 3.0).to_bits());
        let exponent = self.bits_and(above, !((1 << FRACTION) - 1));
        let mantissa = PtxBuilder::sub(self, bits, exponent);
        let mantissa = self.float_from_bits(mantissa);
        let exponent = self.float_from_signed(exponent);
        let exponent = self.mul_add(exponent, ((1_u32 << FRACTION) as f32).recip(), drop);

        let (numerator, denominator) = (PtxBuilder::sub(self, mantissa, 1.0), PtxBuilder::add(self, mantissa, 1.0));
        let s = PtxBuilder::div(self, numerator, denominator);
        let square = PtxBuilder::mul(self, s, s);
        let series = self.variable(1.0 / 9.0);
        let series = [7.0, 5.0, 3.0].into_iter().fold(series, |sum, odd: f32| self.mul_add(sum, square, odd.recip()));
        let twice = PtxBuilder::add(self, s, s);
        let beyond = PtxBuilder::mul(self, series, square);
        let of_mantissa = self.mul_add(twice, beyond, twice);
        let low = self.mul_add(exponent, LN_2[1], of_mantissa);
        let value = self.mul_add(exponent, LN_2[0], low);

        // ∞ and NaN are their own.
        let finite = PtxBuilder::less(self, a, f32::INFINITY);
        let value = PtxBuilder::select(self, finite, value, a);
        let nothing = PtxBuilder::equal(self, a, 0.0);
        let value = PtxBuilder::select(self, nothing, f32::NEG_INFINITY, value);
        let negative = PtxBuilder::less(self, a, 0.0);
        PtxBuilder::select(self, negative, f32::NAN, value)
    }
    fn less(&mut self, a: PtxValue<f32>, b: PtxValue<f32>) -> PtxValue<bool> {
        PtxBuilder::less(self, a, b)
    }
    fn equal(&mut self, a: PtxValue<f32>, b: PtxValue<f32>) -> PtxValue<bool> {
        PtxBuilder::equal(self, a, b)
    }
    fn and(&mut self, a: PtxValue<bool>, b: PtxValue<bool>) -> PtxValue<bool> {
        PtxBuilder::and(self, a, b)
    }
    fn or(&mut self, a: PtxValue<bool>, b: PtxValue<bool>) -> PtxValue<bool> {
        PtxBuilder::or(self, a, b)
    }
    fn select(&mut self, condition: PtxValue<bool>, yes: PtxValue<f32>, no: PtxValue<f32>) -> PtxValue<f32> {
        PtxBuilder::select(self, condition, yes, no)
    }
}
