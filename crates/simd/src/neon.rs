//! NEON: four registers a vector.

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use super::{LANES, LEAST_MANTISSA, Simd, SimdTask, UNIT, by_halves};

/// Shows that the machine has NEON: only [`run`] makes one.
#[derive(Clone, Copy)]
pub(super) struct Neon(());

pub(super) fn detected() -> bool {
    std::arch::is_aarch64_feature_detected!("neon")
}

/// # Safety
/// The machine must have NEON.
#[target_feature(enable = "neon")]
pub(super) unsafe fn run<W: SimdTask>(work: W) -> W::Output {
    work.on(Neon(()))
}

type NeonLanes = [float32x4_t; 4];

/// Applies an intrinsic to each of the four registers.
macro_rules! each {
    ($intrinsic:ident $(, $x:expr)*) => {
        // SAFETY: `self` shows that the machine has the instruction.
        unsafe { [$intrinsic($($x[0]),*), $intrinsic($($x[1]),*), $intrinsic($($x[2]),*), $intrinsic($($x[3]),*)] }
    };
}

impl Simd for Neon {
    type Lanes = NeonLanes;
    type Sums = [float64x2_t; 4];

    #[inline(always)]
    fn splat(self, x: f32) -> NeonLanes {
        // SAFETY: `self` shows that the machine has the instruction.
        [unsafe { vdupq_n_f32(x) }; 4]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> NeonLanes {
        let from = from.as_ptr();
        // SAFETY: `self` shows that the machine has the instruction; the four fours lie within the sixteen.
        unsafe { [vld1q_f32(from), vld1q_f32(from.add(4)), vld1q_f32(from.add(8)), vld1q_f32(from.add(12))] }
    }
    #[inline(always)]
    fn store(self, x: NeonLanes, to: &mut [f32; LANES]) {
        for i in 0..4 {
            // SAFETY: `self` shows that the machine has the instruction; the four fours lie within the sixteen.
            unsafe { vst1q_f32(to.as_mut_ptr().add(4 * i), x[i]) };
        }
    }
    #[inline(always)]
    fn add(self, a: NeonLanes, b: NeonLanes) -> NeonLanes {
        each!(vaddq_f32, a, b)
    }
    #[inline(always)]
    fn sub(self, a: NeonLanes, b: NeonLanes) -> NeonLanes {
        each!(vsubq_f32, a, b)
    }
    #[inline(always)]
    fn mul(self, a: NeonLanes, b: NeonLanes) -> NeonLanes {
        each!(vmulq_f32, a, b)
    }
    #[inline(always)]
    fn mul_add(self, a: NeonLanes, b: NeonLanes, c: NeonLanes) -> NeonLanes {
        each!(vfmaq_f32, c, a, b)
    }
    #[inline(always)]
    fn mul_sub(self, a: NeonLanes, b: NeonLanes, c: NeonLanes) -> NeonLanes {
        self.mul_add(a, b, each!(vnegq_f32, c))
    }
    #[inline(always)]
    fn div(self, a: NeonLanes, b: NeonLanes) -> NeonLanes {
        each!(vdivq_f32, a, b)
    }
    #[inline(always)]
    fn max(self, a: NeonLanes, b: NeonLanes) -> NeonLanes {
        // `fmax` would be NaN where either is.
        each!(larger, a, b)
    }
    #[inline(always)]
    fn min(self, a: NeonLanes, b: NeonLanes) -> NeonLanes {
        each!(smaller, a, b)
    }
    #[inline(always)]
    fn at_least(self, x: NeonLanes, bound: NeonLanes) -> NeonLanes {
        each!(at_least, x, bound)
    }
    #[inline(always)]
    fn either(self, a: NeonLanes, b: NeonLanes, c: NeonLanes) -> NeonLanes {
        each!(either, a, b, c)
    }
    #[inline(always)]
    fn larger_bits(self, a: NeonLanes, b: NeonLanes) -> NeonLanes {
        each!(larger_bits, a, b)
    }
    #[inline(always)]
    fn any_set(self, bits: NeonLanes, mask: u32) -> bool {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe {
            let all = either(either(bits[0], bits[1], bits[2]), bits[3], bits[3]);
            vmaxvq_u32(vandq_u32(vreinterpretq_u32_f32(all), vdupq_n_u32(mask))) != 0
        }
    }
    #[inline(always)]
    fn scale(self, a: NeonLanes, _: NeonLanes, integer: NeonLanes) -> NeonLanes {
        each!(scale, a, integer)
    }
    #[inline(always)]
    fn split(self, x: NeonLanes) -> [NeonLanes; 2] {
        [each!(mantissa, x), each!(exponent, x)]
    }

    #[inline(always)]
    fn sums(self) -> [float64x2_t; 4] {
        // SAFETY: `self` shows that the machine has the instruction.
        [unsafe { vdupq_n_f64(0.0) }; 4]
    }
    #[inline(always)]
    fn accumulate(self, sums: [float64x2_t; 4], x: NeonLanes) -> [float64x2_t; 4] {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe {
            let (low, high) = (vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
            [
                vaddq_f64(sums[0], vcvt_f64_f32(vget_low_f32(low))),
                vaddq_f64(sums[1], vcvt_high_f64_f32(low)),
                vaddq_f64(sums[2], vcvt_f64_f32(vget_low_f32(high))),
                vaddq_f64(sums[3], vcvt_high_f64_f32(high)),
            ]
        }
    }
    #[inline(always)]
    fn total(self, sums: [float64x2_t; 4]) -> f64 {
        let mut array = [0.0; 8];
        for i in 0..4 {
            // SAFETY: `self` shows that the machine has the instruction; the four pairs lie within the array.
            unsafe { vst1q_f64(array.as_mut_ptr().add(2 * i), sums[i]) };
        }
        by_halves(array)
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; UNIT]) -> [NeonLanes; 2] {
        let mut lanes = [self.splat(0.0); 2];
        for i in 0..4 {
            // SAFETY: `self` shows that the machine has the instructions; the four eights lie within the unit.
            unsafe {
                let pairs = vreinterpretq_u32_u16(vld1q_u16(from.as_ptr().cast::<u16>().add(8 * i)));
                lanes[0][i] = vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs));
                lanes[1][i] = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff_0000)));
            }
        }
        lanes
    }
    #[inline(always)]
    fn store_bf16(self, [even, odd]: [NeonLanes; 2], to: &mut [bf16; UNIT]) {
        self.truncate_bf16([each!(round_bf16, even), each!(round_bf16, odd)], to);
    }
    #[inline(always)]
    fn truncate_bf16(self, [even, odd]: [NeonLanes; 2], to: &mut [bf16; UNIT]) {
        for i in 0..4 {
            // SAFETY: `self` shows that the machine has the instructions; the four eights lie within the unit.
            unsafe {
                let (even, odd) = (vreinterpretq_u32_f32(even[i]), vreinterpretq_u32_f32(odd[i]));
                let pairs = vsriq_n_u32::<16>(odd, even);
                vst1q_u16(to.as_mut_ptr().cast::<u16>().add(8 * i), vreinterpretq_u16_u32(pairs));
            }
        }
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; UNIT]) -> [NeonLanes; 2] {
        let mut lanes = [self.splat(0.0); 2];
        for i in 0..8 {
            // SAFETY: `self` shows that the machine has the instructions; the eight fours lie within the unit.
            unsafe {
                let four = vld1_u16(from.as_ptr().cast::<u16>().add(4 * i));
                // The intrinsic takes a type that is not stable yet.
                asm!("fcvtl {to:v}.4s, {from:v}.4h", to = lateout(vreg) lanes[i / 4][i % 4], from = in(vreg) four,
                    options(pure, nomem, nostack, preserves_flags));
            }
        }
        lanes
    }
    #[inline(always)]
    fn store_f16(self, x: [NeonLanes; 2], to: &mut [f16; UNIT]) {
        for i in 0..8 {
            let four: uint16x4_t;
            // SAFETY: `self` shows that the machine has the instructions; the eight fours lie within the unit.
            unsafe {
                asm!("fcvtn {to:v}.4h, {from:v}.4s", to = lateout(vreg) four, from = in(vreg) x[i / 4][i % 4],
                    options(pure, nomem, nostack, preserves_flags));
                vst1_u16(to.as_mut_ptr().cast::<u16>().add(4 * i), four);
            }
        }
    }
}

