//! The comparator is itself tested: each way of being wrong must be rejected, by the gate that is there for it, and a
//! right answer never.

use assay_core::implementation::Implementation;
use assay_core::problem::{Candidate, Dtype, FloatArray, Problem};
use assay_core::spec::{
    DroppedTerm, Kl, KlEstimator, KlImportance, LogitsTransform, LossSpec, QuantilePrecision, Ratio, RatioLevel,
    Support, TopEntropy,
};
use assay_judge::gate::{Edge, Gate, Model, Output};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::judge::{Cancellation, Status, Verdict};
use assay_judge::judgeable::Judgeable;
use assay_judge::metric::half_ulp;
use assay_judge::recorded::recorded_spec;
use assay_judge::tolerance::{Grade, Limits};
use assay_native::Native;
use assay_reference::{self as reference, Reference};
use half::bf16;
use ndarray::{Array3, Ix0, arr0};

const DLOGITS: Gate = Gate::new(Output::Dlogits, Model::Elementwise);
const MASKED: Gate = DLOGITS.at(Some(Edge::Masked));
const ROW_L2: Gate = Gate::new(Output::Dlogits, Model::RowL2);
const ROW_SUM: Gate = Gate::new(Output::Dlogits, Model::RowSum);

fn gate(output: Output) -> Gate {
    Gate::new(output, Model::Elementwise)
}

fn spec() -> LossSpec {
    LossSpec { kl: Some(Kl::plain(0.1, KlEstimator::K3)), entropy_coef: 0.01, ..LossSpec::default() }
}

fn problem(dtype: Dtype) -> Problem {
    let recipe = Recipe {
        shape: [3, 5, 1025],
        dtype,
        regime: Regime::Normal,
        seed: 11,
        old_logp_noise_scale: 0.05,
        masked_garbage: false,
    };
    let mut problem = recipe.problem(&spec()).unwrap();
    problem.mask.fill(true);
    problem.mask[[2, 4]] = false;
    problem
}

/// The native kernel's answer, changed by `break_it`, judged.
fn verdicts(dtype: Dtype, break_it: impl FnOnce(&mut Candidate, &Reference)) -> Vec<Verdict> {
    let (spec, problem) = (spec(), problem(dtype));
    let reference = reference::evaluate(&spec, &problem).unwrap();
    let native = Native::default();
    let mut candidate = native.run(&spec, problem.clone(), 1).unwrap();
    break_it(&mut candidate, &reference);
    problem.judge(&reference, &candidate.lend(), &Limits::for_class(native.class()).unwrap()).unwrap()
}

#[track_caller]
fn assert_rejected(verdicts: &[Verdict], gate: Gate, status: Status) {
    let verdict = verdicts.iter().find(|verdict| verdict.gate == gate).expect("judged");
    assert_eq!(verdict.status, status, "{gate}: {verdict:?}");
}

/// A loss of f32.
fn loss_of(loss: f32) -> FloatArray<Ix0> {
    arr0(loss).into()
}

fn dlogits_f32(candidate: &mut Candidate) -> &mut Array3<f32> {
    let FloatArray::F32(dlogits) = &mut candidate.gradient else { panic!("f32 logits give f32 dlogits") };
    dlogits
}

fn dlogits_bf16(candidate: &mut Candidate) -> &mut Array3<bf16> {
    let FloatArray::Bf16(dlogits) = &mut candidate.gradient else { panic!("bf16 logits give bf16 dlogits") };
    dlogits
}

#[test]
fn verdict_of_right_answers_passes_every_gate() {
    for dtype in Dtype::KERNEL {
        for verdict in verdicts(dtype, |_, _| {}) {
            assert!(verdict.passed(), "{dtype} {}: {verdict:?}", verdict.gate);
        }
    }
}

#[test]
fn dtype_rounding_of_the_reference_passes_every_gate() {
    for dtype in Dtype::KERNEL {
        let (spec, problem) = (spec(), problem(dtype));
        let reference = reference::evaluate(&spec, &problem).unwrap();
        let mut candidate = Candidate::from(reference.outcome());
        candidate.gradient = FloatArray::rounded_from(&candidate.gradient.to_f64(), dtype);
        for verdict in problem.judge(&reference, &candidate.lend(), &Limits::for_class("native").unwrap()).unwrap() {
            assert!(verdict.passed(), "{dtype} {}: {verdict:?}", verdict.gate);
        }
    }
}

