//! The comparison of arrays.

use assay_core::problem::Dtype;
use assay_judge::error_sums::{BoundedValues, ErrorSums};
use assay_judge::judge::Status;
use assay_judge::metric::{Allowance, Position, Tally};

/// What is compared 64 at a time comes to what is compared one by one: of values that are right, wrong, and not finite, at limits that
/// are finite, 0 and infinite.
#[test]
fn metric_of_many_values_is_that_of_each() {
    // Halton's sequence: as good as drawn, and the same every time.
    let drawn = |i: usize, base: usize| {
        let (mut i, mut digit, mut value) = (i, 1.0, 0.0);
        while i > 0 {
            digit /= base as f64;
            value += digit * (i % base) as f64;
            i /= base;
        }
        value
    };
    let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, 1e-42, 3e38];
    let mut seen = [0; 3];
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64] {
        for round in 0..40 {
            let places = 150;
            // A few rounds have no odd value, so that whole blocks are passed over.
            let often = round % 4;
            let value = |i: usize, base| {
                let drawn = drawn(1 + i + round * places, base) - 0.5;
                let turn = base * i + 13 * round;
                if turn % 97 < often { odd[turn % odd.len()] } else { drawn }
            };
            let exact: Vec<f64> = (0..places).map(|i| value(i, 2)).collect();
            let actual: Vec<f64> = (0..places).map(|i| exact[i] + 1e-7 * value(i, 3)).collect();
            let size = |base| (0..places).map(|i| value(i, base).abs() * 1e-6).collect::<Vec<f64>>();
            let [scale, floor] = [7, 11].map(size);
            let allowance = |x: f64, scale, floor| Allowance { rounding: x.abs() * 1e-7, unit: 0.5, scale, floor };
            let at = |v| Position::column(0, round, v);
            let [(mut at_once, mut sums), (mut each, mut sums_of_each)] =
                [(); 2].map(|()| (Tally::default(), ErrorSums::default()));
            let values = BoundedValues { exact: &exact, actual: &actual, scale: &scale, floor: &floor };
            at_once.compare_all(&mut sums, at, values, 2.0, allowance, dtype);
            for v in 0..places {
                let allowed = allowance(exact[v], scale[v], floor[v]);
                each.compare(at(v), exact[v], actual[v], 2.0, allowed, dtype);
                sums_of_each.add(exact[v], actual[v], allowed);
            }
            assert_eq!(format!("{at_once:?}"), format!("{each:?}"), "{dtype}, round {round}");
            let of_each = sums_of_each.plain().into_iter().chain(sums_of_each.norms());
            for (sum, of_each) in sums.plain().into_iter().chain(sums.norms()).zip(of_each) {
                let is_close = (sum - of_each).abs() <= 1e-9 * of_each.abs();
                let both_lost = !sum.is_finite() && !of_each.is_finite();
                assert!(is_close || both_lost, "{sum:e} is not {of_each:e}");
            }
            seen[0] += usize::from(each.nonfinite.is_some());
            seen[1] += usize::from(each.not_compared > 0);
            seen[2] += usize::from(each.passes());
        }
    }
    assert!(seen.iter().all(|seen| *seen > 0), "{seen:?}");
    // A block after one whose limit was 0: the worst share is infinite.
    let (exact, mut actual) = ([0.0; 128], [0.0; 128]);
    (actual[0], actual[100]) = (1.0, f64::INFINITY);
    let sizes = [&[0.0][..], &[1.0; 127]].concat();
    let values = BoundedValues { exact: &exact, actual: &actual, scale: &sizes, floor: &sizes };
    let allowance = |_, scale, floor| Allowance { rounding: 0.0, unit: 1.0, scale, floor };
    let mut tally = Tally::default();
    let at = |v| Position::column(0, 0, v);
    tally.compare_all(&mut ErrorSums::default(), at, values, 1.0, allowance, Dtype::F32);
    assert_eq!(tally.status(), Status::Nonfinite);
}

#[test]
fn metric_skips_infinite_limits_and_finds_nan() {
    let mut tally = Tally::default();
    for scale in [f64::INFINITY, f64::NAN] {
        let allowance = Allowance { scale, unit: 1.0, ..Allowance::default() };
        tally.compare(Position::default(), 1.0, 1e30, 1.0, allowance, Dtype::F32);
    }
    assert_eq!((tally.status(), tally.not_compared), (Status::NotCompared, 2));
    let allowance = Allowance { scale: f64::NAN, unit: 1.0, ..Allowance::default() };
    tally.compare(Position::default(), 1.0, f64::NAN, 1.0, allowance, Dtype::F32);
    assert_eq!(tally.status(), Status::Nonfinite);
}
