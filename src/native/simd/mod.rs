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
