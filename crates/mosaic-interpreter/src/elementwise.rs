//! Functions of the element-by-element operations, each on one element at a time.
//!
//! Floats narrower than f32 compute in f32; the caller rounds the result to the type. Integers may give bits beyond
//! their width; the caller drops them.

use super::value::{ElementBuffer, ElementKind};

/// Result of an integer operation, or the reason why it is undefined.
type Integer = Result<i32, &'static str>;

/// An operation whose operands and result have one type.
#[derive(Clone, Copy)]
pub(super) enum Elementwise {
    FloatUnary(fn(f32) -> f32),
    FloatBinary(fn(f32, f32) -> f32),
    /// A function of two integers or indices.
    IntBinary(fn(ElementKind, i32, i32) -> Integer),
    /// A function of the bits of two integers or truth values.
    Bitwise(fn(i32, i32) -> i32),
}

/// Returns the function of an element-by-element operation, or `None` for any other.
pub(super) fn elementwise(name: &str) -> Option<Elementwise> {
    use Elementwise::{Bitwise, FloatBinary, FloatUnary, IntBinary};
    // Floats are computed in f32, and the caller rounds them to the result's kind; integers are sign-extended to i32,
    // and the caller wraps them.
    Some(match name {
        "arith.negf" => FloatUnary(|x| -x),
        "math.absf" => FloatUnary(f32::abs),
        "math.exp" => FloatUnary(f32::exp),
        "math.exp2" => FloatUnary(f32::exp2),
        "math.log" => FloatUnary(f32::ln),
        "math.log2" => FloatUnary(f32::log2),
        "arith.addf" => FloatBinary(|x, y| x + y),
        "arith.subf" => FloatBinary(|x, y| x - y),
        "arith.mulf" => FloatBinary(|x, y| x * y),
        "arith.divf" => FloatBinary(|x, y| x / y),
        "arith.maximumf" => FloatBinary(maximum),
        "arith.minimumf" => FloatBinary(minimum),
        "arith.addi" => IntBinary(|_, x, y| Ok(x.wrapping_add(y))),
        "arith.subi" => IntBinary(|_, x, y| Ok(x.wrapping_sub(y))),
        "arith.muli" => IntBinary(|_, x, y| Ok(x.wrapping_mul(y))),
        "arith.divsi" => IntBinary(|kind, x, y| {
            // The quotient of the least number of a kind by −1 is beyond that kind, not only in i32.
            let quotient = x.checked_div(y).ok_or("a division by zero, or one that overflows")?;
            if kind.wrap(quotient) == quotient { Ok(quotient) } else { Err("a division that overflows") }
        }),
        "arith.remsi" => IntBinary(|_, x, y| if y == 0 { Err("a division by zero") } else { Ok(x.wrapping_rem(y)) }),
        "arith.minsi" => IntBinary(|_, x, y| Ok(x.min(y))),
        "arith.maxsi" => IntBinary(|_, x, y| Ok(x.max(y))),
        "arith.shli" => IntBinary(|kind, x, y| Ok(x << shift(kind, y)?)),
        "arith.shrsi" => IntBinary(|kind, x, y| Ok(x >> shift(kind, y)?)),
        "arith.shrui" => IntBinary(|kind, x, y| Ok((kind.unsigned(x) >> shift(kind, y)?) as i32)),
        "arith.andi" => Bitwise(|x, y| x & y),
        "arith.ori" => Bitwise(|x, y| x | y),
        "arith.xori" => Bitwise(|x, y| x ^ y),
        _ => return None,
    })
}

fn shift(kind: ElementKind, by: i32) -> Result<u32, &'static str> {
    u32::try_from(by).ok().filter(|&by| by < kind.bits()).ok_or("a shift by more bits than there are")
}

/// Returns the larger number, NaN if either operand is, and +0 for zeros of different sign.
pub(super) fn maximum(x: f32, y: f32) -> f32 {
    if x == y {
        f32::from_bits(x.to_bits() & y.to_bits())
    } else if x.is_nan() || y.is_nan() {
        f32::NAN
    } else {
        x.max(y)
    }
}

/// Returns the smaller number, NaN if either operand is, and −0 for zeros of different sign.
pub(super) fn minimum(x: f32, y: f32) -> f32 {
    if x == y {
        f32::from_bits(x.to_bits() | y.to_bits())
    } else if x.is_nan() || y.is_nan() {
        f32::NAN
    } else {
        x.min(y)
    }
}

/// Returns the comparison with this number in `arith.cmpi`. Sign extension keeps the order of unsigned integers.
pub(super) fn compare_int(predicate: i64) -> Option<fn(i32, i32) -> bool> {
    Some(match predicate {
        0 => |x, y| x == y,
        1 => |x, y| x != y,
        2 => |x, y| x < y,
        3 => |x, y| x <= y,
        4 => |x, y| x > y,
        5 => |x, y| x >= y,
        6 => |x, y| x.cast_unsigned() < y.cast_unsigned(),
        7 => |x, y| x.cast_unsigned() <= y.cast_unsigned(),
        8 => |x, y| x.cast_unsigned() > y.cast_unsigned(),
        9 => |x, y| x.cast_unsigned() >= y.cast_unsigned(),
        _ => return None,
    })
}

