//! The reference against arithmetic that fits in a comment.

use std::f64::consts::LN_2;

use crate::common::uniform::{V, uniform};
use approx::assert_relative_eq;
use assay_core::problem::{Advantages, FloatArray, OtherIds, Problem};
use assay_core::spec::{
    AdvantageLevel, Kl, KlEstimator, LossSpec, Objective, OldLogp, PpoClip, Reduction, Rows, Temperature,
    TemperatureDivides,
};
use assay_reference::evaluate;
use ndarray::{Array3, arr2, arr3};

/// Rounding of a handful of f64 operations.
const ROUNDING: f64 = 8.0 * f64::EPSILON;

/// Per-token advantages, and `ratio = 1` exactly.
fn on_policy() -> LossSpec {
    LossSpec { advantages: AdvantageLevel::Token, old_logp: OldLogp::Current, ..LossSpec::default() }
}

/// Per-token advantages, and `old_logp` from the problem.
fn off_policy(clip: PpoClip) -> LossSpec {
    LossSpec { old_logp: OldLogp::Given, objective: Objective::PpoClip(clip), ..on_policy() }
}

/// One token over four equal logits at the given ratio.
fn at_ratio(ratio: f64, advantage: f64) -> Problem {
    let old_logp = Some(arr2(&[[0.25_f64.ln() - ratio.ln()]]));
    Problem { old_logp, ..uniform(&[[advantage]]) }
}

/// One token with the given logits and id 0.
fn one_row(logits: &[f64], advantage: f64) -> Problem {
    let logits = Array3::from_shape_vec((1, 1, logits.len()), logits.to_vec()).expect("one row");
    Problem { logits: FloatArray::F64(logits), ..uniform(&[[advantage]]) }
}

#[track_caller]
fn assert_near(got: f64, expected: f64) {
    assert_relative_eq!(got, expected, max_relative = ROUNDING, epsilon = 0.0);
}

#[track_caller]
fn assert_row(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert_near(*got, *expected);
    }
}

#[test]
fn uniform_row_outcome_is_exact() {
    let (spec, problem) = (on_policy(), uniform(&[[1.0]]));
    let reference = evaluate(&spec, &problem).unwrap();
    let token = reference.token(0, 0).unwrap();
    assert_near(token.inputs.logp, -4_f64.ln());
    assert_near(token.entropy, 4_f64.ln());
    // r = 1, so loss = −A = −1 and ∂loss/∂ℓ = −rA = −1; dlogits_j = −(1[j=y] − 1/4).
    assert_eq!(reference.loss(), -1.0);
    assert_eq!(reference.dlogits_row(0, 0), [-0.75, 0.25, 0.25, 0.25]);
    let metrics = reference.metrics();
    assert_eq!((metrics.ratio_mean, metrics.clip_region, metrics.kl_mean), (1.0, 0.0, None));
}

#[test]
fn ppo_clip_bounds_by_hand() {
    let plain = PpoClip { epsilon_low: 0.25, epsilon_high: 0.5, ..PpoClip::default() };
    let delta = |delta| PpoClip { delta: Some(delta), ..plain.clone() };
    let dual = |c| PpoClip { dual_clip: Some(c), ..plain.clone() };
    // The factor k of loss = −k·A, and whether the ratio still carries a gradient: ∂loss/∂ℓ = −rA, else 0.
    let cases = [
        // A > 0: k = min(r, δ, 1 + εh).
        (plain.clone(), 0.5, 1.0, 0.5, true),
        (plain.clone(), 2.0, 1.0, 1.5, false),
        (delta(1.125), 1.25, 1.0, 1.125, false),
        (delta(4.0), 2.0, 1.0, 1.5, false),
        (dual(1.125), 1.25, 1.0, 1.25, true),
        // A < 0: k = max(1 − εl, r), at most max(δ, 1 + εh) and at most c.
        (plain.clone(), 0.5, -1.0, 0.75, false),
        (plain.clone(), 2.0, -1.0, 2.0, true),
        (delta(1.125), 1.25, -1.0, 1.25, true),
        (delta(1.125), 2.0, -1.0, 1.5, false),
        (delta(3.0), 2.0, -1.0, 2.0, true),
        (delta(3.0), 8.0, -1.0, 3.0, false),
        (dual(3.0), 2.0, -1.0, 2.0, true),
        (dual(3.0), 8.0, -1.0, 3.0, false),
        (dual(1.25), 1.375, -1.0, 1.25, false),
    ];
    for (clip, ratio, advantage, factor, carries_gradient) in cases {
        let name = format!("{clip:?}, r = {ratio}, A = {advantage}");
        let (spec, problem) = (off_policy(clip), at_ratio(ratio, advantage));
        let reference = evaluate(&spec, &problem).unwrap();
        println!("{name}");
        assert_near(reference.loss(), -factor * advantage);
        let g = if carries_gradient { -ratio * advantage } else { 0.0 };
        assert_row(&reference.dlogits_row(0, 0), &[g * 3.0 / 4.0, -g / 4.0, -g / 4.0, -g / 4.0]);
    }
}

