//! The steps that tile kernels take with a block of rows.

use std::f64::consts::LOG2_E;

use assay_algebra::arithmetic::Arithmetic;
use assay_core::device_dtype::DeviceDtype;
use assay_tile::{Fold, TileBuilder, TileColumn, TileMemory, TileType, TileValue};

/// 2¹⁰⁰: the most that a gap from the maximum counts, so that one of −∞ is a number, its product with an exponential of 0 is 0, and
/// so is its part in every sum.
pub(crate) const FARTHEST: f64 = (1_u128 << 100) as f64;

/// Returns the initial value of a maximum of stored logits: their lowest finite number. It is above −∞, so that the
/// gap of a logit −∞ is not −∞ − −∞; a row with no other logit sums to 0, and quotients by that are NaN.
pub(crate) fn lowest(element: DeviceDtype) -> f64 {
    if element == DeviceDtype::Bf16 { half::bf16::MIN.into() } else { f32::MIN.into() }
}

/// Registers of columns that a trip of a loop takes, at most. Many, because what a trip costs beside its work is shared by
/// all of them.
pub(crate) const REGISTERS: usize = 64;

/// Independent sums along a row, so that an addition need not wait for the one before.
pub(crate) const ACCUMULATORS: usize = 4;

/// Some columns of a block of rows.
#[derive(Clone, Copy)]
pub(crate) struct ColumnChunk {
    pub(crate) column: TileColumn,
    /// A multiple of the machine's lanes.
    pub(crate) columns: usize,
    /// The number of columns that are in the array, a scalar i32; `None` if all are.
    pub(crate) real: Option<TileValue>,
}

/// The columns of a window.
#[derive(Clone, Copy)]
pub(crate) struct WindowColumns {
    /// A multiple of the machine's lanes.
    pub(crate) all: usize,
    /// The number of columns, a multiple of the lanes, that are in the array in every window.
    pub(crate) whole: usize,
    /// The number of columns of this window that are in the array, a scalar i32.
    pub(crate) real: TileValue,
    /// Registers of them that a trip of a loop takes, at most.
    pub(crate) registers: usize,
}

/// Calls `body` on every chunk of the columns, in a loop, then the rest. What is carried goes from each
/// to the next.
pub(crate) fn for_each_chunk(
    on: &mut TileBuilder,
    columns: WindowColumns,
    initial: &[TileValue],
    mut body: impl FnMut(&mut TileBuilder, ColumnChunk, &[TileValue]) -> Vec<TileValue>,
) -> Vec<TileValue> {
    // As many trips as need be, with as little left over as that number allows.
    let lanes = on.machine().lanes;
    let registers = columns.whole / lanes;
    let width = registers / registers.div_ceil(columns.registers).max(1) * lanes;
    let trips = columns.whole.checked_div(width).unwrap_or(0);
    // A single trip needs no loop, and its column is then known when the kernel is compiled.
    let mut carried = if trips == 1 {
        body(on, ColumnChunk { column: TileColumn::Static(0), columns: width, real: None }, initial)
    } else {
        on.for_loop(trips, initial, |on, trip, carried| {
            let width_of_one = on.integer(width);
            let column = on.mul(trip, width_of_one);
            body(on, ColumnChunk { column: TileColumn::Dynamic(column), columns: width, real: None }, carried)
        })
    };
    let done = trips * width;
    if done < columns.whole {
        let rest = ColumnChunk { column: TileColumn::Static(done), columns: columns.whole - done, real: None };
        carried = body(on, rest, &carried);
    }
    // The last tile is masked: its columns beyond the array hold garbage, and the chunk says how many are real.
    if columns.whole < columns.all {
        let before = on.integer(columns.whole);
        let real = on.sub(columns.real, before);
        let tail = ColumnChunk {
            column: TileColumn::Static(columns.whole),
            columns: columns.all - columns.whole,
            real: Some(real),
        };
        carried = body(on, tail, &carried);
    }
    carried
}

