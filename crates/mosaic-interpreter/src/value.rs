//! Types and values of a running module, and the only way to copy a block of an array.
//!
//! Floats of every width are held as `f32`, which represents each of them exactly; integers of every width, truth
//! values and indices as `i32`, sign-extended (a TPU's index has 32 bits). A truth value is 0 or 1.

use std::fmt;

use half::{bf16, f16};

use assay_core::device_dtype::DeviceDtype;

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ElementKind {
    F32,
    Bf16,
    F16,
    I32,
    I16,
    I8,
    I1,
    Index,
}

/// Content of integer memory that was not written: a pattern that no kernel computes by accident.
const INTEGER_POISON: i32 = 0x5A5A_5A5A;

/// Content of i16 memory that was not written: a NaN, if f16 is stored in it.
const F16_NAN: i32 = 0x7E00;
const F32_POISON: u32 = 0x7FC0_0000;

impl ElementKind {
    const ALL: [ElementKind; 8] = [
        ElementKind::F32,
        ElementKind::Bf16,
        ElementKind::F16,
        ElementKind::I32,
        ElementKind::I16,
        ElementKind::I8,
        ElementKind::I1,
        ElementKind::Index,
    ];

    pub(super) fn from_name(name: &str) -> Option<Self> {
        ElementKind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            ElementKind::F32 => "f32",
            ElementKind::Bf16 => "bf16",
            ElementKind::F16 => "f16",
            ElementKind::I32 => "i32",
            ElementKind::I16 => "i16",
            ElementKind::I8 => "i8",
            ElementKind::I1 => "i1",
            ElementKind::Index => "index",
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, ElementKind::F32 | ElementKind::Bf16 | ElementKind::F16)
    }

    pub(super) fn bits(self) -> u32 {
        match self {
            ElementKind::F32 | ElementKind::I32 | ElementKind::Index => 32,
            ElementKind::Bf16 | ElementKind::F16 | ElementKind::I16 => 16,
            ElementKind::I8 => 8,
            ElementKind::I1 => 1,
        }
    }

    /// Returns the type of a caller's array for such elements, if there is one.
    pub(super) fn element(self) -> Option<DeviceDtype> {
        match self {
            ElementKind::F32 => Some(DeviceDtype::F32),
            ElementKind::Bf16 => Some(DeviceDtype::Bf16),
            ElementKind::F16 => Some(DeviceDtype::F16),
            ElementKind::I16 => Some(DeviceDtype::I16),
            ElementKind::I32 => Some(DeviceDtype::I32),
            ElementKind::I8 | ElementKind::I1 | ElementKind::Index => None,
        }
    }

    /// Rounds `x` to this kind, to nearest even.
    pub(super) fn round(self, x: f32) -> f32 {
        match self {
            ElementKind::Bf16 => bf16::from_f32(x).to_f32(),
            ElementKind::F16 => f16::from_f32(x).to_f32(),
            _ => x,
        }
    }

    /// Rounds `x` to this kind once, to nearest even.
    pub(super) fn round_f64(self, x: f64) -> f32 {
        // Not through `half`: its conversions from f64 drop the low half of the bits before they round.
        if self == ElementKind::F32 { x as f32 } else { self.round(to_odd(x)) }
    }

    /// Returns the low bits of `x`, as an integer of this kind.
    pub(super) fn wrap(self, x: i32) -> i32 {
        match self {
            ElementKind::I16 => i32::from(x as i16),
            ElementKind::I8 => i32::from(x as i8),
            ElementKind::I1 => x & 1,
            _ => x,
        }
    }

    /// Reads the bits of `x` as an integer without a sign.
    pub(super) fn unsigned(self, x: i32) -> u32 {
        x.cast_unsigned() & (u32::MAX >> (32 - self.bits()))
    }

    /// Reads the bits of `x` as an integer whose highest bit is the sign: a true `i1` is −1.
    pub(super) fn signed(self, x: i32) -> i32 {
        if self == ElementKind::I1 { -x } else { x }
    }

    pub(super) fn float_bits(self, x: f32) -> u32 {
        match self {
            ElementKind::Bf16 => u32::from(bf16::from_f32(x).to_bits()),
            ElementKind::F16 => u32::from(f16::from_f32(x).to_bits()),
            _ => x.to_bits(),
        }
    }

    pub(super) fn float(self, bits: u32) -> f32 {
        match self {
            ElementKind::Bf16 => bf16::from_bits(bits as u16).to_f32(),
            ElementKind::F16 => f16::from_bits(bits as u16).to_f32(),
            _ => f32::from_bits(bits),
        }
    }

    pub(super) fn integer_poison(self) -> i32 {
        if self == ElementKind::I16 { F16_NAN } else { self.wrap(INTEGER_POISON) }
    }
}

