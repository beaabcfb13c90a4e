//! Operations on each element of arrays.

use super::{HloBuilder, HloType, HloValue};
use assay_core::device_dtype::DeviceDtype;

/// Comparisons; all are false where a side is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HloComparison {
    /// Holds if both sides are equal.
    Equal,
    /// Holds if the left side is smaller.
    Less,
    /// Holds if the left side is not smaller.
    AtLeast,
}
/// Defines one method for each operation, called as StableHLO calls it; the first word is the method that checks and writes it.
macro_rules! operations {
    ($($(#[$doc:meta])* $kind:ident $name:ident;)*) => { $(operations!(@$kind $(#[$doc])* $name);)* };
    (@unary $(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        pub fn $name(&mut self, a: HloValue) -> HloValue {
            self.unary(stringify!($name), a)
        }
    };
    (@$kind:ident $(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        pub fn $name(&mut self, a: HloValue, b: HloValue) -> HloValue {
            self.$kind(stringify!($name), a, b)
        }
    };
}

impl HloBuilder {
    fn unary(&mut self, op: &str, a: HloValue) -> HloValue {
        self.expect_float(op, a);
        let ty = self.type_of(a).clone();
        self.define(ty.clone(), format_args!("stablehlo.{op} {a} : {ty}"))
    }

    fn binary(&mut self, op: &str, a: HloValue, b: HloValue) -> HloValue {
        self.expect_same_type(op, a, b);
        let ty = self.type_of(a).clone();
        self.define(ty.clone(), format_args!("stablehlo.{op} {a}, {b} : {ty}"))
    }

    fn logical(&mut self, op: &str, a: HloValue, b: HloValue) -> HloValue {
        assert_eq!(self.element(a), DeviceDtype::Pred, "{op}: truth values");
        self.binary(op, a, b)
    }

    operations! {
        /// Returns `−a` of real numbers.
        unary negate;
        /// Returns `e^a` of real numbers.
        unary exponential;
        /// Returns `e^a − 1` without loss of digits near 0.
        unary exponential_minus_one;
        /// Returns `tanh a` of real numbers.
        unary tanh;
        /// Returns `ln a` of real numbers.
        unary log;
        /// Returns `ln (1 + a)` without loss of digits near 0.
        unary log_plus_one;
        /// Returns `a + b` of numbers of one type.
        binary add;
        /// Returns `a − b` of numbers of one type.
        binary subtract;
        /// Returns `a · b` of numbers of one type.
        binary multiply;
        /// Returns `a / b` of numbers of one type.
        binary divide;
        /// Returns the larger of `a` and `b`; NaN if either is NaN.
        binary maximum;
        /// Returns the smaller of `a` and `b`; NaN if either is NaN.
        binary minimum;
        /// Returns `a ∧ b` of truth values.
        logical and;
        /// Returns `a ∨ b` of truth values.
        logical or;
    }

    /// Returns `a & b` of integers, bit by bit.
    pub fn bit_and(&mut self, a: HloValue, b: HloValue) -> HloValue {
        assert!(!self.element(a).is_float(), "and: got {}, expected integers", self.type_of(a));
        self.binary("and", a, b)
    }

    /// Returns `a >> b` of integers; the sign is kept.
    pub fn shift_right(&mut self, a: HloValue, b: HloValue) -> HloValue {
        assert!(!self.element(a).is_float(), "shift: got {}, expected integers", self.type_of(a));
        self.binary("shift_right_arithmetic", a, b)
    }

    /// Truth of a comparison, element by element.
    pub fn compare(&mut self, comparison: HloComparison, a: HloValue, b: HloValue) -> HloValue {
        self.expect_same_type("compare", a, b);
        let direction = match comparison {
            HloComparison::Equal => "EQ",
            HloComparison::Less => "LT",
            HloComparison::AtLeast => "GE",
        };
        let operands = self.type_of(a).clone();
        let kind = if operands.element.is_float() { "FLOAT" } else { "SIGNED" };
        let ty = HloType { element: DeviceDtype::Pred, ..operands.clone() };
        let operation = format!("stablehlo.compare {direction}, {a}, {b}, {kind} : ({operands}, {operands}) -> {ty}");
        self.define(ty, format_args!("{operation}"))
    }

    /// `yes` where `condition` holds, else `no`.
    pub fn select(&mut self, condition: HloValue, yes: HloValue, no: HloValue) -> HloValue {
        self.expect_same_type("select", yes, no);
        let ty = self.type_of(yes).clone();
        let truth = self.type_of(condition).clone();
        assert_eq!(truth, HloType { element: DeviceDtype::Pred, shape: ty.shape.clone() }, "select: the condition");
        self.define(ty.clone(), format_args!("stablehlo.select {condition}, {yes}, {no} : {truth}, {ty}"))
    }

    /// `a` in another element type, rounded to nearest even.
    pub fn convert(&mut self, a: HloValue, element: DeviceDtype) -> HloValue {
        if self.element(a) == element {
            return a;
        }
        let from = self.type_of(a).clone();
        let ty = HloType { element, ..from.clone() };
        self.define(ty.clone(), format_args!("stablehlo.convert {a} : ({from}) -> {ty}"))
    }

    /// The bits of `a` as another element type of the same size.
    pub fn bitcast(&mut self, a: HloValue, element: DeviceDtype) -> HloValue {
        if self.element(a) == element {
            return a;
        }
        let from = self.type_of(a).clone();
        assert_eq!(from.element.size(), element.size(), "bitcast: {from} to {element}");
        let ty = HloType { element, ..from.clone() };
        self.define(ty.clone(), format_args!("stablehlo.bitcast_convert {a} : ({from}) -> {ty}"))
    }
}
