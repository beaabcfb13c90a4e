//! Sixteen `f32` at a time, on the vector unit that the machine has.
//!
//! An algorithm is written once, over [`Simd`], and compiled for each instruction set; [`Isa`] says which of them this
//! machine has. A vector is sixteen lanes on all of them, every operation is rounded as IEEE 754 says, and a product and a
//! sum are fused everywhere: so all give the same bits.
//!
//! `std::arch` and not a crate of vectors, because the conversion of 16-bit floats in registers is what decides here, and
//! those leave it out.

#![allow(unsafe_code)]
#![allow(clippy::cast_ptr_alignment, reason = "loads and stores are those of any alignment")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use std::fmt;

use half::{bf16, f16};

/// Elements that are loaded and stored at once: two vectors.
pub(super) const UNIT: usize = 32;

/// A vector unit of sixteen `f32` lanes. A value of such a type shows that the machine has it.
pub trait Simd: Copy {
    /// Sixteen `f32`.
    type Lanes: Copy;
    /// Eight `f64`, of sums.
    type Sums: Copy;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::Lanes;
    /// The lanes, in order.
    fn array(self, x: Self::Lanes) -> [f32; 16];
    /// `a + b`
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a − b`
    fn sub(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a·b`
    fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a·b + c`, rounded once.
    fn mul_add(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    /// `a` where `a > b`, else `b`: so `b` where either is NaN.
    fn max(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a·2^n`, for the integer `n` in the low bits of `integer`'s pattern: added to the exponent, which must stay that of
    /// a normal number. Nothing is said of a NaN.
    fn scale(self, a: Self::Lanes, integer: Self::Lanes) -> Self::Lanes;

    /// Sums of nothing.
    fn sums(self) -> Self::Sums;
    /// Adds `x_i + x_(i+8)`, rounded to f32, to the `i`th sum.
    fn accumulate(self, sums: Self::Sums, x: Self::Lanes) -> Self::Sums;
    /// `((s₀ + s₄) + (s₂ + s₆)) + ((s₁ + s₅) + (s₃ + s₇))`
    fn total(self, sums: Self::Sums) -> f64;

    /// Elements in order.
    fn load_f32(self, from: &[f32; UNIT]) -> [Self::Lanes; 2];
    /// As they were loaded.
    fn store_f32(self, x: [Self::Lanes; 2], to: &mut [f32; UNIT]);
    /// Those of even index, then those of odd index.
    fn load_bf16(self, from: &[bf16; UNIT]) -> [Self::Lanes; 2];
    /// As they were loaded, to nearest even; NaN stays NaN.
    fn store_bf16(self, x: [Self::Lanes; 2], to: &mut [bf16; UNIT]);
    /// Elements in order.
    fn load_f16(self, from: &[f16; UNIT]) -> [Self::Lanes; 2];
    /// As they were loaded, to nearest even; NaN stays NaN.
    fn store_f16(self, x: [Self::Lanes; 2], to: &mut [f16; UNIT]);
}

