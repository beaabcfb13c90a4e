//! Numbers and strangers' text as the page shows them.

/// Three significant digits: `0.0123`, `4.56`, `1.2e-9`.
///
/// ```
/// # use assay_report::number::short;
/// assert_eq!(short(0.012_345), "0.0123");
/// ```
pub fn short(x: f64) -> String {
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
///
/// ```
/// # use assay_report::number::or_dash;
/// assert_eq!(or_dash(None), "–");
/// ```
pub fn or_dash(x: Option<f64>) -> String {
    x.map_or("–".into(), short)
}

/// Formats a count in three digits: `512`, `12.3k`, `4.56M`.
///
/// ```
/// # use assay_report::number::count;
/// assert_eq!(count(12_345), "12.3k");
/// ```
pub fn count(n: u64) -> String {
    scaled(n as f64, 1e3, &["", "k", "M", "G", "T"])
}

/// `1.25 GB`, in powers of 1000.
///
/// ```
/// # use assay_report::number::bytes;
/// assert_eq!(bytes(1.25e9), "1.25 GB");
/// ```
pub fn bytes(n: f64) -> String {
    scaled(n, 1e3, &[" B", " kB", " MB", " GB", " TB"])
}

/// A duration given in milliseconds: `850 ns`, `1.20 ms`, `3.40 s`.
///
/// ```
/// # use assay_report::number::milliseconds;
/// assert_eq!(milliseconds(1.2), "1.20 ms");
/// ```
pub fn milliseconds(ms: f64) -> String {
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

/// Formats extents as a shape: `1x4096x151936`.
///
/// ```
/// # use assay_report::number::shape;
/// assert_eq!(shape(&[1, 4096, 151_936]), "1x4096x151936");
/// ```
pub fn shape(extents: &[usize]) -> String {
    extents.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// `tile-one-pass ×4, loops`; one device goes without saying.
///
/// ```
/// # use assay_report::number::ran;
/// assert_eq!(ran("tile-one-pass", 4, Some("loops")), "tile-one-pass ×4, loops");
/// ```
pub fn ran(implementation: &str, devices: usize, lowering: Option<&str>) -> String {
    let on = if devices == 1 { String::new() } else { format!(" ×{devices}") };
    let lowering = lowering.map(|lowering| format!(", {lowering}")).unwrap_or_default();
    format!("{implementation}{on}{lowering}")
}

/// The start of a stranger's text, on one line.
///
/// ```
/// # use assay_report::number::clipped;
/// assert_eq!(clipped("two\nlines"), "two lines");
/// ```
pub fn clipped(text: &str) -> String {
    const SHOWN: usize = 160;
    let line = assay_core::text::shown_lines(&text.split_whitespace().collect::<Vec<_>>().join(" ")).into_owned();
    match line.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line,
    }
}