#[test]
fn nan_and_infinity_are_nonfinite() {
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let of_dlogits = verdicts(Dtype::F32, |candidate, _| dlogits_f32(candidate)[[1, 2, 3]] = wrong);
        assert_rejected(&of_dlogits, DLOGITS, Status::Nonfinite);
        let of_loss = verdicts(Dtype::F32, |candidate, _| candidate.loss = Some(loss_of(wrong)));
        assert_rejected(&of_loss, gate(Output::Loss), Status::Nonfinite);
        for output in [Output::Logp, Output::Entropy, Output::TokenLoss] {
            let of_token = verdicts(Dtype::F32, |candidate, _| *token(candidate, output, 0, 1) = wrong);
            assert_rejected(&of_token, gate(output), Status::Nonfinite);
        }
    }
}

fn token(candidate: &mut Candidate, output: Output, b: usize, t: usize) -> &mut f32 {
    let array = match output {
        Output::Logp => &mut candidate.logp,
        Output::Entropy => &mut candidate.entropy,
        Output::TokenLoss => &mut candidate.token_loss,
        _ => panic!("not an output of tokens"),
    };
    let Some(FloatArray::F32(array)) = array else { panic!("native gives f32") };
    &mut array[[b, t]]
}

#[test]
fn sign_flips_are_rejected() {
    let verdict = verdicts(Dtype::F32, |candidate, _| dlogits_f32(candidate)[[0, 0, 77]] *= -1.0);
    assert_rejected(&verdict, DLOGITS, Status::Fail);
    let verdict = verdicts(Dtype::Bf16, |candidate, _| dlogits_bf16(candidate)[[0, 0, 77]] *= bf16::NEG_ONE);
    assert_rejected(&verdict, DLOGITS, Status::Fail);
    for output in [Output::Logp, Output::Entropy, Output::TokenLoss] {
        let verdict = verdicts(Dtype::F32, |candidate, _| *token(candidate, output, 2, 0) *= -1.0);
        assert_rejected(&verdict, gate(output), Status::Fail);
    }
    let verdict = verdicts(Dtype::F32, |candidate, _| {
        candidate.loss = candidate.loss.as_ref().map(|loss| loss_of(-loss.value() as f32));
    });
    assert_rejected(&verdict, gate(Output::Loss), Status::Fail);
}

#[test]
fn dlogits_one_bf16_ulp_or_1000_f32_ulps_off_are_rejected() {
    // In bf16 the limit is half an ulp and a little; in f32 a few roundings of every term, here about 160 ulp.
    let verdict = verdicts(Dtype::Bf16, |candidate, reference| {
        let exact = reference.dlogits_row(1, 1)[500];
        let off = bf16::from_bits(bf16::from_f64(exact).to_bits() + 1);
        dlogits_bf16(candidate)[[1, 1, 500]] = off;
    });
    assert_rejected(&verdict, DLOGITS, Status::Fail);
    let verdict = verdicts(Dtype::F32, |candidate, reference| {
        let exact = reference.dlogits_row(1, 1)[500] as f32;
        dlogits_f32(candidate)[[1, 1, 500]] = f32::from_bits(exact.to_bits() + 1000);
    });
    assert_rejected(&verdict, DLOGITS, Status::Fail);
    for output in [Output::Logp, Output::Entropy, Output::TokenLoss] {
        let verdict = verdicts(Dtype::F32, |candidate, _| {
            let value = token(candidate, output, 0, 2);
            *value = f32::from_bits(value.to_bits() + 1000);
        });
        assert_rejected(&verdict, gate(output), Status::Fail);
    }
}

#[test]
fn dlogits_dropped_column_fails_elements_and_row_l2() {
    for dtype in Dtype::KERNEL {
        let verdict = verdicts(dtype, |candidate, _| {
            let mut values = candidate.gradient.to_f64();
            values.slice_mut(ndarray::s![.., .., 1024]).fill(0.0);
            candidate.gradient = FloatArray::rounded_from(&values, dtype);
        });
        assert_rejected(&verdict, DLOGITS, Status::Fail);
    }
    let verdict = verdicts(Dtype::F32, |candidate, _| dlogits_f32(candidate)[[0, 0, 1024]] = 0.0);
    assert_rejected(&verdict, ROW_L2, Status::Fail);
    assert_rejected(&verdict, ROW_SUM, Status::Fail);
}

