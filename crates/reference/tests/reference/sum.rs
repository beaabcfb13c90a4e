//! The compensated sum.

use assay_reference::Sum;

#[test]
fn sum_keeps_what_plain_addition_loses() {
    let terms = [1.0, 1e100, 1.0, -1e100];
    assert_eq!(terms.into_iter().collect::<Sum>().value(), 2.0);
    assert_eq!(terms.into_iter().sum::<f64>(), 0.0, "else this test shows nothing");
}

#[test]
fn sum_reaches_infinity_and_nan_as_plain_addition_does() {
    assert_eq!([f64::INFINITY, 1.0].into_iter().collect::<Sum>().value(), f64::INFINITY);
    assert!([f64::INFINITY, f64::NEG_INFINITY].into_iter().collect::<Sum>().value().is_nan());
    assert!([f64::NAN, 1.0].into_iter().collect::<Sum>().value().is_nan());
}
