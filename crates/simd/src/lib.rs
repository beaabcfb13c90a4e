//! Sixteen `f32` at a time, on the vector unit that the machine has.
//!
//! An algorithm is written once, over [`Simd`], and compiled for each instruction set; [`Isa`] says which of them this
//! machine has. A vector has sixteen lanes on all of them, every operation is rounded as IEEE 754 says, and a product and a
//! sum are fused everywhere, so all give the same bits.
//!
//! The intrinsics are those of `std::arch`: crates of vectors lack the conversion of 16-bit floats in registers, which decides the
//! speed here.

#![allow(unsafe_code)]
#![allow(clippy::cast_ptr_alignment, reason = "loads and stores are those of any alignment")]
#![allow(clippy::inline_always, reason = "what is generic over a vector unit must be inlined to be compiled for it")]

/// Declares the methods of [`Simd`] that are one instruction for each register of a vector, which `each!` applies.
#[cfg(target_arch = "x86_64")]
macro_rules! instructions {
    ($lanes:ty; $($method:ident($($x:ident),*) = $intrinsic:ident;)*) => {
        $(
            #[inline(always)]
            fn $method(self $(, $x: $lanes)*) -> $lanes {
                each!($intrinsic $(, $x)*)
            }
        )*
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod exp;
mod gemm;
pub mod log;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packed;
mod portable;
pub mod tanh;

use std::fmt;

use bytemuck::{pod_align_to_mut, try_cast_slice_mut};
pub use gemm::gemm;
use half::{bf16, f16};
pub use packed::{ExpFactor, PackedElement, smallest};

/// Number of f32 lanes in a vector.
pub const LANES: usize = 16;

/// Number of elements that are loaded and stored at once: two vectors.
pub const UNIT: usize = 2 * LANES;

/// A vector unit of sixteen `f32` lanes. A value of such a type shows that the machine has it.
pub trait Simd: Copy {
    /// A vector of sixteen `f32` lanes.
    type Lanes: Copy;
    /// Eight running sums in `f64`, one for two lanes each.
    type Sums: Copy;

    /// Puts `x` into every lane.
    fn splat(self, x: f32) -> Self::Lanes;
    /// Loads sixteen lanes from memory, in order.
    fn load(self, from: &[f32; LANES]) -> Self::Lanes;
    /// Stores sixteen lanes to memory, in order.
    fn store(self, x: Self::Lanes, to: &mut [f32; LANES]);
    /// Adds lane by lane: `a + b`.
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Subtracts lane by lane: `a − b`.
    fn sub(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Multiplies lane by lane: `a·b`.
    fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Multiplies and adds lane by lane: `a·b + c`, rounded once.
    fn mul_add(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    /// Multiplies and subtracts lane by lane: `a·b − c`, rounded once.
    fn mul_sub(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    /// Divides lane by lane: `a/b`, rounded once.
    fn div(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Selects `a` if `a > b`, else `b`: `b` if either is NaN.
    fn max(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Selects `a` if `a < b`, else `b`: `b` if either is NaN.
    fn min(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Keeps `x` if `x ≥ bound`, else gives 0.
    fn at_least(self, x: Self::Lanes, bound: Self::Lanes) -> Self::Lanes;
    /// Rounds `x·factor` to the nearest number of eight significant bits. Veltkamp's splitting does it: the difference between the
    /// product and one that is `2¹⁶` times as large has no bits for the rest. `split` is `(2¹⁶ + 1)·factor`. The result is rounded once
    /// and must be 0 or a normal number.
    #[inline(always)]
    fn high_product(self, x: Self::Lanes, factor: Self::Lanes, split: Self::Lanes) -> Self::Lanes {
        let large = self.mul(x, split);
        self.add(self.mul_sub(x, factor, large), large)
    }
    /// Computes [`high_product`](Self::high_product) if `x ≥ bound`, else gives 0.
    #[inline(always)]
    fn high_product_at_least(
        self,
        x: Self::Lanes,
        bound: Self::Lanes,
        factor: Self::Lanes,
        split: Self::Lanes,
    ) -> Self::Lanes {
        self.high_product(self.at_least(x, bound), factor, split)
    }
    /// Selects the larger bit pattern, as an unsigned integer. Among numbers from 0 up that is the larger number, and any number below 0
    /// is above all of them.
    fn larger_bits(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Combines the bits that are set in any of the three.
    fn either(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    /// Whether any lane has one of the bits of `mask`.
    fn any_set(self, bits: Self::Lanes, mask: u32) -> bool;
    /// Scales by a power of two: `a·2^n`, of an integer `n` that is also in the low bits of `integer`'s pattern; each
    /// unit reads the one that it is faster with. `a` and the product must be normal numbers.
    fn scale(self, a: Self::Lanes, n: Self::Lanes, integer: Self::Lanes) -> Self::Lanes;
    /// Splits a positive normal number into a mantissa from `√½` to `√2` and the exponent `n`, an integer: `x = mantissa·2^n`.
    /// The result for any other number is unspecified.
    fn split(self, x: Self::Lanes) -> [Self::Lanes; 2];

    /// Returns eight sums that are 0.
    fn sums(self) -> Self::Sums;
    /// Adds `x_i + x_(i+8)`, rounded to f32, to the `i`th sum.
    fn accumulate(self, sums: Self::Sums, x: Self::Lanes) -> Self::Sums;
    /// Adds up the eight sums, `((s₀ + s₄) + (s₂ + s₆)) + ((s₁ + s₅) + (s₃ + s₇))`.
    fn total(self, sums: Self::Sums) -> f64;

    /// Loads a unit of bf16: the elements of even index, then those of odd index.
    fn load_bf16(self, from: &[bf16; UNIT]) -> [Self::Lanes; 2];
    /// Stores a unit in the order of [`Simd::load_bf16`], rounded to nearest even; the result for a NaN is unspecified.
    fn store_bf16(self, x: [Self::Lanes; 2], to: &mut [bf16; UNIT]);
    /// Stores the upper halves of a unit's lanes, in the order of [`Simd::load_bf16`].
    fn truncate_bf16(self, x: [Self::Lanes; 2], to: &mut [bf16; UNIT]);
    /// Loads a unit of f16, its elements in order.
    fn load_f16(self, from: &[f16; UNIT]) -> [Self::Lanes; 2];
    /// Stores a unit of f16 in order, rounded to nearest even; NaN stays NaN.
    fn store_f16(self, x: [Self::Lanes; 2], to: &mut [f16; UNIT]);
    /// Copies a cache line past the caches, where the unit can; it is there once the [`Streaming`] is dropped.
    #[inline(always)]
    fn stream(self, _: &Streaming, from: &[u8; CACHE_LINE], to: &mut CacheLine) {
        to.0 = *from;
    }
}

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// The bytes of a cache line, aligned to one.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct CacheLine([u8; CACHE_LINE]);

/// Bit pattern of `√½`, the least mantissa of [`Simd::split`].
const LEAST_MANTISSA: u32 = 0x3f35_04f3;

/// Distance in bytes by which [`prefetch`] is ahead of the reads: as far as the first cache is from memory in the time
/// of a vector's arithmetic. Between 4 and 16 KiB it makes no difference.
pub const AHEAD: usize = 8 << 10;

/// Asks for the cache lines that are [`AHEAD`] of a unit. It crosses the ends of pages, where hardware stops.
#[inline(always)]
pub fn prefetch<E>(unit: &[E; UNIT]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for line in (0..size_of_val(unit)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 has SSE; a hint is no access, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(unit.as_ptr().wrapping_byte_add(AHEAD + line).cast()) };
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    let _ = (unit, AHEAD);
}

/// Stores that bypass the caches where the vector unit can, and do not read the lines that they fill. They are complete
/// when the value is dropped.
pub struct Streaming(());

#[allow(clippy::unused_self, reason = "the value is what waits for the stores when it is dropped")]
impl Streaming {
    /// Begins a series of such stores.
    pub fn begin() -> Self {
        Self(())
    }

    /// Copies `from` to `to`, which have the same length: whole cache lines past the caches, and both ends through them.
    #[inline(always)]
    pub fn copy<S: Simd>(&self, simd: S, from: &[u8], to: &mut [u8]) {
        // A destination of whole lines, the usual case, has no ends to be copied by themselves.
        if let Ok(lines) = try_cast_slice_mut(to) {
            return self.lines(simd, from, lines);
        }
        let (head, lines, tail) = pod_align_to_mut(to);
        let (from_head, from) = from.split_at(head.len());
        let (from_lines, from_tail) = from.split_at(lines.len() * CACHE_LINE);
        head.copy_from_slice(from_head);
        self.lines(simd, from_lines, lines);
        tail.copy_from_slice(from_tail);
    }

    #[inline(always)]
    fn lines<S: Simd>(&self, simd: S, from: &[u8], to: &mut [CacheLine]) {
        for (to, from) in to.iter_mut().zip(from.as_chunks().0) {
            simd.stream(self, from, to);
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Drop for Streaming {
    fn drop(&mut self) {
        // SAFETY: every x86-64 has SSE. Streaming stores are in no order with others before it.
        unsafe { std::arch::x86_64::_mm_sfence() };
    }
}

/// Adds up eight numbers by halves.
#[inline(always)]
fn by_halves([a, b, c, d, e, f, g, h]: [f64; 8]) -> f64 {
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// A computation that is written once and runs on every vector unit.
pub trait SimdTask {
    /// Result of the computation, on any vector unit.
    type Output;

    /// Runs the computation on a vector unit. It must be `#[inline(always)]`, and so must everything that it calls and
    /// that is generic over [`Simd`]: only then is it compiled for the vector unit. That rules out closures.
    fn on<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(InstructionSet);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstructionSet {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Isa {
    /// The names of all instruction sets that kernels are compiled for on this architecture, the fastest first.
    pub const NAMES: &[&str] = if cfg!(target_arch = "x86_64") {
        &["avx512", "avx2", "portable"]
    } else if cfg!(target_arch = "aarch64") {
        &["neon", "portable"]
    } else {
        &["portable"]
    };

    /// Lists the instruction sets that this machine has, the fastest first; `portable` is always among them.
    pub fn available() -> Vec<Self> {
        let all = [
            #[cfg(target_arch = "x86_64")]
            avx512::detected().then_some(InstructionSet::Avx512),
            #[cfg(target_arch = "x86_64")]
            avx2::detected().then_some(InstructionSet::Avx2),
            #[cfg(target_arch = "aarch64")]
            neon::detected().then_some(InstructionSet::Neon),
            Some(InstructionSet::Portable),
        ];
        all.into_iter().flatten().map(Self).collect()
    }

    /// Returns the fastest instruction set that this machine has.
    pub fn fastest() -> Self {
        Self::available()[0]
    }

    /// Returns the name: `avx512`, `avx2`, `neon` or `portable`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => "neon",
            InstructionSet::Portable => "portable",
        }
    }

    /// Runs `work` with these instructions.
    pub fn run<W: SimdTask>(self, work: W) -> W::Output {
        match self.0 {
            // SAFETY: an `Isa` of this kind is made only where the machine was seen to have what `run` asks for.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { avx512::run(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => unsafe { avx2::run(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => unsafe { neon::run(work) },
            InstructionSet::Portable => work.on(portable::Portable),
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
    struct Everything<'x>([&'x [f32; LANES]; 3]);

    /// Numbers around `2^64`, of the mantissas of `x`, and powers of two to bring them near to the smallest normal one.
    fn scaled<S: Simd>(simd: S, x: &[f32; LANES], powers: &[f32; LANES]) -> S::Lanes {
        let power = |x: f32| -f32::from((x.to_bits() % 190) as u8);
        let around = x.map(|x| f32::from_bits(x.to_bits() & 0x007f_ffff | (127 + 64) << 23));
        let (n, integer) = (powers.map(power), powers.map(|x| 12_582_912.0 + power(x)));
        simd.scale(simd.load(&around), simd.load(&n), simd.load(&integer))
    }

    impl SimdTask for Everything<'_> {
        type Output = Vec<[f32; LANES]>;

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> Vec<[f32; LANES]> {
            let [a, b, c] = self.0;
            let (scaled, a_bits) = (scaled(simd, a, b), a);
            let (a, b, c) = (simd.load(a), simd.load(b), simd.load(c));
            let mut all = Vec::new();
            for x in [
                scaled,
                a,
                simd.add(a, b),
                simd.sub(a, b),
                simd.mul(a, b),
                simd.mul_add(a, b, c),
                simd.mul_sub(a, b, c),
                simd.div(a, b),
                simd.max(a, b),
                simd.min(a, b),
                simd.at_least(a, b),
                simd.either(a, b, c),
                simd.splat(1.5),
            ] {
                let mut to = [0.0; LANES];
                simd.store(x, &mut to);
                all.push(to);
            }
            // Any number is made a positive normal one first.
            let normal = a_bits.map(|x| f32::from_bits((x.to_bits() & 0x7fff_ffff).clamp(0x0080_0000, 0x7f7f_ffff)));
            for x in simd.split(simd.load(&normal)) {
                let mut to = [0.0; LANES];
                simd.store(x, &mut to);
                all.push(to);
            }
            let (factor, split) = (simd.splat(-1.1), simd.splat(-1.1 * 65_537.0));
            for x in [
                simd.high_product(a, factor, split),
                simd.high_product_at_least(a, b, factor, split),
                simd.larger_bits(a, b),
            ] {
                let mut to = [0.0; LANES];
                simd.store(x, &mut to);
                all.push(to);
            }
            let sums = simd.accumulate(simd.accumulate(simd.sums(), a), b);
            all.push([simd.total(sums) as f32; LANES]);
            for mask in [1 << 31, 0b11 << 30, 1] {
                all.push([f32::from(u8::from(simd.any_set(a, mask))); LANES]);
            }
            all
        }
    }

    /// Logits of 16 bits as they are read, and in 16 bits again.
    struct Sixteen<'x>(&'x [bf16; UNIT], &'x [f16; UNIT]);

    impl SimdTask for Sixteen<'_> {
        type Output = ([[f32; LANES]; 4], [bf16; UNIT], [f16; UNIT]);

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> Self::Output {
            let (brain, half) = (simd.load_bf16(self.0), simd.load_f16(self.1));
            let mut read = [[0.0; LANES]; 4];
            for (x, to) in brain.into_iter().chain(half).zip(&mut read) {
                simd.store(x, to);
            }
            let (mut brain_again, mut half_again) = ([bf16::ZERO; UNIT], [f16::ZERO; UNIT]);
            simd.store_bf16(brain, &mut brain_again);
            simd.store_f16(half, &mut half_again);
            (read, brain_again, half_again)
        }
    }

    /// Conversions to 16 bits: rounded, and cut to the upper halves.
    struct RoundingTask<'x>(&'x [[f32; LANES]; 2]);

    impl SimdTask for RoundingTask<'_> {
        type Output = ([bf16; UNIT], [f16; UNIT], [bf16; UNIT]);

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> Self::Output {
            let x = [simd.load(&self.0[0]), simd.load(&self.0[1])];
            let (mut brain, mut half, mut upper) = ([bf16::ZERO; UNIT], [f16::ZERO; UNIT], [bf16::ZERO; UNIT]);
            simd.store_bf16(x, &mut brain);
            simd.store_f16(x, &mut half);
            simd.truncate_bf16(x, &mut upper);
            (brain, half, upper)
        }
    }

    /// Stride over the inputs of a test, so that an interpreter takes few of them.
    const EVERY: usize = if cfg!(miri) { 1000 } else { 1 };

    fn bits(x: f32) -> u32 {
        if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
    }

    /// Vectors of any bits at all, and of numbers that a row is made of.
    fn vectors(count: usize) -> Vec<[f32; LANES]> {
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let mut vector = |i: usize| -> [f32; LANES] {
            std::array::from_fn(|_| match i % 3 {
                0 => f32::from_bits(rng.random()),
                1 => rng.random_range(-120.0..10.0),
                // Halfway between two bf16, or near it.
                _ => f32::from_bits((rng.random::<u32>() & 0xffff_0000) | (0x7fff + rng.random_range(0..3))),
            })
        };
        (0..count).map(&mut vector).collect()
    }

    #[test]
    fn isa_every_operation_has_bits_of_portable() {
        for window in vectors(6000 / EVERY).windows(3) {
            let [a, b, c] = window else { unreachable!("windows of three") };
            let run = |isa: Isa| -> Vec<u32> {
                let all = isa.run(Everything([a, b, c]));
                all.into_flattened().into_iter().map(bits).collect()
            };
            let [all @ .., portable] = &Isa::available()[..] else { unreachable!("portable is always there") };
            // Where there is no other, that it is defined behaviour is all that is asked.
            let expected = run(*portable);
            for isa in all {
                assert_eq!(run(*isa), expected, "{isa}");
            }
        }
    }

    #[test]
    fn dtype_16_bit_logits_are_read_and_written_exactly() {
        for first in (0..=u16::MAX).step_by(UNIT * EVERY) {
            let brain: [bf16; UNIT] = std::array::from_fn(|i| bf16::from_bits(first + i as u16));
            let half: [f16; UNIT] = std::array::from_fn(|i| f16::from_bits(first + i as u16));
            for isa in Isa::available() {
                let (read, brain_again, half_again) = isa.run(Sixteen(&brain, &half));
                for i in 0..UNIT {
                    assert_eq!(bits(read[i % 2][i / 2]), bits(brain[i].to_f32()), "{isa}: {}", brain[i]);
                    assert_eq!(bits(read[2 + i / LANES][i % LANES]), bits(half[i].to_f32()), "{isa}: {}", half[i]);
                    assert!(brain[i].is_nan() || brain_again[i].to_bits() == brain[i].to_bits(), "{isa}: {}", brain[i]);
                    assert!(half[i].is_nan() || half_again[i].to_bits() == half[i].to_bits(), "{isa}: {}", half[i]);
                }
            }
        }
    }

    #[test]
    fn dtype_16_bit_rounding_is_to_nearest_even() {
        for pair in vectors(60_000 / EVERY).as_chunks().0 {
            for isa in Isa::available() {
                let (brain, half, upper) = isa.run(RoundingTask(pair));
                for i in 0..UNIT {
                    let (even_odd, in_order) = (pair[i % 2][i / 2], pair[i / LANES][i % LANES]);
                    assert!(even_odd.is_nan() || brain[i] == bf16::from_f32(even_odd), "{isa}: {even_odd:e}");
                    assert_eq!(u32::from(upper[i].to_bits()), even_odd.to_bits() >> 16, "{isa}: {even_odd:e}");
                    assert!(in_order.is_nan() || half[i] == f16::from_f32(in_order), "{isa}: {in_order:e}");
                }
            }
        }
    }

    /// The copy of some bytes past the caches.
    struct StreamTask<'x>(&'x [u8], &'x mut [u8]);

    impl SimdTask for StreamTask<'_> {
        type Output = ();

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) {
            Streaming::begin().copy(simd, self.0, self.1);
        }
    }

    #[test]
    fn streaming_copies_any_alignment_and_no_others() {
        let from: Vec<u8> = (1..=250).collect();
        let lengths = [0, 1, 15, 63, 64, 65, 127, 128, 129, 190];
        for (start, length) in (0..66).flat_map(|start| lengths.map(move |length| (start, length))).step_by(EVERY) {
            let expected: Vec<u8> = (0..256)
                .map(|i| if i < start { 0 } else { i - start + 1 })
                .map(|i| if i <= length { i as u8 } else { 0 })
                .collect();
            for isa in Isa::available() {
                let mut to = [CacheLine([0; CACHE_LINE]); 4];
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut to);
                isa.run(StreamTask(&from[..length], &mut bytes[start..start + length]));
                assert_eq!(*bytes, expected[..], "{isa}: {length} bytes at {start}");
            }
        }
    }

    #[test]
    fn isa_names_end_with_portable() {
        let available = Isa::available();
        assert_eq!(available.last().map(|isa| isa.name()), Some("portable"));
        assert!(available.iter().all(|isa| Isa::NAMES.contains(&isa.name())), "{available:?}");
        assert_eq!(Isa::fastest(), available[0]);
    }
}
