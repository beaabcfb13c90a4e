//! The columns that the tables of both targets have in common.

use assay_core::problem::Dtype;

/// Formats a shape as `1x4096x151936`.
pub(crate) fn extents(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// Returns `bytes` divided by the bytes of an array of this shape and dtype; `None` for an unknown dtype.
pub(crate) fn relative_to_logits(bytes: i64, shape: &[usize], dtype: &str) -> Option<f64> {
    let elements = shape.iter().map(|&extent| extent as f64).product::<f64>();
    let dtype: Dtype = dtype.parse().ok()?;
    Some(bytes as f64 / (elements * dtype.size() as f64))
}

/// Formats a number with `digits` decimals, or a dash for a missing number.
pub(crate) fn or_dash(number: Option<f64>, digits: usize) -> String {
    number.map_or("–".into(), |number| format!("{number:.digits$}"))
}
