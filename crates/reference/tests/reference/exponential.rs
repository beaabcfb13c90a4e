//! The exponential of the softmax, which every logit has one of.

use assay_reference::Softmax;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::common::real::Real;

/// Returns `e^−a`: of a row with one logit, which is its maximum and has the sum 1.
fn exponential(a: f64) -> f64 {
    Softmax::new(&[0.0]).probability(-a)
}

/// Returns the error of `value` as `e^−a`, in ulp.
fn error_in_ulp(a: f64, value: f64) -> f64 {
    let exact = Real::from(-a).exp();
    // The exponent's bits alone are the power of two below. The ulp itself may be subnormal, as no `Real` is.
    let power_of_two = f64::from_bits(exact.to_f64().to_bits() & f64::INFINITY.to_bits());
    ((Real::from(value) - exact) / (Real::from(power_of_two) * Real::power_of_two(-52))).abs().to_f64()
}

#[test]
fn exponential_is_correct_to_505_thousandths_of_an_ulp() {
    let mut random = ChaCha8Rng::seed_from_u64(0);
    let mut uniform = |most: f64| most * (random.next_u64() >> 11) as f64 / 2_f64.powi(53);
    // Gaps of usual logits, of all logits that have a normal exponential, and near the ends of the polynomial's range, where `k` is
    // half an integer.
    let step = std::f64::consts::LN_2 / 256.0;
    let mut gaps: Vec<f64> = (0..3000).flat_map(|_| [uniform(1.0), uniform(20.0), uniform(700.0)]).collect();
    gaps.extend((0..1000).map(|k| step * (f64::from(k) + 0.5) * (1.0 + 1e-12 * (uniform(2.0) - 1.0))));
    let worst = gaps
        .into_iter()
        .map(|a| (error_in_ulp(a, exponential(a)), a))
        .fold((0.0, 0.0), |worst, error| if error.0 > worst.0 { error } else { worst });
    assert!(worst.0 <= 0.505, "off by {} ulp at {}", worst.0, -worst.1);
}

#[test]
fn exponential_has_values_at_and_beyond_its_range() {
    assert_eq!(exponential(0.0), 1.0);
    assert_eq!(exponential(-0.0), 1.0);
    assert_eq!(exponential(f64::INFINITY), 0.0);
    assert!(exponential(f64::NAN).is_nan());
    // On either side of the gap from which on another function serves, and where results are subnormal.
    for a in [700_f64.next_down(), 700.0, 700_f64.next_up(), 708.0, 745.0, 746.0] {
        let exact = Real::from(-a).exp().to_f64();
        assert!((exponential(a) - exact).abs() <= exact * 2_f64.powi(-52) + f64::from_bits(1), "{a}");
    }
}
