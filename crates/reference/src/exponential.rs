//! The exponential of a gap between logits: the one function that is evaluated for every logit.
//!
//! With `x = k·ln 2/256 + r`, `k` an integer, `|r| ≤ ln 2/512` and `k = 256·n + i`:
//!
//! ```text
//! e^x = 2^n · 2^(i/256) · e^r          2^(i/256) = T_i·(1 + t_i)          e^r ≈ 1 + r + r²/2 + r³/6 + r⁴/24 + r⁵/120
//! ```
//!
//! `T_i` is an f64 and `t_i` its rounding error, so that only the last addition, `T_i + T_i·(t_i + r + …)`, rounds at the size of the
//! result. The other roundings are at the size of `r` and below, together less than 0.005 ulp, and the polynomial leaves out less than
//! 1e-20 of the result. The error is therefore at most 0.505 ulp, and the bits are the same on every machine. The exponential of the C
//! library is another one on each system, and a call for each logit.

/// The number of steps from one power of two to the next.
const STEPS: usize = 256;

/// The root `2^(1/256)`, in units of `2^-127`.
const ROOT: u128 = 0x8058_d7d2_d5e5_f6b0_94d5_89f6_08ee_4aa2;

/// The pairs `T_i` and `t_i` of the powers `2^(i/256) = T_i·(1 + t_i)`.
static POWERS: [[f64; 2]; STEPS] = powers();

/// The steps of a unit, `256/ln 2`.
const STEPS_OF_1: f64 = 256.0 * std::f64::consts::LOG2_E;

/// The step `ln 2/256` in two parts. The first has 35 bits, so that its product with a `k` of 18 bits is exact.
const STEP: [f64; 2] = [0.002_707_606_173_999_011, 6.327_543_041_662_719e-14];

/// The number `1.5·2^52`: an f64 of this size has a spacing of 1, so that adding it rounds to an integer, in the last bits.
const TO_INTEGER: f64 = 6_755_399_441_055_744.0;

/// The largest size of `x` of the formula, which has no results that are subnormal, infinite or NaN.
const LARGEST: f64 = 700.0;

/// Returns the exponential `e^x`, correct to 0.505 ulp.
#[inline]
pub(super) fn exponential(x: f64) -> f64 {
    if x.abs() <= LARGEST { by_formula(x) } else { x.exp() }
}

/// Replaces each `x` of a few hundred by `then` of [`exponential`] of it, in a loop without a branch where the formula serves for all.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the loop is compiled for the vector unit of its caller")]
pub(super) fn exponentiate(values: &mut [f64], then: impl Fn(f64) -> f64) {
    if values.iter().fold(true, |all, x| all & (x.abs() <= LARGEST)) {
        for x in values {
            *x = then(by_formula(*x));
        }
    } else {
        for x in values {
            *x = then(exponential(*x));
        }
    }
}

/// Returns `e^x` for an `x` of at most [`LARGEST`] in size.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the loops over it are compiled for several vector units")]
fn by_formula(x: f64) -> f64 {
    let shifted = x * STEPS_OF_1 + TO_INTEGER;
    let k = shifted - TO_INTEGER;
    let r = (x - k * STEP[0]) - k * STEP[1];
    // The last bits of `shifted` are `k`, as two's complement: `i` is the lowest eight of them, and `n` the others.
    let bits = shifted.to_bits();
    let [power, error] = POWERS[bits as usize % STEPS];
    let n = bits / STEPS as u64;
    // Adding `n` to the exponent's bits multiplies by 2^n.
    let power = f64::from_bits(power.to_bits().wrapping_add(n << (f64::MANTISSA_DIGITS - 1)));
    let r2 = r * r;
    power + power * (error + r + r2 * ((1.0 / 2.0 + r * (1.0 / 6.0)) + r2 * (1.0 / 24.0 + r * (1.0 / 120.0))))
}

/// Multiplies the root by itself, in integers.
#[allow(clippy::cast_sign_loss, reason = "a power is positive")]
const fn powers() -> [[f64; 2]; STEPS] {
    let mut powers = [[0.0; 2]; STEPS];
    let unit: u128 = 1 << 127;
    let mut exact = unit;
    let mut i = 0;
    while i < STEPS {
        let rounded = exact as f64;
        let error = exact.wrapping_sub(rounded as u128) as i128;
        powers[i] = [rounded / unit as f64, error as f64 / rounded];
        exact = product(exact, ROOT);
        i += 1;
    }
    powers
}

/// Returns the product of two numbers in units of `2^-127`, rounded down by less than four units.
const fn product(a: u128, b: u128) -> u128 {
    let low = u64::MAX as u128;
    // The product of the two lower halves is less than a unit, and is left out of the four.
    let crossed = (((a >> 64) * (b & low)) >> 1) + (((a & low) * (b >> 64)) >> 1);
    ((a >> 64) * (b >> 64) + (crossed >> 63)) << 1
}
