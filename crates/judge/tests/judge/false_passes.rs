//! Wrong kernels that a judge may take for right ones: each is rejected, or said not to have been compared.

use assay_core::implementation::Implementation;
use assay_core::problem::{Advantages, Candidate, Dtype, FloatArray, HeadCandidate, HeadLayout, HeadProblem, Problem};
use assay_core::spec::LossSpec;
use assay_judge::coverage::Coverage;
use assay_judge::gate::{Edge, Gate, Model, Output};
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::judge::{Status, Verdict};
use assay_judge::report::{self, total};
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use assay_native::{Native, NativeHead};
use assay_reference::evaluate;
use assay_schema::verdicts::Verdicts;
use ndarray::{Array2, arr0, s};

fn status(verdicts: &[Verdict], gate: Gate) -> Status {
    verdicts.iter().find(|verdict| verdict.gate == gate).unwrap_or_else(|| panic!("no {gate}")).status
}

fn elements(output: Output) -> Gate {
    Gate::new(output, Model::Elementwise)
}

/// A problem of which token `[0,0]` has a ratio beyond f32, and a loss that is ∞ for it.
fn overflowing(spec: &LossSpec) -> Problem {
    let recipe = Recipe {
        shape: [2, 3, 33],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 1,
        old_logp_noise_scale: 0.1,
        masked_garbage: false,
    };
    let mut problem = recipe.unmasked_problem(spec).unwrap();
    problem.advantages = Advantages::Sequence(ndarray::arr1(&[-1.0, 1.0]));
    problem.old_logp.as_mut().unwrap()[[0, 0]] = -200.0;
    problem
}

#[test]
fn nan_where_f32_overflows_excuses_no_other_value() {
    let spec = LossSpec::default();
    let problem = overflowing(&spec);
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    let mut candidate = Native::default().run(&spec, problem.clone(), 1).unwrap();
    let honest = known.judge(candidate.clone(), &Limits::external(Grade::Standard)).unwrap();
    assert_eq!(honest.failed().count(), 0, "{:?}", honest.verdicts);
    let FloatArray::F32(dlogits) = &mut candidate.gradient else { panic!("f32") };
    dlogits.slice_mut(s![0, 0, ..]).fill(1e30);
    dlogits[[0, 0, 7]] = f32::NAN;
    let verdicts = known.judge(candidate, &Limits::external(Grade::Standard)).unwrap().verdicts;
    let gate = elements(Output::Dlogits).at(Some(Edge::Overflow));
    assert_eq!(status(&verdicts, gate), Status::Fail);
    assert_eq!(status(&verdicts, Gate { model: Model::RowL2, ..gate }), Status::NotCompared);
}

#[test]
fn lm_head_nan_excuses_no_other_weight() {
    let spec = LossSpec::default();
    let recipe = HeadRecipe {
        hidden: 5,
        layout: HeadLayout::VocabByHidden,
        rounds_logits: false,
        recipe: Recipe {
            shape: [2, 3, 33],
            dtype: Dtype::F32,
            regime: Regime::Normal,
            seed: 1,
            old_logp_noise_scale: 0.1,
            masked_garbage: false,
        },
    };
    let mut problem = recipe.unmasked_problem(&spec).unwrap();
    problem.advantages = Advantages::Sequence(ndarray::arr1(&[-1.0, 1.0]));
    problem.old_logp.as_mut().unwrap()[[0, 0]] = -200.0;
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    let mut outcome = NativeHead::default().run(&spec, problem.clone(), 1).unwrap();
    let mut wrong = outcome.gradient.dlm_head.to_f64();
    wrong.fill(123.0);
    wrong[[0, 0]] = f64::NAN;
    outcome.gradient.dlm_head = FloatArray::rounded_from(&wrong, Dtype::F32);
    outcome.loss = Some(arr0(f32::NAN).into());
    let verdicts = known.judge(outcome, &Limits::external(Grade::Standard)).unwrap().verdicts;
    assert_eq!(status(&verdicts, elements(Output::DlmHead)), Status::Fail);
    assert_eq!(status(&verdicts, elements(Output::Loss)), Status::NotCompared);
}

fn reported(verdicts: &[Verdict]) -> Verdicts {
    let check = |verdict: &Verdict| report::check("problem", "candidate", &verdict.gate.to_string(), verdict);
    report::verdicts(verdicts.iter().map(check).collect(), Vec::new())
}

