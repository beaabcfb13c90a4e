//! Real numbers to 640 bits.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::iter::Sum;
use std::ops::{Add, Div, Mul, Neg, Sub};

use astro_float::{BigFloat, Consts, RoundingMode};

/// Bits of significand. A margin of 100 nats at temperature ½ leaves a probability of 2⁻²⁸⁹ to the other columns; to
/// know it to f64's 53 bits from a central difference with step 2⁻⁸⁰ takes 422, and ratios of e³⁰ take 44 more.
const BITS: usize = 640;
const ROUND: RoundingMode = RoundingMode::ToEven;

thread_local! {
    static CONSTS: RefCell<Consts> = RefCell::new(Consts::new().expect("a constants cache"));
}

/// A real number, to 640 bits.
#[derive(Clone, Debug)]
pub(crate) struct Real(BigFloat);

impl Real {
    /// 2ⁿ.
    pub(crate) fn power_of_two(n: i32) -> Self {
        Real::from(2_f64.powi(n))
    }

    pub(crate) fn exp(&self) -> Self {
        CONSTS.with_borrow_mut(|consts| Real(self.0.exp(BITS, ROUND, consts)))
    }

    pub(crate) fn ln(&self) -> Self {
        CONSTS.with_borrow_mut(|consts| Real(self.0.ln(BITS, ROUND, consts)))
    }

    pub(crate) fn abs(&self) -> Self {
        Real(self.0.abs())
    }

    pub(crate) fn min(self, other: Self) -> Self {
        if other < self { other } else { self }
    }

    pub(crate) fn max(self, other: Self) -> Self {
        if other > self { other } else { self }
    }

    /// To about 60 bits, for printing and for error scales; 0 below f64's range.
    pub(crate) fn to_f64(&self) -> f64 {
        if self.0.is_zero() {
            return 0.0;
        }
        let (words, _, sign, exponent, _) = self.0.as_raw_parts().expect("a finite number");
        let top = *words.last().expect("a non-zero number has words") as f64 / 2_f64.powi(64);
        let half = exponent / 2;
        let magnitude = top * 2_f64.powi(half) * 2_f64.powi(exponent - half);
        if sign.is_negative() { -magnitude } else { magnitude }
    }
}

impl From<f64> for Real {
    fn from(x: f64) -> Self {
        Real(BigFloat::from_f64(x, BITS))
    }
}

macro_rules! operator {
    ($trait:ident, $method:ident) => {
        impl $trait for Real {
            type Output = Real;
            fn $method(self, other: Real) -> Real {
                Real(self.0.$method(&other.0, BITS, ROUND))
            }
        }
    };
}
operator!(Add, add);
operator!(Sub, sub);
operator!(Mul, mul);
operator!(Div, div);

impl Neg for Real {
    type Output = Real;
    fn neg(self) -> Real {
        Real(self.0.neg())
    }
}

impl Sum for Real {
    fn sum<I: Iterator<Item = Real>>(terms: I) -> Real {
        terms.fold(Real::from(0.0), Add::add)
    }
}

impl PartialEq for Real {
    fn eq(&self, other: &Self) -> bool {
        self.partial_cmp(other) == Some(Ordering::Equal)
    }
}

impl PartialOrd for Real {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        self.0.cmp(&other.0).map(|sign| sign.cmp(&0))
    }
}
