//! Elements of 16 and of 32 bits: loads, stores, and products of stored exponentials.

use bytemuck::Pod;
use half::{bf16, f16};

use crate::exp::{LEAST_NEAR, SCALE};
use crate::{LANES, Simd, UNIT};

/// `2^16 + 1`, by which [`Simd::high_product`] takes off all but eight bits.
const SPLIT: f32 = 65_537.0;

/// A factor of stored exponentials `2^64·e`, with what its products need.
#[derive(Clone, Copy)]
pub struct ExpFactor<S: Simd> {
    value: S::Lanes,
    /// The factor times [`SPLIT`], for [`Simd::high_product`].
    split: S::Lanes,
    /// Smallest exponential whose product is not flushed to 0.
    smallest: S::Lanes,
    /// Whether the product of every exponential of a gap within [`NEAR`](crate::exp::NEAR) is a normal number.
    keeps_near: bool,
}

impl<S: Simd> ExpFactor<S> {
    /// Prepares `factor`, or returns `None` if it is not a normal number or a product with an exponential would leave
    /// the range of f32 on the way.
    #[inline(always)]
    pub fn new(simd: S, factor: f32) -> Option<Self> {
        let split = factor * SPLIT;
        // An exponential is 2^64 at most.
        let in_range = factor.is_normal() && (split * 2.0 * SCALE as f32).is_finite();
        let smallest = smallest(f64::from(factor) * SCALE);
        in_range.then_some(Self {
            value: simd.splat(factor),
            split: simd.splat(split),
            smallest: simd.splat(smallest),
            // An exponential is off by 1e-7 of itself, and by 4e-6 where the largest near gap was rounded up to f32.
            keeps_near: f64::from(smallest) < LEAST_NEAR * (1.0 - 1e-5),
        })
    }

    /// Whether [`PackedElement::store_products`] need not look for exponentials that are too small, if all are of gaps within
    /// [`NEAR`](crate::exp::NEAR).
    pub fn keeps_near(&self) -> bool {
        self.keeps_near
    }

    /// Multiplies stored exponentials by the factor; those below the smallest give 0, unless `ALL_NEAR` says that none is.
    #[inline(always)]
    pub fn products<const ALL_NEAR: bool>(&self, simd: S, [mut low, mut high]: [S::Lanes; 2]) -> [S::Lanes; 2] {
        if !ALL_NEAR {
            (low, high) = (simd.at_least(low, self.smallest), simd.at_least(high, self.smallest));
        }
        [simd.mul(low, self.value), simd.mul(high, self.value)]
    }
}

/// Returns the smallest exponential, times 2^64, that is a normal number both without that and times `factor`. Smaller
/// ones count as 0: a processor takes a hundred times as long for numbers below the normal ones, which end at 1.2e-38.
pub fn smallest(factor: f64) -> f32 {
    // So much more that no rounding leads below.
    let margin = 1.0 + 1e-6;
    (f64::from(f32::MIN_POSITIVE) * SCALE / factor.abs().min(1.0) * margin) as f32
}

/// An element type of logits: loads widen it to f32 exactly, stores round to nearest even.
pub trait PackedElement: PartialEq + Pod + Send + Sync {
    /// The element `−∞`, whose exponential is 0.
    const MINUS_INFINITY: Self;
    /// Widens the element to f32 exactly.
    fn to_f32(self) -> f32;
    /// Rounds `x` to the element type, to nearest even.
    fn from_f32(x: f32) -> Self;
    /// Loads a unit into two vectors, in the type's own order, [`PackedElement::place`].
    fn load<S: Simd>(simd: S, from: &[Self; UNIT]) -> [S::Lanes; 2];
    /// Returns the lane, among the two vectors, of the `j`th element of a unit.
    fn place(j: usize) -> usize {
        j
    }
    /// Stores two vectors as a unit, in the same order; the result for a NaN is unspecified.
    fn store<S: Simd>(simd: S, x: [S::Lanes; 2], to: &mut [Self; UNIT]);
    /// Stores `x·factor`, or 0 if `x` is below the factor's smallest exponential, in the same order. With `ALL_NEAR` none is: all are of
    /// gaps within [`NEAR`](crate::exp::NEAR), and the factor [keeps](ExpFactor::keeps_near) such.
    #[inline(always)]
    fn store_products<S: Simd, const ALL_NEAR: bool>(
        simd: S,
        x: [S::Lanes; 2],
        by: ExpFactor<S>,
        to: &mut [Self; UNIT],
    ) {
        Self::store(simd, by.products::<ALL_NEAR>(simd, x), to);
    }
    /// Returns the row as f32 storage for exponentials, if its elements are f32.
    fn as_floats(_row: &mut [Self]) -> Option<&mut [f32]> {
        None
    }
}

impl PackedElement for f32 {
    const MINUS_INFINITY: Self = Self::NEG_INFINITY;
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; UNIT]) -> [S::Lanes; 2] {
        let (halves, _) = from.as_chunks();
        [simd.load(&halves[0]), simd.load(&halves[1])]
    }
    #[inline(always)]
    fn store<S: Simd>(simd: S, [low, high]: [S::Lanes; 2], to: &mut [Self; UNIT]) {
        let (halves, _) = to.as_chunks_mut();
        simd.store(low, &mut halves[0]);
        simd.store(high, &mut halves[1]);
    }
    fn as_floats(row: &mut [Self]) -> Option<&mut [f32]> {
        Some(row)
    }
}

