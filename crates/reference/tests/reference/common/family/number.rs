//! The arithmetic that the formulas are written in.

use std::cmp::Ordering;
use std::iter::Sum;
use std::ops::{Add, Div, Mul, Neg, Sub};

use crate::common::real::Real;

/// What the formulas ask of a number.
pub(crate) trait Number:
    Clone
    + From<f64>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Sum
{
    fn exp(&self) -> Self;
    fn ln(&self) -> Self;
    fn abs(&self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// `e^x − 1 − x`
    fn exp_excess(&self) -> Self;
    /// `x − sg(held)`, where `held` is what `x` is at the base point.
    fn since(&self, held: &Self) -> Self;
    /// By value, where a choice hangs on it.
    fn order(&self, other: &Self) -> Ordering;
    /// By value, where none does.
    fn compare(&self, other: &Self) -> Ordering;

    fn at_most(&self, bound: f64) -> bool {
        self.order(&Self::from(bound)) != Ordering::Greater
    }

    fn at_least(&self, bound: f64) -> bool {
        self.order(&Self::from(bound)) != Ordering::Less
    }

    fn clamp(self, low: f64, high: f64) -> Self {
        self.max(Self::from(low)).min(Self::from(high))
    }

    fn within(self, bound: Option<f64>) -> Self {
        bound.map_or(self.clone(), |bound| self.clamp(-bound, bound))
    }

    fn squared(&self) -> Self {
        self.clone() * self.clone()
    }
}

/// Defines each method as that of the same name of [`Real`] itself.
macro_rules! forward {
    ($($name:ident($($other:ident)?)),*) => {$(
        fn $name(self $(, $other: Self)?) -> Self {
            Real::$name(self $(, $other)?)
        }
    )*};
    (&: $($name:ident),*) => {$(
        fn $name(&self) -> Self {
            Real::$name(self)
        }
    )*};
}

impl Number for Real {
    forward!(&: exp, ln, abs);
    forward!(min(other), max(other));

    fn exp_excess(&self) -> Self {
        self.exp() - Real::from(1.0) - self.clone()
    }

    fn since(&self, held: &Self) -> Self {
        self.clone() - held.clone()
    }

    fn order(&self, other: &Self) -> Ordering {
        self.compare(other)
    }

    fn compare(&self, other: &Self) -> Ordering {
        self.partial_cmp(other).expect("finite numbers")
    }
}
