//! Numbers that JSON cannot write.

use serde::{Deserialize, Deserializer};

/// A number; NaN where it is `null`.
pub(crate) fn or_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// What a number is that was not written.
pub(crate) fn nan() -> f64 {
    f64::NAN
}