/// `a` where `a > b`, else `b`.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// `a` where `a < b`, else `b`.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn smaller(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
}

/// `x` where `x ≥ bound`, else 0.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn at_least(x: float32x4_t, bound: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe { vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(x, bound), vreinterpretq_u32_f32(x))) }
}

/// The bits that are set in any of the three.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn either(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe {
        let [a, b, c] = [vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b), vreinterpretq_u32_f32(c)];
        vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(a, b), c))
    }
}

/// The larger of two bit patterns, as unsigned integers.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn larger_bits(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe { vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b))) }
}

/// `a·2^n`, for the `n` in the low bits of `integer`.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn scale(a: float32x4_t, integer: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe {
        let exponent = vshlq_n_u32::<23>(vreinterpretq_u32_f32(integer));
        vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(a), exponent))
    }
}

/// Returns the exponents of positive normal numbers, as integers, as [`Simd::split`].
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn integer_exponent(x: float32x4_t) -> int32x4_t {
    // SAFETY: the caller's.
    unsafe {
        let above = vsubq_s32(vreinterpretq_s32_f32(x), vdupq_n_s32(LEAST_MANTISSA.cast_signed()));
        vshrq_n_s32::<23>(above)
    }
}

/// Returns the exponents of positive normal numbers, as [`Simd::split`].
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn exponent(x: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe { vcvtq_f32_s32(integer_exponent(x)) }
}

/// Returns the mantissas of positive normal numbers, as [`Simd::split`].
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn mantissa(x: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe {
        let bits = vsubq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32::<23>(integer_exponent(x)));
        vreinterpretq_f32_s32(bits)
    }
}

/// The upper half of each lane is the bf16 nearest to it, if it is a number.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn round_bf16(x: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let last = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        vreinterpretq_f32_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), last))
    }
}
