//! AVX-512: one register a vector.

#[allow(clippy::wildcard_imports, reason = "intrinsics")]
use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{CACHE_LINE, CacheLine, LANES, LEAST_MANTISSA, Simd, SimdTask, Streaming, UNIT, by_halves};

/// Shows that the machine has AVX-512F and BW: only [`run`] makes one.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
}

/// # Safety
/// The machine must have AVX-512F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn run<W: SimdTask>(work: W) -> W::Output {
    work.on(Avx512(()))
}

/// Applies an intrinsic to the register.
macro_rules! each {
    ($intrinsic:ident $(, $x:ident)*) => {
        // SAFETY: `self` shows that the machine has the instruction.
        unsafe { $intrinsic($($x),*) }
    };
}

impl Simd for Avx512 {
    type Lanes = __m512;
    type Sums = __m512d;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` shows that the machine has the instruction.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        // SAFETY: `self` shows that the machine has the instruction; sixteen lanes are all there is.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, x: __m512, to: &mut [f32; LANES]) {
        // SAFETY: `self` shows that the machine has the instruction; sixteen lanes fill the array.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) };
    }
    instructions! {
        __m512;
        add(a, b) = _mm512_add_ps;
        sub(a, b) = _mm512_sub_ps;
        mul(a, b) = _mm512_mul_ps;
        mul_add(a, b, c) = _mm512_fmadd_ps;
        mul_sub(a, b, c) = _mm512_fmsub_ps;
        div(a, b) = _mm512_div_ps;
        max(a, b) = _mm512_max_ps;
        min(a, b) = _mm512_min_ps;
    }
    #[inline(always)]
    fn at_least(self, x: __m512, bound: __m512) -> __m512 {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, bound), x) }
    }
    #[inline(always)]
    fn high_product_at_least(self, x: __m512, bound: __m512, factor: __m512, split: __m512) -> __m512 {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe {
            let there = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, bound);
            let large = _mm512_maskz_mul_ps(there, x, split);
            _mm512_add_ps(_mm512_maskz_fmsub_ps(there, x, factor, large), large)
        }
    }
    #[inline(always)]
    fn either(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` shows that the machine has the instruction.
        unsafe {
            let [a, b, c] = [_mm512_castps_si512(a), _mm512_castps_si512(b), _mm512_castps_si512(c)];
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0b1111_1110>(a, b, c))
        }
    }
    #[inline(always)]
    fn larger_bits(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` shows that the machine has the instruction.
        unsafe { _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b))) }
    }
    #[inline(always)]
    fn any_set(self, bits: __m512, mask: u32) -> bool {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe { _mm512_test_epi32_mask(_mm512_castps_si512(bits), _mm512_set1_epi32(mask.cast_signed())) != 0 }
    }

    #[inline(always)]
    fn scale(self, a: __m512, n: __m512, _: __m512) -> __m512 {
        // SAFETY: `self` shows that the machine has the instruction.
        unsafe { _mm512_scalef_ps(a, n) }
    }
    #[inline(always)]
    fn split(self, x: __m512) -> [__m512; 2] {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe {
            let bits = _mm512_castps_si512(x);
            let above = _mm512_sub_epi32(bits, _mm512_set1_epi32(LEAST_MANTISSA.cast_signed()));
            let exponent = _mm512_srai_epi32::<23>(above);
            let mantissa = _mm512_sub_epi32(bits, _mm512_slli_epi32::<23>(exponent));
            [_mm512_castsi512_ps(mantissa), _mm512_cvtepi32_ps(exponent)]
        }
    }

    #[inline(always)]
    fn sums(self) -> __m512d {
        // SAFETY: `self` shows that the machine has the instruction.
        unsafe { _mm512_setzero_pd() }
    }
    #[inline(always)]
    fn accumulate(self, sums: __m512d, x: __m512) -> __m512d {
        // SAFETY: `self` shows that the machine has the instructions.
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x)));
            let halves = _mm256_add_ps(_mm512_castps512_ps256(x), high);
            _mm512_add_pd(sums, _mm512_cvtps_pd(halves))
        }
    }
    #[inline(always)]
    fn total(self, sums: __m512d) -> f64 {
        let mut array = [0.0; 8];
        // SAFETY: `self` shows that the machine has the instruction; eight lanes fill the array.
        unsafe { _mm512_storeu_pd(array.as_mut_ptr(), sums) };
        by_halves(array)
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; UNIT]) -> [__m512; 2] {
        // SAFETY: `self` shows that the machine has the instructions; a unit fills the register.
        unsafe {
            let pairs = _mm512_loadu_si512(from.as_ptr().cast());
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(-0x1_0000));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd)]
        }
    }
    #[inline(always)]
    fn store_bf16(self, [even, odd]: [__m512; 2], to: &mut [bf16; UNIT]) {
        // SAFETY: `self` shows that the machine has the instructions.
        let rounded = unsafe { [round_bf16(even), round_bf16(odd)] };
        self.truncate_bf16(rounded, to);
    }
    #[inline(always)]
    fn truncate_bf16(self, [even, odd]: [__m512; 2], to: &mut [bf16; UNIT]) {
        // SAFETY: `self` shows that the machine has the instructions; a unit takes the whole register.
        unsafe {
            let even = _mm512_srli_epi32::<16>(_mm512_castps_si512(even));
            let (odd, upper) = (_mm512_castps_si512(odd), _mm512_set1_epi32(-0x1_0000));
            // even | odd & upper
            let pairs = _mm512_ternarylogic_epi32::<0b1111_1000>(even, odd, upper);
            _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs);
        }
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; UNIT]) -> [__m512; 2] {
        let from = from.as_ptr().cast::<__m256i>();
        // SAFETY: `self` shows that the machine has the instructions; both sixteens lie within the unit.
        unsafe { [_mm512_cvtph_ps(_mm256_loadu_si256(from)), _mm512_cvtph_ps(_mm256_loadu_si256(from.add(1)))] }
    }
    #[inline(always)]
    fn store_f16(self, [low, high]: [__m512; 2], to: &mut [f16; UNIT]) {
        // SAFETY: `self` shows that the machine has the instructions; a unit takes the whole register.
        unsafe {
            let low = _mm512_castsi256_si512(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low));
            let high = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
            _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_inserti64x4::<1>(low, high));
        }
    }
    #[cfg(not(miri))]
    #[inline(always)]
    fn stream(self, _: &Streaming, from: &[u8; CACHE_LINE], to: &mut CacheLine) {
        // SAFETY: `self` shows that the machine has the instructions; a line is where a register may stand, and fills it. `Streaming`
        // orders the stores when it is dropped.
        unsafe { _mm512_stream_si512(to.0.as_mut_ptr().cast(), _mm512_loadu_si512(from.as_ptr().cast())) };
    }
}

/// The upper half of each lane is the bf16 nearest to it, if it is a number.
///
/// # Safety
/// The machine must have AVX-512F.
#[inline(always)]
unsafe fn round_bf16(x: __m512) -> __m512 {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x1_0000));
        let even = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
        _mm512_castsi512_ps(_mm512_mask_add_epi32(even, odd, bits, _mm512_set1_epi32(0x8000)))
    }
}