/// Folds `a` into the accumulators, register by register in turn. What one accumulator gets is folded by halves first:
/// an error then grows with the logarithm of a chunk's columns and the number of chunks.
pub(crate) fn accumulate(on: &mut TileBuilder, fold: Fold, accumulators: &mut [TileValue], a: TileValue) {
    let [_, columns] = on.type_of(a).tile.expect("a tile is accumulated");
    let lanes = on.machine().lanes;
    // Registers go to the accumulators in turn, so that additions do not wait for one another.
    let registers: Vec<TileValue> = (0..columns).step_by(lanes).map(|start| on.columns(a, start, lanes)).collect();
    let turns = accumulators.len();
    for (turn, accumulator) in accumulators.iter_mut().enumerate() {
        let own: Vec<TileValue> = registers.iter().copied().skip(turn).step_by(turns).collect();
        if !own.is_empty() {
            let folded = join(on, fold, &own);
            *accumulator = combine(on, fold, *accumulator, folded);
        }
    }
}

fn combine(on: &mut TileBuilder, fold: Fold, a: TileValue, b: TileValue) -> TileValue {
    match fold {
        Fold::Add => on.add(a, b),
        Fold::Max => on.max(a, b),
    }
}

/// One value from several, folded by halves.
pub(crate) fn join(on: &mut TileBuilder, fold: Fold, values: &[TileValue]) -> TileValue {
    let mut rest = values.to_vec();
    while rest.len() > 1 {
        rest = rest.chunks(2).map(|pair| if let [a, b] = *pair { combine(on, fold, a, b) } else { pair[0] }).collect();
    }
    rest[0]
}

/// `[1,b·t,v]`, as the kernels are given `[b,t,v]` logits: no row's part needs its sequence, so that the sequences follow one
/// another and a short one leaves no row of a block empty. The first axis makes what XLA does around a kernel faster.
pub(crate) fn in_rows([b, t, v]: [usize; 3]) -> [usize; 3] {
    [1, b * t, v]
}

/// Returns the dtype by which logits are stored: f16 as its bit patterns, because a TPU has no f16.
pub(crate) fn stored_as(logits: DeviceDtype) -> DeviceDtype {
    if logits == DeviceDtype::F16 { DeviceDtype::I16 } else { logits }
}

/// Stored logits in f32, exactly.
pub(crate) fn widen(on: &mut TileBuilder, x: TileValue) -> TileValue {
    if on.type_of(x).element != DeviceDtype::I16 {
        return on.convert(x, DeviceDtype::F32);
    }
    let bits = on.convert(x, DeviceDtype::I32);
    let integer = |on: &mut TileBuilder, x: i32| on.constant(f64::from(x), TileType::scalar(DeviceDtype::I32));
    // The magnitude is converted, and the sign put back at the end.
    let (zero, no_sign) = (on.integer(0), integer(on, 0x7FFF));
    let magnitude = on.and(bits, no_sign);
    let (least_normal, infinite) = (integer(on, 0x0400), integer(on, 0x7C00));
    // Exponent and fraction move to their places in an f32, whose bias is 112 more; that of ∞ and NaN, all ones, by 224.
    let (wider, bias, bias_of_specials) = (integer(on, 1 << 13), integer(on, 112 << 23), integer(on, 224 << 23));
    let finite = on.less(magnitude, infinite);
    let bias = on.select(finite, bias, bias_of_specials);
    let moved = on.mul(magnitude, wider);
    let moved = on.add(moved, bias);
    let normal = on.bitcast(moved, DeviceDtype::F32);
    // Below the normal numbers the fraction counts units of 2⁻²⁴.
    let counted = on.convert(magnitude, DeviceDtype::F32);
    let unit = on.number(2_f64.powi(-24));
    let subnormal = on.mul(counted, unit);
    let small = on.less(magnitude, least_normal);
    let value = on.select(small, subnormal, normal);
    let negated = on.neg(value);
    let negative = on.less(bits, zero);
    on.select(negative, negated, value)
}

