//! Cross-entropy with label smoothing and z-loss: against its literal formula in 640 bits and that formula's central differences, against
//! numbers by hand, and where a row has logits of −∞ or a batch no token.

use crate::common::draws::{self, Case, Regime};
use crate::common::family::{self, Row};
use crate::common::real::Real;
use crate::common::uniform::uniform;
use assay_core::problem::{Advantages, Extra, FloatArray, Problem};
use assay_core::spec::{LogitsTransform, LossSpec, Reduction};
use assay_reference::evaluate;
use ndarray::{Array1, Array2, Array3, arr2};
use proptest::prelude::*;
use proptest::sample::select;

/// The largest error of a value, over the sum of the sizes of its terms: a handful of roundings.
const ROUNDINGS: f64 = 16.0 * f64::EPSILON;

/// `−(1 − ε)·ℓ + ε·(1/V)·Σ_j −ln p_j + ζ·(ln Σ_j e^{z_j})²` of a row of scaled logits, and the size of its terms.
fn literal(spec: &LossSpec, row: &Row, id: usize, temperature: f64) -> (Real, f64) {
    let assay_core::spec::Objective::CrossEntropy(of) = &spec.objective else { panic!("a cross-entropy") };
    let z: Vec<Real> = row.iter().flatten().map(|x| x.clone() / Real::from(temperature)).collect();
    let lse = z.iter().map(Real::exp).sum::<Real>().ln();
    let vocab = Real::from(z.len() as f64);
    let of_id = lse.clone() - z[id].clone();
    let of_all = z.iter().map(|z| lse.clone() - z.clone()).sum::<Real>() / vocab;
    let hard = Real::from(1.0) - Real::from(of.label_smoothing);
    let terms =
        [hard * of_id, Real::from(of.label_smoothing) * of_all, Real::from(of.z_loss) * lse.clone() * lse.clone()];
    // Each exponent is rounded at the size of its logits.
    let size = z.iter().map(|z| z.clone().abs().to_f64()).fold(1.0, f64::max);
    let sizes = terms.iter().map(|term| term.clone().abs().to_f64()).sum::<f64>();
    let slope = 1.0 + 2.0 * of.z_loss * lse.abs().to_f64();
    (terms.into_iter().sum(), sizes + slope * size)
}

/// The advantages that a problem has in any case, of which nothing may be left.
fn without_advantage() -> Advantages {
    Advantages::Sequence(Array1::zeros(1))
}

/// One token over four equal logits.
fn one_token() -> Problem {
    Problem { advantages: without_advantage(), ..uniform(&[[0.0]]) }
}

fn case() -> impl Strategy<Value = Case> {
    let number = |most: f64| prop_oneof![1 => Just(0.0), 2 => 0.0..most];
    let transform = (select(vec![1.0, 0.5, -0.7]), proptest::option::of(select(vec![3.0, 30.0])), any::<bool>())
        .prop_map(|(scale, softcap, bias)| LogitsTransform { scale, softcap, bias });
    let reduction = select(vec![Reduction::TokenMean, Reduction::Normalizer(1.0), Reduction::Normalizer(7.0)]);
    let regime =
        select(vec![Regime::Normal, Regime::Small, Regime::Wide, Regime::Confident, Regime::Shifted, Regime::Tied]);
    let spec = (number(1.0), number(0.5), transform, select(vec![1.0, 0.7, 2.0]), reduction).prop_map(
        |(label_smoothing, z_loss, logits, temperature, reduction)| LossSpec {
            logits,
            temperature: f64::into(temperature),
            reduction,
            scale: 1.5,
            ..LossSpec::cross_entropy(label_smoothing, z_loss)
        },
    );
    (spec, regime, 2..=7_usize).prop_flat_map(|(spec, regime, vocab)| {
        let token = (0..vocab).prop_flat_map(move |id| (Just(id), regime.row(vocab, id), prop::bool::weighted(0.8)));
        (Just(spec), proptest::collection::vec(token, 3)).prop_map(move |(spec, tokens)| {
            let logits = tokens.iter().flat_map(|(_, row, _)| row.clone()).collect();
            let logits = Array3::from_shape_vec((1, 3, vocab), logits).expect("three rows");
            let problem = Problem {
                logits: FloatArray::F64(logits),
                ids: Array2::from_shape_fn((1, 3), |(_, t)| i64::try_from(tokens[t].0).expect("few columns")),
                mask: Array2::from_shape_fn((1, 3), |(_, t)| tokens[t].2 || t == 0),
                advantages: without_advantage(),
                old_logp: None,
                ref_logp: None,
                extra: Extra { bias: Some(Array1::from_shape_fn(vocab, |j| 0.7 - 0.4 * j as f64)), ..Extra::default() },
            };
            Case { spec, problem }
        })
    })
}

