//! What instructions without memory make of the bits of their operands. Bits beyond a type's width are 0.

use half::{bf16, f16};

use super::ApproximateUnits;
use super::types::{FloatFormat, PtxType};

/// What an instruction makes of up to three operands.
pub(super) type LaneFunction = Box<dyn Fn(u64, u64, u64) -> u64 + Send + Sync>;

/// An operation that rounds once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundedOperation {
    Add,
    Sub,
    Mul,
    Fma,
}

/// A function that the manual gives an error for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ApproximateFunction {
    Ex2,
    Lg2,
    Rcp,
    Sqrt,
    Rsqrt,
    Tanh,
    /// Of a divisor within 2^±126.
    Div,
    DivFull,
}

/// How a value becomes one of fewer bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PtxComparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    /// Neither is NaN.
    Ordered,
    /// One is NaN.
    Unordered,
}

pub(super) fn mask(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
}

/// The lower `bits` of `x` as a signed number.
pub(super) fn signed(x: u64, bits: u32) -> i64 {
    ((x << (64 - bits)) as i64) >> (64 - bits)
}

/// The number that an integer of type `ty` stands for.
pub(super) fn whole(ty: PtxType, x: u64) -> i128 {
    if ty.is_signed() { signed(x, ty.bits()).into() } else { (x & mask(ty.bits())).into() }
}

/// The lower `bits` of a number.
pub(super) fn wrapped(x: i128, bits: u32) -> u64 {
    x.cast_unsigned() as u64 & mask(bits)
}

/// What a register of `bits` holds of an `x` of type `ty`: signed integers are extended by their sign.
pub(super) fn widened(ty: PtxType, x: u64, bits: u32) -> u64 {
    if ty.is_signed() && bits > ty.bits() {
        signed(x, ty.bits()).cast_unsigned() & mask(bits)
    } else {
        x & mask(ty.bits())
    }
}

fn single(x: u64) -> f32 {
    f32::from_bits(x as u32)
}

/// Bits of f32, NaN as the manual has it.
fn bits_of(x: f32) -> u64 {
    if x.is_nan() { 0x7FFF_FFFF } else { x.to_bits().into() }
}

/// Zero of the same sign where `x` is subnormal.
fn flushed(float: FloatFormat, x: u64) -> u64 {
    let (exponent, sign) = match float {
        FloatFormat::F16 => (0x7C00, 0x8000),
        FloatFormat::Bf16 => (0x7F80, 0x8000),
        FloatFormat::F32 => (0x7F80_0000, 0x8000_0000),
    };
    if x & exponent == 0 { x & sign } else { x }
}

fn flushed_if(ftz: bool, float: FloatFormat, x: u64) -> u64 {
    if ftz { flushed(float, x) } else { x }
}

pub(super) fn value(float: FloatFormat, x: u64) -> f64 {
    match float {
        FloatFormat::F16 => f16::from_bits(x as u16).to_f64(),
        FloatFormat::Bf16 => bf16::from_bits(x as u16).to_f64(),
        FloatFormat::F32 => single(x).into(),
    }
}

/// f32 by truncation, its last bit set where something was cut off: what is rounded to fewer bits from it is rounded once.
fn odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() {
        return near;
    }
    let truncated = if f64::from(near).abs() > x.abs() { near.to_bits() - 1 } else { near.to_bits() };
    f32::from_bits(truncated | 1)
}