#[test]
fn verdict_without_a_gradient_that_was_compared_is_no_pass() {
    let spec = LossSpec::default();
    let mut problem = overflowing(&spec);
    problem.mask.fill(false);
    problem.mask[[0, 0]] = true;
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    let mut candidate = Native::default().run(&spec, problem.clone(), 1).unwrap();
    candidate.gradient.fill_row(0, 0, f64::NAN);
    let verdicts = known.judge(candidate, &Limits::external(Grade::Standard)).unwrap().verdicts;
    assert!(verdicts.iter().all(Verdict::passed), "{verdicts:?}");
    let reported = reported(&verdicts);
    assert!(!reported.pass);
    assert!(total(&reported).ends_with("; no gradient of problem with candidate was compared"), "{}", total(&reported));
}

/// The loss and the gradient of a batch in which no token counts are 0, which is compared.
#[test]
fn verdict_without_a_counting_token_passes_if_the_gradient_is_0() {
    let spec = LossSpec::default();
    let mut problem = overflowing(&spec);
    problem.mask.fill(false);
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    let right = Native::default().run(&spec, problem.clone(), 1).unwrap();
    let judged = |candidate| known.judge(candidate, &Limits::external(Grade::Standard)).unwrap().verdicts;
    assert!(reported(&judged(right.clone())).pass);
    let mut wrong = right.clone();
    wrong.gradient.fill_row(1, 2, 1e-30);
    assert!(!reported(&judged(wrong)).pass);
    let without_loss_of_0 = Candidate { loss: Some(arr0(1e-6_f32).into()), ..right };
    assert!(!reported(&judged(without_loss_of_0)).pass);
}

#[test]
fn dtype_coarser_than_promised_is_judged_by_the_promise() {
    let spec = LossSpec::default();
    let recipe = |dtype| Recipe {
        shape: [3, 4, 129],
        dtype,
        regime: Regime::Normal,
        seed: 4,
        old_logp_noise_scale: 0.1,
        masked_garbage: false,
    };
    let judged = |of: Dtype, stored: Dtype, logp: Dtype| {
        let problem = recipe(of).problem(&spec).unwrap();
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        let mut candidate = Candidate::from(known.reference.outcome());
        candidate.gradient = FloatArray::rounded_from(&candidate.gradient.to_f64(), stored);
        candidate.logp = candidate.logp.map(|values| FloatArray::rounded_from(&values.to_f64(), logp));
        candidate.metrics = None;
        let verdicts = known.judge(candidate, &Limits::external(Grade::Standard)).unwrap().verdicts;
        let dlogits = verdicts.iter().find(|verdict| verdict.gate == elements(Output::Dlogits)).unwrap();
        assert_eq!((dlogits.dtype, dlogits.promised), (stored, of));
        [elements(Output::Dlogits), elements(Output::Logp)].map(|gate| status(&verdicts, gate))
    };
    assert_eq!(judged(Dtype::F32, Dtype::F32, Dtype::F32), [Status::Pass, Status::Pass]);
    assert_eq!(judged(Dtype::F32, Dtype::Bf16, Dtype::F32), [Status::Fail, Status::Pass]);
    assert_eq!(judged(Dtype::F32, Dtype::F16, Dtype::Bf16), [Status::Fail, Status::Fail]);
    assert_eq!(judged(Dtype::Bf16, Dtype::Bf16, Dtype::F16), [Status::Pass, Status::Fail]);
    assert_eq!(judged(Dtype::Bf16, Dtype::F32, Dtype::F32), [Status::Pass, Status::Pass]);
}

#[test]
fn generated_problems_have_gradients_as_rollouts_have() {
    let spec = LossSpec::default();
    let mut within = 0;
    for seed in 0..8 {
        let shape = [2, 16, 151_936];
        let recipe = Recipe {
            shape,
            dtype: Dtype::Bf16,
            regime: Regime::Sampled,
            seed,
            old_logp_noise_scale: 0.1,
            masked_garbage: false,
        };
        let problem = recipe.problem(&spec).unwrap();
        let reference = evaluate(&spec, &problem).unwrap();
        let coverage = Coverage::from_reference(&reference);
        assert!(coverage.tokens >= 14, "{coverage}");
        for (b, t) in ndarray::indices((2, 16)) {
            let Some(token) = reference.token(b, t) else { continue };
            let p = 1.0 - token.probability_of_others;
            assert!((9e-4..1.0 - 5e-7).contains(&p), "p = {p}");
            within += 1;
        }
    }
    assert!(within > 150, "{within}");
}

