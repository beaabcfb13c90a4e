//! The types of registers and instructions.

use std::fmt;

/// The type of a register or an instruction: how many bits, and how they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PtxType {
    Pred,
    Bits(u32),
    Unsigned(u32),
    Signed(u32),
    Float(FloatFormat),
    /// Two floats, the first in the lower half.
    Two(FloatFormat),
}

/// A floating-point format of 16 or 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FloatFormat {
    F16,
    Bf16,
    F32,
}

/// The type of predicates, which guard instructions.
pub(super) const PREDICATE: PtxType = PtxType::Pred;

impl FloatFormat {
    pub(super) fn bits(self) -> u32 {
        if self == FloatFormat::F32 { 32 } else { 16 }
    }
}

impl PtxType {
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => PtxType::Pred,
            "f16" => PtxType::Float(FloatFormat::F16),
            "bf16" => PtxType::Float(FloatFormat::Bf16),
            "f32" => PtxType::Float(FloatFormat::F32),
            "f16x2" => PtxType::Two(FloatFormat::F16),
            "bf16x2" => PtxType::Two(FloatFormat::Bf16),
            "f32x2" => PtxType::Two(FloatFormat::F32),
            _ => {
                let bits = name.get(1..)?.parse().ok().filter(|bits| [8, 16, 32, 64].contains(bits))?;
                match &name[..1] {
                    "b" => PtxType::Bits(bits),
                    "u" => PtxType::Unsigned(bits),
                    "s" => PtxType::Signed(bits),
                    _ => return None,
                }
            }
        })
    }

    /// Returns the width in bits, 1 for a predicate.
    pub(super) fn bits(self) -> u32 {
        match self {
            PtxType::Pred => 1,
            PtxType::Bits(bits) | PtxType::Unsigned(bits) | PtxType::Signed(bits) => bits,
            PtxType::Float(float) => float.bits(),
            PtxType::Two(float) => 2 * float.bits(),
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, PtxType::Float(_) | PtxType::Two(_))
    }

    pub(super) fn is_integer(self) -> bool {
        matches!(self, PtxType::Unsigned(_) | PtxType::Signed(_))
    }

    pub(super) fn is_signed(self) -> bool {
        matches!(self, PtxType::Signed(_))
    }

    /// Whether a register of this type may be an operand of an instruction of type `wanted`.
    pub(super) fn serves(self, wanted: Self) -> bool {
        self.bits() == wanted.bits()
            && (self == wanted
                || matches!(self, PtxType::Bits(_)) && wanted != PtxType::Pred
                || matches!(wanted, PtxType::Bits(_)) && self != PtxType::Pred
                || self.is_integer() && wanted.is_integer())
    }

    /// Whether a register of this type may be an operand of a load, store or conversion of type `wanted`: as for
    /// [`serves`](Self::serves), or a wider register of integers.
    pub(super) fn serves_loosely(self, wanted: Self) -> bool {
        let of_bits = |ty: Self| matches!(ty, PtxType::Bits(_)) || ty.is_integer();
        self.serves(wanted) || of_bits(self) && of_bits(wanted) && self.bits() > wanted.bits()
    }
}

impl fmt::Display for PtxType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = |float| match float {
            FloatFormat::F16 => "f16",
            FloatFormat::Bf16 => "bf16",
            FloatFormat::F32 => "f32",
        };
        match *self {
            PtxType::Pred => write!(f, ".pred"),
            PtxType::Bits(bits) => write!(f, ".b{bits}"),
            PtxType::Unsigned(bits) => write!(f, ".u{bits}"),
            PtxType::Signed(bits) => write!(f, ".s{bits}"),
            PtxType::Float(float) => write!(f, ".{}", name(float)),
            PtxType::Two(float) => write!(f, ".{}x2", name(float)),
        }
    }
}