#[test]
fn dlogits_zero_beside_the_target_fail_every_dlogits_gate() {
    for dtype in Dtype::KERNEL {
        let verdict = verdicts(dtype, |candidate, reference| {
            let mut values = candidate.gradient.to_f64();
            for ((b, t, v), x) in values.indexed_iter_mut() {
                if reference.token(b, t).is_some_and(|token| token.id != v) {
                    *x = 0.0;
                }
            }
            candidate.gradient = FloatArray::rounded_from(&values, dtype);
        });
        for gate in [DLOGITS, ROW_L2, ROW_SUM] {
            assert_rejected(&verdict, gate, Status::Fail);
        }
    }
}

/// What README says of one fixed tolerance, on the recorded group: `atol = 5e-2, rtol = 5e-1`, Liger's for bf16, accepts
/// dlogits without a single non-target gradient. The judge does not.
/// What a spec does to logits, each part of it left out: a bias, columns that are outside the support, and on the way back the
/// derivative of a cap.
#[test]
fn softcap_bias_or_support_mistakes_are_rejected() {
    let logits = LogitsTransform { scale: 0.7, softcap: Some(6.0), bias: true };
    let support = Support { vocab: Some(1000), excluded_ids: vec![1, 5], keep_sampled: true, kept: None };
    let spec = LossSpec { logits: logits.clone(), support: support.clone(), ..spec() };
    let recipe = Recipe {
        shape: [3, 5, 1025],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 11,
        old_logp_noise_scale: 0.05,
        masked_garbage: false,
    };
    let problem = recipe.problem(&spec).unwrap();
    let reference = reference::evaluate(&spec, &problem).unwrap();
    let native = Native::default();
    let verdicts = |candidate: Candidate| {
        problem.judge(&reference, &candidate.lend(), &Limits::for_class(native.class()).unwrap()).unwrap()
    };
    let right = native.run(&spec, problem.clone(), 1).unwrap();
    assert!(verdicts(right).iter().all(|verdict| verdict.status == Status::Pass));
    let unbiased = LossSpec { logits: LogitsTransform { bias: false, ..logits }, ..spec.clone() };
    let whole = LossSpec { support: Support::default(), ..spec.clone() };
    for other in [unbiased, whole] {
        let wrong = verdicts(native.run(&other, problem.clone(), 1).unwrap());
        assert_rejected(&wrong, DLOGITS, Status::Fail);
        assert_rejected(&wrong, gate(Output::Logp), Status::Fail);
    }
    let mut without_slope = native.run(&spec, problem.clone(), 1).unwrap();
    let bias = problem.extra.bias.as_ref().unwrap();
    let given = problem.logits.to_f64();
    for ((b, t, v), dx) in dlogits_f32(&mut without_slope).indexed_iter_mut() {
        *dx *= (0.7 * (given[[b, t, v]] + bias[v]) / 6.0).cosh().powi(2) as f32;
    }
    let wrong = verdicts(without_slope);
    assert_rejected(&wrong, DLOGITS, Status::Fail);
    assert!(wrong.iter().find(|verdict| verdict.gate == gate(Output::Logp)).unwrap().status == Status::Pass);
}

#[test]
fn published_bf16_tolerance_accepts_what_the_judge_rejects() {
    let file = assay_fixture::ProblemFile::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../fixtures/qwen_gsm8k.safetensors"
    ))
    .unwrap();
    let (spec, problem) = (recorded_spec(), file.problem("logits", Some("old_logps")).unwrap());
    let reference = reference::evaluate(&spec, &problem).unwrap();
    let mut candidate = Candidate::from(reference.outcome());
    let FloatArray::F64(dlogits) = &mut candidate.gradient else { panic!("the reference gives f64") };
    for ((b, t, v), x) in dlogits.indexed_iter_mut() {
        if reference.token(b, t).is_some_and(|token| token.id != v) {
            assert!(x.abs() <= 5e-2 + 5e-1 * x.abs(), "[{b},{t},{v}]");
            *x = 0.0;
        }
    }
    candidate.gradient = FloatArray::rounded_from(&candidate.gradient.to_f64(), Dtype::Bf16);
    candidate.metrics = None;
    let verdicts = problem.judge(&reference, &candidate.lend(), &Limits::for_class("external").unwrap());
    for gate in [DLOGITS, ROW_L2, ROW_SUM] {
        assert_rejected(verdicts.as_ref().unwrap(), gate, Status::Fail);
    }
}