/// Returns the comparison with this number in `arith.cmpf`: 1 to 7 are false for a NaN, 8 to 14 are true.
pub(super) fn compare_float(predicate: i64) -> Option<fn(f32, f32) -> bool> {
    fn unordered(x: f32, y: f32) -> bool {
        x.is_nan() || y.is_nan()
    }
    Some(match predicate {
        0 => |_, _| false,
        1 => |x, y| x == y,
        2 => |x, y| x > y,
        3 => |x, y| x >= y,
        4 => |x, y| x < y,
        5 => |x, y| x <= y,
        6 => |x, y| !unordered(x, y) && x != y,
        7 => |x, y| !unordered(x, y),
        8 => |x, y| unordered(x, y) || x == y,
        9 => |x, y| unordered(x, y) || x > y,
        10 => |x, y| unordered(x, y) || x >= y,
        11 => |x, y| unordered(x, y) || x < y,
        12 => |x, y| unordered(x, y) || x <= y,
        13 => |x, y| x != y,
        14 => unordered,
        15 => |_, _| true,
        _ => return None,
    })
}

/// Predicate that tells whether elements of the first kind convert to the second.
type Takes = fn(ElementKind, ElementKind) -> bool;
type Convert = fn(&ElementBuffer, ElementKind, ElementKind) -> ElementBuffer;

/// A change of element type: its domain, and its function.
#[derive(Clone, Copy)]
pub(super) struct Conversion {
    pub(super) takes: Takes,
    pub(super) convert: Convert,
}

/// Returns the conversion of an operation, or `None` if it changes no element type.
pub(super) fn conversion(name: &str) -> Option<Conversion> {
    // A 16-bit float is held as the f32 that equals it: extension changes no number, and truncation rounds once.
    let (takes, convert): (Takes, Convert) = match name {
        "arith.extf" => (
            |from, to| from.is_float() && to.is_float() && from.bits() < to.bits(),
            |x, _, to| floats(x.floats(), |&x| to.round(x)),
        ),
        "arith.truncf" => (
            |from, to| from.is_float() && to.is_float() && from.bits() > to.bits(),
            |x, _, to| floats(x.floats(), |&x| to.round(x)),
        ),
        "arith.sitofp" => (
            |from, to| is_integer(from) && to.is_float(),
            // The integer goes through f64, which holds every i32, so that it is rounded once.
            |x, from, to| floats(x.ints(), |&x| to.round_f64(from.signed(x).into())),
        ),
        "arith.fptosi" => (
            |from, to| from.is_float() && is_integer(to) && to != ElementKind::I1,
            |x, _, to| ints(x.floats(), |&x| truncated(x, to)),
        ),
        "arith.extsi" => (
            |from, to| is_integer(from) && is_integer(to) && from.bits() < to.bits(),
            |x, from, _| ints(x.ints(), |&x| from.signed(x)),
        ),
        "arith.extui" => (
            |from, to| is_integer(from) && is_integer(to) && from.bits() < to.bits(),
            |x, from, to| ints(x.ints(), |&x| to.wrap(from.unsigned(x) as i32)),
        ),
        "arith.trunci" => (
            |from, to| is_integer(from) && is_integer(to) && from.bits() > to.bits(),
            |x, _, to| ints(x.ints(), |&x| to.wrap(x)),
        ),
        "arith.index_cast" => (
            |from, to| (from == ElementKind::Index && is_integer(to)) || (is_integer(from) && to == ElementKind::Index),
            |x, from, to| ints(x.ints(), |&x| to.wrap(from.signed(x))),
        ),
        "arith.bitcast" => (
            |from, to| from != ElementKind::Index && to != ElementKind::Index && from.bits() == to.bits(),
            |x, from, to| match (x, to.is_float()) {
                (ElementBuffer::Float(x), false) => ints(x, |&x| to.wrap(from.float_bits(x) as i32)),
                (ElementBuffer::Float(x), true) => floats(x, |&x| to.float(from.float_bits(x))),
                (ElementBuffer::Int(x), true) => floats(x, |&x| to.float(from.unsigned(x))),
                (ElementBuffer::Int(x), false) => ElementBuffer::Int(x.clone()),
            },
        ),
        _ => return None,
    };
    Some(Conversion { takes, convert })
}

fn is_integer(kind: ElementKind) -> bool {
    !kind.is_float() && kind != ElementKind::Index
}

fn floats<T>(x: &[T], f: impl Fn(&T) -> f32) -> ElementBuffer {
    ElementBuffer::Float(x.iter().map(f).collect())
}

fn ints<T>(x: &[T], f: impl Fn(&T) -> i32) -> ElementBuffer {
    ElementBuffer::Int(x.iter().map(f).collect())
}

/// Removes the fraction of `x`; poison if `to` has no such number, because the result is then undefined.
fn truncated(x: f32, to: ElementKind) -> i32 {
    // Every f32, and every bound of an integer type, is exact in f64.
    let limit = 2f64.powi(to.bits() as i32 - 1);
    let whole = f64::from(x).trunc();
    if whole >= -limit && whole < limit { whole as i32 } else { to.integer_poison() }
}
