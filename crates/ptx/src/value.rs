//! Operands and results of instructions: registers and constants of a type.

use std::fmt;
use std::marker::PhantomData;

/// A type of registers: `bool` of predicates, `u16`, `u32` and `u64` of bits and whole numbers, `f32`.
pub trait PtxElement: Copy + 'static {
    /// The type in a register declaration, such as `.f32`.
    const DECLARED: &'static str;
    /// The prefix of register names, such as `%f`.
    const PREFIX: &'static str;
    /// The index of the type in `ELEMENTS`.
    const PLACE: usize;
    /// The type suffix of instructions that only move bits.
    const BITS: &'static str;
}

/// A type that is loaded and stored.
pub trait PtxStorable: PtxElement {
    /// The size of a value in bytes.
    const SIZE: u32;
}

/// A type that is counted with.
pub trait PtxNumber: PtxStorable {
    /// The type suffix of arithmetic instructions.
    const NAME: &'static str;
    /// `a + b`, rounded to nearest even where it is rounded.
    const ADD: &'static str;
    /// The instruction for `a − b`, rounded likewise.
    const SUB: &'static str;
    /// The instruction for `a · b`, rounded likewise.
    const MUL: &'static str;
    /// `a · b + c`, rounded once.
    const MUL_ADD: &'static str;
    /// The smaller; NaN if either is.
    const MIN: &'static str;
    /// The larger; NaN if either is.
    const MAX: &'static str;
}

/// A type of whole numbers.
pub trait PtxInteger: PtxNumber {}

macro_rules! element {
    ($($ty:ty: $declared:literal, $prefix:literal, $place:literal, $bits:literal;)*) => {
        $(impl PtxElement for $ty {
            const DECLARED: &'static str = $declared;
            const PREFIX: &'static str = $prefix;
            const PLACE: usize = $place;
            const BITS: &'static str = $bits;
        })*

        /// The declared type and the register prefix of each type, in declaration order.
        pub(crate) const ELEMENTS: [(&str, &str); 5] = [$(($declared, $prefix)),*];
    };
}

element! {
    bool: ".pred", "%p", 0, "pred";
    u16: ".b16", "%h", 1, "b16";
    u32: ".b32", "%r", 2, "b32";
    u64: ".b64", "%d", 3, "b64";
    f32: ".f32", "%f", 4, "f32";
}

impl PtxStorable for u16 {
    const SIZE: u32 = 2;
}

impl PtxStorable for u32 {
    const SIZE: u32 = 4;
}

impl PtxStorable for u64 {
    const SIZE: u32 = 8;
}

impl PtxStorable for f32 {
    const SIZE: u32 = 4;
}

macro_rules! whole {
    ($($ty:ty: $name:literal;)*) => {
        $(impl PtxNumber for $ty {
            const NAME: &'static str = $name;
            const ADD: &'static str = concat!("add.", $name);
            const SUB: &'static str = concat!("sub.", $name);
            const MUL: &'static str = concat!("mul.lo.", $name);
            const MUL_ADD: &'static str = concat!("mad.lo.", $name);
            const MIN: &'static str = concat!("min.", $name);
            const MAX: &'static str = concat!("max.", $name);
        }

        impl PtxInteger for $ty {})*
    };
}

whole! {
    u32: "u32";
    u64: "u64";
}

impl PtxNumber for f32 {
    const NAME: &'static str = "f32";
    // Without a rounding an assembler may fuse a sum with a product.
    const ADD: &'static str = "add.rn.f32";
    const SUB: &'static str = "sub.rn.f32";
    const MUL: &'static str = "mul.rn.f32";
    const MUL_ADD: &'static str = "fma.rn.f32";
    const MIN: &'static str = "min.NaN.f32";
    const MAX: &'static str = "max.NaN.f32";
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PtxOperand {
    Register(u32),
    Constant(u64),
}

/// A register, or a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PtxValue<T> {
    operand: PtxOperand,
    element: PhantomData<T>,
}

impl<T: PtxElement> PtxValue<T> {
    pub(crate) fn register(number: u32) -> Self {
        Self { operand: PtxOperand::Register(number), element: PhantomData }
    }

    fn from_bits(bits: u64) -> Self {
        Self { operand: PtxOperand::Constant(bits), element: PhantomData }
    }

    pub(crate) fn is_register(self) -> bool {
        matches!(self.operand, PtxOperand::Register(_))
    }
}

impl From<u16> for PtxValue<u16> {
    fn from(x: u16) -> Self {
        Self::from_bits(x.into())
    }
}

impl From<u32> for PtxValue<u32> {
    fn from(x: u32) -> Self {
        Self::from_bits(x.into())
    }
}

impl From<u64> for PtxValue<u64> {
    fn from(x: u64) -> Self {
        Self::from_bits(x)
    }
}

impl From<f32> for PtxValue<f32> {
    fn from(x: f32) -> Self {
        Self::from_bits(x.to_bits().into())
    }
}

impl<T: PtxElement> fmt::Display for PtxValue<T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.operand {
            PtxOperand::Register(number) => write!(f, "{}{number}", T::PREFIX),
            PtxOperand::Constant(bits) if T::PLACE == f32::PLACE => write!(f, "0f{bits:08X}"),
            PtxOperand::Constant(bits) => write!(f, "{bits}"),
        }
    }
}
