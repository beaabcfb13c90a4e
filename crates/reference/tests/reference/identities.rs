//! What must hold of the reference without knowing any value: symmetries of the loss, what a mask hides, what happens
//! at the edges of f64, and which inputs are refused with which words.

use crate::common::cases;
use crate::common::draws::{self, Case, Regime};
use crate::common::uniform::uniform;
use assay_core::problem::{Advantages, Dtype, Extra, FloatArray, Outcome, Problem, ProblemError, mask_from};
use assay_core::spec::{
    AdvantageLevel, Kl, KlEstimator, LogitsTransform, LossSpec, Objective, OldLogp, PpoClip, Ratio, RatioLevel,
    Reduction, Rows, SpecError, Support, TemperatureDivides,
};
use assay_judge::generate::Recipe;
use assay_judge::packed::Twins;
use assay_reference::{Reference, evaluate};
use ndarray::{Array1, Array2, Array3, Axis, Dimension, Ix3, arr1, arr2, s};
use proptest::prelude::*;
use proptest::strategy::Union;

/// `u`, f64's unit roundoff.
const U: f64 = f64::EPSILON / 2.0;

// --- Symmetries, over the options of PPO-clip and every regime of logits. ---

const REGIMES: [Regime; 8] = [
    Regime::Small,
    Regime::Normal,
    Regime::Wide,
    Regime::Shifted,
    Regime::Low,
    Regime::Confident,
    Regime::Excluded,
    Regime::Tied,
];

/// Runs `check` on cases of every regime.
fn for_every_case(check: impl Fn(Case)) {
    for regime in REGIMES {
        let checked = draws::run("reference_identities", 64, &cases::plain(regime), |case| {
            check(case);
            Ok(())
        });
        checked.unwrap_or_else(|error| panic!("{regime:?}: {error}"));
    }
}

fn outcome(spec: &LossSpec, problem: &Problem) -> Outcome {
    evaluate(spec, problem).unwrap().outcome()
}

fn array_bits<D: Dimension>(array: &FloatArray<D>) -> Vec<u64> {
    array.to_f64().iter().map(|x| x.to_bits()).collect()
}

/// Every value of an outcome, bit for bit.
fn bits(outcome: &Outcome) -> Vec<u64> {
    let metrics = outcome.metrics;
    let means = [metrics.clip_low, metrics.clip_high, metrics.clip_region, metrics.entropy_mean, metrics.ratio_mean];
    let metrics = means.into_iter().chain(metrics.kl_mean).map(f64::to_bits);
    let tokens = [&outcome.logp, &outcome.entropy, &outcome.token_loss].into_iter().flat_map(array_bits);
    let mut bits = array_bits(&outcome.loss);
    bits.extend(tokens.chain(array_bits(&outcome.gradient)).chain(metrics));
    bits
}

/// `Σ_b w_b Σ_t m |token_loss| + |entropy_coef| · mean(H)`: what the loss's rounding is relative to.
fn loss_scale(reference: &Reference) -> f64 {
    let shape = reference.shape();
    let tokens = (0..shape.batch).flat_map(|b| (0..shape.tokens).map(move |t| (b, t)));
    let tokens = tokens.filter_map(|(b, t)| reference.token(b, t));
    let terms: f64 = tokens.map(|token| token.weight * token.token_loss.abs()).sum();
    terms + reference.spec().entropy_coef.abs() * reference.metrics().entropy_mean
}

