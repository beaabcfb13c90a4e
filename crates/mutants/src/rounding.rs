//! Roundings of kernels that are wrong: to TF32, and by chance.

use assay_core::problem::Dtype;

/// Bits of an f32's mantissa that TF32 does not have.
const DROPPED: u32 = 13;

/// Rounds to the ten bits of TF32's mantissa, ties to even.
pub(crate) fn to_tf32(x: f32) -> f32 {
    if !x.is_finite() {
        return x;
    }
    let bits = x.to_bits();
    // Half of the last kept bit, less one where that bit is even: the carry then goes up at ties of odd numbers alone.
    let up = (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1);
    f32::from_bits((bits + up) >> DROPPED << DROPPED)
}

/// Rounds to `dtype`, up or down by chance: the nearer a neighbour, the more often it is taken. `place` is the seed.
pub(crate) fn by_chance(x: f64, dtype: Dtype, place: usize) -> f64 {
    // Explicit bits of the mantissa, and the least exponent of a normal number.
    let (mantissa, least) = match dtype {
        Dtype::Bf16 => (7, -126),
        Dtype::F16 => (10, -14),
        Dtype::F32 | Dtype::F64 => return dtype.round(x),
    };
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = (x.abs().log2().floor() as i32).max(least);
    // A number from −½ to ½ of the last bit, from the mixed bits of the place.
    let mixed = (place as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let share = (mixed >> 11) as f64 / (1_u64 << 53) as f64 - 0.5;
    dtype.round(x + share * 2.0_f64.powi(exponent - mantissa))
}

#[cfg(test)]
mod tests {
    use super::{by_chance, to_tf32};
    use assay_core::problem::Dtype;

    #[test]
    fn tf32_keeps_ten_bits_and_rounds_ties_to_even() {
        let last = 2.0_f32.powi(-10);
        assert_eq!(to_tf32(1.0 + last), 1.0 + last);
        assert_eq!(to_tf32(1.0 + last / 2.0), 1.0);
        assert_eq!(to_tf32(1.0 + 1.5 * last), 1.0 + 2.0 * last);
        assert_eq!(to_tf32(-1.0 - 0.75 * last), -1.0 - last);
        assert_eq!(to_tf32(f32::NEG_INFINITY), f32::NEG_INFINITY);
    }

    #[test]
    fn stochastic_rounding_takes_both_neighbours_and_is_unbiased() {
        // A quarter of the way from 1 to the next number of bf16.
        let (x, ulp) = (1.0 + 0.25 / 128.0, 1.0 / 128.0);
        let all: Vec<f64> = (0..4_000).map(|place| by_chance(x, Dtype::Bf16, place)).collect();
        assert!(all.iter().all(|y| *y == 1.0 || *y == 1.0 + ulp), "{all:?}");
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        assert!((mean - x).abs() < 0.03 * ulp, "{mean}");
    }
}
