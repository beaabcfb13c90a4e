//! Types and values of a running module, and the one way to copy a block of an array.
//!
//! Floats of every width are held as `f32`, which represents each of them exactly; integers of every width, truth
//! values and indices as `i32`, sign-extended (a TPU's index has 32 bits). A truth value is 0 or 1.

use std::fmt;

use half::{bf16, f16};

use assay_core::device_dtype::DeviceDtype;

/// What an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    F32,
    Bf16,
    F16,
    I32,
    I16,
    I8,
    I1,
    Index,
}

/// What memory holds where nothing was written: a pattern that no kernel computes by accident.
const INTEGER_POISON: i32 = 0x5A5A_5A5A;

/// An f16's NaN: what holds f16 as i16 reads that.
const F16_NAN: i32 = 0x7E00;
const F32_POISON: u32 = 0x7FC0_0000;

impl Kind {
    const ALL: [Kind; 8] = [Kind::F32, Kind::Bf16, Kind::F16, Kind::I32, Kind::I16, Kind::I8, Kind::I1, Kind::Index];

    pub(super) fn from_name(name: &str) -> Option<Self> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Kind::F32 => "f32",
            Kind::Bf16 => "bf16",
            Kind::F16 => "f16",
            Kind::I32 => "i32",
            Kind::I16 => "i16",
            Kind::I8 => "i8",
            Kind::I1 => "i1",
            Kind::Index => "index",
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, Kind::F32 | Kind::Bf16 | Kind::F16)
    }

    pub(super) fn bits(self) -> u32 {
        match self {
            Kind::F32 | Kind::I32 | Kind::Index => 32,
            Kind::Bf16 | Kind::F16 | Kind::I16 => 16,
            Kind::I8 => 8,
            Kind::I1 => 1,
        }
    }

    /// The type of a caller's array that such elements can be fetched from and written to.
    pub(super) fn element(self) -> Option<DeviceDtype> {
        match self {
            Kind::F32 => Some(DeviceDtype::F32),
            Kind::Bf16 => Some(DeviceDtype::Bf16),
            Kind::F16 => Some(DeviceDtype::F16),
            Kind::I16 => Some(DeviceDtype::I16),
            Kind::I32 => Some(DeviceDtype::I32),
            Kind::I8 | Kind::I1 | Kind::Index => None,
        }
    }

    /// `x` rounded to nearest even.
    pub(super) fn round(self, x: f32) -> f32 {
        match self {
            Kind::Bf16 => bf16::from_f32(x).to_f32(),
            Kind::F16 => f16::from_f32(x).to_f32(),
            _ => x,
        }
    }

    /// `x` rounded once, to nearest even.
    pub(super) fn round_f64(self, x: f64) -> f32 {
        // Not through `half`: its conversions from f64 drop the low half of the bits before they round.
        if self == Kind::F32 { x as f32 } else { self.round(to_odd(x)) }
    }

    /// The low bits of `x`, as an integer of this kind.
    pub(super) fn wrap(self, x: i32) -> i32 {
        match self {
            Kind::I16 => i32::from(x as i16),
            Kind::I8 => i32::from(x as i8),
            Kind::I1 => x & 1,
            _ => x,
        }
    }

    /// The integer that the bits of `x` spell when they have no sign.
    pub(super) fn unsigned(self, x: i32) -> u32 {
        x.cast_unsigned() & (u32::MAX >> (32 - self.bits()))
    }

    /// The integer that the bits of `x` spell when the highest is a sign: a true `i1` is −1.
    pub(super) fn signed(self, x: i32) -> i32 {
        if self == Kind::I1 { -x } else { x }
    }

    pub(super) fn float_bits(self, x: f32) -> u32 {
        match self {
            Kind::Bf16 => u32::from(bf16::from_f32(x).to_bits()),
            Kind::F16 => u32::from(f16::from_f32(x).to_bits()),
            _ => x.to_bits(),
        }
    }

    pub(super) fn float(self, bits: u32) -> f32 {
        match self {
            Kind::Bf16 => bf16::from_bits(bits as u16).to_f32(),
            Kind::F16 => f16::from_bits(bits as u16).to_f32(),
            _ => f32::from_bits(bits),
        }
    }

    pub(super) fn integer_poison(self) -> i32 {
        if self == Kind::I16 { F16_NAN } else { self.wrap(INTEGER_POISON) }
    }
}

/// `x` cut to an f32 whose last bit is set if anything was cut off, so that rounding it further does not err.
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) == x || x.is_nan() {
        return nearest;
    }
    let beyond = f64::from(nearest).abs() > x.abs();
    f32::from_bits((nearest.to_bits() - u32::from(beyond)) | 1)
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a memref lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    Vmem,
    Smem,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(if *self == Space::Vmem { "vmem" } else { "smem" })
    }
}

/// Element kind and extents; a scalar has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shaped {
    pub(super) kind: Kind,
    pub(super) shape: Vec<usize>,
}

/// No array of a module may hold more, nor all its values together: 1 GiB as they are kept here.
pub(super) const MOST_ELEMENTS: usize = 1 << 28;

impl Shaped {
    pub(super) fn scalar(kind: Kind) -> Self {
        Self { kind, shape: Vec::new() }
    }

