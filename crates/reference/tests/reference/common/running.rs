//! Running error analysis: what an f64 evaluation of a formula, and of its derivative, can lose to rounding.

use std::cell::Cell;
use std::cmp::Ordering;
use std::iter::Sum;
use std::ops::{Add, Div, Mul, Neg, Sub};

use super::family::Number;

/// A value and its derivative in one direction, each with the error, in units of `u`, that an evaluation step by step
/// comes with when every step rounds once. An f64 is exact.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running {
    pub(crate) value: f64,
    pub(crate) error: f64,
    pub(crate) slope: f64,
    pub(crate) slope_error: f64,
}

/// `u`, f64's unit roundoff.
pub(crate) const U: f64 = 1.0 / (1_u64 << 53) as f64;

thread_local! {
    static NEAREST: Cell<f64> = const { Cell::new(f64::INFINITY) };
}

/// Runs `f`, and returns how near, relative to the larger side and 1, any two sides of a choice came: of a comparison,
/// or of a minimum, maximum or absolute value whose sides have different derivatives.
pub(crate) fn nearest_choice<T>(f: impl FnOnce() -> T) -> (T, f64) {
    NEAREST.set(f64::INFINITY);
    let result = f();
    (result, NEAREST.get())
}

fn came_near(a: f64, b: f64) {
    let margin = (a - b).abs() / a.abs().max(b.abs()).max(1.0);
    NEAREST.set(NEAREST.get().min(margin));
}

impl Running {
    /// A value that comes with `error`, and is moved by 1 or held.
    pub(crate) fn input(value: f64, error: f64, moves: bool) -> Self {
        Self { value, error, slope: f64::from(u8::from(moves)), slope_error: 0.0 }
    }

    fn came_near(&self, other: &Self) {
        // Where both sides are the same function it does not matter which is taken.
        if (self.slope - other.slope).abs() > 1e-9 * self.slope.abs().max(other.slope.abs()) {
            came_near(self.value, other.value);
        }
    }

    /// `f` of this number, with `f′`, and the relative error that `f′` has of its own and for each `u` of this number.
    fn through(&self, value: f64, derivative: f64, own: f64, condition: f64) -> Self {
        let slope = derivative * self.slope;
        let relative = own + condition * self.error;
        Self {
            value,
            error: derivative.abs() * self.error + value.abs(),
            slope,
            slope_error: derivative.abs() * self.slope_error + slope.abs() * (1.0 + relative),
        }
    }
}

impl From<f64> for Running {
    fn from(value: f64) -> Self {
        Self::input(value, 0.0, false)
    }
}

impl Add for Running {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        let (value, slope) = (self.value + other.value, self.slope + other.slope);
        let error = self.error + other.error + value.abs();
        Self { value, error, slope, slope_error: self.slope_error + other.slope_error + slope.abs() }
    }
}

impl Neg for Running {
    type Output = Self;
    fn neg(self) -> Self {
        Self { value: -self.value, slope: -self.slope, ..self }
    }
}

impl Sub for Running {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl Mul for Running {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        let one_way = |a: Self, b: Self| {
            let term = a.value * b.slope;
            (term, a.value.abs() * b.slope_error + a.error * b.slope.abs() + term.abs())
        };
        let ((ab, ab_error), (ba, ba_error)) = (one_way(self, other), one_way(other, self));
        let value = self.value * other.value;
        // Two errors meet where neither value is there to carry the other's.
        let both = U * self.error * other.error;
        let error = self.value.abs() * other.error + other.value.abs() * self.error + both + value.abs();
        Self { value, error, slope: ab + ba, slope_error: ab_error + ba_error + (ab + ba).abs() }
    }
}

impl Div for Running {
    type Output = Self;
    // One over the divisor is a function of it; the quotient is a product.
    #[allow(clippy::suspicious_arithmetic_impl)]
    fn div(self, other: Self) -> Self {
        let inverse = 1.0 / other.value;
        self * other.through(inverse, -inverse * inverse, 1.0, 2.0 * inverse.abs())
    }
}

impl Sum for Running {
    fn sum<I: Iterator<Item = Self>>(terms: I) -> Self {
        terms.reduce(Add::add).unwrap_or(Self::from(0.0))
    }
}

impl Number for Running {
    fn exp(&self) -> Self {
        let value = self.value.exp();
        self.through(value, value, 0.0, 1.0)
    }

    fn ln(&self) -> Self {
        self.through(self.value.ln(), 1.0 / self.value, 0.0, 1.0 / self.value.abs())
    }

    fn abs(&self) -> Self {
        self.came_near(&-*self);
        if self.value < 0.0 { -*self } else { *self }
    }

    fn min(self, other: Self) -> Self {
        self.came_near(&other);
        if other.value < self.value { other } else { self }
    }

    fn max(self, other: Self) -> Self {
        self.came_near(&other);
        if other.value > self.value { other } else { self }
    }

    fn exp_excess(&self) -> Self {
        let (d, rise) = (self.value, self.value.exp_m1());
        let value = if d.abs() < 1e-3 { d * d / 2.0 * (1.0 + d / 3.0) } else { rise - d };
        let slope = rise * self.slope;
        Self {
            value,
            // `exp(d) − 1` to its last bit, and then `d` taken off it.
            error: rise.abs() * (self.error + 1.0) + d.abs() + U * self.error * self.error / 2.0,
            slope,
            slope_error: rise.abs() * self.slope_error + self.slope.abs() * d.exp() * self.error + 2.0 * slope.abs(),
        }
    }

    fn since(&self, held: &Self) -> Self {
        Self { value: self.value - held.value, error: 0.0, ..*self }
    }

    fn order(&self, other: &Self) -> Ordering {
        came_near(self.value, other.value);
        self.compare(other)
    }

    fn compare(&self, other: &Self) -> Ordering {
        self.value.total_cmp(&other.value)
    }
}
