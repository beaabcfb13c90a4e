//! Arrays of sixteen lanes, for any machine: the vector units must give the same bits. On a target without a fused
//! product and sum each of these is a call.

use std::array::from_fn;

use half::{bf16, f16};

use super::{LANES, LEAST_MANTISSA, Simd, UNIT, by_halves};

#[derive(Clone, Copy)]
pub(super) struct Portable;

type PortableLanes = [f32; 16];

impl Simd for Portable {
    type Lanes = PortableLanes;
    type Sums = [f64; 8];

    #[inline(always)]
    fn splat(self, x: f32) -> PortableLanes {
        [x; 16]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> PortableLanes {
        *from
    }
    #[inline(always)]
    fn store(self, x: PortableLanes, to: &mut [f32; LANES]) {
        *to = x;
    }
    #[inline(always)]
    fn add(self, a: PortableLanes, b: PortableLanes) -> PortableLanes {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: PortableLanes, b: PortableLanes) -> PortableLanes {
        from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: PortableLanes, b: PortableLanes) -> PortableLanes {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn mul_add(self, a: PortableLanes, b: PortableLanes, c: PortableLanes) -> PortableLanes {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn mul_sub(self, a: PortableLanes, b: PortableLanes, c: PortableLanes) -> PortableLanes {
        from_fn(|i| a[i].mul_add(b[i], -c[i]))
    }
    #[inline(always)]
    fn div(self, a: PortableLanes, b: PortableLanes) -> PortableLanes {
        from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn max(self, a: PortableLanes, b: PortableLanes) -> PortableLanes {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: PortableLanes, b: PortableLanes) -> PortableLanes {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn at_least(self, x: PortableLanes, bound: PortableLanes) -> PortableLanes {
        from_fn(|i| if x[i] >= bound[i] { x[i] } else { 0.0 })
    }
    #[inline(always)]
    fn either(self, a: PortableLanes, b: PortableLanes, c: PortableLanes) -> PortableLanes {
        from_fn(|i| f32::from_bits(a[i].to_bits() | b[i].to_bits() | c[i].to_bits()))
    }
    #[inline(always)]
    fn larger_bits(self, a: PortableLanes, b: PortableLanes) -> PortableLanes {
        from_fn(|i| f32::from_bits(a[i].to_bits().max(b[i].to_bits())))
    }
    #[inline(always)]
    fn any_set(self, bits: PortableLanes, mask: u32) -> bool {
        bits.iter().any(|x| x.to_bits() & mask != 0)
    }
    #[inline(always)]
    fn scale(self, a: PortableLanes, _: PortableLanes, integer: PortableLanes) -> PortableLanes {
        from_fn(|i| f32::from_bits(a[i].to_bits().wrapping_add(integer[i].to_bits() << 23)))
    }
    #[inline(always)]
    fn split(self, x: PortableLanes) -> [PortableLanes; 2] {
        let exponents: [i32; LANES] = x.map(|x| x.to_bits().wrapping_sub(LEAST_MANTISSA).cast_signed() >> 23);
        let mantissa = |i: usize| x[i].to_bits().wrapping_sub(exponents[i].cast_unsigned() << 23);
        [from_fn(|i| f32::from_bits(mantissa(i))), exponents.map(|n| n as f32)]
    }

    #[inline(always)]
    fn sums(self) -> [f64; 8] {
        [0.0; 8]
    }
    #[inline(always)]
    fn accumulate(self, sums: [f64; 8], x: PortableLanes) -> [f64; 8] {
        from_fn(|i| sums[i] + f64::from(x[i] + x[i + 8]))
    }
    #[inline(always)]
    fn total(self, sums: [f64; 8]) -> f64 {
        by_halves(sums)
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; UNIT]) -> [PortableLanes; 2] {
        [from_fn(|i| from[2 * i].to_f32()), from_fn(|i| from[2 * i + 1].to_f32())]
    }
    #[inline(always)]
    fn store_bf16(self, x: [PortableLanes; 2], to: &mut [bf16; UNIT]) {
        *to = from_fn(|j| bf16::from_f32(x[j % 2][j / 2]));
    }
    #[inline(always)]
    fn truncate_bf16(self, x: [PortableLanes; 2], to: &mut [bf16; UNIT]) {
        *to = from_fn(|j| bf16::from_bits((x[j % 2][j / 2].to_bits() >> 16) as u16));
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; UNIT]) -> [PortableLanes; 2] {
        [from_fn(|i| from[i].to_f32()), from_fn(|i| from[16 + i].to_f32())]
    }
    #[inline(always)]
    fn store_f16(self, [low, high]: [PortableLanes; 2], to: &mut [f16; UNIT]) {
        *to = from_fn(|j| f16::from_f32(if j < 16 { low[j] } else { high[j - 16] }));
    }
}