#[test]
fn dlogits_zeroed_row_is_rejected() {
    for dtype in Dtype::KERNEL {
        let verdict = verdicts(dtype, |candidate, _| candidate.gradient.fill_row(1, 3, 0.0));
        assert_rejected(&verdict, DLOGITS, Status::Fail);
        assert_rejected(&verdict, ROW_L2, Status::Fail);
    }
}

#[test]
fn masked_token_with_a_gradient_is_rejected() {
    let verdict = verdicts(Dtype::F32, |candidate, _| dlogits_f32(candidate)[[2, 4, 9]] = 1e-30);
    assert_rejected(&verdict, MASKED, Status::Fail);
    let verdict = verdicts(Dtype::F32, |candidate, _| dlogits_f32(candidate)[[2, 4, 9]] = f32::NAN);
    assert_rejected(&verdict, MASKED, Status::Nonfinite);
}

#[test]
fn metrics_off_by_one_token_are_rejected() {
    let change = |change: fn(&mut assay_core::problem::Metrics)| {
        verdicts(Dtype::F32, |candidate, _| change(candidate.metrics.as_mut().expect("native gives metrics")))
    };
    let rejected = |verdicts: &[Verdict], output, model| {
        assert_rejected(verdicts, Gate::new(output, model), Status::Fail);
    };
    rejected(&change(|m| m.clip_low += 1.0 / 14.0), Output::ClipLow, Model::Count);
    rejected(&change(|m| m.clip_high += 1.0 / 14.0), Output::ClipHigh, Model::Count);
    rejected(&change(|m| m.clip_region += 1.0 / 14.0), Output::ClipRegion, Model::Count);
    rejected(&change(|m| m.entropy_mean *= 14.0 / 15.0), Output::EntropyMean, Model::Elementwise);
    rejected(&change(|m| m.ratio_mean *= 14.0 / 15.0), Output::RatioMean, Model::Elementwise);
    rejected(&change(|m| m.kl_mean = m.kl_mean.map(|kl| -kl - 0.01)), Output::KlMean, Model::Elementwise);
    let missing = change(|m| m.kl_mean = None);
    assert_rejected(&missing, gate(Output::KlMean), Status::Nonfinite);
}

#[test]
fn nonfinite_reference_rejects_a_finite_answer() {
    let (spec, mut problem) = (spec(), problem(Dtype::F32));
    let FloatArray::F32(logits) = &mut problem.logits else { panic!("asked for f32") };
    logits[[1, 1, 8]] = f32::NAN;
    let reference = reference::evaluate(&spec, &problem).unwrap();
    assert_eq!(reference.first_nonfinite(), Some((1, 1)));
    let native = Native::default();
    let honest = native.run(&spec, problem.clone(), 1).unwrap();
    let judged = |candidate: &Candidate| {
        problem.judge(&reference, &candidate.lend(), &Limits::for_class(native.class()).unwrap()).unwrap()
    };
    for verdict in judged(&honest) {
        assert!(verdict.passed(), "a kernel that reports the NaN is right: {verdict:?}");
    }
    let mut silent = honest;
    *token(&mut silent, Output::Logp, 1, 1) = -3.0;
    let overflow = Some(Edge::Overflow);
    assert_rejected(&judged(&silent), gate(Output::Logp).at(overflow), Status::Fail);
    silent.gradient.fill_row(1, 1, 0.0);
    assert_rejected(&judged(&silent), DLOGITS.at(overflow), Status::Fail);
    silent.loss = Some(loss_of(0.5_f32));
    assert_rejected(&judged(&silent), gate(Output::Loss), Status::Fail);
}

/// A problem of one token whose ratio lies at `1 + epsilon_high`, `steps` f32 roundings of its logp beyond.
fn at_the_clip(steps: f64) -> (LossSpec, Problem) {
    let spec = LossSpec::default();
    let recipe = Recipe {
        shape: [1, 1, 97],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 3,
        old_logp_noise_scale: 0.0,
        masked_garbage: false,
    };
    let mut problem = recipe.problem(&spec).unwrap();
    problem.advantages = assay_core::problem::Advantages::Sequence(ndarray::arr1(&[1.0]));
    let logp = reference::evaluate(&spec, &problem).unwrap().token(0, 0).unwrap().inputs.logp;
    let old_logp = logp - 1.2_f64.ln() - steps * assay_judge::U;
    problem.old_logp = Some(ndarray::arr2(&[[old_logp]]));
    (spec, problem)
}

