//! Reads numbers that JSON cannot write.

use serde::{Deserialize, Deserializer};

/// Reads a number; NaN if it is `null`.
pub(crate) fn or_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Returns NaN, the value of a number that was not written.
pub(crate) fn nan() -> f64 {
    f64::NAN
}