/// f32 as logits are stored, rounded to nearest even.
pub(crate) fn narrow(on: &mut TileBuilder, x: TileValue, stored: DeviceDtype) -> TileValue {
    if stored != DeviceDtype::I16 {
        return on.convert(x, stored);
    }
    let integer = |on: &mut TileBuilder, x: i32| on.constant(f64::from(x), TileType::scalar(DeviceDtype::I32));
    let zero = on.number(0.0);
    let negated = on.neg(x);
    let negative = on.less(x, zero);
    let value = on.select(negative, negated, x);
    // 13 bits of the fraction go: half of the last that stays is added, and less where a tie is to stay even.
    let bits = on.bitcast(value, DeviceDtype::I32);
    let (one, dropped, almost_half) = (integer(on, 1), integer(on, 13), integer(on, (1 << 12) - 1));
    let kept = on.shift_right(bits, dropped);
    let odd = on.and(kept, one);
    let up = on.add(odd, almost_half);
    let rounded = on.add(bits, up);
    let rounded = on.shift_right(rounded, dropped);
    let (bias, infinite, nan) = (integer(on, 112 << 10), integer(on, 0x7C00), integer(on, 0x7E00));
    let normal = on.sub(rounded, bias);
    // Values beyond the largest f16 become ∞; a fraction that rounds up has carried into the exponent by itself.
    let normal = on.min(normal, infinite);
    // Below the normal numbers: added to 2²³ the value is rounded to whole units of 2⁻²⁴, which are its last bits.
    let (unit, whole, fraction) = (on.number(2_f64.powi(24)), on.number(2_f64.powi(23)), integer(on, (1 << 23) - 1));
    let counted = on.mul(value, unit);
    let counted = on.add(counted, whole);
    let counted = on.bitcast(counted, DeviceDtype::I32);
    let subnormal = on.and(counted, fraction);
    let least_normal = on.number(2_f64.powi(-14));
    let small = on.less(value, least_normal);
    let magnitude = on.select(small, subnormal, normal);
    // NaN is the only number that differs from itself.
    let number = on.equal(x, x);
    let magnitude = on.select(number, magnitude, nan);
    let sign = integer(on, -0x8000);
    let with_sign = on.add(magnitude, sign);
    let result = on.select(negative, with_sign, magnitude);
    on.convert(result, stored)
}

/// A sum that is taken by halves while its terms come: few of them wait at any time.
#[derive(Clone, Default)]
pub(crate) struct PairwiseSum {
    /// Sums of ever fewer terms, each with the logarithm of their number.
    waiting: Vec<(u32, TileValue)>,
}

impl PairwiseSum {
    pub(crate) fn add(&mut self, on: &mut TileBuilder, term: TileValue) {
        let mut sum = (0, term);
        // Two sums of equally many terms are added as soon as both exist, as a binary counter carries.
        while let Some((terms, before)) = self.waiting.pop_if(|(terms, _)| *terms == sum.0) {
            sum = (terms + 1, on.add(before, sum.1));
        }
        self.waiting.push(sum);
    }

    /// Returns `start` plus the sum of all terms.
    pub(crate) fn onto(self, on: &mut TileBuilder, start: TileValue) -> TileValue {
        // The sums that wait hold ever fewer terms from the first to the last: the smallest is added first.
        let total = self.waiting.into_iter().map(|(_, sum)| sum).rev().reduce(|a, b| on.add(b, a));
        total.map_or(start, |total| on.add(start, total))
    }
}

/// The columns of `chunk`, −∞ in those that are beyond the array.
pub(crate) fn load_logits(on: &mut TileBuilder, logits: TileMemory, chunk: ColumnChunk) -> TileValue {
    let x = on.load(logits, chunk.column, chunk.columns);
    let Some(real) = chunk.real else { return x };
    let ty = on.type_of(x);
    let [rows, columns] = ty.tile.expect("logits are loaded as tiles");
    // Compared in 32 bits whatever the logits are: the mask is then one of 32-bit lanes.
    let wide = widen(on, x);
    let lane = on.iota(1, rows, columns);
    let inside = on.less(lane, real);
    let nothing = on.number(f64::NEG_INFINITY);
    let kept = on.select(inside, wide, nothing);
    narrow(on, kept, ty.element)
}

/// Returns the gap of `x`, in f32, below `max`; at most [`FARTHEST`].
pub(crate) fn gap(on: &mut TileBuilder, max: TileValue, x: TileValue) -> TileValue {
    let (gap, farthest) = (on.sub(max, x), on.number(FARTHEST));
    on.min(gap, farthest)
}

