//! The types of registers and instructions.

use std::fmt;

/// What bits of a register stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Pred,
    Bits(u32),
    Unsigned(u32),
    Signed(u32),
    Float(Float),
    /// Two floats, the first in the lower half.
    Two(Float),
}

/// A floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Float {
    F16,
    Bf16,
    F32,
}

/// What decides.
pub(super) const PREDICATE: Type = Type::Pred;

impl Float {
    pub(super) fn bits(self) -> u32 {
        if self == Float::F32 { 32 } else { 16 }
    }
}

impl Type {
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Type::Pred,
            "f16" => Type::Float(Float::F16),
            "bf16" => Type::Float(Float::Bf16),
            "f32" => Type::Float(Float::F32),
            "f16x2" => Type::Two(Float::F16),
            "bf16x2" => Type::Two(Float::Bf16),
            "f32x2" => Type::Two(Float::F32),
            _ => {
                let bits = name.get(1..)?.parse().ok().filter(|bits| [8, 16, 32, 64].contains(bits))?;
                match &name[..1] {
                    "b" => Type::Bits(bits),
                    "u" => Type::Unsigned(bits),
                    "s" => Type::Signed(bits),
                    _ => return None,
                }
            }
        })
    }

    /// 1 for a predicate.
    pub(super) fn bits(self) -> u32 {
        match self {
            Type::Pred => 1,
            Type::Bits(bits) | Type::Unsigned(bits) | Type::Signed(bits) => bits,
            Type::Float(float) => float.bits(),
            Type::Two(float) => 2 * float.bits(),
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, Type::Float(_) | Type::Two(_))
    }

    pub(super) fn is_integer(self) -> bool {
        matches!(self, Type::Unsigned(_) | Type::Signed(_))
    }

    pub(super) fn is_signed(self) -> bool {
        matches!(self, Type::Signed(_))
    }

    /// Whether a register of this type may stand where an instruction of type `wanted` reads or writes.
    pub(super) fn serves(self, wanted: Self) -> bool {
        self.bits() == wanted.bits()
            && (self == wanted
                || matches!(self, Type::Bits(_)) && wanted != Type::Pred
                || matches!(wanted, Type::Bits(_)) && self != Type::Pred
                || self.is_integer() && wanted.is_integer())
    }

    /// As [`serves`](Self::serves) for loads, stores and conversions: a register of integers may be wider.
    pub(super) fn serves_loosely(self, wanted: Self) -> bool {
        let of_bits = |ty: Self| matches!(ty, Type::Bits(_)) || ty.is_integer();
        self.serves(wanted) || of_bits(self) && of_bits(wanted) && self.bits() > wanted.bits()
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = |float| match float {
            Float::F16 => "f16",
            Float::Bf16 => "bf16",
            Float::F32 => "f32",
        };
        match *self {
            Type::Pred => write!(f, ".pred"),
            Type::Bits(bits) => write!(f, ".b{bits}"),
            Type::Unsigned(bits) => write!(f, ".u{bits}"),
            Type::Signed(bits) => write!(f, ".s{bits}"),
            Type::Float(float) => write!(f, ".{}", name(float)),
            Type::Two(float) => write!(f, ".{}x2", name(float)),
        }
    }
}