/// x + y with the last bit set where something was cut off.
fn odd_sum(x: f64, y: f64) -> f64 {
    let sum = x + y;
    let back = sum - x;
    let error = (x - (sum - back)) + (y - back);
    if error == 0.0 || !error.is_finite() || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let further = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if further { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// The bits of `x` in `float`, ties to even.
fn nearest(float: FloatFormat, x: f64) -> u64 {
    if x.is_nan() {
        return if float == FloatFormat::F32 { 0x7FFF_FFFF } else { 0x7FFF };
    }
    match float {
        FloatFormat::F16 => f16::from_f32(odd(x)).to_bits().into(),
        FloatFormat::Bf16 => bf16::from_f32(odd(x)).to_bits().into(),
        FloatFormat::F32 => u64::from((x as f32).to_bits()),
    }
}

/// The bits of `x` in `float`.
pub(super) fn rounded(float: FloatFormat, x: f64, rounding: Rounding) -> u64 {
    let near = nearest(float, x);
    let of_near = value(float, near);
    let step = match rounding {
        Rounding::Nearest => false,
        Rounding::Zero => of_near.abs() > x.abs(),
        Rounding::Down => of_near > x,
        Rounding::Up => of_near < x,
    };
    if !step {
        return near;
    }
    let outwards = (rounding == Rounding::Down && x < 0.0) || (rounding == Rounding::Up && x > 0.0);
    let sign = 1 << (float.bits() - 1);
    match (outwards, near & !sign) {
        (true, 0) => 1 | if x < 0.0 { sign } else { 0 },
        (true, _) => near + 1,
        (false, _) => near - 1,
    }
}

/// `operation` on one float.
pub(super) fn round_once(float: FloatFormat, operation: RoundedOperation, ftz: bool, a: u64, b: u64, c: u64) -> u64 {
    let [a, b, c] = [a, b, c].map(|x| flushed_if(ftz, float, x));
    let result = if float == FloatFormat::F32 {
        let (a, b, c) = (single(a), single(b), single(c));
        bits_of(match operation {
            RoundedOperation::Add => a + b,
            RoundedOperation::Sub => a - b,
            RoundedOperation::Mul => a * b,
            RoundedOperation::Fma => a.mul_add(b, c),
        })
    } else {
        let (a, b, c) = (value(float, a), value(float, b), value(float, c));
        nearest(
            float,
            match operation {
                RoundedOperation::Add => odd_sum(a, b),
                RoundedOperation::Sub => odd_sum(a, -b),
                RoundedOperation::Mul => a * b,
                RoundedOperation::Fma => odd_sum(a * b, c),
            },
        )
    };
    flushed_if(ftz, float, result)
}

/// a / b, rounded once: f64 has more than twice the bits.
pub(super) fn quotient(float: FloatFormat, ftz: bool, a: u64, b: u64) -> u64 {
    let [a, b] = [a, b].map(|x| value(float, flushed_if(ftz, float, x)));
    flushed_if(ftz, float, nearest(float, a / b))
}

/// A float within [0, 1], NaN as 0.
pub(super) fn saturated(float: FloatFormat, x: u64) -> u64 {
    let value = value(float, x);
    if value >= 1.0 {
        nearest(float, 1.0)
    } else if value > 0.0 {
        x
    } else {
        0
    }
}

/// The larger of two floats; +0 is larger than −0. NaN where both are, or with `nan` where one is.
pub(super) fn larger(float: FloatFormat, ftz: bool, nan: bool, a: u64, b: u64) -> u64 {
    extreme(float, ftz, nan, a, b, |a, b| a > b, false)
}

/// The smaller of two floats, as [`larger`].
pub(super) fn smaller(float: FloatFormat, ftz: bool, nan: bool, a: u64, b: u64) -> u64 {
    extreme(float, ftz, nan, a, b, |a, b| a < b, true)
}

fn extreme(
    float: FloatFormat,
    ftz: bool,
    nan: bool,
    a: u64,
    b: u64,
    wins: fn(f64, f64) -> bool,
    negative: bool,
) -> u64 {
    let [a, b] = [a, b].map(|x| flushed_if(ftz, float, x));
    let (x, y) = (value(float, a), value(float, b));
    match (x.is_nan(), y.is_nan()) {
        (true, true) => nearest(float, f64::NAN),
        (true, false) | (false, true) if nan => nearest(float, f64::NAN),
        (true, false) => b,
        (false, true) => a,
        // Of zeros, the sign decides.
        (false, false) if x == y => {
            if x.is_sign_negative() == negative {
                a
            } else {
                b
            }
        }
        (false, false) => {
            if wins(x, y) {
                a
            } else {
                b
            }
        }
    }
}

/// −x, or |x| where `absolute`.
pub(super) fn signs(float: FloatFormat, ftz: bool, absolute: bool, x: u64) -> u64 {
    let sign = 1 << (float.bits() - 1);
    let x = flushed_if(ftz, float, x);
    if absolute { x & !sign } else { x ^ sign }
}

/// `function` of one element, for a type of one or two.
pub(super) fn elementwise(
    ty: PtxType,
    function: impl Fn(FloatFormat, u64, u64, u64) -> u64 + Send + Sync + 'static,
) -> LaneFunction {
    match ty {
        PtxType::Two(float) => {
            let bits = float.bits();
            let part = move |x: u64, i: u32| x >> (i * bits) & mask(bits);
            Box::new(move |a, b, c| {
                let of = |i| function(float, part(a, i), part(b, i), part(c, i));
                of(0) | of(1) << bits
            })
        }
        PtxType::Float(float) => Box::new(move |a, b, c| function(float, a, b, c)),
        _ => unreachable!("decoded: an instruction on floats"),
    }
}

pub(super) fn compares(ty: PtxType, comparison: PtxComparison, unordered: bool, ftz: bool, a: u64, b: u64) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let order = match ty {
        PtxType::Float(float) => {
            let [a, b] = [a, b].map(|x| value(float, flushed_if(ftz, float, x)));
            a.partial_cmp(&b)
        }
        _ => Some(whole(ty, a).cmp(&whole(ty, b))),
    };
    let Some(order) = order else {
        return unordered || comparison == PtxComparison::Unordered;
    };
    match comparison {
        PtxComparison::Equal => order == Equal,
        PtxComparison::NotEqual => order != Equal,
        PtxComparison::Less => order == Less,
        PtxComparison::LessOrEqual => order != Greater,
        PtxComparison::Greater => order == Greater,
        PtxComparison::GreaterOrEqual => order != Less,
        PtxComparison::Ordered => true,
        PtxComparison::Unordered => false,
    }
}

/// An approximate function of f32, by `units`.
pub(super) fn approximate(function: ApproximateFunction, units: ApproximateUnits, ftz: bool, a: u64, b: u64) -> u64 {
    let [a, b] = [a, b].map(|x| f64::from(single(flushed_if(ftz, FloatFormat::F32, x))));
    let exact = match function {
        ApproximateFunction::Ex2 => a.exp2(),
        ApproximateFunction::Lg2 => a.log2(),
        ApproximateFunction::Rcp => 1.0 / a,
        ApproximateFunction::Sqrt => a.sqrt(),
        ApproximateFunction::Rsqrt => 1.0 / a.sqrt(),
        ApproximateFunction::Tanh => a.tanh(),
        // Beyond 2^126 the quotient is that of a reciprocal that is 0.
        ApproximateFunction::Div if b.is_finite() && b.abs() > 126_f64.exp2() => {
            a * f64::from(0_f32.copysign(b as f32))
        }
        ApproximateFunction::Div | ApproximateFunction::DivFull => a / b,
    };
    let off = match function {
        ApproximateFunction::Ex2 | ApproximateFunction::Div | ApproximateFunction::DivFull => LargestError::Ulps(2),
        ApproximateFunction::Rcp => LargestError::Ulps(1),
        ApproximateFunction::Lg2 if 0.5 < a && a < 2.0 => LargestError::By((-22_f64).exp2()),
        ApproximateFunction::Lg2 => LargestError::By(exact.abs() * (-22_f64).exp2()),
        ApproximateFunction::Sqrt => LargestError::By(exact * (-23_f64).exp2()),
        ApproximateFunction::Rsqrt => LargestError::By(exact * (-22.9_f64).exp2()),
        ApproximateFunction::Tanh => LargestError::By(exact.abs() * (-11_f64).exp2()),
    };
    flushed_if(ftz, FloatFormat::F32, bits_of(off_by(exact, off, units)))
}

/// The largest error of a result.
#[derive(Clone, Copy)]
enum LargestError {
    /// ApproximateUnits in the last place of the right result.
    Ulps(i32),
    By(f64),
}

fn off_by(exact: f64, off: LargestError, units: ApproximateUnits) -> f32 {
    let near = exact as f32;
    let sign = match units {
        ApproximateUnits::Rounded => return near,
        ApproximateUnits::Above => 1.0,
        ApproximateUnits::Below => -1.0,
    };
    match off {
        LargestError::Ulps(ulps) if near.is_finite() && near != 0.0 => {
            let magnitude = near.abs().to_bits().cast_signed();
            let moved = (magnitude + if sign > 0.0 { ulps } else { -ulps }).clamp(0, f32::MAX.to_bits().cast_signed());
            f32::from_bits(moved.cast_unsigned()).copysign(near)
        }
        LargestError::By(error) if error.is_finite() && error > 0.0 => {
            let moved = exact + sign * error.copysign(exact);
            let rounded = moved as f32;
            // Not beyond the error by rounding.
            if (f64::from(rounded) - exact).abs() <= error {
                rounded
            } else if f64::from(rounded) > exact {
                rounded.next_down()
            } else {
                rounded.next_up()
            }
        }
        _ => near,
    }
}

/// Selects bytes of b:a by the nibbles of the selector; a nibble's highest bit spreads the byte's sign.
pub(super) fn permuted(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = a & mask(32) | b << 32;
    (0..4).fold(0, |result, i| {
        let nibble = selector >> (4 * i) & 0xF;
        let byte = bytes >> (8 * (nibble & 7)) & 0xFF;
        let byte = if nibble & 8 == 0 { byte } else { 0xFF * (byte >> 7) };
        result | byte << (8 * i)
    })
}

/// The bitwise function of three operands whose truth table is `table`.
pub(super) fn looked_up(table: u64, a: u64, b: u64, c: u64) -> u64 {
    (0..8).filter(|row| table >> row & 1 == 1).fold(0, |result, row| {
        let pick = |x: u64, bit: u64| if row >> bit & 1 == 1 { x } else { !x };
        result | pick(a, 2) & pick(b, 1) & pick(c, 0)
    }) & mask(32)
}

/// x shifted: amounts beyond the width clear it, or spread its sign.
pub(super) fn shifted(ty: PtxType, left: bool, x: u64, by: u64) -> u64 {
    let bits = ty.bits();
    let by = by & mask(32);
    match (left, ty.is_signed()) {
        (true, _) | (_, false) if by >= bits.into() => 0,
        (true, _) => x << by & mask(bits),
        (false, true) => (signed(x, bits) >> by.min(63)).cast_unsigned() & mask(bits),
        (false, false) => x >> by,
    }
}

/// `length` bits of `x` from `start` on, extended by the field's sign where `ty` is signed.
pub(super) fn extracted(ty: PtxType, x: u64, start: u64, length: u64) -> u64 {
    let bits = u64::from(ty.bits());
    let (start, length) = (start & 0xFF, length & 0xFF);
    let negative = ty.is_signed() && length > 0 && {
        let last = (start + length - 1).min(bits - 1);
        x >> last & 1 == 1
    };
    let field = if start < bits { x >> start & mask(length as u32) } else { 0 };
    let held = length.min(bits.saturating_sub(start));
    let filled = if negative && held < bits { field | mask(ty.bits()) << held } else { field };
    filled & mask(ty.bits())
}

/// `y` with `length` bits from `start` on taken from the lowest bits of `x`.
pub(super) fn inserted(bits: u32, x: u64, y: u64, start: u64, length: u64) -> u64 {
    let (start, length) = (start & 0xFF, length & 0xFF);
    if start >= bits.into() {
        return y;
    }
    let field = mask(length as u32) << start & mask(bits);
    y & !field | x << start & field
}

/// What `from` holds, as a `to`; None where there is no such conversion. `integral` rounds to a whole number first.
pub(super) fn conversion(
    to: PtxType,
    from: PtxType,
    rounding: Option<Rounding>,
    integral: bool,
    ftz: bool,
    saturate: bool,
) -> Option<LaneFunction> {
    let clamped = move |ty: PtxType, x: i128| {
        let bits = ty.bits();
        let (low, high) =
            if ty.is_signed() { (-(1_i128 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1_i128 << bits) - 1) };
        wrapped(x.clamp(low, high), bits)
    };
    let whole_of = move |x: f64| match rounding {
        Some(Rounding::Nearest) => x.round_ties_even(),
        Some(Rounding::Zero) => x.trunc(),
        Some(Rounding::Down) => x.floor(),
        Some(Rounding::Up) => x.ceil(),
        None => x,
    };
    match (to, from) {
        (to, from) if to.is_integer() && from.is_integer() => (rounding.is_none() && !ftz).then(|| -> LaneFunction {
            Box::new(move |x, _, _| {
                let x = whole(from, x);
                if saturate { clamped(to, x) } else { wrapped(x, to.bits()) }
            })
        }),
        (to, PtxType::Float(from)) if to.is_integer() => (rounding.is_some() && integral).then(|| -> LaneFunction {
            Box::new(move |x, _, _| {
                let x = value(from, flushed_if(ftz, from, x & mask(from.bits())));
                if x.is_nan() { if to.bits() == 64 { 1 << 63 } else { 0 } } else { clamped(to, whole_of(x) as i128) }
            })
        }),
        (PtxType::Float(to), from) if from.is_integer() => {
            let rounding = rounding.filter(|_| !integral && !ftz && (from.bits() < 64 || to == FloatFormat::F32))?;
            Some(Box::new(move |x, _, _| {
                let x = whole(from, x);
                // 64 bits do not fit into f64: the last bit says that something was cut off.
                let cut = 128 - x.unsigned_abs().leading_zeros();
                let cut = cut.saturating_sub(50);
                let (head, tail) = (x.unsigned_abs() >> cut, x.unsigned_abs() & ((1 << cut) - 1));
                let odd = (head | u128::from(tail != 0)) as f64 * f64::from(cut).exp2();
                let result = rounded(to, if x < 0 { -odd } else { odd }, rounding);
                if saturate { saturated(to, result) } else { result }
            }))
        }
        (PtxType::Float(to), PtxType::Float(from)) => {
            let narrows = to != from && to != FloatFormat::F32;
            let fits = match rounding {
                None => !narrows,
                Some(_) => (integral && to == from) || (!integral && narrows),
            };
            let ftz_fits = !ftz || to == FloatFormat::F32 || from == FloatFormat::F32;
            (fits && ftz_fits).then(|| -> LaneFunction {
                Box::new(move |x, _, _| {
                    // Only f32 is flushed.
                    let flush = |float, x| flushed_if(ftz && float == FloatFormat::F32, float, x);
                    let x = value(from, flush(from, x & mask(from.bits())));
                    let result = match rounding {
                        Some(rounding) if !integral => rounded(to, x, rounding),
                        _ => nearest(to, whole_of(x)),
                    };
                    let result = flush(to, result);
                    if saturate { saturated(to, result) } else { result }
                })
            })
        }
        _ => None,
    }
}
