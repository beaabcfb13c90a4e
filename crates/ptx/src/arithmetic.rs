//! The [`Arithmetic`] of a token's loss, on f32 registers, within 3 ulp for exponentials and logarithms.

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
    /// Computes `e^a` within 3 ulp: with `n` the whole number nearest to `a·log₂e` it is `2^((a − n·ln 2)·log₂e) ·
    /// 2^n`. The power `2^n` is two factors, since it may exceed f32 where the product does not.
    fn exp(&mut self, a: PtxValue<f32>) -> PtxValue<f32> {
        // Beyond ±104 the result is 0 or ∞ in any case, and the bit tricks below stay within range.
        let a = self.max(a, -104.0);
        let a = self.min(a, 104.0);
        // Adding 1.5·2²³ rounds to the nearest whole number, which is then in the low bits.
        let exponent = self.mul_add(a, LOG2_E, WHOLE);
        let whole = PtxBuilder::sub(self, exponent, WHOLE);
        let minus = PtxBuilder::neg(self, whole);
        // The remainder keeps its digits, because n·ln 2 is subtracted as a sum of two f32.
        let rest = self.mul_add(minus, LN_2[0], a);
        let rest = self.mul_add(minus, LN_2[1], rest);
        let rest = PtxBuilder::mul(self, rest, LOG2_E);
        let value = self.exp2(rest);
        // 2^n is the product of 2^⌊n/2⌉ and 2^(n − ⌊n/2⌉), each of which is a normal f32.
        let shifted_half = self.mul_add(whole, 0.5, WHOLE);
        let half = PtxBuilder::sub(self, shifted_half, WHOLE);
        let other = PtxBuilder::sub(self, whole, half);
        let shifted_other = PtxBuilder::add(self, other, WHOLE);
        [shifted_half, shifted_other].into_iter().fold(value, |value, shifted| {
            // The low bits of the shifted number hold n; moved up by 23 they are an exponent, to which that of 1 is
            // added.
            let bits = self.bits(shifted);
            let exponent = self.shift_left(bits, FRACTION);
            let power = PtxBuilder::add(self, exponent, 1_f32.to_bits());
            let power = self.float_from_bits(power);
            PtxBuilder::mul(self, value, power)
        })
    }
    /// Computes `ln a` within 3 ulp, near 1 as well, where `lg2.approx` is not. With `a = 2^k·m`, m in [2/3, 4/3),
    /// and `s = (m − 1)/(m + 1)` it is `k·ln 2 + 2s·(1 + s²/3 + s⁴/5 + s⁶/7 + s⁸/9)`, whose next term is below 2⁻²⁶.
    fn ln(&mut self, a: PtxValue<f32>) -> PtxValue<f32> {
        // Subnormal numbers are lifted by 2²³, and 23 is subtracted from their exponent.
        let tiny = PtxBuilder::less(self, a, f32::MIN_POSITIVE);
        let lifted = PtxBuilder::mul(self, a, (1_u32 << FRACTION) as f32);
        let lifted = PtxBuilder::select(self, tiny, lifted, a);
        let drop: PtxValue<f32> = PtxBuilder::select(self, tiny, -(FRACTION as f32), 0.0);
        let bits = self.bits(lifted);
        // Counting exponents from 2/3 instead of 1 leaves a mantissa in [2/3, 4/3), where the series converges fast.
        let above = PtxBuilder::sub(self, bits, (2.0_f32 / 3.0).to_bits());
        let exponent = self.bits_and(above, !((1 << FRACTION) - 1));
        let mantissa = PtxBuilder::sub(self, bits, exponent);
        let mantissa = self.float_from_bits(mantissa);
        let exponent = self.float_from_signed(exponent);
        let exponent = self.mul_add(exponent, ((1_u32 << FRACTION) as f32).recip(), drop);

        // The logarithm of the mantissa as an odd series in s, by Horner's rule.
        let (numerator, denominator) = (PtxBuilder::sub(self, mantissa, 1.0), PtxBuilder::add(self, mantissa, 1.0));
        let s = PtxBuilder::div(self, numerator, denominator);
        let square = PtxBuilder::mul(self, s, s);
        let series = self.variable(1.0 / 9.0);
        let series = [7.0, 5.0, 3.0].into_iter().fold(series, |sum, odd: f32| self.mul_add(sum, square, odd.recip()));
        let twice = PtxBuilder::add(self, s, s);
        let beyond = PtxBuilder::mul(self, series, square);
        let of_mantissa = self.mul_add(twice, beyond, twice);
        // k·ln 2 is added from its small part to its large one.
        let low = self.mul_add(exponent, LN_2[1], of_mantissa);
        let value = self.mul_add(exponent, LN_2[0], low);

        // The logarithm of ∞ is ∞, and that of NaN is NaN.
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
