//! Numbers and strangers' text as the page shows them.

/// Three significant digits: `0.0123`, `4.56`, `1.2e-9`.
pub(super) fn short(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() { "NaN".into() } else { format!("{}∞", if x < 0.0 { "−" } else { "" }) };
    }
    if x == 0.0 {
        return "0".into();
    }
    match x.abs() {
        a if !(1e-3..1e5).contains(&a) => format!("{x:.2e}"),
        a => format!("{x:.*}", usize::try_from(2 - a.log10().floor() as i32).unwrap_or(0)),
    }
}

/// `short`, or a dash where there is no number.
pub(super) fn or_dash(x: Option<f64>) -> String {
    x.map_or("–".into(), short)
}

/// `512`, `12.3k`, `4.56M`.
pub(super) fn count(n: u64) -> String {
    scaled(n as f64, 1e3, &["", "k", "M", "G", "T"])
}

/// `1.25 GB`, in powers of 1000.
pub(super) fn bytes(n: f64) -> String {
    scaled(n, 1e3, &[" B", " kB", " MB", " GB", " TB"])
}

/// A duration given in milliseconds: `850 ns`, `1.20 ms`, `3.40 s`.
pub(super) fn milliseconds(ms: f64) -> String {
    scaled(ms * 1e6, 1e3, &[" ns", " µs", " ms", " s"])
}

fn scaled(x: f64, step: f64, units: &[&str]) -> String {
    let mut x = x;
    let mut at = 0;
    while x.abs() >= step && at + 1 < units.len() {
        x /= step;
        at += 1;
    }
    let digits = if at == 0 && x.fract() == 0.0 || x.abs() >= 100.0 { 0 } else { 1 + usize::from(x.abs() < 10.0) };
    format!("{x:.digits$}{}", units[at])
}

/// `1x4096x151936`
pub(super) fn shape(extents: &[usize]) -> String {
    extents.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// `tile-one-pass ×4, loops`; one device goes without saying.
pub(super) fn ran(implementation: &str, devices: usize, lowering: Option<&str>) -> String {
    let on = if devices == 1 { String::new() } else { format!(" ×{devices}") };
    let lowering = lowering.map(|lowering| format!(", {lowering}")).unwrap_or_default();
    format!("{implementation}{on}{lowering}")
}

/// The start of a stranger's text, on one line.
pub(super) fn clipped(text: &str) -> String {
    const SHOWN: usize = 160;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits_and_their_unit() {
        let shorts = [0.0, 0.012_345, 4.5678, 123.4, 1.234e-9, -2.0, f64::NAN, f64::NEG_INFINITY].map(short);
        assert_eq!(shorts, ["0", "0.0123", "4.57", "123", "1.23e-9", "-2.00", "NaN", "−∞"]);
        assert_eq!([0, 999, 1000, 12_345, 9_999_999].map(count), ["0", "999", "1.00k", "12.3k", "10.00M"]);
        assert_eq!([512.0, 1_245_086_752.0].map(bytes), ["512 B", "1.25 GB"]);
        assert_eq!([0.0005, 9.01, 3400.0].map(milliseconds), ["500 ns", "9.01 ms", "3.40 s"]);
    }

    #[test]
    fn text_is_clipped_between_characters() {
        assert_eq!(clipped("a\n b"), "a b");
        assert_eq!(clipped(&"ü".repeat(200)).chars().count(), 161);
    }
}