#[test]
fn metrics_clip_shares_by_hand() {
    // εl = 1/4, εh = 1/2. r = 2: clipped high where A > 0. r = 1/2: clipped low where A < 0. A = 0 never counts.
    let log_ratios = arr2(&[[LN_2, LN_2, -LN_2, -LN_2], [LN_2, -LN_2, LN_2, 0.0]]);
    let mut problem = uniform(&[[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 2.0, 1.0]]);
    problem.old_logp = Some(log_ratios.mapv(|log_ratio| 0.25_f64.ln() - log_ratio));
    let spec = off_policy(PpoClip { epsilon_low: 0.25, epsilon_high: 0.5, ..PpoClip::default() });
    let metrics = evaluate(&spec, &problem).unwrap().metrics();
    assert_eq!((metrics.clip_low, metrics.clip_high, metrics.clip_region), (1.0 / 8.0, 2.0 / 8.0, 3.0 / 8.0));
    // (4·2 + 3·1/2 + 1) / 8
    assert_near(metrics.ratio_mean, 10.5 / 8.0);
}

#[test]
fn kl_estimators_by_hand() {
    // d = ref_logp − ℓ = ln 2, and A = 0 leaves the KL term alone.
    let cases = [
        (KlEstimator::K1, -LN_2, 1.0),
        (KlEstimator::K2, LN_2 * LN_2 / 2.0, -LN_2),
        (KlEstimator::K3, 1.0 - LN_2, -1.0),
        (KlEstimator::Abs, LN_2, -1.0),
    ];
    for (estimator, value, derivative) in cases {
        let spec = LossSpec { kl: Some(Kl::plain(0.5, estimator)), ..on_policy() };
        let problem = Problem { ref_logp: Some(arr2(&[[0.5_f64.ln()]])), ..uniform(&[[0.0]]) };
        let reference = evaluate(&spec, &problem).unwrap();
        assert_near(reference.loss(), value / 2.0);
        let kl_mean = reference.metrics().kl_mean.expect("a KL term");
        assert_near(kl_mean, value);
        let g = derivative / 2.0;
        assert_row(&reference.dlogits_row(0, 0), &[g * 3.0 / 4.0, -g / 4.0, -g / 4.0, -g / 4.0]);
    }
}