#[test]
fn tie_band_takes_either_branch_inside_and_one_outside() {
    let clipped = |problem: &Problem, spec: &LossSpec| {
        let reference = reference::evaluate(spec, problem).unwrap();
        let mut candidate = Native::default().run(spec, problem.clone(), 1).unwrap();
        candidate.gradient.fill_row(0, 0, 0.0);
        let zeroed = problem.judge(&reference, &candidate.lend(), &Limits::for_class("native").unwrap()).unwrap();
        zeroed.iter().find(|verdict| verdict.gate == DLOGITS).unwrap().passed()
    };
    for steps in [-1.0, 0.0, 1.0] {
        let (spec, problem) = at_the_clip(steps);
        assert!(clipped(&problem, &spec), "{steps} roundings away the gradient may be 0");
    }
    let (spec, problem) = at_the_clip(-2000.0);
    assert!(!clipped(&problem, &spec), "below the bound the gradient is not 0");
    let (spec, problem) = at_the_clip(2000.0);
    assert!(clipped(&problem, &spec), "above the bound it is");
}

/// One of three tokens lies at the clip's bound: a share of 0 may be ⅓, which f32 rounds up, and no more.
#[test]
fn tie_share_of_tokens_is_rounded_where_it_is() {
    let spec = LossSpec::default();
    let recipe = Recipe {
        shape: [1, 3, 97],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 3,
        old_logp_noise_scale: 0.0,
        masked_garbage: false,
    };
    let mut problem = recipe.unmasked_problem(&spec).unwrap();
    problem.advantages = assay_core::problem::Advantages::Sequence(ndarray::arr1(&[1.0]));
    let known = reference::evaluate(&spec, &problem).unwrap();
    let logp = [0, 1, 2].map(|t| known.token(0, t).unwrap().inputs.logp);
    problem.old_logp = Some(ndarray::arr2(&[[logp[0] - 1.2_f64.ln() + assay_judge::U, logp[1], logp[2]]]));
    let reference = reference::evaluate(&spec, &problem).unwrap();
    assert_eq!(reference.outcome().metrics.clip_high, 0.0);
    let judged = |share: f32| {
        let mut candidate = Native::default().run(&spec, problem.clone(), 1).unwrap();
        candidate.metrics.as_mut().expect("native gives metrics").clip_high = share.into();
        let verdicts = problem.judge(&reference, &candidate.lend(), &Limits::for_class("native").unwrap()).unwrap();
        verdicts.iter().find(|verdict| verdict.gate == Gate::new(Output::ClipHigh, Model::Count)).unwrap().passed()
    };
    let third = 1.0_f32 / 3.0;
    assert!(f64::from(third) > 1.0 / 3.0);
    assert!(judged(0.0) && judged(third));
    assert!(!judged(third.next_up()) && !judged(2.0 * third));
}

/// `jnp.minimum(ρA, jnp.clip(ρ, 0.8, 1.2)·A)` at a `ρ` of 1.2 has ¾ of a gradient: ½ of one argument, and ½ of ½ of the other.
#[test]
fn tie_gradient_between_its_branches_passes_and_beyond_fails() {
    let scaled = |steps: f64, by: f32| {
        let (spec, problem) = at_the_clip(steps);
        // The piece with a gradient is the one below the clip.
        let (_, below) = at_the_clip(-1.0);
        let mut candidate = Native::default().run(&spec, problem.clone(), 1).unwrap();
        let FloatArray::F32(dlogits) = &mut candidate.gradient else { panic!("f32") };
        let exact = reference::evaluate(&spec, &below).unwrap().dlogits_row(0, 0);
        dlogits.slice_mut(ndarray::s![0, 0, ..]).iter_mut().zip(exact).for_each(|(x, exact)| *x = exact as f32 * by);
        let reference = reference::evaluate(&spec, &problem).unwrap();
        problem.judge(&reference, &candidate.lend(), &Limits::for_class("native").unwrap()).unwrap()
    };
    for by in [0.25, 0.5, 0.75] {
        assert!(scaled(0.0, by).iter().all(Verdict::passed), "{by}");
        assert_rejected(&scaled(-2000.0, by), DLOGITS, Status::Fail);
    }
    for by in [-0.25, 1.25] {
        assert_rejected(&scaled(0.0, by), DLOGITS, Status::Fail);
    }
}

