//! AVX2 with FMA and F16C: two registers a vector.

#[allow(clippy::wildcard_imports, reason = "intrinsics")]
use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{CACHE_LINE, CacheLine, LANES, LEAST_MANTISSA, Simd, SimdTask, Streaming, UNIT, by_halves};

/// Shows that the machine has AVX2, FMA and F16C: only [`run`] makes one.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// # Safety
/// The machine must have AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<W: SimdTask>(work: W) -> W::Output {
    work.on(Avx2(()))
}

type Avx2Lanes = [__m256; 2];

/// Applies an intrinsic to both registers.
macro_rules! each {
    ($intrinsic:ident $(, $x:ident)*) => {
        // SAFETY: `self` shows that the machine has the instruction.
        unsafe { [$intrinsic($($x[0]),*), $intrinsic($($x[1]),*)] }
    };
}

impl Simd for Avx2 {
    type Lanes = Avx2Lanes;
    type Sums = [__m256d; 2];

    #[inline(always)]
    fn splat(self, x: f32) -> Avx2Lanes {
        // SAFETY: `self` shows that the machine has the instruction.
        [unsafe { _mm256_set1_ps(x) }; 2]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Avx2Lanes {
        let from = from.as_ptr();
        // SAFETY: `self` shows that the machine has the instruction; both eights lie within the sixteen.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    fn store(self, [low, high]: Avx2Lanes, to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        // SAFETY: `self` shows that the machine has the instruction; both eights lie within the sixteen.
        unsafe {
            _mm256_storeu_ps(to, low);
            _mm256_storeu_ps(to.add(8), high);
        }
    }
    instructions! {
        Avx2Lanes;
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        mul_add(a, b, c) = _mm256_fmadd_ps;
        mul_sub(a, b, c) = _mm256_fmsub_ps;
        div(a, b) = _mm256_div_ps;
        max(a, b) = _mm256_max_ps;
        min(a, b) = _mm256_min_ps;
    }
    #[inline(always)]
    fn at_least(self, x: Avx2Lanes, bound: Avx2Lanes) -> Avx2Lanes {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe {
            let there = [_mm256_cmp_ps::<_CMP_GE_OQ>(x[0], bound[0]), _mm256_cmp_ps::<_CMP_GE_OQ>(x[1], bound[1])];
            [_mm256_and_ps(there[0], x[0]), _mm256_and_ps(there[1], x[1])]
        }
    }
    #[inline(always)]
    fn either(self, a: Avx2Lanes, b: Avx2Lanes, c: Avx2Lanes) -> Avx2Lanes {
        // SAFETY: `self` shows that the machine has the instruction.
        unsafe { [_mm256_or_ps(_mm256_or_ps(a[0], b[0]), c[0]), _mm256_or_ps(_mm256_or_ps(a[1], b[1]), c[1])] }
    }
    #[inline(always)]
    fn larger_bits(self, a: Avx2Lanes, b: Avx2Lanes) -> Avx2Lanes {
        // SAFETY: `self` shows that the machine has the instruction.
        unsafe {
            [
                _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a[0]), _mm256_castps_si256(b[0]))),
                _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a[1]), _mm256_castps_si256(b[1]))),
            ]
        }
    }
    #[inline(always)]
    fn any_set(self, bits: Avx2Lanes, mask: u32) -> bool {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe {
            let all = _mm256_castps_si256(_mm256_or_ps(bits[0], bits[1]));
            _mm256_testz_si256(all, _mm256_set1_epi32(mask.cast_signed())) == 0
        }
    }

    #[inline(always)]
    fn scale(self, a: Avx2Lanes, _: Avx2Lanes, integer: Avx2Lanes) -> Avx2Lanes {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe { [scale(a[0], integer[0]), scale(a[1], integer[1])] }
    }
    #[inline(always)]
    fn split(self, x: Avx2Lanes) -> [Avx2Lanes; 2] {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe {
            let [(low, of_low), (high, of_high)] = [split(x[0]), split(x[1])];
            [[low, high], [of_low, of_high]]
        }
    }

    #[inline(always)]
    fn sums(self) -> [__m256d; 2] {
        // SAFETY: `self` shows that the machine has the instruction.
        [unsafe { _mm256_setzero_pd() }; 2]
    }
    #[inline(always)]
    fn accumulate(self, sums: [__m256d; 2], x: Avx2Lanes) -> [__m256d; 2] {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe {
            let halves = _mm256_add_ps(x[0], x[1]);
            let (low, high) = (_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
            [_mm256_add_pd(sums[0], _mm256_cvtps_pd(low)), _mm256_add_pd(sums[1], _mm256_cvtps_pd(high))]
        }
    }
    #[inline(always)]
    fn total(self, sums: [__m256d; 2]) -> f64 {
        let mut array = [0.0; 8];
        // SAFETY: `self` shows that the machine has the instruction; both fours lie within the array.
        unsafe {
            _mm256_storeu_pd(array.as_mut_ptr(), sums[0]);
            _mm256_storeu_pd(array.as_mut_ptr().add(4), sums[1]);
        }
        by_halves(array)
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; UNIT]) -> [Avx2Lanes; 2] {
        let from = from.as_ptr().cast::<__m256i>();
        // SAFETY: `self` shows that the machine has the instructions; both halves lie within the unit.
        unsafe {
            let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            let odd = _mm256_set1_epi32(-0x1_0000);
            [
                [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high))],
                [_mm256_castsi256_ps(_mm256_and_si256(low, odd)), _mm256_castsi256_ps(_mm256_and_si256(high, odd))],
            ]
        }
    }
    #[inline(always)]
    fn store_bf16(self, [even, odd]: [Avx2Lanes; 2], to: &mut [bf16; UNIT]) {
        // SAFETY: `self` shows that the machine has the instructions.
        let rounded = unsafe { [[round_bf16(even[0]), round_bf16(even[1])], [round_bf16(odd[0]), round_bf16(odd[1])]] };
        self.truncate_bf16(rounded, to);
    }
    #[inline(always)]
    fn truncate_bf16(self, [even, odd]: [Avx2Lanes; 2], to: &mut [bf16; UNIT]) {
        let to = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: `self` shows that the machine has the instructions; both halves lie within the unit.
        unsafe {
            for i in 0..2 {
                let (even, odd) = (_mm256_castps_si256(even[i]), _mm256_castps_si256(odd[i]));
                let pairs = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(even), odd);
                _mm256_storeu_si256(to.add(i), pairs);
            }
        }
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; UNIT]) -> [Avx2Lanes; 2] {
        let from = from.as_ptr().cast::<__m128i>();
        // SAFETY: `self` shows that the machine has the instructions; the four eights lie within the unit.
        unsafe {
            [
                [_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1)))],
                [_mm256_cvtph_ps(_mm_loadu_si128(from.add(2))), _mm256_cvtph_ps(_mm_loadu_si128(from.add(3)))],
            ]
        }
    }
    #[inline(always)]
    fn store_f16(self, [low, high]: [Avx2Lanes; 2], to: &mut [f16; UNIT]) {
        let to = to.as_mut_ptr().cast::<__m256i>();
        for (i, [low, high]) in [low, high].into_iter().enumerate() {
            // SAFETY: `self` shows that the machine has the instructions; both sixteens lie within the unit.
            unsafe {
                let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
                let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
                _mm256_storeu_si256(to.add(i), _mm256_set_m128i(high, low));
            }
        }
    }
    #[cfg(not(miri))]
    #[inline(always)]
    fn stream(self, _: &Streaming, from: &[u8; CACHE_LINE], to: &mut CacheLine) {
        let (from, to) = (from.as_ptr().cast::<__m256i>(), to.0.as_mut_ptr().cast::<__m256i>());
        // SAFETY: `self` shows that the machine has the instructions; both halves lie within the lines, and a line is where registers
        // may stand. `Streaming` orders the stores when it is dropped.
        unsafe {
            _mm256_stream_si256(to, _mm256_loadu_si256(from));
            _mm256_stream_si256(to.add(1), _mm256_loadu_si256(from.add(1)));
        }
    }
}

/// The upper half of each lane is the bf16 nearest to it, if it is a number.
///
/// # Safety
/// The machine must have AVX2.
#[inline(always)]
unsafe fn round_bf16(x: __m256) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let last = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last))
    }
}

/// `a·2^n`, for the `n` in the low bits of `integer`.
///
/// # Safety
/// The machine must have AVX2.
#[inline(always)]
unsafe fn scale(a: __m256, integer: __m256) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(integer));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent))
    }
}

/// Splits positive normal numbers into mantissas and exponents, as [`Simd::split`].
///
/// # Safety
/// The machine must have AVX2.
#[inline(always)]
unsafe fn split(x: __m256) -> (__m256, __m256) {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let above = _mm256_sub_epi32(bits, _mm256_set1_epi32(LEAST_MANTISSA.cast_signed()));
        let exponent = _mm256_srai_epi32::<23>(above);
        let mantissa = _mm256_sub_epi32(bits, _mm256_slli_epi32::<23>(exponent));
        (_mm256_castsi256_ps(mantissa), _mm256_cvtepi32_ps(exponent))
    }
}
