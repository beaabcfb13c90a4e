//! Terms of a loss with their derivatives, and values held within bounds.
//!
//! A derivative that is 0 whatever the numbers is `None`, and no operation is written for it.

use super::arithmetic::Arithmetic;

/// A value after its bounds, and whether a bound replaced it, so that it has no gradient.
#[derive(Clone, Copy)]
pub(crate) struct HeldValue<V, T> {
    /// The value to compute with, within its bounds.
    pub(crate) value: V,
    /// Whether a bound replaced the value; `None` if it has no bound. A value that equals a bound is not replaced.
    pub(crate) replaced: Option<T>,
}

/// A term of the loss of a token with its two derivatives, each 0 if it is `None`.
#[derive(Clone, Copy)]
pub(crate) struct LossTerm<V> {
    pub(crate) value: V,
    pub(crate) by_logp: Option<V>,
    pub(crate) by_log_ratio: Option<V>,
}

impl<V: Copy> LossTerm<V> {
    /// Applies `f` to the value and to both derivatives.
    pub(crate) fn map<A: Arithmetic<Value = V>>(self, on: &mut A, f: impl Fn(&mut A, V) -> V) -> Self {
        Self {
            value: f(on, self.value),
            by_logp: self.by_logp.map(|slope| f(on, slope)),
            by_log_ratio: self.by_log_ratio.map(|slope| f(on, slope)),
        }
    }

    /// Returns the term, or 0 if `out` holds.
    pub(crate) fn unless<A: Arithmetic<Value = V>>(self, on: &mut A, out: A::Truth) -> Self {
        self.map(on, |on, x| unless(on, Some(out), x))
    }

    /// Multiplies the term by `weight`; a weight of 0 gives 0, even if the term overflows.
    pub(crate) fn weighed<A: Arithmetic<Value = V>>(self, on: &mut A, weight: V) -> Self {
        let zero = on.constant(0.0);
        let out = on.equal(weight, zero);
        self.map(on, |on, x| on.mul(weight, x)).unless(on, out)
    }

    /// Adds `other`, value to value and derivative to derivative.
    pub(crate) fn plus<A: Arithmetic<Value = V>>(self, on: &mut A, other: Self) -> Self {
        Self {
            value: on.add(self.value, other.value),
            by_logp: sum_if_any(on, self.by_logp, other.by_logp),
            by_log_ratio: sum_if_any(on, self.by_log_ratio, other.by_log_ratio),
        }
    }
}

/// Adds two optional values, where `None` is 0.
pub(crate) fn sum<A: Arithmetic>(on: &mut A, a: Option<A::Value>, b: Option<A::Value>) -> A::Value {
    match (a, b) {
        (Some(a), Some(b)) => on.add(a, b),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => on.constant(0.0),
    }
}

/// Adds two optional values, where `None` is 0, and returns `None` if both are.
pub(crate) fn sum_if_any<A: Arithmetic>(on: &mut A, a: Option<A::Value>, b: Option<A::Value>) -> Option<A::Value> {
    a.or(b).map(|_| sum(on, a, b))
}

/// Returns `value`, or 0 if `out` holds.
pub(crate) fn unless<A: Arithmetic>(on: &mut A, out: Option<A::Truth>, value: A::Value) -> A::Value {
    let Some(out) = out else { return value };
    let zero = on.constant(0.0);
    on.select(out, zero, value)
}

/// Holds `x` within the bounds that are given. At a bound it still follows `x`.
pub(crate) fn bounded<A: Arithmetic>(
    on: &mut A,
    x: A::Value,
    low: Option<A::Value>,
    high: Option<A::Value>,
) -> HeldValue<A::Value, A::Truth> {
    let below = low.map(|low| (on.less(x, low), low));
    let above = high.map(|high| (on.less(high, x), high));
    let value = below.map_or(x, |(below, low)| on.select(below, low, x));
    let value = above.map_or(value, |(above, high)| on.select(above, high, value));
    let replaced = match (below, above) {
        (Some((below, _)), Some((above, _))) => Some(on.or(below, above)),
        (one, other) => one.or(other).map(|(beyond, _)| beyond),
    };
    HeldValue { value, replaced }
}

/// Holds `x` within `±bound`, where the bound is not negative.
pub(crate) fn within<A: Arithmetic>(on: &mut A, x: A::Value, bound: A::Value) -> HeldValue<A::Value, A::Truth> {
    let low = on.neg(bound);
    bounded(on, x, Some(low), Some(bound))
}
