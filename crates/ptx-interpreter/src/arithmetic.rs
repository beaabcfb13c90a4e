//! The arithmetic of instructions that touch no memory, on the bits of their operands. Bits beyond a type's width are 0.

use half::{bf16, f16};

use super::ApproximateUnits;
use super::types::{FloatFormat, PtxType};

/// The result of an instruction as a function of the bits of up to three operands.
pub(super) type LaneFunction = Box<dyn Fn(u64, u64, u64) -> u64 + Send + Sync>;

/// An operation on floats whose exact result is rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundedOperation {
    Add,
    Sub,
    Mul,
    Fma,
}

/// A function of f32 that the manual allows an error: its `.approx` or `.full` form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ApproximateFunction {
    Ex2,
    Lg2,
    Rcp,
    Sqrt,
    Rsqrt,
    Tanh,
    /// `div.approx`, which the manual bounds for divisors within 2^±126.
    Div,
    DivFull,
}

/// The direction in which a value is rounded to fewer bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// The relation that `setp` tests between two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PtxComparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    /// Holds where neither operand is NaN (`num`).
    Ordered,
    /// Holds where an operand is NaN (`nan`).
    Unordered,
}

pub(super) fn mask(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
}

/// Reads the lower `bits` of `x` as a number in two's complement.
pub(super) fn signed(x: u64, bits: u32) -> i64 {
    ((x << (64 - bits)) as i64) >> (64 - bits)
}

/// Reads the bits of an integer register as the number that they mean in type `ty`.
pub(super) fn whole(ty: PtxType, x: u64) -> i128 {
    if ty.is_signed() { signed(x, ty.bits()).into() } else { (x & mask(ty.bits())).into() }
}

/// Returns the lower `bits` of a number in two's complement.
pub(super) fn wrapped(x: i128, bits: u32) -> u64 {
    x.cast_unsigned() as u64 & mask(bits)
}

/// Widens an `x` of type `ty` to a register of `bits` bits: signed integers by their sign, all else by zeros.
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

/// Returns the bits of an f32, every NaN as the manual's canonical one, `0x7FFFFFFF`.
fn bits_of(x: f32) -> u64 {
    if x.is_nan() { 0x7FFF_FFFF } else { x.to_bits().into() }
}

/// Replaces a subnormal number by zero of its sign.
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

/// Rounds to f32 by truncation and sets the last bit where bits were cut off, so that rounding the result to fewer bits
/// equals one rounding of `x` (round to odd).
fn odd(x: f64) -> f32 {
    // One step towards zero from the nearest f32 if that was rounded away from zero.
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() {
        return near;
    }
    let truncated = if f64::from(near).abs() > x.abs() { near.to_bits() - 1 } else { near.to_bits() };
    f32::from_bits(truncated | 1)
}

