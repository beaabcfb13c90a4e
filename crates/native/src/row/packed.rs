//! Elements of logits and dlogits: how they are loaded, stored and multiplied.

use bytemuck::Pod;
use half::{bf16, f16};

use crate::simd::{LANES, Simd, UNIT};
use assay_core::problem::Float;

/// An element of logits that the CPU kernel reads: f32, bf16 or f16.
pub trait Element: Packed {}

impl<E: Packed> Element for E {}

/// `2^16 + 1`, by which [`Simd::high_product`] takes off all but eight bits.
pub(super) const SPLIT: f32 = 65_537.0;

/// What products are made with.
#[derive(Clone, Copy)]
pub struct Factor<S: Simd> {
    pub(super) value: S::Lanes,
    /// [`SPLIT`] times it.
    pub(super) split: S::Lanes,
    /// What is below has a product of 0.
    pub(super) smallest: S::Lanes,
}

/// How elements are loaded and stored; widened to f32 exactly, narrowed to nearest even.
pub trait Packed: Float + PartialEq + Pod {
    /// −∞
    const MINUS_INFINITY: Self;
    /// Exactly.
    fn to_f32(self) -> f32;
    /// Rounded.
    fn from_f32(x: f32) -> Self;
    /// In an order of the type's own, [`Packed::place`].
    fn load<S: Simd>(simd: S, from: &[Self; UNIT]) -> [S::Lanes; 2];
    /// Where the `j`th of a unit is among the lanes that are loaded.
    fn place(j: usize) -> usize {
        j
    }
    /// In the same order. Nothing is said of a NaN.
    fn store<S: Simd>(simd: S, x: [S::Lanes; 2], to: &mut [Self; UNIT]);
    /// `x·factor`, or 0 where `x` is below the factor's smallest, in the same.
    #[inline(always)]
    fn store_products<S: Simd>(simd: S, [low, high]: [S::Lanes; 2], by: Factor<S>, to: &mut [Self; UNIT]) {
        let (low, high) = (simd.at_least(low, by.smallest), simd.at_least(high, by.smallest));
        Self::store(simd, [simd.mul(low, by.value), simd.mul(high, by.value)], to);
    }
    /// A row as what exponentials may be kept in, if it is.
    fn as_floats(_row: &mut [Self]) -> Option<&mut [f32]> {
        None
    }
}

impl Packed for f32 {
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
        impl Packed for $type {
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
    fn store_products<S: Simd>(simd: S, [even, odd]: [S::Lanes; 2], by: Factor<S>, to: &mut [Self; UNIT]) {
        let even = simd.high_product(even, by.smallest, by.value, by.split);
        let odd = simd.high_product(odd, by.smallest, by.value, by.split);
        simd.truncate_bf16([even, odd], to);
    }
);
sixteen_bits!(f16, load_f16, store_f16);
