//! The constants that kernels compute with.

use assay_core::tanh;

/// The quotient as kernels write it, with fused products and without: what docs/tolerances.md counts for it.
#[test]
fn softcap_tanh_quotient_is_within_eight_units() {
    let horner = |coefficients: &[f32], square: f32, step: fn(f32, f32, f32) -> f32| {
        let descending = coefficients.iter().rev().chain(&[1.0]);
        descending.copied().reduce(|sum, next| step(sum, square, next)).expect("there are some")
    };
    let plain = |a: f32, b: f32, c: f32| a * b + c;
    for (name, step, most) in [("plain", plain as fn(f32, f32, f32) -> f32, 6.4), ("fused", f32::mul_add, 5.9)] {
        let mut worst: f64 = 0.0;
        // From where tanh y is y on.
        for y in (1e-4_f32.to_bits()..tanh::FAR.to_bits()).step_by(1009).map(f32::from_bits) {
            let square = y * y;
            let (p, q) = (horner(&tanh::NUMERATOR, square, step), horner(&tanh::DENOMINATOR, square, step));
            let exact = f64::from(y).tanh();
            for t in [y * p / q, y * p * (1.0 / q)] {
                worst = worst.max((f64::from(t.min(1.0)) - exact).abs() / exact);
            }
        }
        let units = worst / 2.0_f64.powi(-24);
        assert!((4.0..most).contains(&units), "{name}: {units}");
    }
}