/// The sum of eight by halves.
#[inline(always)]
fn by_halves([a, b, c, d, e, f, g, h]: [f64; 8]) -> f64 {
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Something to compute on a vector unit.
pub(super) trait Work {
    /// What comes of it.
    type Output;

    /// `#[inline(always)]`, as must be all that it calls and that is generic over [`Simd`]: only then is it compiled for
    /// the vector unit. That rules out closures.
    fn on<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Isa {
    /// The names of all that kernels are compiled for on this architecture, the fastest first.
    pub const NAMES: &[&str] = if cfg!(target_arch = "x86_64") {
        &["avx512", "avx2", "portable"]
    } else if cfg!(target_arch = "aarch64") {
        &["neon", "portable"]
    } else {
        &["portable"]
    };

    /// All that this machine has, the fastest first; `portable` is always among them.
    pub fn available() -> Vec<Self> {
        let all = [
            #[cfg(target_arch = "x86_64")]
            avx512::detected().then_some(Kind::Avx512),
            #[cfg(target_arch = "x86_64")]
            avx2::detected().then_some(Kind::Avx2),
            #[cfg(target_arch = "aarch64")]
            neon::detected().then_some(Kind::Neon),
            Some(Kind::Portable),
        ];
        all.into_iter().flatten().map(Self).collect()
    }

    /// The fastest that this machine has.
    pub fn fastest() -> Self {
        Self::available()[0]
    }

    /// `avx512`, `avx2`, `neon` or `portable`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon",
            Kind::Portable => "portable",
        }
    }

    /// Does `work` with these instructions.
    pub(in crate::native) fn run<W: Work>(self, work: W) -> W::Output {
        match self.0 {
            // SAFETY: an `Isa` of this kind is made only where the machine was seen to have what `run` asks for.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => unsafe { avx512::run(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::run(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => unsafe { neon::run(work) },
            Kind::Portable => work.on(portable::Portable),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// Every operation on the same bits.
    struct Everything<'x>([&'x [f32; UNIT]; 3]);

    impl Work for Everything<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> Vec<f32> {
            let [a, b, c] = self.0;
            let ([a, a2], [b, b2], [c, c2]) = (simd.load_f32(a), simd.load_f32(b), simd.load_f32(c));
            let mut all = Vec::new();
            for [low, high] in [
                [a, a2],
                [simd.add(a, b), simd.add(a2, b2)],
                [simd.sub(a, b), simd.sub(a2, b2)],
                [simd.mul(a, b), simd.mul(a2, b2)],
                [simd.mul_add(a, b, c), simd.mul_add(a2, b2, c2)],
                [simd.max(a, b), simd.max(a2, b2)],
                [simd.scale(a, b), simd.scale(a2, b2)],
                [simd.splat(1.5), simd.splat(-2.5)],
            ] {
                let mut to = [0.0; UNIT];
                simd.store_f32([low, high], &mut to);
                assert_eq!(
                    [simd.array(low), simd.array(high)].as_flattened().iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                    to.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
                );
                all.extend(to);
            }
            let sums = simd.accumulate(simd.accumulate(simd.sums(), a), b2);
            all.push(simd.total(sums) as f32);
            all
        }
    }

    /// To 16 bits and back: the bits, and what they are read as.
    struct Sixteen<'x>(&'x [f32; UNIT]);

    impl Work for Sixteen<'_> {
        type Output = ([bf16; UNIT], [f16; UNIT], [f32; UNIT], [f32; UNIT]);

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> Self::Output {
            let (mut bf16s, mut f16s) = ([bf16::ZERO; UNIT], [f16::ZERO; UNIT]);
            let (mut from_bf16, mut from_f16) = ([0.0; UNIT], [0.0; UNIT]);
            // Stored in the order that a load of the same kind gives.
            let given: [bf16; UNIT] = self.0.map(bf16::from_f32);
            let order = simd.load_bf16(&given);
            simd.store_f32(order, &mut from_bf16);
            let paired = std::array::from_fn(|i| self.0[if i < 16 { 2 * i } else { 2 * (i - 16) + 1 }]);
            simd.store_bf16(simd.load_f32(&paired), &mut bf16s);
            simd.store_f16(simd.load_f32(self.0), &mut f16s);
            simd.store_f32(simd.load_f16(&f16s), &mut from_f16);
            (bf16s, f16s, from_bf16, from_f16)
        }
    }

    fn bits(x: f32) -> u32 {
        if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
    }

    /// Units of any bits at all, and of numbers that a row is made of.
    fn units(count: usize) -> Vec<[f32; UNIT]> {
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let mut unit = |i: usize| -> [f32; UNIT] {
            std::array::from_fn(|_| match i % 3 {
                0 => f32::from_bits(rng.random()),
                1 => rng.random_range(-120.0..10.0),
                // Halfway between two bf16, or near it.
                _ => f32::from_bits((rng.random::<u32>() & 0xffff_0000) | (0x7fff + rng.random_range(0..3))),
            })
        };
        (0..count).map(&mut unit).collect()
    }

    #[test]
    fn every_operation_has_the_bits_of_the_portable_one() {
        let units = units(3000);
        for window in units.windows(3) {
            let [a, b, c] = window else { unreachable!("windows of three") };
            let run = |isa: Isa| -> Vec<u32> {
                isa.run(Everything([a, b, c]))
                    .into_iter()
                    .enumerate()
                    .filter(|(i, x)| {
                        // Nothing is said of what scaling makes of a NaN.
                        !(6 * UNIT..7 * UNIT).contains(i) || x.is_finite()
                    })
                    .map(|(_, x)| bits(x))
                    .collect()
            };
            let [all @ .., portable] = &Isa::available()[..] else { unreachable!("portable is always there") };
            for isa in all {
                assert_eq!(run(*isa), run(*portable), "{isa}");
            }
        }
    }

    #[test]
    fn sixteen_bits_are_rounded_to_nearest_even_and_nan_is_kept() {
        for unit in units(30_000) {
            for isa in Isa::available() {
                let (bf16s, f16s, from_bf16, from_f16) = isa.run(Sixteen(&unit));
                for (i, &x) in unit.iter().enumerate() {
                    let (bf, half) = (bf16::from_f32(x), f16::from_f32(x));
                    let place = if i % 2 == 0 { i / 2 } else { 16 + i / 2 };
                    assert_eq!(bf16s[i].is_nan(), x.is_nan(), "{isa}: {x:e}");
                    assert_eq!(f16s[i].is_nan(), x.is_nan(), "{isa}: {x:e}");
                    assert_eq!(bits(from_bf16[place]), bits(bf.to_f32()), "{isa}: {x:e}");
                    assert_eq!(bits(from_f16[i]), bits(half.to_f32()), "{isa}: {x:e}");
                    if !x.is_nan() {
                        assert_eq!((bf16s[i], f16s[i]), (bf, half), "{isa}: {x:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn instruction_sets_are_named_and_the_portable_one_is_last() {
        let available = Isa::available();
        assert_eq!(available.last().map(|isa| isa.name()), Some("portable"));
        assert!(available.iter().all(|isa| Isa::NAMES.contains(&isa.name())), "{available:?}");
        assert_eq!(Isa::fastest(), available[0]);
    }
}
