//! What the page is made of.

use assay::report::number::{bytes, clipped, count, milliseconds, short};
use assay::report::plot::{Axis, Bar, Curve, Markup, Strip, Tone, bars, curves, histogram, power_of_ten, strips};

#[test]
fn report_numbers_keep_three_digits_and_their_unit() {
    let shorts = [0.0, 0.012_345, 4.5678, 123.4, 1.234e-9, -2.0, f64::NAN, f64::NEG_INFINITY].map(short);
    assert_eq!(shorts, ["0", "0.0123", "4.57", "123", "1.23e-9", "-2.00", "NaN", "−∞"]);
    assert_eq!([0, 999, 1000, 12_345, 9_999_999].map(count), ["0", "999", "1.00k", "12.3k", "10.00M"]);
    assert_eq!([512.0, 1_245_086_752.0].map(bytes), ["512 B", "1.25 GB"]);
    assert_eq!([0.0005, 9.01, 3400.0].map(milliseconds), ["500 ns", "9.01 ms", "3.40 s"]);
}

#[test]
fn report_text_is_clipped_between_characters() {
    assert_eq!(clipped("a\n b"), "a b");
    assert_eq!(clipped(&"ü".repeat(200)).chars().count(), 161);
}

#[test]
fn report_powers_of_ten_are_written_small() {
    assert_eq!([1e-12, 0.1, 1.0, 100.0].map(power_of_ten), ["10⁻¹²", "10⁻¹", "limit", "10²"]);
}

#[test]
fn report_draws_or_says_something_whatever_the_numbers() {
    let none = Markup::default();
    let odd = [0.0, f64::NAN, f64::INFINITY, -1.0, 1e300, 1e-300, f64::MAX];
    let drawn = strips(&[Strip { name: "<b>".into(), shares: odd.to_vec() }], &none).into_string();
    assert!(drawn.contains("&lt;b&gt;") && !drawn.contains("<b>"), "{drawn}");
    let points = odd.iter().map(|&y| (y, y)).collect();
    curves(&[Curve { tone: Tone::First, points }], &Axis { format: short, from_zero: true }, &none);
    bars(&odd.map(|x| Bar::single("x", x, Tone::First, "x")), Some(f64::NAN), &none);
    histogram(&["a".into(), "b".into()], &[0, u64::MAX], &none);
    strips(&[], &none);
}