/// For `A < 0` the loss has no kink at `1 + epsilon_high`: the gradient is the ratio's, and the ¾ of it that `jax.grad` makes of two equal
/// arguments are forgiven, by grade `standard` alone, and there alone.
#[test]
fn tie_without_a_kink_is_forgiven_by_standard_alone() {
    let scaled = |steps: f64, by: f32, level: RatioLevel, grade: Grade| {
        let (spec, mut problem) = at_the_clip(steps);
        let spec = LossSpec { ratio: Ratio { level, ..spec.ratio }, ..spec };
        problem.advantages = assay_core::problem::Advantages::Sequence(ndarray::arr1(&[-1.0]));
        let mut candidate = Native::default().run(&spec, problem.clone(), 1).unwrap();
        let FloatArray::F32(dlogits) = &mut candidate.gradient else { panic!("f32") };
        *dlogits *= by;
        let reference = reference::evaluate(&spec, &problem).unwrap();
        problem.judge(&reference, &candidate.lend(), &Limits::external(grade)).unwrap()
    };
    for level in [RatioLevel::Token, RatioLevel::Sequence] {
        for by in [1.0, 0.75, 0.5] {
            assert!(scaled(0.0, by, level, Grade::Standard).iter().all(Verdict::passed), "{level:?} {by}");
        }
        assert_rejected(&scaled(0.0, 0.75, level, Grade::Exact), DLOGITS, Status::Fail);
        let short = scaled(0.0, 0.75, level, Grade::Standard).into_iter().filter_map(|verdict| verdict.short_of_exact);
        assert!(short.into_iter().any(|short| short.cancellation == Cancellation::Bound));
        for (steps, by) in [(0.0, -0.25), (0.0, 1.25), (-2000.0, 0.75), (2000.0, 0.75)] {
            assert_rejected(&scaled(steps, by, level, Grade::Standard), DLOGITS, Status::Fail);
        }
    }
}

/// Two tokens of one entropy, of which the upper half has a policy term: either may, but none may have half of one.
#[test]
fn tie_at_a_jump_takes_no_gradient_between() {
    let spec = LossSpec {
        top_entropy: Some(TopEntropy {
            fraction: 0.5,
            drops: DroppedTerm::PolicyTerm,
            precision: QuantilePrecision::Exact,
        }),
        ..LossSpec::default()
    };
    let (_, of_one) = at_the_clip(-2000.0);
    let twice = |array: &ndarray::Array2<f64>| ndarray::concatenate![ndarray::Axis(1), *array, *array];
    let FloatArray::F32(logits) = &of_one.logits else { panic!("f32") };
    let problem = Problem {
        logits: ndarray::concatenate![ndarray::Axis(1), *logits, *logits].into(),
        ids: ndarray::concatenate![ndarray::Axis(1), of_one.ids, of_one.ids],
        mask: ndarray::concatenate![ndarray::Axis(1), of_one.mask, of_one.mask],
        old_logp: of_one.old_logp.as_ref().map(twice),
        ref_logp: None,
        extra: assay_core::problem::Extra::default(),
        ..of_one.clone()
    };
    let reference = reference::evaluate(&spec, &problem).unwrap();
    let scaled = |by: f64| {
        let mut outcome = reference.outcome();
        let FloatArray::F64(dlogits) = &mut outcome.gradient else { panic!("f64") };
        *dlogits *= by;
        let candidate = Candidate { token_loss: None, ..Candidate::from(outcome) };
        problem.judge(&reference, &candidate.lend(), &Limits::external(Grade::Standard)).unwrap()
    };
    assert!(scaled(1.0).iter().all(Verdict::passed));
    assert_rejected(&scaled(0.5), DLOGITS, Status::Fail);
}

/// `G/S` of five equal logits: a device that flushes it to 0 has no gradient, and one that need not flush it has.
#[test]
fn flushed_factor_of_exponentials_passes() {
    let (spec, mut problem) = at_the_clip(0.0);
    let vocab = 5;
    problem.logits = ndarray::Array3::<f32>::zeros((1, 1, vocab)).into();
    problem.ids.fill(2);
    let zeros = |times: f64| {
        let ratio = times * f64::from(f32::MIN_POSITIVE) * vocab as f64;
        let problem =
            Problem { old_logp: Some(ndarray::arr2(&[[-(vocab as f64).ln() - ratio.ln()]])), ..problem.clone() };
        let reference = reference::evaluate(&spec, &problem).unwrap();
        let mut candidate = Candidate::from(reference.outcome());
        candidate.gradient.fill_row(0, 0, 0.0);
        problem.judge(&reference, &candidate.lend(), &Limits::external(Grade::Exact)).unwrap()
    };
    assert!(zeros(0.9).iter().all(Verdict::passed));
    assert_rejected(&zeros(2.0), DLOGITS, Status::Fail);
}

