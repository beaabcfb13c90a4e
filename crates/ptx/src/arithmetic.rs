//! Per-token arithmetic in f32.

use std::f32::consts::LOG2_E;

use crate::build::Builder;
use crate::value::Value;
use assay_algebra::arithmetic::Arithmetic;

/// `ln 2`, and what rounding it leaves.
const LN_2: [f32; 2] = [std::f32::consts::LN_2, (std::f64::consts::LN_2 - std::f32::consts::LN_2 as f64) as f32];

/// Added to a small number it leaves the nearest whole number in the last bits.
const WHOLE: f32 = 12_582_912.0;

/// Bits of an f32 after which its exponent begins.
const FRACTION: u32 = 23;

impl Arithmetic for Builder {
    type Value = Value<f32>;
    type Truth = Value<bool>;

    fn constant(&mut self, x: f64) -> Value<f32> {
        (x as f32).into()
    }
    fn add(&mut self, a: Value<f32>, b: Value<f32>) -> Value<f32> {
        Builder::add(self, a, b)
    }
    fn sub(&mut self, a: Value<f32>, b: Value<f32>) -> Value<f32> {
        Builder::sub(self, a, b)
    }
    fn mul(&mut self, a: Value<f32>, b: Value<f32>) -> Value<f32> {
        Builder::mul(self, a, b)
    }
    fn div(&mut self, a: Value<f32>, b: Value<f32>) -> Value<f32> {
        Builder::div(self, a, b)
    }
    fn neg(&mut self, a: Value<f32>) -> Value<f32> {
        Builder::neg(self, a)
    }
    /// Within 3 ulp: with `n` the whole number nearest to `a·log₂e`, `2^((a − n·ln 2)·log₂e) · 2^n`, the last in two factors,
    /// as it may be beyond f32 where the product is not.
    fn exp(&mut self, a: Value<f32>) -> Value<f32> {
        // 0 and ∞ begin before.
        let a = self.max(a, -104.0);
        let a = self.min(a, 104.0);
        let exponent = self.mul_add(a, LOG2_E, WHOLE);
        let whole = Builder::sub(self, exponent, WHOLE);
        let minus = Builder::neg(self, whole);
        let rest = self.mul_add(minus, LN_2[0], a);
        let rest = self.mul_add(minus, LN_2[1], rest);
        let rest = Builder::mul(self, rest, LOG2_E);
        let value = self.exp2(rest);
        let shifted_half = self.mul_add(whole, 0.5, WHOLE);
        let half = Builder::sub(self, shifted_half, WHOLE);
        let other = Builder::sub(self, whole, half);
        let shifted_other = Builder::add(self, other, WHOLE);
        [shifted_half, shifted_other].into_iter().fold(value, |value, shifted| {
            let bits = self.bits(shifted);
            let exponent = self.shift_left(bits, FRACTION);
            let power = Builder::add(self, exponent, 1_f32.to_bits());
            let power = self.of_bits(power);
            Builder::mul(self, value, power)
        })
    }
    /// Within 3 ulp, near 1 too, where `lg2.approx` is not: `a = 2^k·m` with m in [2/3, 4/3), and with `s = (m − 1)/(m + 1)`
    /// `k·ln 2 + 2s·(1 + s²/3 + s⁴/5 + s⁶/7 + s⁸/9)`, of which the next term is below 2⁻²⁶.
    fn ln(&mut self, a: Value<f32>) -> Value<f32> {
        let tiny = Builder::less(self, a, f32::MIN_POSITIVE);
        let lifted = Builder::mul(self, a, (1_u32 << FRACTION) as f32);
        let lifted = Builder::select(self, tiny, lifted, a);
        let drop: Value<f32> = Builder::select(self, tiny, -(FRACTION as f32), 0.0);
        let bits = self.bits(lifted);
        let above = Builder::sub(self, bits, (2.0_f32 / 3.0).to_bits());
        let exponent = self.bits_and(above, !((1 << FRACTION) - 1));
        let mantissa = Builder::sub(self, bits, exponent);
        let mantissa = self.of_bits(mantissa);
        let exponent = self.of_signed(exponent);
        let exponent = self.mul_add(exponent, ((1_u32 << FRACTION) as f32).recip(), drop);

        let (numerator, denominator) = (Builder::sub(self, mantissa, 1.0), Builder::add(self, mantissa, 1.0));
        let s = Builder::div(self, numerator, denominator);
        let square = Builder::mul(self, s, s);
        let series = self.variable(1.0 / 9.0);
        let series = [7.0, 5.0, 3.0].into_iter().fold(series, |sum, odd: f32| self.mul_add(sum, square, odd.recip()));
        let twice = Builder::add(self, s, s);
        let beyond = Builder::mul(self, series, square);
        let of_mantissa = self.mul_add(twice, beyond, twice);
        let low = self.mul_add(exponent, LN_2[1], of_mantissa);
        let value = self.mul_add(exponent, LN_2[0], low);

        // ∞ and NaN are their own.
        let finite = Builder::less(self, a, f32::INFINITY);
        let value = Builder::select(self, finite, value, a);
        let nothing = Builder::equal(self, a, 0.0);
        let value = Builder::select(self, nothing, f32::NEG_INFINITY, value);
        let negative = Builder::less(self, a, 0.0);
        Builder::select(self, negative, f32::NAN, value)
    }
    fn less(&mut self, a: Value<f32>, b: Value<f32>) -> Value<bool> {
        Builder::less(self, a, b)
    }
    fn equal(&mut self, a: Value<f32>, b: Value<f32>) -> Value<bool> {
        Builder::equal(self, a, b)
    }
    fn and(&mut self, a: Value<bool>, b: Value<bool>) -> Value<bool> {
        Builder::and(self, a, b)
    }
    fn or(&mut self, a: Value<bool>, b: Value<bool>) -> Value<bool> {
        Builder::or(self, a, b)
    }
    fn select(&mut self, condition: Value<bool>, yes: Value<f32>, no: Value<f32>) -> Value<f32> {
        Builder::select(self, condition, yes, no)
    }
}