/// Of several ids the loss and dlogits are the sums of those of one id each, whatever becomes of logits before their softmax.
#[test]
fn ids_per_token_outcome_is_the_sum_of_each_id() {
    const TOP: usize = 4;
    let logits = LogitsTransform { softcap: Some(20.0), scale: -0.5, bias: true };
    let plain = LossSpec { temperature: 0.7.into(), ..LossSpec::from_cotangents(false) };
    let left_out = Support { vocab: Some(29), excluded_ids: vec![3, 5], ..Support::default() };
    let divides_logp = LossSpec { temperature_divides: TemperatureDivides::Logp, ..plain.clone() };
    let changed = LossSpec { logits, support: left_out, ..plain.clone() };
    for (seed, one) in (0..).zip([plain, divides_logp, changed, LossSpec::from_cotangents(true)]) {
        let spec = LossSpec { ids_per_token: TOP, ..one.clone() };
        let (shape, dtype, regime) = ([3, 4, 31], Dtype::F32, assay_judge::generate::Regime::Sampled);
        let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true };
        let problem = recipe.problem(&spec).unwrap();
        let all = outcome(&spec, &problem);
        let others = problem.extra.others.as_ref().expect("drawn by the spec");
        let mut sum = Array3::zeros(shape);
        let (mut sizes, mut loss): (Array3<f64>, f64) = (Array3::zeros(shape), 0.0);
        let logps = all.logp.with_others(all.logp_of_others.as_ref().unwrap()).to_f64();
        for k in 0..TOP {
            let mut single = problem.clone();
            single.extra.others = None;
            if k > 0 {
                single.ids = others.ids.index_axis(Axis(2), k - 1).to_owned();
                single.advantages = Advantages::Dlogp(others.dlogp.index_axis(Axis(2), k - 1).to_owned());
                single.extra.dentropy = single.extra.dentropy.map(|dentropy| dentropy * 0.0);
            }
            let of_one = outcome(&one, &single);
            loss += of_one.loss.value();
            for ((b, t), _) in single.mask.indexed_iter().filter(|(_, counts)| **counts) {
                assert_eq!(of_one.logp.at(b, t), logps[[b, t, k]], "{seed}: {b} {t} {k}");
            }
            sum += &of_one.gradient.to_f64();
            sizes += &of_one.gradient.to_f64().mapv(f64::abs);
        }
        for (((b, t, j), dx), sum) in all.gradient.to_f64().indexed_iter().zip(&sum) {
            let error = (dx - sum).abs();
            assert!(error <= 64.0 * U * sizes[[b, t, j]], "{seed}: {b} {t} {j}: {dx} for {sum}");
        }
        assert!((all.loss.value() - loss).abs() <= 1e-13 * loss.abs(), "{seed}: {:?} for {loss}", all.loss);
    }
}

/// Without a KL term and an entropy bonus, the loss is the policy term alone.
fn policy_only(spec: LossSpec) -> LossSpec {
    LossSpec { kl: None, entropy_coef: 0.0, ..spec }
}

fn scaled(advantages: &Advantages, by: f64) -> Advantages {
    match advantages {
        Advantages::Sequence(a) => Advantages::Sequence(a * by),
        Advantages::Token(a) => Advantages::Token(a * by),
        Advantages::Dlogp(a) => Advantages::Dlogp(a * by),
    }
}

/// `array` in the row-major layout that a problem's logits must have.
fn dense(array: Array3<f64>) -> FloatArray<Ix3> {
    FloatArray::F64(array.as_standard_layout().into_owned())
}

#[test]
fn dlogits_row_sums_to_zero() {
    for_every_case(|Case { spec, problem }| {
        let reference = evaluate(&spec, &problem).unwrap();
        let shape = reference.shape();
        for (b, t) in (0..shape.batch).flat_map(|b| (0..shape.tokens).map(move |t| (b, t))) {
            let Some(token) = reference.token(b, t) else { continue };
            let sum: f64 = reference.dlogits_row(b, t).iter().sum();
            // The two halves that cancel: the target's 1 − p_y against the others, columns above ā against those below.
            let policy = reference.grad_logp(token, &token.branch, token.coupling).abs() * token.probability_of_others;
            let bonus = token.grad_entropy.abs() * token.entropy_softmax.stats.mean_gap;
            let limit = 8.0 * U * 2.0 * (policy + bonus) / token.temperature();
            assert!(sum.abs() <= limit, "[{b},{t}]: row sums to {sum:e}, limit {limit:e}");
        }
    });
}

#[test]
fn logits_exact_shift_changes_nothing() {
    for_every_case(|Case { spec, mut problem }| {
        // At T = 1/2 and on multiples of 1/8 the shift, the division and every gap are exact.
        let spec = LossSpec { temperature: 0.5.into(), ..spec };
        let logits = problem.logits.to_f64().mapv(|x| (x * 8.0).round() / 8.0);
        problem.logits = FloatArray::F64(logits.clone());
        let before = bits(&outcome(&spec, &problem));
        problem.logits = FloatArray::F64(logits + 1024.0);
        assert_eq!(before, bits(&outcome(&spec, &problem)));
    });
}