/// An advantage of 0 leaves it as it is: it has none.
#[test]
fn it_is_the_literal_formula_and_its_derivative() {
    let cases = case().boxed();
    let result = draws::run("reference_cross_entropy", 96, &cases, |case| {
        let Case { spec, problem } = &case;
        prop_assert_eq!(spec.check(), Ok(()));
        let reference = evaluate(spec, problem).expect("a valid case");
        let temperature = spec.temperature.number().expect("a number");
        let step = Real::power_of_two(-200);
        let (mut total, mut total_size) = (Real::from(0.0), 0.0);
        for t in 0..3 {
            let Some(token) = reference.token(0, t) else {
                prop_assert!(reference.dlogits_row(0, t).iter().all(|x| *x == 0.0));
                continue;
            };
            let row = family::logits(problem, 0, t);
            let at = |row: &Row| literal(spec, &family::scaled(spec, problem, row, token.id), token.id, temperature);
            let (value, size) = at(&row);
            let error = (Real::from(token.token_loss) - value.clone()).abs().to_f64();
            prop_assert!(error <= ROUNDINGS * size, "token loss {}: off by {error:e}", token.token_loss);
            total = total + Real::from(token.weight) * value;
            total_size += token.weight * size;
            for (j, dlogit) in reference.dlogits_row(0, t).into_iter().enumerate() {
                let moved = |by: Real| {
                    let mut row = row.clone();
                    row[j] = row[j].take().map(|x| x + by);
                    at(&row).0
                };
                let slope = (moved(step.clone()) - moved(-step.clone())) / (Real::from(2.0) * step.clone());
                let exact = (Real::from(token.weight) * slope).to_f64();
                // Its terms are at most 2 + 2·ζ·lse, each off by the roundings of its exponent.
                let scale = spec.logits.scale.abs() / temperature * token.weight * size * size;
                prop_assert!(
                    (dlogit - exact).abs() <= ROUNDINGS * scale,
                    "dlogits[{t},{j}]: {dlogit:e}, exact {exact:e}"
                );
            }
        }
        let error = (Real::from(reference.loss()) - total).abs().to_f64();
        prop_assert!(error <= ROUNDINGS * total_size, "loss {}: off by {error:e}", reference.loss());
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// Over four equal logits of 3 every `−ln p` is `ln 4`, whatever the smoothing, and `lse = 3 + ln 4`.
#[test]
fn equal_logits_are_by_hand() {
    let problem = Problem { logits: FloatArray::F64(Array3::from_elem((1, 1, 4), 3.0)), ..one_token() };
    let spec = LossSpec::cross_entropy(0.2, 0.5);
    let reference = evaluate(&spec, &problem).unwrap();
    let lse = 3.0 + 4_f64.ln();
    assert!((reference.loss() - (4_f64.ln() + 0.5 * lse * lse)).abs() < 1e-14);
    // p = 1/4 everywhere: the smoothing has no slope, the z-loss 2·ζ·lse/4, and the target −0.8·3/4.
    let others = 0.8 / 4.0 + lse / 4.0;
    let expected = [others - 0.8, others, others, others];
    for (got, expected) in reference.dlogits_row(0, 0).into_iter().zip(expected) {
        assert!((got - expected).abs() < 1e-15, "{got} for {expected}");
    }
}

/// A uniform target asks −∞ of nothing: the loss is ∞, and the gradient what automatic differentiation makes of it.
#[test]
fn minus_infinity_under_smoothing_is_an_infinite_loss() {
    let logits = Array3::from_shape_vec((1, 1, 3), vec![0.0, f64::NEG_INFINITY, 0.0]).expect("one row");
    let problem = Problem { logits: FloatArray::F64(logits), ..one_token() };
    let spec = LossSpec::cross_entropy(0.3, 0.0);
    let reference = evaluate(&spec, &problem).unwrap();
    assert_eq!(reference.loss(), f64::INFINITY);
    assert_eq!(reference.first_nonfinite(), Some((0, 0)));
    let dlogits = reference.dlogits_row(0, 0);
    let expected = [0.5 - 0.7 - 0.1, -0.1, 0.5 - 0.1];
    assert!(dlogits.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-15), "{dlogits:?}");
}

/// The mean of no loss is NaN, and their sum 0.
#[test]
fn no_token_is_nan_in_a_mean_and_nothing_in_a_sum() {
    let problem = Problem { mask: arr2(&[[false]]), ..one_token() };
    let mean = LossSpec::cross_entropy(0.1, 0.0);
    assert!(evaluate(&mean, &problem).unwrap().loss().is_nan());
    let sum = LossSpec { reduction: Reduction::Normalizer(1.0), ..mean };
    assert_eq!(evaluate(&sum, &problem).unwrap().loss(), 0.0);
}

#[test]
fn what_it_does_not_have_is_named() {
    let refused = |spec: LossSpec| spec.check().unwrap_err().to_string();
    let plain = || LossSpec::cross_entropy(0.1, 0.0);
    assert_eq!(
        refused(LossSpec::cross_entropy(1.5, 0.0)),
        "spec field `objective.cross_entropy.label_smoothing`: got 1.5, expected a share: from 0 to 1"
    );
    assert!(refused(LossSpec::cross_entropy(0.0, -1.0)).starts_with("spec field `objective.cross_entropy.z_loss`"));
    assert!(
        refused(LossSpec { old_logp: assay_core::spec::OldLogp::Given, ..plain() })
            .starts_with("spec field `old_logp`")
    );
    let kl = assay_core::spec::Kl::plain(0.1, assay_core::spec::KlEstimator::K3);
    assert_eq!(
        refused(LossSpec { kl: Some(kl), ..plain() }),
        "spec field `kl`: got one, expected none with `objective: cross_entropy`"
    );
}
