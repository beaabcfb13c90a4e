//! Numbers in words, and numbers that JSON cannot write.

use serde::{Deserialize, Deserializer};

/// Reads a number; NaN if it is `null`.
pub(crate) fn or_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Returns NaN, the value of a number that was not written.
pub(crate) fn nan() -> f64 {
    f64::NAN
}

/// Writes a number to six significant digits: `0.0123457`, `-1.5`, `1.2e-9`.
///
/// ```
/// # use assay_schema::number::six;
/// assert_eq!([0.012_345_678, -1.5, 1.2e-9, f64::NAN].map(six), ["0.0123457", "-1.5", "1.2e-9", "NaN"]);
/// ```
pub fn six(x: f64) -> String {
    significant(x, 6)
}

/// Writes two numbers to six significant digits, or to as many as it takes for unequal numbers to differ.
///
/// ```
/// # use assay_schema::number::distinct;
/// assert_eq!(distinct(0.5, 0.25), ["0.5", "0.25"]);
/// assert_eq!(distinct(1.0, 1.000_000_12), ["1", "1.0000001"]);
/// ```
pub fn distinct(a: f64, b: f64) -> [String; 2] {
    let pair = |digits| [significant(a, digits), significant(b, digits)];
    let differ = |digits: &usize| {
        let [a, b] = pair(*digits);
        a != b
    };
    // 17 digits tell any two numbers apart.
    let digits = if a == b { 6 } else { (6..17).find(differ).unwrap_or(17) };
    pair(digits)
}

/// Writes error / limit to four digits, which tell a value above 1 from 1: `1.009`, `147.3`, `2.5e6`.
///
/// ```
/// # use assay_schema::number::quotient;
/// assert_eq!([1.0091, 147.31, 1.000_04, 2.5e6].map(quotient), ["1.009", "147.3", "1.00004", "2.5e6"]);
/// ```
pub fn quotient(x: f64) -> String {
    // A quotient just above 1 must not read as a pass.
    distinct_from_one(x, 4)
}

fn distinct_from_one(x: f64, digits: usize) -> String {
    let written = significant(x, digits);
    if written == "1" && x != 1.0 && digits < 17 { distinct_from_one(x, digits + 1) } else { written }
}

fn significant(x: f64, digits: usize) -> String {
    if x.is_nan() {
        return "NaN".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "∞".into() } else { "−∞".into() };
    }
    if x == 0.0 {
        return if x.is_sign_negative() { "-0".into() } else { "0".into() };
    }
    // The exponent after rounding, which may carry into the next power of ten.
    let written = format!("{x:.*e}", digits - 1);
    let (mantissa, exponent) = written.split_once('e').expect("the exponential form has an exponent");
    let exponent: i32 = exponent.parse().expect("a whole number");
    let trimmed = |text: &str| {
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_string() } else { text.to_string() }
    };
    if (-4..digits as i32).contains(&exponent) {
        let decimals = usize::try_from(digits as i32 - 1 - exponent).unwrap_or(0);
        trimmed(&format!("{x:.decimals$}"))
    } else {
        format!("{}e{exponent}", trimmed(mantissa))
    }
}