/// Adds in f64, rounding to odd: the last bit is set where the sum is inexact.
fn odd_sum(x: f64, y: f64) -> f64 {
    // The error of the sum, exact (Knuth's two-sum); its sign says on which side of `sum` the true value is.
    let sum = x + y;
    let back = sum - x;
    let error = (x - (sum - back)) + (y - back);
    if error == 0.0 || !error.is_finite() || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let further = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if further { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// Rounds `x` to the nearest number of `float`, ties to even, and returns its bits.
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

/// Rounds `x` to a number of `float` in the given direction, and returns its bits.
pub(super) fn rounded(float: FloatFormat, x: f64, rounding: Rounding) -> u64 {
    // Round to nearest, then take one step back if that went the wrong way.
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
    // Neighbouring floats of one sign have neighbouring bit patterns; zero is left by the smallest subnormal.
    let outwards = (rounding == Rounding::Down && x < 0.0) || (rounding == Rounding::Up && x > 0.0);
    let sign = 1 << (float.bits() - 1);
    match (outwards, near & !sign) {
        (true, 0) => 1 | if x < 0.0 { sign } else { 0 },
        (true, _) => near + 1,
        (false, _) => near - 1,
    }
}

/// Applies `operation` to floats of one format and rounds its exact result once; `c` is the addend of `fma`.
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
        // A product of two 16-bit floats is exact in f64. A sum need not be: it is rounded to odd, so that the rounding
        // to 16 bits gives what that of the exact sum would.
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

/// Divides a by b, rounded once: an f64 has more than twice the bits of the operands.
pub(super) fn quotient(float: FloatFormat, ftz: bool, a: u64, b: u64) -> u64 {
    let [a, b] = [a, b].map(|x| value(float, flushed_if(ftz, float, x)));
    flushed_if(ftz, float, nearest(float, a / b))
}

/// Clamps a float to [0, 1]; NaN becomes 0.
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

/// Returns the larger of two floats; +0 is larger than −0. The result is NaN if both are, or with `nan` if one is.
pub(super) fn larger(float: FloatFormat, ftz: bool, nan: bool, a: u64, b: u64) -> u64 {
    extreme(float, ftz, nan, a, b, |a, b| a > b, false)
}

/// Returns the smaller of two floats, with zeros and NaN as in [`larger`].
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
        // With .NaN one NaN is enough; without it a single NaN is ignored.
        (true, false) | (false, true) if nan => nearest(float, f64::NAN),
        (true, false) => b,
        (false, true) => a,
        // Equal numbers differ only as zeros, whose sign decides.
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

/// Returns −x, or |x| if `absolute`.
pub(super) fn signs(float: FloatFormat, ftz: bool, absolute: bool, x: u64) -> u64 {
    let sign = 1 << (float.bits() - 1);
    let x = flushed_if(ftz, float, x);
    if absolute { x & !sign } else { x ^ sign }
}

/// Lifts a function of one float to a type: itself for a single float, applied to both halves for a packed pair.
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
            // NaN has no order: the unordered relations hold for it.
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

/// Evaluates an approximate function of f32, off by the largest allowed error in the direction of `units`.
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
    // The manual's largest errors.
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

/// The largest error that the manual allows a result.
#[derive(Clone, Copy)]
enum LargestError {
    /// Units in the last place of the correctly rounded result.
    Ulps(i32),
    /// An absolute error.
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
            // Neighbouring floats have neighbouring bits: ulps are added to the bits of the magnitude.
            let magnitude = near.abs().to_bits().cast_signed();
            let moved = (magnitude + if sign > 0.0 { ulps } else { -ulps }).clamp(0, f32::MAX.to_bits().cast_signed());
            f32::from_bits(moved.cast_unsigned()).copysign(near)
        }
        LargestError::By(error) if error.is_finite() && error > 0.0 => {
            let moved = exact + sign * error.copysign(exact);
            let rounded = moved as f32;
            // Rounding to f32 must not exceed the allowed error.
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

/// Selects bytes of b:a by the nibbles of the selector (`prmt`); a nibble's highest bit replicates the byte's sign.
pub(super) fn permuted(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = a & mask(32) | b << 32;
    (0..4).fold(0, |result, i| {
        let nibble = selector >> (4 * i) & 0xF;
        let byte = bytes >> (8 * (nibble & 7)) & 0xFF;
        let byte = if nibble & 8 == 0 { byte } else { 0xFF * (byte >> 7) };
        result | byte << (8 * i)
    })
}

/// Evaluates the bitwise function of three operands whose truth table is `table` (`lop3`).
pub(super) fn looked_up(table: u64, a: u64, b: u64, c: u64) -> u64 {
    (0..8).filter(|row| table >> row & 1 == 1).fold(0, |result, row| {
        let pick = |x: u64, bit: u64| if row >> bit & 1 == 1 { x } else { !x };
        result | pick(a, 2) & pick(b, 1) & pick(c, 0)
    }) & mask(32)
}

/// Shifts x; an amount beyond the width gives 0, or a signed number's sign in every bit.
pub(super) fn shifted(ty: PtxType, left: bool, x: u64, by: u64) -> u64 {
    let bits = ty.bits();
    // Amounts are unsigned and are not taken modulo the width, unlike in C.
    let by = by & mask(32);
    match (left, ty.is_signed()) {
        (true, _) | (_, false) if by >= bits.into() => 0,
        (true, _) => x << by & mask(bits),
        (false, true) => (signed(x, bits) >> by.min(63)).cast_unsigned() & mask(bits),
        (false, false) => x >> by,
    }
}

/// Extracts `length` bits of `x` from bit `start` on (`bfe`), extended by the field's sign if `ty` is signed.
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

/// Inserts the lowest `length` bits of `x` into `y` from bit `start` on (`bfi`).
pub(super) fn inserted(bits: u32, x: u64, y: u64, start: u64, length: u64) -> u64 {
    let (start, length) = (start & 0xFF, length & 0xFF);
    if start >= bits.into() {
        return y;
    }
    let field = mask(length as u32) << start & mask(bits);
    y & !field | x << start & field
}

/// Returns the conversion of a `from` to a `to` (`cvt`), or None where PTX has no such conversion. With `integral` the value
/// is rounded to a whole number of the same type.
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
                // Floats beyond the integer's range saturate, with `.sat` and without. A NaN becomes 2^63 in 64 bits,
                // and 0 in fewer.
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