/// `E/S` of an entropy bonus, with one logit above all others: its `a − ā` is some multiple of what is lost of `E/S`.
#[test]
fn flushed_factor_of_an_entropy_bonus_passes() {
    let (spec, mut problem) = at_the_clip(0.0);
    let mut logits = Array3::<f32>::from_elem((1, 1, 4097), -6.0);
    logits[[0, 0, 0]] = 0.0;
    let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    problem.logits = logits.into();
    problem.ids.fill(2);
    problem.advantages = assay_core::problem::Advantages::Sequence(ndarray::arr1(&[0.0]));
    let zeros = |times: f64| {
        let spec = LossSpec { entropy_coef: times * f64::from(f32::MIN_POSITIVE) * sum, ..spec.clone() };
        let reference = reference::evaluate(&spec, &problem).unwrap();
        let mut candidate = Candidate::from(reference.outcome());
        candidate.gradient.fill_row(0, 0, 0.0);
        problem.judge(&reference, &candidate.lend(), &Limits::external(Grade::Exact)).unwrap()
    };
    assert!(zeros(0.9).iter().all(Verdict::passed));
    assert_rejected(&zeros(2.0), DLOGITS, Status::Fail);
}

/// `ρ·(e^d − d − 1)` of one token, whose `ρ` is 0.005 and whose `e^d` is what f32 overflows at, or not.
fn importance_sampled_k3(d: f64) -> (LossSpec, Problem) {
    let kl = Kl { importance: KlImportance::Ratio, ..Kl::plain(0.1, KlEstimator::K3) };
    let (spec, mut problem) = at_the_clip(0.0);
    let spec = LossSpec { kl: Some(kl), ..spec };
    let FloatArray::F32(logits) = &mut problem.logits else { panic!("asked for f32") };
    let target = usize::try_from(problem.ids[[0, 0]]).unwrap();
    logits[[0, 0, target]] -= 100.0;
    let logp = reference::evaluate(&spec, &problem).unwrap().token(0, 0).unwrap().inputs.logp;
    problem.old_logp = Some(ndarray::arr2(&[[logp - 0.005_f64.ln()]]));
    problem.ref_logp = Some(ndarray::arr2(&[[logp + d]]));
    (spec, problem)
}

#[test]
fn kl_k3_that_overflows_before_its_product_passes() {
    let not_finite = |d: f64| {
        let (spec, problem) = importance_sampled_k3(d);
        let reference = reference::evaluate(&spec, &problem).unwrap();
        assert!(reference.loss() < f64::from(f32::MAX), "{}", reference.loss());
        let mut candidate = Native::default().run(&spec, problem.clone(), 1).unwrap();
        candidate.loss = Some(loss_of(f32::INFINITY));
        *token(&mut candidate, Output::TokenLoss, 0, 0) = f32::INFINITY;
        candidate.gradient.fill_row(0, 0, f64::NAN);
        problem.judge(&reference, &candidate.lend(), &Limits::for_class("native").unwrap()).unwrap()
    };
    for verdict in not_finite(92.0) {
        assert!(verdict.passed(), "{verdict:?}");
    }
    for output in [Output::Loss, Output::TokenLoss, Output::Dlogits] {
        assert_rejected(&not_finite(85.0), gate(output), Status::Nonfinite);
    }
}