/// Cuts `x` to an f32 whose last bit is set if anything was cut off, so that rounding it further does not err.
fn to_odd(x: f64) -> f32 {
    // The nearest f32, if it is exact; otherwise the one towards 0, with its last bit set.
    let nearest = x as f32;
    if f64::from(nearest) == x || x.is_nan() {
        return nearest;
    }
    let beyond = f64::from(nearest).abs() > x.abs();
    f32::from_bits((nearest.to_bits() - u32::from(beyond)) | 1)
}

impl fmt::Display for ElementKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The memory that a memref is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemorySpace {
    Vmem,
    Smem,
}

impl fmt::Display for MemorySpace {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(if *self == MemorySpace::Vmem { "vmem" } else { "smem" })
    }
}

/// The type of an array: element kind and extents; a scalar has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ArrayType {
    pub(super) kind: ElementKind,
    pub(super) shape: Vec<usize>,
}

/// Largest number of elements of an array, and of all values of a module together: 1 GiB as they are stored here.
pub(super) const MOST_ELEMENTS: usize = 1 << 28;

impl ArrayType {
    pub(super) fn scalar(kind: ElementKind) -> Self {
        Self { kind, shape: Vec::new() }
    }

    /// Creates the type of an array of at most [`MOST_ELEMENTS`].
    pub(super) fn new(kind: ElementKind, shape: Vec<usize>) -> Option<Self> {
        let len = shape.iter().try_fold(1usize, |len, &extent| len.checked_mul(extent))?;
        (len <= MOST_ELEMENTS).then_some(Self { kind, shape })
    }

    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn with_kind(&self, kind: ElementKind) -> Self {
        Self { kind, shape: self.shape.clone() }
    }

    fn write_dimensions(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for extent in &self.shape {
            write!(f, "{extent}x")?;
        }
        write!(f, "{}", self.kind)
    }
}

impl fmt::Display for ArrayType {
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
pub(super) enum MosaicType {
    /// A scalar or a vector, held by value.
    Data(ArrayType),
    MemRef(ArrayType, MemorySpace),
}

impl MosaicType {
    pub(super) fn scalar(kind: ElementKind) -> Self {
        MosaicType::Data(ArrayType::scalar(kind))
    }

    pub(super) fn shaped(&self) -> &ArrayType {
        match self {
            MosaicType::Data(shaped) | MosaicType::MemRef(shaped, _) => shaped,
        }
    }
}

impl fmt::Display for MosaicType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            MosaicType::Data(shaped) => shaped.fmt(f),
            MosaicType::MemRef(shaped, space) => {
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
pub(super) enum ElementBuffer {
    Float(Vec<f32>),
    Int(Vec<i32>),
}

impl ElementBuffer {
    pub(super) fn poison(ty: &ArrayType) -> Self {
        if ty.kind.is_float() {
            ElementBuffer::Float(vec![f32::from_bits(F32_POISON); ty.len()])
        } else {
            ElementBuffer::Int(vec![ty.kind.integer_poison(); ty.len()])
        }
    }

    /// Decodes the elements of `bytes`, little-endian, all of `kind`.
    pub(super) fn from_bytes(kind: ElementKind, bytes: &[u8]) -> Self {
        // Each element is a little-endian word of its width.
        let words = bytes.chunks_exact(kind.bits() as usize / 8);
        let bits = words.map(|word| word.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte)));
        if kind.is_float() {
            ElementBuffer::Float(bits.map(|bits| kind.float(bits)).collect())
        } else {
            ElementBuffer::Int(bits.map(|bits| kind.wrap(bits as i32)).collect())
        }
    }