macro_rules! sixteen_bits {
    ($type:ident, $load:ident, $store:ident $(, $own:item)*) => {
        impl PackedElement for $type {
            const MINUS_INFINITY: Self = Self::NEG_INFINITY;
            fn to_f32(self) -> f32 {
                $type::to_f32(self)
            }
            fn from_f32(x: f32) -> Self {
                $type::from_f32(x)
            }
            #[inline(always)]
            fn load<S: Simd>(simd: S, from: &[Self; UNIT]) -> [S::Lanes; 2] {
                simd.$load(from)
            }
            #[inline(always)]
            fn store<S: Simd>(simd: S, x: [S::Lanes; 2], to: &mut [Self; UNIT]) {
                simd.$store(x, to);
            }
            $($own)*
        }
    };
}
sixteen_bits!(
    bf16,
    load_bf16,
    store_bf16,
    fn place(j: usize) -> usize {
        j / 2 + j % 2 * LANES
    },
    #[inline(always)]
    fn store_products<S: Simd, const ALL_NEAR: bool>(
        simd: S,
        [even, odd]: [S::Lanes; 2],
        by: ExpFactor<S>,
        to: &mut [Self; UNIT],
    ) {
        let ExpFactor { value, split, smallest, .. } = by;
        let products = if ALL_NEAR {
            [simd.high_product(even, value, split), simd.high_product(odd, value, split)]
        } else {
            [
                simd.high_product_at_least(even, smallest, value, split),
                simd.high_product_at_least(odd, smallest, value, split),
            ]
        };
        simd.truncate_bf16(products, to);
    }
);
sixteen_bits!(f16, load_f16, store_f16);

#[cfg(test)]
mod tests {
    use half::bf16;
    use rand::{RngExt as _, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::{Isa, SimdTask};

    /// Products of `exps` and a factor, in bf16, if the factor is in range; and whether they were compared with those of near exponentials.
    struct Products<'x>(&'x [f32; UNIT], f32);

    impl SimdTask for Products<'_> {
        type Output = Option<([bf16; UNIT], bool)>;

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> Option<([bf16; UNIT], bool)> {
            let (exps, factor) = (f32::load(simd, self.0), ExpFactor::new(simd, self.1)?);
            let mut products = [bf16::ZERO; UNIT];
            bf16::store_products::<S, false>(simd, exps, factor, &mut products);
            // Exponentials that are all near need no search for those to flush: leaving it out changes no bit.
            let all_near = factor.keeps_near() && self.0.iter().all(|x| f64::from(*x) >= LEAST_NEAR * (1.0 - 4e-6));
            if all_near {
                let mut near = [bf16::ZERO; UNIT];
                bf16::store_products::<S, true>(simd, exps, factor, &mut near);
                assert_eq!(near, products);
            }
            Some((products, all_near))
        }
    }

    #[test]
    fn bf16_products_are_rounded_once_to_nearest() {
        let mut rng = ChaCha8Rng::seed_from_u64(6);
        for case in 0..(if cfg!(miri) { 20 } else { 20_000 }) {
            // Every second unit has near exponentials alone.
            let least = if case % 2 == 0 { -60.0_f32 } else { -28.0 };
            let mut exps: [f32; UNIT] = std::array::from_fn(|_| rng.random_range(least..64.0).exp2());
            let odd = [0.0, 1.0, 1.0 + f32::EPSILON, 2.0 - f32::EPSILON, 257.0 / 256.0];
            exps[case % 2..5].copy_from_slice(&odd[case % 2..]);
            let factor = match case % 4 {
                0 => 1.0,
                1 => -(1.0 + f32::EPSILON),
                2 => 1.0 - f32::EPSILON / 2.0,
                _ => rng.random_range(-4.0_f32..4.0),
            };
            // In the order in which they are stored.
            let exact = |j: usize| f64::from(exps[j / 2 + j % 2 * LANES]) * f64::from(factor);
            for isa in Isa::available() {
                for (j, product) in isa.run(Products(&exps, factor)).unwrap().0.into_iter().enumerate() {
                    let (exact, product) = (exact(j), f64::from(product.to_f32()));
                    let half_ulp = if exact == 0.0 { 0.0 } else { (exact.abs().log2().floor() - 8.0).exp2() };
                    assert!((product - exact).abs() <= half_ulp, "{isa}: {exact:e} as {product:e}");
                }
            }
        }
    }

    #[test]
    fn exp_factor_that_keeps_near_flushes_none_of_them() {
        // A gap within `NEAR`, rounded up to f32, has an exponential a little below the least.
        let least = [(LEAST_NEAR * (1.0 - 3e-6)) as f32; UNIT];
        for isa in Isa::available() {
            // Only factors from somewhere in this range on keep near exponentials.
            let factors = (0..200).map(|i| (-98.0_f32).exp2() * (1.0 + i as f32 * f32::EPSILON));
            let compared =
                factors.filter(|factor| isa.run(Products(&least, *factor)).expect("a factor in range").1).count();
            assert!((1..200).contains(&compared), "{isa}: {compared} factors were compared");
        }
    }

    #[test]
    fn exp_factor_is_in_range_unless_a_product_overflows() {
        let power = |exponent: i32| f64::from(exponent).exp2() as f32;
        let largest = [power(64); UNIT];
        for isa in Isa::available() {
            let product = |factor: f32| isa.run(Products(&largest, factor)).map(|(products, _)| products[0].to_f32());
            for factor in [power(-126), -power(-126), 1.0, 1.75 * power(46), -1.75 * power(46)] {
                assert_eq!(product(factor), Some(factor * power(64)), "{isa}: {factor:e}");
            }
            for factor in [0.0, power(-127), power(47), -power(47), power(127), f32::INFINITY, f32::NAN] {
                assert_eq!(product(factor), None, "{isa}: {factor:e}");
            }
        }
    }
}