/// `−w·e^d/T` of one token, of which a column has too little for f32 to overflow.
#[test]
fn temperature_that_overflows_a_gradient_passes_only_after() {
    let not_finite = |temperature: f64| {
        let (spec, mut problem) = at_the_clip(0.0);
        let spec = LossSpec { kl: Some(Kl::plain(1.0, KlEstimator::K3)), temperature: temperature.into(), ..spec };
        let logp = reference::evaluate(&spec, &problem).unwrap().token(0, 0).unwrap().inputs.logp;
        problem.ref_logp = Some(ndarray::arr2(&[[logp + 87.0]]));
        let reference = reference::evaluate(&spec, &problem).unwrap();
        let mut candidate = Native::default().run(&spec, problem.clone(), 1).unwrap();
        let row = reference.dlogits_row(0, 0);
        let column = (0..row.len()).find(|&v| row[v].abs() < 1e37).expect("a small one");
        let FloatArray::F32(dlogits) = &mut candidate.gradient else { panic!("f32") };
        dlogits[[0, 0, column]] = f32::INFINITY;
        problem.judge(&reference, &candidate.lend(), &Limits::for_class("native").unwrap()).unwrap()
    };
    for verdict in not_finite(0.3) {
        assert!(verdict.passed(), "{verdict:?}");
    }
    assert_rejected(&not_finite(1.0), gate(Output::Dlogits), Status::Nonfinite);
}

/// `ρ·|d|` with `|d| = 120` and a `ρ` that f32 flushes, or not: what is lost of the ratio is lost 120-fold.
#[test]
fn kl_estimate_may_be_lost_with_a_flushed_ratio_alone() {
    let kl = Kl { importance: KlImportance::Ratio, ..Kl::plain(0.1, KlEstimator::Abs) };
    let lost = |log_ratio: f64| {
        let (spec, mut problem) = at_the_clip(0.0);
        let spec = LossSpec { kl: Some(kl.clone()), ..spec };
        let logp = reference::evaluate(&LossSpec::default(), &problem).unwrap().token(0, 0).unwrap().inputs.logp;
        problem.old_logp = Some(ndarray::arr2(&[[logp - log_ratio]]));
        problem.ref_logp = Some(ndarray::arr2(&[[logp - 120.0]]));
        let reference = reference::evaluate(&spec, &problem).unwrap();
        assert!(reference.loss() > 2.0 * f64::from(f32::MIN_POSITIVE) * 0.1, "{:e}", reference.loss());
        let mut candidate = Native::default().run(&spec, problem.clone(), 1).unwrap();
        candidate.loss = Some(loss_of(0.0_f32));
        *token(&mut candidate, Output::TokenLoss, 0, 0) = 0.0;
        candidate.gradient.fill_row(0, 0, 0.0);
        candidate.metrics.as_mut().unwrap().kl_mean = Some(0.0);
        problem.judge(&reference, &candidate.lend(), &Limits::for_class("native").unwrap()).unwrap()
    };
    for verdict in lost(-87.7) {
        assert!(verdict.passed(), "{verdict:?}");
    }
    let verdicts = lost(-80.0);
    for output in [Output::Loss, Output::TokenLoss, Output::Dlogits, Output::KlMean] {
        assert_rejected(&verdicts, gate(output), Status::Fail);
    }
}

#[test]
fn shape_of_outputs_that_is_wrong_is_refused_by_name() {
    let (spec, problem) = (spec(), problem(Dtype::F32));
    let reference = reference::evaluate(&spec, &problem).unwrap();
    let right = Candidate::from(reference.outcome());
    let error = |candidate: &Candidate| {
        problem.judge(&reference, &candidate.lend(), &Limits::for_class("native").unwrap()).unwrap_err()
    };

    let mut short = right;
    short.gradient = FloatArray::F32(Array3::zeros((3, 5, 1024)));
    assert_eq!(
        error(&short).to_string(),
        "candidate `dlogits`: got shape [3, 5, 1024], expected [3, 5, 1025] as in the problem"
    );
}

#[test]
fn ulp_half_is_half_the_distance_to_the_next_number() {
    let power = |n: i32| 2.0_f64.powi(n);
    for (dtype, at_one, below_normal) in [(Dtype::F32, -24, -150), (Dtype::Bf16, -8, -134), (Dtype::F16, -11, -25)] {
        assert_eq!(half_ulp(1.0, dtype), power(at_one), "{dtype}");
        assert_eq!(half_ulp(-1.99, dtype), power(at_one), "{dtype}");
        assert_eq!(half_ulp(0.99, dtype), power(at_one - 1), "{dtype}");
        assert_eq!(half_ulp(0.0, dtype), power(below_normal), "{dtype}");
        // A number that far off 1 is the last that rounds to it.
        assert_eq!(dtype.round(1.0 + 0.999 * half_ulp(1.0, dtype)), 1.0);
        assert!(dtype.round(1.0 + 1.001 * half_ulp(1.0, dtype)) > 1.0);
    }
}