    pub(super) fn to_bytes(&self, kind: ElementKind) -> Vec<u8> {
        let size = kind.bits() as usize / 8;
        match self {
            ElementBuffer::Float(x) => {
                x.iter().flat_map(|&x| kind.float_bits(x).to_le_bytes().into_iter().take(size)).collect()
            }
            ElementBuffer::Int(x) => x.iter().flat_map(|x| x.to_le_bytes().into_iter().take(size)).collect(),
        }
    }

    pub(super) fn floats(&self) -> &[f32] {
        match self {
            ElementBuffer::Float(x) => x,
            ElementBuffer::Int(_) => unreachable!("{CHECKED}"),
        }
    }

    pub(super) fn ints(&self) -> &[i32] {
        match self {
            ElementBuffer::Int(x) => x,
            ElementBuffer::Float(_) => unreachable!("{CHECKED}"),
        }
    }

    /// Returns the element of a scalar integer.
    pub(super) fn int(&self) -> i32 {
        self.ints()[0]
    }

    /// Gathers the elements at `places`, in that order.
    pub(super) fn gather(&self, places: impl Iterator<Item = usize>) -> Self {
        match self {
            ElementBuffer::Float(x) => ElementBuffer::Float(places.map(|place| x[place]).collect()),
            ElementBuffer::Int(x) => ElementBuffer::Int(places.map(|place| x[place]).collect()),
        }
    }

    /// Copies a block of `from` into a block of the same `extent`. Both are within their arrays.
    pub(super) fn copy_block(&mut self, to: &BlockOrigin, from: &ElementBuffer, at: &BlockOrigin, extent: &[usize]) {
        match (self, from) {
            (ElementBuffer::Float(x), ElementBuffer::Float(y)) => copy_block(x, to, y, at, extent),
            (ElementBuffer::Int(x), ElementBuffer::Int(y)) => copy_block(x, to, y, at, extent),
            _ => unreachable!("{CHECKED}"),
        }
    }
}

/// The start of a block in an array of some shape.
pub(super) struct BlockOrigin<'a> {
    pub(super) shape: &'a [usize],
    pub(super) start: &'a [usize],
}

impl BlockOrigin<'_> {
    /// Returns the index in the array of the element at `position` of the block.
    pub(super) fn place(&self, position: &[usize]) -> usize {
        self.shape
            .iter()
            .zip(self.start)
            .zip(position)
            .fold(0, |place, ((extent, start), position)| place * extent + start + position)
    }
}

fn copy_block<T: Copy>(to: &mut [T], to_block: &BlockOrigin, from: &[T], from_block: &BlockOrigin, extent: &[usize]) {
    // The last dimension is contiguous in both arrays: it is copied at once.
    let (outer, run) = match extent.split_last() {
        Some((&run, outer)) => (outer, run),
        None => (extent, 1),
    };
    // The outer dimensions are counted through.
    let mut position = vec![0; extent.len()];
    for _ in 0..outer.iter().product() {
        let (at, source) = (to_block.place(&position), from_block.place(&position));
        to[at..at + run].copy_from_slice(&from[source..source + run]);
        advance(&mut position[..outer.len()], outer);
    }
}

/// Moves to the next position of `extent` in row-major order, and from the last to the first.
pub(super) fn advance(position: &mut [usize], extent: &[usize]) {
    for (place, &extent) in position.iter_mut().zip(extent).rev() {
        *place += 1;
        if *place < extent {
            return;
        }
        *place = 0;
    }
}
