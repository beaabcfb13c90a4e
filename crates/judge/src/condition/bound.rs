//! [`ErrorBound`]: how far a value may be off.

/// The largest error of flushing a number below f32's normal range to 0.
pub(crate) const FLUSHED: f64 = f32::MIN_POSITIVE as f64;

/// A bound `κ·u·scale + floor` of the error of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ErrorBound {
    /// The part that `κ·u` multiplies.
    pub(crate) scale: f64,
    /// The part that nothing multiplies.
    pub(crate) floor: f64,
}

impl ErrorBound {
    /// Adds an error that nothing multiplies.
    pub(crate) fn plus_floor(self, floor: f64) -> Self {
        Self { floor: self.floor + floor, ..self }
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self { scale: self.scale + other.scale, floor: self.floor + other.floor }
    }

    pub(crate) fn times(self, factor: f64) -> Self {
        Self { scale: self.scale * factor, floor: self.floor * factor }
    }

    /// Takes the larger scale and the larger floor.
    pub(crate) fn or(self, other: Self) -> Self {
        Self { scale: self.scale.max(other.scale), floor: self.floor.max(other.floor) }
    }

    /// Replaces a part that is not finite by 0: it must not enter a sum with the bounds of other tokens.
    pub(super) fn finite_or_zero(self) -> Self {
        let finite = |x: f64| if x.is_finite() { x } else { 0.0 };
        Self { scale: finite(self.scale), floor: finite(self.floor) }
    }
}