#[test]
fn sequences_permuted_permute_their_rows() {
    for_every_case(|Case { spec, problem }| {
        let order: Vec<usize> = (0..problem.shape().batch).rev().collect();
        let flip = |a: &Array2<f64>| a.select(Axis(0), &order);
        let reversed = Problem {
            logits: dense(problem.logits.to_f64().select(Axis(0), &order)),
            ids: problem.ids.select(Axis(0), &order),
            mask: problem.mask.select(Axis(0), &order),
            advantages: match &problem.advantages {
                Advantages::Sequence(a) => Advantages::Sequence(a.select(Axis(0), &order)),
                Advantages::Token(a) => Advantages::Token(flip(a)),
                Advantages::Dlogp(a) => Advantages::Dlogp(flip(a)),
            },
            old_logp: problem.old_logp.as_ref().map(flip),
            ref_logp: problem.ref_logp.as_ref().map(flip),
            extra: Extra::default(),
        };
        let there = evaluate(&spec, &problem).unwrap();
        let back = evaluate(&spec, &reversed).unwrap();
        let shape = there.shape();
        for (b, t) in (0..shape.batch).flat_map(|b| (0..shape.tokens).map(move |t| (b, t))) {
            assert_eq!(there.dlogits_row(b, t), back.dlogits_row(shape.batch - 1 - b, t), "[{b},{t}]");
        }
        // The order of summation is all that changed.
        assert!((there.loss() - back.loss()).abs() <= 4.0 * U * loss_scale(&there));
    });
}

#[test]
fn advantage_times_4_or_minus_1_scales_exactly() {
    for_every_case(|Case { spec, problem }| {
        let unbounded = PpoClip { epsilon_low: 1e30, epsilon_high: 1e30, delta: None, dual_clip: None };
        let clipped = policy_only(spec);
        let unclipped = LossSpec { objective: Objective::PpoClip(unbounded), ..clipped.clone() };
        // A negated advantage is clipped on the other side.
        for (spec, factor) in [(clipped, 4.0), (unclipped, -1.0)] {
            let once = outcome(&spec, &problem);
            let scaled = Problem { advantages: scaled(&problem.advantages, factor), ..problem.clone() };
            let scaled = outcome(&spec, &scaled);
            assert_eq!(scaled.loss.value(), factor * once.loss.value());
            assert_eq!(scaled.gradient.to_f64(), factor * once.gradient.to_f64());
        }
    });
}

#[test]
fn advantage_scaled_scales_loss_and_dlogits() {
    for_every_case(|Case { spec, problem }| {
        let spec = policy_only(spec);
        let once = evaluate(&spec, &problem).unwrap();
        let tripled = Problem { advantages: scaled(&problem.advantages, 3.0), ..problem.clone() };
        let tripled = evaluate(&spec, &tripled).unwrap();
        assert!((tripled.loss() - 3.0 * once.loss()).abs() <= 3.0 * 4.0 * U * loss_scale(&once));
        let (one, three) = (once.outcome().gradient.to_f64(), tripled.outcome().gradient.to_f64());
        for (one, three) in one.iter().zip(&three) {
            assert!((three - 3.0 * one).abs() <= 8.0 * U * three.abs(), "{three:e} is not 3 × {one:e}");
        }
    });
}

#[test]
fn token_mean_of_one_long_row_is_the_same() {
    for_every_case(|Case { spec, mut problem }| {
        let shape = problem.shape();
        let advantages = Array2::from_shape_fn((shape.batch, shape.tokens), |(b, t)| problem.advantages.at(b, t));
        problem.advantages = Advantages::Token(advantages);
        let spec = LossSpec { advantages: AdvantageLevel::Token, reduction: Reduction::TokenMean, ..spec };

        let packed = (1, shape.batch * shape.tokens);
        let pack = |a: &Array2<f64>| a.to_shape(packed).unwrap().to_owned();
        let Advantages::Token(advantages) = &problem.advantages else { unreachable!("set above") };
        let one_row = Problem {
            logits: problem.logits.to_f64().into_shape_with_order((1, packed.1, shape.vocab)).unwrap().into(),
            ids: problem.ids.to_shape(packed).unwrap().to_owned(),
            mask: problem.mask.to_shape(packed).unwrap().to_owned(),
            advantages: Advantages::Token(pack(advantages)),
            old_logp: problem.old_logp.as_ref().map(pack),
            ref_logp: problem.ref_logp.as_ref().map(pack),
            extra: Extra::default(),
        };
        assert_eq!(bits(&outcome(&spec, &problem)), bits(&outcome(&spec, &one_row)));
    });
}