/// `dlogp·(1[j = y] − p_j) − dentropy·p_j(ln p_j + H)`, over `T`.
#[test]
fn logp_dlogits_of_cotangents_by_hand() {
    let (temperature, dlogp, dentropy) = (0.5, -0.75, 0.25);
    let spec = LossSpec { temperature: temperature.into(), ..LossSpec::from_cotangents(true) };
    assert!(spec.is_from_cotangents());
    // 2 ln 3 and three zeros: 9/12, and 1/12 each.
    let mut problem = one_row(&[3_f64.ln(), 0.0, 0.0, 0.0], 0.0);
    problem.advantages = Advantages::Dlogp(arr2(&[[dlogp]]));
    problem.extra.dentropy = Some(arr2(&[[dentropy]]));
    let reference = evaluate(&spec, &problem).unwrap();
    let (p, q) = (0.75_f64, 1.0 / 12.0_f64);
    let entropy = -p * p.ln() - 3.0 * q * q.ln();
    assert_near(reference.loss(), dlogp * p.ln() + dentropy * entropy);
    let of_target = (dlogp * (1.0 - p) - dentropy * p * (p.ln() + entropy)) / temperature;
    let of_other = (-dlogp * q - dentropy * q * (q.ln() + entropy)) / temperature;
    let row = reference.dlogits_row(0, 0);
    for (j, &dlogit) in row.iter().enumerate() {
        let expected = if j == 0 { of_target } else { of_other };
        assert_relative_eq!(dlogit, expected, max_relative = 8.0 * ROUNDING, epsilon = 0.0);
    }
}

/// `(Σ_k dlogp_k (1[j = y_k] − p_j))/T`, of an id that stands at two places and one that stands at one.
#[test]
fn ids_per_token_logp_and_dlogits_by_hand() {
    let (temperature, dlogp) = (0.5, [-0.75, 0.5, 2.0]);
    let spec = LossSpec { temperature: temperature.into(), ids_per_token: 3, ..LossSpec::from_cotangents(false) };
    assert!(spec.is_from_cotangents());
    let mut problem = one_row(&[3_f64.ln(), 0.0, 0.0, 0.0], 0.0);
    problem.advantages = Advantages::Dlogp(arr2(&[[dlogp[0]]]));
    problem.extra.others = Some(OtherIds { ids: arr3(&[[[1, 0]]]), dlogp: arr3(&[[[dlogp[1], dlogp[2]]]]) });
    let reference = evaluate(&spec, &problem).unwrap();
    let (p, q) = (0.75_f64, 1.0 / 12.0_f64);
    let outcome = reference.outcome();
    let logps = outcome.logp_of_others.expect("of several ids").row(0, 0);
    assert_row(&[outcome.logp.at(0, 0), logps[0], logps[1]], &[p.ln(), q.ln(), p.ln()]);
    let twice = dlogp[0] + dlogp[2];
    assert_relative_eq!(reference.loss(), twice * p.ln() + dlogp[1] * q.ln(), max_relative = 8.0 * ROUNDING);
    let of_neither = -(twice + dlogp[1]) * q;
    let expected = [twice * (1.0 - p) - dlogp[1] * p, dlogp[1] * (1.0 - q) - twice * q, of_neither, of_neither];
    assert_row(&reference.dlogits_row(0, 0), &expected.map(|dx| dx / temperature));
}

#[test]
fn entropy_bonus_dlogits_by_hand() {
    // x = [0, ln 3]: p = [1/4, 3/4], H = ln 4 − (3/4) ln 3, ∂H/∂x_0 = −p_0 (ln p_0 + H) = (3/16) ln 3.
    let spec = LossSpec { entropy_coef: 0.5, ..on_policy() };
    let problem = one_row(&[0.0, 3_f64.ln()], 0.0);
    let reference = evaluate(&spec, &problem).unwrap();
    let entropy = 4_f64.ln() - 0.75 * 3_f64.ln();
    assert_near(reference.loss(), -0.5 * entropy);
    let slope = 3.0 / 16.0 * 3_f64.ln();
    assert_row(&reference.dlogits_row(0, 0), &[-0.5 * slope, 0.5 * slope]);
}

#[test]
fn temperature_dividing_logits_by_hand() {
    // x/T = [0, 2 ln 3] / 2 = [0, ln 3], so p = [1/4, 3/4]; the chain rule halves the gradient.
    let spec = LossSpec { temperature: 2.0.into(), ..on_policy() };
    let problem = one_row(&[0.0, 2.0 * 3_f64.ln()], 1.0);
    let reference = evaluate(&spec, &problem).unwrap();
    let token = reference.token(0, 0).unwrap();
    assert_near(token.inputs.logp, 0.25_f64.ln());
    assert_row(&reference.dlogits_row(0, 0), &[-3.0 / 8.0, 3.0 / 8.0]);
}