    /// An array of no more than [`MOST_ELEMENTS`].
    pub(super) fn new(kind: Kind, shape: Vec<usize>) -> Option<Self> {
        let len = shape.iter().try_fold(1usize, |len, &extent| len.checked_mul(extent))?;
        (len <= MOST_ELEMENTS).then_some(Self { kind, shape })
    }

    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn with_kind(&self, kind: Kind) -> Self {
        Self { kind, shape: self.shape.clone() }
    }

    fn write_dimensions(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for extent in &self.shape {
            write!(f, "{extent}x")?;
        }
        write!(f, "{}", self.kind)
    }
}

impl fmt::Display for Shaped {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.shape.is_empty() {
            return write!(f, "{}", self.kind);
        }
        f.write_str("vector<")?;
        self.write_dimensions(f)?;
        f.write_str(">")
    }
}

/// The type of an SSA value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Type {
    /// A scalar or a vector.
    Data(Shaped),
    MemRef(Shaped, Space),
}

impl Type {
    pub(super) fn scalar(kind: Kind) -> Self {
        Type::Data(Shaped::scalar(kind))
    }

    pub(super) fn shaped(&self) -> &Shaped {
        match self {
            Type::Data(shaped) | Type::MemRef(shaped, _) => shaped,
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Type::Data(shaped) => shaped.fmt(f),
            Type::MemRef(shaped, space) => {
                f.write_str("memref<")?;
                shaped.write_dimensions(f)?;
                write!(f, ", #tpu.memory_space<{space}>>")
            }
        }
    }
}

const CHECKED: &str = "checked: operands have the kinds that their instruction takes";

/// The elements of a scalar, a vector or a piece of memory, row-major.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Elements {
    Float(Vec<f32>),
    Int(Vec<i32>),
}

impl Elements {
    pub(super) fn poison(ty: &Shaped) -> Self {
        if ty.kind.is_float() {
            Elements::Float(vec![f32::from_bits(F32_POISON); ty.len()])
        } else {
            Elements::Int(vec![ty.kind.integer_poison(); ty.len()])
        }
    }

    /// The elements of `bytes`, little-endian, all of `kind`.
    pub(super) fn from_bytes(kind: Kind, bytes: &[u8]) -> Self {
        let words = bytes.chunks_exact(kind.bits() as usize / 8);
        let bits = words.map(|word| word.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte)));
        if kind.is_float() {
            Elements::Float(bits.map(|bits| kind.float(bits)).collect())
        } else {
            Elements::Int(bits.map(|bits| kind.wrap(bits as i32)).collect())
        }
    }

    pub(super) fn to_bytes(&self, kind: Kind) -> Vec<u8> {
        let size = kind.bits() as usize / 8;
        match self {
            Elements::Float(x) => {
                x.iter().flat_map(|&x| kind.float_bits(x).to_le_bytes().into_iter().take(size)).collect()
            }
            Elements::Int(x) => x.iter().flat_map(|x| x.to_le_bytes().into_iter().take(size)).collect(),
        }
    }

    pub(super) fn floats(&self) -> &[f32] {
        match self {
            Elements::Float(x) => x,
            Elements::Int(_) => unreachable!("{CHECKED}"),
        }
    }

    pub(super) fn ints(&self) -> &[i32] {
        match self {
            Elements::Int(x) => x,
            Elements::Float(_) => unreachable!("{CHECKED}"),
        }
    }

    /// The element of a scalar integer.
    pub(super) fn int(&self) -> i32 {
        self.ints()[0]
    }

    /// Elements at `places`, in that order.
    pub(super) fn gather(&self, places: impl Iterator<Item = usize>) -> Self {
        match self {
            Elements::Float(x) => Elements::Float(places.map(|place| x[place]).collect()),
            Elements::Int(x) => Elements::Int(places.map(|place| x[place]).collect()),
        }
    }

    /// Copies a block of `from` into a block of this of the same `extent`. Both lie within their arrays.
    pub(super) fn copy_block(&mut self, to: &Block, from: &Elements, at: &Block, extent: &[usize]) {
        match (self, from) {
            (Elements::Float(x), Elements::Float(y)) => copy_block(x, to, y, at, extent),
            (Elements::Int(x), Elements::Int(y)) => copy_block(x, to, y, at, extent),
            _ => unreachable!("{CHECKED}"),
        }
    }
}

/// Where a block begins in an array of some shape.
pub(super) struct Block<'a> {
    pub(super) shape: &'a [usize],
    pub(super) start: &'a [usize],
}

impl Block<'_> {
    /// Where the element at `position` of the block lies in the array.
    pub(super) fn place(&self, position: &[usize]) -> usize {
        self.shape
            .iter()
            .zip(self.start)
            .zip(position)
            .fold(0, |place, ((extent, start), position)| place * extent + start + position)
    }
}

fn copy_block<T: Copy>(to: &mut [T], to_block: &Block, from: &[T], from_block: &Block, extent: &[usize]) {
    let (outer, run) = match extent.split_last() {
        Some((&run, outer)) => (outer, run),
        None => (extent, 1),
    };
    let mut position = vec![0; extent.len()];
    for _ in 0..outer.iter().product() {
        let (at, source) = (to_block.place(&position), from_block.place(&position));
        to[at..at + run].copy_from_slice(&from[source..source + run]);
        advance(&mut position[..outer.len()], outer);
    }
}

/// The next position of `extent` in row-major order; round to the first after the last.
pub(super) fn advance(position: &mut [usize], extent: &[usize]) {
    for (place, &extent) in position.iter_mut().zip(extent).rev() {
        *place += 1;
        if *place < extent {
            return;
        }
        *place = 0;
    }
}
