//! The log-ratios of a sequence, and the ratio of each of its tokens.

use super::sum::Sum;
use assay_core::spec::{OldLogp, Ratio, RatioLevel};

/// A value that follows its argument, or is at a bound where its derivative is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BoundedValue {
    /// The value after its bounds.
    pub value: f64,
    /// The derivative by the argument: 1 or 0.
    pub slope: f64,
}

/// Bounds `x` to `[low, high]`; exactly at a bound the value still follows `x`.
pub(super) fn held(x: f64, low: f64, high: f64) -> BoundedValue {
    if x > high {
        BoundedValue { value: high, slope: 0.0 }
    } else if x < low {
        BoundedValue { value: low, slope: 0.0 }
    } else {
        BoundedValue { value: x, slope: 1.0 }
    }
}

/// Returns a token's log-ratio, from `x = ℓ − old_logp`:
///
/// ```text
/// x clamped to ±clamp                                                unless it is the sum over a row that is
/// x ≤ high where A > 0,  x ≥ −low where A < 0,  0 where A = 0        with a clip
/// ```
pub(super) fn log_ratio(ratio: &Ratio, x: f64, advantage: f64) -> BoundedValue {
    // A product clamps its sum, not its terms.
    let clamp = if ratio.level == RatioLevel::SequenceProduct { None } else { ratio.clamp };
    let clamp = clamp.unwrap_or(f64::INFINITY);
    let clamped = held(x, -clamp, clamp);
    let Some(clip) = ratio.clip else { return clamped };
    // GMPO's clip is one-sided, by the sign of the advantage.
    let clipped = if advantage > 0.0 {
        held(clamped.value, f64::NEG_INFINITY, clip.high)
    } else if advantage < 0.0 {
        held(clamped.value, -clip.low, f64::INFINITY)
    } else {
        BoundedValue { value: 0.0, slope: 0.0 }
    };
    BoundedValue { slope: clamped.slope * clipped.slope, ..clipped }
}

/// Returns the log-ratio `w = ln ρ`, from the token's own or its sequence's.
pub(super) fn capped(ratio: &Ratio, log_ratio: f64) -> BoundedValue {
    // Only a product clamps its sum.
    let clamped = match ratio.clamp {
        Some(clamp) if ratio.level == RatioLevel::SequenceProduct => held(log_ratio, -clamp, clamp),
        _ => BoundedValue { value: log_ratio, slope: 1.0 },
    };
    let capped = held(clamped.value, f64::NEG_INFINITY, ratio.cap.unwrap_or(f64::INFINITY));
    // Straight through: the value of the cap, the slope of what it holds.
    let slope = if ratio.straight_through { 1.0 } else { capped.slope };
    BoundedValue { slope: clamped.slope * slope, ..capped }
}

/// Returns the log-ratio of a sequence: `Σ x / (n + ε)`, for a product `Σ x`; 0 without a token.
pub(super) fn row_log_ratio(ratio: &Ratio, log_ratios: &[f64]) -> f64 {
    if log_ratios.is_empty() {
        0.0
    } else {
        log_ratios.iter().copied().collect::<Sum>().value() * share(ratio, log_ratios.len())
    }
}

/// Returns the derivative of the sequence's log-ratio by each of its terms: `1 / (n + ε)`, for a product 1.
pub(super) fn share(ratio: &Ratio, count: usize) -> f64 {
    match ratio.level {
        RatioLevel::SequenceProduct => 1.0,
        _ => 1.0 / (count as f64 + ratio.denominator_epsilon),
    }
}

/// Returns the log-probability that the ratio is taken against, as the spec chooses it.
pub(super) fn old_logp(source: OldLogp, old_logp: Option<f64>, rollout_logp: Option<f64>, logp: f64) -> f64 {
    match source {
        OldLogp::Given => old_logp.unwrap_or(f64::NAN),
        OldLogp::Rollout => rollout_logp.unwrap_or(f64::NAN),
        OldLogp::Current => logp,
    }
}