/// A head over Qwen's vocabulary, of which a kernel lacks the last 384 columns.
#[test]
fn lm_head_without_last_columns_is_rejected_at_151936() {
    let spec = LossSpec::default();
    for (regime, dtype) in [(Regime::Normal, Dtype::Bf16), (Regime::LongTail, Dtype::F32)] {
        let known_problem = wide(&spec, regime, dtype, [1, 2, 151_936], 16);
        let known = JudgedProblem::new(&spec, &known_problem).unwrap();
        let honest = HeadCandidate::from(known.reference.outcome());
        let mut dlogits = known.reference.dlogits(0..151_936);
        dlogits.slice_mut(s![.., 151_936 - 384..]).fill(0.0);
        let without = |dlogits: &Array2<f64>| {
            let mut wrong = honest.clone();
            let dhidden = known
                .reference
                .dhidden(|columns| dlogits.slice(s![.., columns]).to_owned())
                .into_shape_with_order((1, 2, 16))
                .unwrap();
            wrong.gradient.dhidden = FloatArray::rounded_from(&dhidden, Dtype::F32);
            wrong.gradient.dlm_head = FloatArray::rounded_from(&known.reference.dlm_head(dlogits), Dtype::F32);
            wrong.gradient.dlogits_dtype = Dtype::F32;
            wrong.metrics = None;
            known.judge(wrong, &Limits::external(Grade::Standard)).unwrap().verdicts
        };
        let right = without(&known.reference.dlogits(0..151_936));
        assert!(right.iter().all(Verdict::passed), "{regime} {dtype}");
        let wrong = without(&dlogits);
        assert_eq!(status(&wrong, elements(Output::DlmHead)), Status::Fail, "{regime} {dtype}");
        assert_eq!(status(&wrong, elements(Output::Dhidden)), Status::Fail, "{regime} {dtype}");
    }
}

/// A head whose logits were rounded where the problem promises f32 logits.
#[test]
fn lm_head_of_rounded_logits_is_rejected_at_production_width() {
    let spec = LossSpec::default();
    for (hidden, vocab) in [(896, 1024), (4096, 256)] {
        for regime in Regime::FINITE.into_iter().filter(|regime| !regime.has_holes()) {
            // The finer of both. Every logit of `ties` is a number of both; those of `small` are below f16's own errors.
            let round = match regime {
                Regime::Ties => continue,
                Regime::Small => Dtype::Bf16,
                _ => Dtype::F16,
            };
            let problem = wide(&spec, regime, Dtype::F32, [1, 3, vocab], hidden);
            let known = JudgedProblem::new(&spec, &problem).unwrap();
            let exact = known.reference.on_logits().problem();
            let rounded = exact.with_logits(FloatArray::F64(exact.logits.to_f64().mapv(|x| round.round(x))));
            let of_rounded = evaluate(&spec, &rounded).unwrap().outcome();
            let dlogits = of_rounded.gradient.to_f64().into_shape_with_order((3, vocab)).unwrap();
            let mut wrong = HeadCandidate::from(known.reference.outcome());
            wrong.metrics = None;
            (wrong.loss, wrong.logp) = (Some(of_rounded.loss), Some(of_rounded.logp));
            let dhidden = known
                .reference
                .dhidden(|columns| dlogits.slice(s![.., columns]).to_owned())
                .into_shape_with_order((1, 3, hidden))
                .unwrap();
            wrong.gradient.dhidden = FloatArray::rounded_from(&dhidden, Dtype::F32);
            wrong.gradient.dlm_head = FloatArray::rounded_from(&known.reference.dlm_head(&dlogits), Dtype::F32);
            wrong.gradient.dlogits_dtype = Dtype::F32;
            let judged = known.judge(wrong, &Limits::external(Grade::Standard)).unwrap();
            assert!(judged.failed().next().is_some(), "H = {hidden} {regime}, logits rounded to {round}");
        }
    }
}

/// A head problem with a gradient.
fn wide(spec: &LossSpec, regime: Regime, dtype: Dtype, shape: [usize; 3], hidden: usize) -> HeadProblem {
    let recipe = Recipe { shape, dtype, regime, seed: 6, old_logp_noise_scale: 0.05, masked_garbage: false };
    let head = HeadRecipe { hidden, layout: HeadLayout::VocabByHidden, rounds_logits: false, recipe };
    let mut problem = head.unmasked_problem(spec).unwrap();
    problem.advantages = Advantages::Sequence(ndarray::arr1(&[1.25]));
    problem
}