/// Each token's softmax and gradient are over its own temperature: of a sequence, or of a token, and what the mask hides is not looked at.
#[test]
fn temperature_per_sequence_or_token_by_hand() {
    let spec = LossSpec { temperature: Temperature::Given, ..on_policy() };
    // x = [0, 2 ln 3] over 2 is [0, ln 3], p = [1/4, 3/4]; over 1 it is [0, ln 9], p = [1/10, 9/10].
    let x = 2.0 * 3_f64.ln();
    let logits = Array3::from_shape_fn((2, 3, 2), |(_, _, j)| if j == 0 { 0.0 } else { x });
    let mut problem = Problem { logits: FloatArray::F64(logits), ..uniform(&[[1.0; 3]; 2]) };
    problem.mask = arr2(&[[true, true, false], [true, false, false]]);
    let row = |temperature: f64| {
        let p = if temperature == 2.0 { 0.75 } else { 0.9 };
        [-p / (3.0 * temperature), p / (3.0 * temperature)]
    };
    for (given, temperatures) in
        [(arr2(&[[2.0], [1.0]]), [2.0, 2.0, 1.0]), (arr2(&[[1.0, 2.0, f64::NAN], [2.0, 0.0, -1.0]]), [1.0, 2.0, 2.0])]
    {
        problem.extra.temperature = Some(given);
        let reference = evaluate(&spec, &problem).unwrap();
        for ((b, t), temperature) in [(0, 0), (0, 1), (1, 0)].into_iter().zip(temperatures) {
            let token = reference.token(b, t).unwrap();
            let logp = if temperature == 2.0 { 0.25_f64.ln() } else { 0.1_f64.ln() };
            assert_near(token.inputs.logp, logp);
            assert_row(&reference.dlogits_row(b, t), &row(temperature));
        }
    }
}

#[test]
fn temperature_dividing_logp_by_hand() {
    // x = [0, ln 3]: p = [1/4, 3/4] and ℓ = ln(1/4) / 2 = −ln 2. Entropy is that of softmax(x / 2), with z = [0, ln √3]:
    // q = [1, √3] / (1 + √3) and H = ln(1 + √3) − q_1 ln √3.
    let spec = LossSpec { temperature: 2.0.into(), temperature_divides: TemperatureDivides::Logp, ..on_policy() };
    let problem = one_row(&[0.0, 3_f64.ln()], 1.0);
    let reference = evaluate(&spec, &problem).unwrap();
    let token = reference.token(0, 0).unwrap();
    assert_near(token.inputs.logp, -LN_2);
    let root = 3_f64.sqrt();
    let entropy = (1.0 + root).ln() - root / (1.0 + root) * root.ln();
    assert_near(token.entropy, entropy);
    assert_row(&reference.dlogits_row(0, 0), &[-3.0 / 8.0, 3.0 / 8.0]);
}

/// `r = 1`, so a token's loss is `−A`:
///
/// ```text
/// −A       −1  −2  −3        mask  1 1 1
///         −10  ·   ·               1 0 0
/// ```
fn ragged() -> Problem {
    let mut problem = uniform(&[[1.0, 2.0, 3.0], [10.0, 99.0, 99.0]]);
    problem.mask = arr2(&[[true, true, true], [true, false, false]]);
    problem
}