/// `−log₂e · scale`: what a gap from the maximum is multiplied by to become an exponent of 2.
pub(crate) fn exponent_scale(on: &mut TileBuilder, inverse_temperature: Option<TileValue>) -> TileValue {
    let minus_log2_e = on.number(-LOG2_E);
    match inverse_temperature {
        Some(inverse) => on.mul(minus_log2_e, inverse),
        None => minus_log2_e,
    }
}

/// The arithmetic of a token's loss on `[rows, 1]` of f32.
pub(crate) struct PerRow<'b> {
    pub(crate) on: &'b mut TileBuilder,
    pub(crate) rows: usize,
}

impl Arithmetic for PerRow<'_> {
    type Value = TileValue;
    type Truth = TileValue;

    fn constant(&mut self, x: f64) -> TileValue {
        self.on.constant(x, TileType::tile(DeviceDtype::F32, self.rows, 1))
    }
    fn add(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.on.add(a, b)
    }
    fn sub(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.on.sub(a, b)
    }
    fn mul(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.on.mul(a, b)
    }
    fn div(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.on.div(a, b)
    }
    fn neg(&mut self, a: TileValue) -> TileValue {
        self.on.neg(a)
    }
    /// Computes `e^a`, and exactly 1 for 0, whatever the unit returns: an error there would be added to sums that may
    /// be far smaller than an ulp of 1.
    fn exp(&mut self, a: TileValue) -> TileValue {
        let (zero, one) = (self.constant(0.0), self.constant(1.0));
        let (nothing, exp) = (self.on.equal(a, zero), self.on.exp(a));
        self.on.select(nothing, one, exp)
    }
    /// Computes `e^a − 1`, by a series for small `a`: the unit's error in `e^a` may be as large as the result. From
    /// −1/2 to 1/2 the terms left out are below 2⁻²⁶ of it.
    fn exp_m1(&mut self, a: TileValue) -> TileValue {
        let one = self.constant(1.0);
        // Horner's rule for 1 + a/2·(1 + a/3·(1 + …)), which `a` then multiplies.
        let mut series = one;
        for factor in (2..=8).rev() {
            let over = self.constant(1.0 / f64::from(factor));
            let part = self.mul(a, over);
            let term = self.mul(part, series);
            series = self.add(one, term);
        }
        let series = self.mul(a, series);
        let exp = self.exp(a);
        let less_one = self.sub(exp, one);
        let (low, high) = (self.constant(-0.5), self.constant(0.5));
        let (above, below) = (self.less(low, a), self.less(a, high));
        let small = self.and(above, below);
        self.select(small, series, less_one)
    }
    fn ln(&mut self, a: TileValue) -> TileValue {
        self.on.log(a)
    }
    /// Computes `ln(1 + a)`, by a series for small `a`: near 1 a TPU's logarithm has an error of about 2⁻²⁴, however
    /// small the result. With `s = a/(2 + a)` it is `2·(s + s³/3 + s⁵/5 + s⁷/7 + s⁹/9)`, whose next term is below
    /// 2⁻²⁶ of it from −1/4 to 1/2.
    fn ln_1p(&mut self, a: TileValue) -> TileValue {
        let (one, two) = (self.constant(1.0), self.constant(2.0));
        let sum = self.add(two, a);
        let s = self.div(a, sum);
        let square = self.mul(s, s);
        let mut tail = self.constant(1.0 / 9.0);
        for odd in [7.0, 5.0, 3.0] {
            let (shifted, term) = (self.mul(tail, square), self.constant(1.0 / odd));
            tail = self.add(shifted, term);
        }
        let twice = self.mul(two, s);
        let of_square = self.mul(square, tail);
        let correction = self.mul(twice, of_square);
        let series = self.add(twice, correction);
        let u = self.add(one, a);
        let log = self.ln(u);
        let (low, high) = (self.constant(-0.25), self.constant(0.5));
        let (above, below) = (self.less(low, a), self.less(a, high));
        let small = self.and(above, below);
        self.select(small, series, log)
    }
    fn less(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.on.less(a, b)
    }
    fn equal(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.on.equal(a, b)
    }
    fn and(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.on.and(a, b)
    }
    fn or(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.on.or(a, b)
    }
    fn select(&mut self, condition: TileValue, yes: TileValue, no: TileValue) -> TileValue {
        self.on.select(condition, yes, no)
    }
}