/// Every option, choices over the whole batch too.
#[test]
fn packed_sequences_have_the_bits_of_padded_ones() {
    let objectives = Union::new(cases::objectives().into_iter().map(|(_, arm)| arm));
    let cases = cases::of_family(objectives.boxed());
    let result = draws::run("reference_identities", 600, &cases, |Case { spec, problem }| {
        let Some(twins) = Twins::from_padded(&spec, &problem) else { return Ok(()) };
        let evaluated = |problem| evaluate(&twins.spec, problem).map(|reference| reference.outcome().into());
        let [packed, padded] = [&twins.packed, &twins.padded].map(evaluated);
        match (packed, padded) {
            (Ok(packed), Ok(padded)) => {
                prop_assert_eq!(twins.between(&packed, &padded).other, Vec::<&str>::new());
            }
            (packed, padded) => prop_assert_eq!(packed.map(drop), padded.map(drop)),
        }
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

// --- Masks. ---

#[test]
fn mask_garbage_under_it_changes_nothing() {
    for_every_case(|Case { spec, problem }| {
        let mut logits = problem.logits.to_f64();
        let mut garbage = problem.clone();
        for ((b, t), _) in problem.mask.indexed_iter().filter(|(_, counts)| !**counts) {
            logits.slice_mut(s![b, t, ..]).fill(f64::NAN);
            garbage.ids[[b, t]] = -100;
            for array in [&mut garbage.old_logp, &mut garbage.ref_logp].into_iter().flatten() {
                array[[b, t]] = f64::NAN;
            }
            match &mut garbage.advantages {
                Advantages::Token(a) | Advantages::Dlogp(a) => a[[b, t]] = f64::NAN,
                Advantages::Sequence(a) if !problem.mask.row(b).iter().any(|counts| *counts) => a[b] = f64::NAN,
                Advantages::Sequence(_) => {}
            }
        }
        garbage.logits = FloatArray::rounded_from(&logits, problem.logits.dtype());
        assert_eq!(bits(&outcome(&spec, &problem)), bits(&outcome(&spec, &garbage)));
    });
}

#[test]
fn mask_of_nothing_makes_the_outcome_zero() {
    for_every_case(|Case { spec, mut problem }| {
        problem.mask.fill(false);
        let reference = evaluate(&spec, &problem).unwrap();
        assert_eq!(reference.first_nonfinite(), None);
        assert!(bits(&reference.outcome()).iter().all(|bits| *bits == 0), "{:?}", reference.outcome());
    });
}

// --- Kinks. ---

fn ppo(clip: PpoClip) -> LossSpec {
    LossSpec { advantages: AdvantageLevel::Token, objective: Objective::PpoClip(clip), ..LossSpec::default() }
}

/// A clip with one bound at the ratio given.
type ClipAt<'a> = &'a dyn Fn(f64) -> PpoClip;

#[test]
fn ppo_clip_exact_tie_takes_the_unclipped_branch() {
    let wide = PpoClip { epsilon_low: 1e30, epsilon_high: 1e30, delta: None, dual_clip: None };
    // The ratio lies in [1/2, 2], so that r − 1 is exact and 1 + (r − 1) is r again.
    let upper = |r: f64| PpoClip { epsilon_high: r - 1.0, ..wide.clone() };
    let lower = |r: f64| PpoClip { epsilon_low: 1.0 - r, ..wide.clone() };
    let delta_below_the_clip = |r: f64| PpoClip { delta: Some(r), ..wide.clone() };
    let delta_above_the_clip = |r: f64| PpoClip { epsilon_high: 0.0, delta: Some(r), ..wide.clone() };
    let dual = |r: f64| PpoClip { dual_clip: Some(r), ..wide.clone() };
    // Log-ratio and advantage at which each bound binds.
    let ties: [(f64, f64, ClipAt); 8] = [
        (0.0, 1.0, &upper),
        (0.1, 1.0, &upper),
        (0.0, -1.0, &lower),
        (-0.5, -1.0, &lower),
        (0.3, 1.0, &delta_below_the_clip),
        (-0.3, 1.0, &delta_below_the_clip),
        (0.3, -1.0, &delta_above_the_clip),
        (0.3, -1.0, &dual),
    ];
    for (log_ratio, advantage, tie) in ties {
        let mut problem = uniform(&[[advantage]]);
        problem.old_logp = problem.old_logp.map(|logp| logp - log_ratio);
        let wide = ppo(wide.clone());
        let unclipped = evaluate(&wide, &problem).unwrap();
        let ratio = unclipped.token(0, 0).unwrap().inputs.ratio(unclipped.spec());
        let spec = ppo(tie(ratio));
        let reference = evaluate(&spec, &problem).unwrap();
        assert_eq!(reference.loss(), unclipped.loss(), "{spec:?}");
        assert_eq!(reference.dlogits_row(0, 0), unclipped.dlogits_row(0, 0), "{spec:?}");
        assert_eq!(reference.metrics().clip_region, 0.0, "{spec:?}");
    }
}

#[test]
fn ppo_clip_one_ulp_beyond_a_tie_is_clipped() {
    let mut problem = uniform(&[[1.0]]);
    problem.old_logp = problem.old_logp.map(|logp| logp - 0.5);
    let spec = ppo(PpoClip::default());
    let ratio = evaluate(&spec, &problem).unwrap().token(0, 0).unwrap().inputs.ratio(&spec);
    let spec = ppo(PpoClip { epsilon_high: ratio.next_down() - 1.0, ..PpoClip::default() });
    let reference = evaluate(&spec, &problem).unwrap();
    assert_eq!(reference.dlogits_row(0, 0), [0.0; 4]);
    assert_eq!(reference.metrics().clip_high, 1.0);
}

// --- The edges of f64. ---

/// Three tokens over four equal logits; the middle one has advantage `advantage` and `log r ≈ 800`, beyond f64's exp.
fn overflowing(advantage: f64) -> Problem {
    let mut problem = uniform(&[[0.5, advantage, -0.5]]);
    problem.old_logp.as_mut().unwrap()[[0, 1]] = -800.0;
    problem
}

#[test]
fn overflowing_ratio_is_clipped_or_without_part_in_the_loss() {
    let bounds = |delta, dual_clip| PpoClip { delta, dual_clip, ..PpoClip::default() };
    for (clip, advantage, token_loss) in [
        (PpoClip::default(), 2.0, -1.2 * 2.0),
        (PpoClip::default(), 0.0, 0.0),
        (bounds(Some(4.0), None), -2.0, 4.0 * 2.0),
        (bounds(None, Some(3.0)), -2.0, 3.0 * 2.0),
    ] {
        let (spec, problem) = (ppo(clip), overflowing(advantage));
        let reference = evaluate(&spec, &problem).unwrap();
        assert_eq!(reference.token(0, 1).unwrap().token_loss, token_loss, "{spec:?}");
        assert_eq!(reference.dlogits_row(0, 1), [0.0; 4], "{spec:?}");
        assert_eq!(reference.first_nonfinite(), None, "{spec:?}");
        assert!(reference.loss().is_finite(), "{spec:?}");
    }
}

#[test]
fn overflowing_ratio_of_negative_advantage_is_infinite() {
    let (spec, problem) = (ppo(PpoClip::default()), overflowing(-2.0));
    let reference = evaluate(&spec, &problem).unwrap();
    assert_eq!(reference.loss(), f64::INFINITY);
    assert_eq!(reference.token(0, 1).unwrap().token_loss, f64::INFINITY);
    assert_eq!(reference.first_nonfinite(), Some((0, 1)));
    let row = reference.dlogits_row(0, 1);
    assert_eq!(row, [f64::INFINITY, f64::NEG_INFINITY, f64::NEG_INFINITY, f64::NEG_INFINITY]);
}

/// Two ratios of `e^400` and one of 1 are, as a product, beyond f64.
#[test]
fn overflowing_sequence_product_is_clipped_as_a_whole() {
    let mut problem = uniform(&[[2.0; 3]]);
    problem.advantages = Advantages::Sequence(arr1(&[2.0]));
    let logp = problem.old_logp.as_ref().unwrap()[[0, 2]];
    let old_logp = problem.old_logp.as_mut().unwrap();
    (old_logp[[0, 0]], old_logp[[0, 1]]) = (logp - 400.0, logp - 400.0);
    let ratio = Ratio { level: RatioLevel::SequenceProduct, ..Ratio::default() };
    let spec = LossSpec { ratio, advantages: AdvantageLevel::Sequence, ..ppo(PpoClip::default()) };
    let reference = evaluate(&spec, &problem).unwrap();
    assert_eq!((reference.loss(), reference.first_nonfinite()), (-1.2 * 2.0, None));
    assert_eq!(reference.dlogits_row(0, 0), [0.0; 4]);
    // A clamp is that of the sum.
    let clamped = LossSpec { ratio: Ratio { clamp: Some(0.1), ..spec.ratio.clone() }, ..spec.clone() };
    let loss = evaluate(&clamped, &problem).unwrap().loss();
    assert!((loss + 2.0 * 0.1_f64.exp()).abs() < 1e-15, "{loss}");
}

/// [`uniform`] logits with row `[0,1]` replaced.
fn with_row(row: [f64; 4], advantage: f64) -> Problem {
    let mut logits = Array3::zeros((1, 3, 4));
    logits.slice_mut(s![0, 1, ..]).assign(&arr1(&row));
    Problem { logits: FloatArray::F64(logits), ..uniform(&[[0.5, advantage, -0.5]]) }
}

#[test]
fn nonfinite_row_is_named_and_other_rows_stay_right() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let spec = LossSpec { entropy_coef: 0.1, ..ppo(PpoClip::default()) };
    let clean_problem = with_row([0.0; 4], 2.0);
    let clean = evaluate(&spec, &clean_problem).unwrap();
    for row in [[0.0, nan, 0.0, 0.0], [nan, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, inf], [inf, 0.0, 0.0, 0.0], [-inf; 4]] {
        for advantage in [2.0, 0.0, -2.0] {
            let problem = with_row(row, advantage);
            let reference = evaluate(&spec, &problem).unwrap();
            assert_eq!(reference.first_nonfinite(), Some((0, 1)), "{row:?}, A = {advantage}");
            assert!(!reference.loss().is_finite(), "{row:?}, A = {advantage}: a loss of {}", reference.loss());
            for t in [0, 2] {
                assert_eq!(reference.dlogits_row(0, t), clean.dlogits_row(0, t), "{row:?}");
                let (token, expected) = (reference.token(0, t).unwrap(), clean.token(0, t).unwrap());
                assert_eq!(token.token_loss.to_bits(), expected.token_loss.to_bits(), "{row:?}");
                assert_eq!(token.entropy.to_bits(), expected.entropy.to_bits(), "{row:?}");
            }
        }
    }
}

#[test]
fn excluded_id_has_no_probability_entropy_or_gradient() {
    let spec = LossSpec { entropy_coef: 0.1, ..ppo(PpoClip::default()) };
    let excluded = with_row([0.0, 1.0, f64::NEG_INFINITY, 2.0], 2.0);
    let without = {
        let logits = excluded.logits.to_f64().select(Axis(2), &[0, 1, 3]);
        Problem { logits: dense(logits), ..excluded.clone() }
    };
    let reference = evaluate(&spec, &excluded).unwrap();
    let smaller = evaluate(&spec, &without).unwrap();
    let (token, expected) = (reference.token(0, 1).unwrap(), smaller.token(0, 1).unwrap());
    assert_eq!((token.inputs.logp, token.entropy), (expected.inputs.logp, expected.entropy));
    let [a, b, excluded, c] = reference.dlogits_row(0, 1)[..] else { panic!("V = 4") };
    assert_eq!(excluded, 0.0);
    assert_eq!(vec![a, b, c], smaller.dlogits_row(0, 1));
    assert_eq!(reference.first_nonfinite(), None);
}

#[test]
fn excluded_id_keeps_dlogit_zero_under_infinite_loss() {
    let mut problem = with_row([0.0, 0.0, f64::NEG_INFINITY, 0.0], -2.0);
    problem.old_logp.as_mut().unwrap()[[0, 1]] = -800.0;
    let spec = ppo(PpoClip::default());
    let row = evaluate(&spec, &problem).unwrap().dlogits_row(0, 1);
    assert_eq!(row, [f64::INFINITY, f64::NEG_INFINITY, 0.0, f64::NEG_INFINITY]);
}

#[test]
fn nonfinite_row_of_zero_advantage_has_zero_dlogits() {
    let (spec, problem) = (ppo(PpoClip::default()), with_row([0.0, f64::NAN, 0.0, 0.0], 0.0));
    let reference = evaluate(&spec, &problem).unwrap();
    assert_eq!(reference.dlogits_row(0, 1), [0.0; 4]);
    assert_eq!(reference.first_nonfinite(), Some((0, 1)), "its log-probability is NaN all the same");
}

#[test]
fn excluded_target_has_logp_minus_infinity() {
    for advantage in [2.0, 0.0, -2.0] {
        let (spec, problem) = (ppo(PpoClip::default()), with_row([f64::NEG_INFINITY, 0.0, 0.0, 0.0], advantage));
        let reference = evaluate(&spec, &problem).unwrap();
        assert_eq!(reference.token(0, 1).unwrap().inputs.logp, f64::NEG_INFINITY);
        assert_eq!(reference.first_nonfinite(), Some((0, 1)));
        assert!(!reference.dlogits_row(0, 1).iter().any(|x| x.is_nan()), "A = {advantage}");
    }
}

// --- What is refused, and with which words. ---

fn refusal(spec: &LossSpec, problem: &Problem) -> String {
    evaluate(spec, problem).expect_err("a refusal").to_string()
}

#[test]
fn spec_out_of_range_is_refused_by_field() {
    let with_clip = |change: &dyn Fn(&mut PpoClip)| {
        let mut clip = PpoClip::default();
        change(&mut clip);
        ppo(clip)
    };
    let base = || ppo(PpoClip::default());
    let kl = |beta| Some(Kl::plain(beta, KlEstimator::K3));
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let refused = [
        (LossSpec { temperature: 0.0.into(), ..base() }, "temperature", "0", "a finite number > 0"),
        (LossSpec { temperature: (-1.0).into(), ..base() }, "temperature", "-1", "a finite number > 0"),
        (LossSpec { temperature: nan.into(), ..base() }, "temperature", "NaN", "a finite number > 0"),
        (LossSpec { temperature: inf.into(), ..base() }, "temperature", "inf", "a finite number > 0"),
        (with_clip(&|c| c.epsilon_low = -0.1), "objective.ppo_clip.epsilon_low", "-0.1", "a finite number ≥ 0"),
        (with_clip(&|c| c.epsilon_low = nan), "objective.ppo_clip.epsilon_low", "NaN", "a finite number ≥ 0"),
        (with_clip(&|c| c.epsilon_high = -0.1), "objective.ppo_clip.epsilon_high", "-0.1", "a finite number ≥ 0"),
        (with_clip(&|c| c.epsilon_high = inf), "objective.ppo_clip.epsilon_high", "inf", "a finite number ≥ 0"),
        (with_clip(&|c| c.delta = Some(0.0)), "objective.ppo_clip.delta", "0", "a finite number > 0"),
        (with_clip(&|c| c.dual_clip = Some(1.0)), "objective.ppo_clip.dual_clip", "1", "a finite number > 1"),
        (with_clip(&|c| c.dual_clip = Some(inf)), "objective.ppo_clip.dual_clip", "inf", "a finite number > 1"),
        (LossSpec { kl: kl(-0.5), ..base() }, "kl.beta", "-0.5", "a finite number ≥ 0"),
        (LossSpec { kl: kl(nan), ..base() }, "kl.beta", "NaN", "a finite number ≥ 0"),
        (LossSpec { entropy_coef: nan, ..base() }, "entropy_coef", "NaN", "a finite number"),
        (
            LossSpec { reduction: Reduction::FixedLength { rows: Rows::All, length: Some(0) }, ..base() },
            "reduction.fixed_length.length",
            "0",
            "an integer ≥ 1",
        ),
        (
            LossSpec { reduction: Reduction::Normalizer(0.0), ..base() },
            "reduction.normalizer",
            "0",
            "a finite number > 0",
        ),
    ];
    for (spec, field, given, expected) in refused {
        let message = format!("spec field `{field}`: got {given}, expected {expected}");
        let error: SpecError = spec.check().expect_err("out of range");
        assert_eq!((error.field, error.to_string()), (field, message.clone()));
        assert_eq!(refusal(&spec, &uniform(&[[1.0]])), message);
    }
}

#[test]
fn spec_at_the_end_of_its_range_is_accepted() {
    let clip = PpoClip { epsilon_low: 0.0, epsilon_high: 0.0, delta: Some(1e-3), dual_clip: Some(1.0_f64.next_up()) };
    let spec = LossSpec {
        kl: Some(Kl::plain(0.0, KlEstimator::K1)),
        entropy_coef: -1.0,
        reduction: Reduction::FixedLength { rows: Rows::All, length: Some(1) },
        temperature: 1e-3.into(),
        ..ppo(clip)
    };
    assert_eq!(spec.check(), Ok(()));
}

/// Makes one thing wrong.
type Spoil<'a> = &'a dyn Fn(&mut LossSpec, &mut Problem);

#[test]
fn problem_that_does_not_fit_is_refused_by_field() {
    let spec = || LossSpec { kl: Some(Kl::plain(0.1, KlEstimator::K3)), ..ppo(PpoClip::default()) };
    let batch = || uniform(&[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]);
    let refused: [(Spoil, &str); 16] = [
        (
            &|_, p| p.logits = FloatArray::F64(Array3::zeros((2, 3, 0))),
            "`logits`: got shape [2, 3, 0], expected [B,T,V] with B, T, V ≥ 1",
        ),
        (
            &|_, p| p.logits = FloatArray::F64(Array3::zeros((4, 3, 2)).reversed_axes()),
            "`logits`: got a strided array, expected dense row-major (use `as_standard_layout`)",
        ),
        (&|_, p| p.ids = Array2::zeros((2, 2)), "`ids`: got shape [2, 2], expected [2, 3] ([B,T] of the logits)"),
        (
            &|_, p| p.mask = Array2::from_elem((3, 2), true),
            "`mask`: got shape [3, 2], expected [2, 3] ([B,T] of the logits)",
        ),
        (
            &|_, p| p.advantages = Advantages::Sequence(Array1::zeros(2)),
            "`advantages`: got shape [2], expected [2, 3] ([B,T] of the logits, as the spec has `advantages: token`)",
        ),
        (
            &|s, _| s.advantages = AdvantageLevel::Sequence,
            "`advantages`: got shape [2, 3], expected [2] ([B] of the logits, as the spec has `advantages: sequence`)",
        ),
        (
            &|_, p| p.old_logp = None,
            "`old_logp`: not given, expected shape [2, 3] because the spec has `old_logp: given`",
        ),
        (&|_, p| p.ref_logp = None, "`ref_logp`: not given, expected shape [2, 3] because the spec has a `kl` term"),
        (
            &|_, p| p.old_logp = Some(Array2::zeros((2, 4))),
            "`old_logp`: got shape [2, 4], expected [2, 3] ([B,T] of the logits)",
        ),
        (
            &|_, p| p.ref_logp = Some(Array2::zeros((1, 3))),
            "`ref_logp`: got shape [1, 3], expected [2, 3] ([B,T] of the logits)",
        ),
        (
            &|_, p| p.old_logp.as_mut().unwrap()[[1, 2]] = f64::NAN,
            "`old_logp[1,2]`: got NaN, expected a finite number on an unmasked token",
        ),
        (
            &|_, p| p.ref_logp.as_mut().unwrap()[[0, 1]] = f64::NEG_INFINITY,
            "`ref_logp[0,1]`: got -inf, expected a finite number on an unmasked token",
        ),
        (
            &|_, p| p.advantages = Advantages::Token(arr2(&[[1.0, 2.0, 3.0], [f64::NAN, 5.0, 6.0]])),
            "`advantages[1,0]`: got NaN, expected a finite number on an unmasked token",
        ),
        (&|_, p| p.ids[[0, 2]] = 4, "`ids[0,2]`: got 4, expected 0 ≤ id < V = 4 on an unmasked token"),
        (&|_, p| p.ids[[1, 1]] = -100, "`ids[1,1]`: got -100, expected 0 ≤ id < V = 4 on an unmasked token"),
        (&|s, _| s.temperature = (-2.0).into(), "spec field `temperature`: got -2, expected a finite number > 0"),
    ];
    for (change, message) in refused {
        let (mut spec, mut problem) = (spec(), batch());
        change(&mut spec, &mut problem);
        assert_eq!(refusal(&spec, &problem), message);
    }
    assert!(evaluate(&spec(), &batch()).is_ok(), "else the refusals show nothing");
}

#[test]
fn problem_array_that_is_not_read_may_be_missing() {
    let spec = LossSpec { old_logp: OldLogp::Current, ..ppo(PpoClip::default()) };
    let problem = Problem { old_logp: None, ref_logp: None, ..uniform(&[[1.0]]) };
    assert!(evaluate(&spec, &problem).is_ok());
}

#[test]
fn mask_value_other_than_0_and_1_is_refused() {
    assert_eq!(mask_from("mask", &arr2(&[[0.0, 1.0]])), Ok(arr2(&[[false, true]])));
    for given in [0.5, -1.0, 2.0, f64::NAN] {
        let error: ProblemError = mask_from("mask", &arr2(&[[1.0, 0.0], [1.0, given]])).expect_err("not a mask");
        assert_eq!(error.to_string(), format!("`mask[1,1]`: got {given}, expected 0 or 1"));
    }
}