/// [`ragged`] with a third row, fully masked.
fn ragged_with_an_empty_row() -> Problem {
    let mut problem = uniform(&[[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [99.0, 99.0, 99.0]]);
    problem.mask = arr2(&[[true, true, true], [true, false, false], [false, false, false]]);
    problem
}

/// Checks the loss, and the weights of the first and the second row through dlogits: `w · (−A) · (1 − 1/4)`.
fn assert_reduces(problem: &Problem, reduction: Reduction, loss: f64, weights: [f64; 2]) {
    let spec = LossSpec { reduction, ..on_policy() };
    let reference = evaluate(&spec, problem).unwrap();
    assert_near(reference.loss(), loss);
    let Advantages::Token(advantages) = &problem.advantages else { unreachable!("advantages are per token") };
    for ((b, t), counts) in problem.mask.indexed_iter() {
        let g = if *counts { -weights[b] * advantages[[b, t]] } else { 0.0 };
        assert_row(&reference.dlogits_row(b, t), &[g * 3.0 / 4.0, -g / 4.0, -g / 4.0, -g / 4.0]);
    }
}

#[test]
fn reduction_weights_by_hand() {
    let mean = |rows| Reduction::SequenceMean { rows };
    let length = Reduction::FixedLength { rows: Rows::All, length: Some(8) };
    let (ragged, with_empty) = (ragged(), ragged_with_an_empty_row());
    for (problem, reduction, loss, weights) in [
        // −(1 + 2 + 3 + 10) / 4
        (&ragged, Reduction::TokenMean, -4.0, [1.0 / 4.0; 2]),
        (&with_empty, Reduction::TokenMean, -4.0, [1.0 / 4.0; 2]),
        // −((1 + 2 + 3) / 3 + 10 / 1) / 2
        (&ragged, mean(Rows::All), -6.0, [1.0 / 6.0, 1.0 / 2.0]),
        (&ragged, mean(Rows::NonEmpty), -6.0, [1.0 / 6.0, 1.0 / 2.0]),
        // The same sum over three rows, and over the two that have a token.
        (&with_empty, mean(Rows::All), -4.0, [1.0 / 9.0, 1.0 / 3.0]),
        (&with_empty, mean(Rows::NonEmpty), -6.0, [1.0 / 6.0, 1.0 / 2.0]),
        // −16 / (2 · 8), −16 / (3 · 8)
        (&ragged, length, -1.0, [1.0 / 16.0; 2]),
        (&with_empty, length, -2.0 / 3.0, [1.0 / 24.0; 2]),
        // −16 / 32
        (&ragged, Reduction::Normalizer(32.0), -0.5, [1.0 / 32.0; 2]),
        (&with_empty, Reduction::Normalizer(32.0), -0.5, [1.0 / 32.0; 2]),
    ] {
        assert_reduces(problem, reduction, loss, weights);
    }
}

#[test]
fn entropy_bonus_is_a_token_mean_under_every_reduction() {
    // Every token's entropy is ln 4, so the bonus is coef · ln 4 whatever the weights.
    for reduction in [Reduction::FixedLength { rows: Rows::All, length: Some(8) }, Reduction::Normalizer(32.0)] {
        let spec = LossSpec { reduction, ..on_policy() };
        let with_bonus = LossSpec { entropy_coef: 0.5, ..spec.clone() };
        let problem = ragged_with_an_empty_row();
        let bonus = evaluate(&spec, &problem).unwrap().loss() - evaluate(&with_bonus, &problem).unwrap().loss();
        assert_near(bonus, 0.5 * 4_f64.ln());
    }
}

#[test]
fn confident_target_keeps_its_gradient() {
    // x = [margin, 0, 0, 0]: 1 − p_y = 3e / (1 + 3e) with e = exp(−margin); 1 − p_y from a rounded p_y is 0 beyond 37.
    for margin in [30.0_f64, 60.0, 100.0, 700.0] {
        let (spec, problem) = (on_policy(), one_row(&[margin, 0.0, 0.0, 0.0], 1.0));
        let reference = evaluate(&spec, &problem).unwrap();
        let e = (-margin).exp();
        let p = e / (1.0 + (V - 1) as f64 * e);
        assert_row(&reference.dlogits_row(0, 0), &[-3.0 * p, p, p, p]);
        let token = reference.token(0, 0).unwrap();
        assert_near(token.inputs.logp, -(3.0 * e).ln_1p());
        let entropy = (3.0 * e).ln_1p() + 3.0 * p * margin;
        assert_near(token.entropy, entropy);
    }
}
