//! `torch.log_softmax` in f32 on a CPU, and plain vector loops, at Qwen's vocabulary: a row's exponentials are added one after
//! another in lanes. It passes at grade `standard`, on logits and behind an LM head, and what is wrong beside it does not.

use assay_core::problem::{Dtype, FloatArray, HeadLayout, HeadProblem, Problem};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::judge::Verdict;
use assay_judge::trial::JudgedProblem;
use ndarray::Array3;

use super::lane_kernel::{LaneKernel, RIGHT, VOCAB, failed, judged, regimes_apart, to_bf16, to_f16, to_tf32};

/// The regimes in which 32 of 151,936 terms weigh enough to be missed.
const EVEN: [Regime; 3] = [Regime::Ties, Regime::Sampled, Regime::Normal];

fn spec() -> LossSpec {
    LossSpec::from_cotangents(false)
}

fn recipe(regime: Regime, dtype: Dtype, seed: u64) -> Recipe {
    Recipe { shape: [1, 2, VOCAB], dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: false }
}

fn problem(regime: Regime, dtype: Dtype, seed: u64) -> Problem {
    recipe(regime, dtype, seed).unmasked_problem(&spec()).unwrap()
}

fn head_problem(regime: Regime, dtype: Dtype, seed: u64) -> HeadProblem {
    // Two tokens of `sampled`, of which one may have its id among the last columns.
    let tokens = if regime == Regime::Sampled { 2 } else { 1 };
    let recipe = Recipe { shape: [1, tokens, VOCAB], ..recipe(regime, dtype, seed) };
    let head = HeadRecipe { hidden: 4, layout: HeadLayout::VocabByHidden, rounds_logits: false, recipe };
    head.unmasked_problem(&spec()).unwrap()
}

/// Counts the verdicts that name the sum in lanes.
fn named(verdicts: &[Verdict]) -> usize {
    let why = verdicts.iter().filter_map(|verdict| verdict.short_of_exact.map(|short| short.to_string()));
    why.filter(|why| why.contains("one after another in lanes")).count()
}

/// Lists the gates that each kernel fails on given logits.
fn failures(problem: &Problem, kernels: &[LaneKernel]) -> Vec<Vec<String>> {
    let spec = spec();
    let known = JudgedProblem::new(&spec, problem).unwrap();
    let candidates: Vec<_> = kernels.iter().map(|kernel| kernel.run(problem)).collect();
    judged(&known, &candidates).iter().map(|verdicts| failed(verdicts)).collect()
}

/// Lists the gates that each kernel fails behind a head.
fn head_failures(problem: &HeadProblem, kernels: &[LaneKernel]) -> Vec<Vec<String>> {
    let spec = spec();
    let known = JudgedProblem::new(&spec, problem).unwrap();
    let candidates: Vec<_> = kernels.iter().map(|kernel| kernel.run_head(&known)).collect();
    judged(&known, &candidates).iter().map(|verdicts| failed(verdicts)).collect()
}

const IN_LANES: [LaneKernel; 2] = [RIGHT, LaneKernel { lanes: 16, ..RIGHT }];

#[test]
fn sum_in_lanes_passes_standard_and_names_why_not_exact() {
    let (spec, mut count) = (spec(), 0);
    for (regime, seed) in Regime::FINITE.into_iter().zip(0..) {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let problem = problem(regime, dtype, seed);
            let known = JudgedProblem::new(&spec, &problem).unwrap();
            let candidates = IN_LANES.map(|kernel| kernel.run(&problem));
            for (verdicts, lanes) in judged(&known, &candidates).iter().zip([8, 16]) {
                assert_eq!(failed(verdicts), Vec::<String>::new(), "{regime} {dtype}, {lanes} lanes");
                count += named(verdicts);
            }
        }
    }
    assert!(count > 3, "{count}");
}

#[test]
fn sum_in_lanes_passes_at_standard_behind_an_lm_head() {
    let (spec, mut count) = (spec(), 0);
    let regimes = Regime::FINITE.into_iter().filter(|regime| !regime.has_holes());
    let drawn = regimes.zip(0..).zip([Dtype::F32, Dtype::Bf16].into_iter().cycle());
    for ((regime, seed), dtype) in drawn.skip(regimes_apart() / 2).step_by(regimes_apart()) {
        let problem = head_problem(regime, dtype, seed);
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        let candidates = IN_LANES.map(|kernel| kernel.run_head(&known));
        for (verdicts, lanes) in judged(&known, &candidates).iter().zip([8, 16]) {
            assert_eq!(failed(verdicts), Vec::<String>::new(), "{regime} {dtype}, {lanes} lanes");
            count += named(verdicts);
        }
    }
    assert!(count > 0, "{count}");
}

/// Returns rows of one large logit above others so near each other that each exponential is 1.6 to 1.8 ulp of the sum in the largest's
/// lane, where all are rounded up without being equal.
fn crowd_below_a_peak() -> Problem {
    const PEAK: usize = VOCAB / 2;
    let problem = problem(Regime::Small, Dtype::F32, 4);
    let shape = problem.shape();
    let logits = Array3::from_shape_fn((shape.batch, shape.tokens, VOCAB), |(_, _, v)| match v {
        PEAK => 15.42,
        v => 0.1 * v as f64 / VOCAB as f64 - 0.05,
    });
    let logits = FloatArray::rounded_from(&logits, Dtype::F32);
    Problem { logits, ..problem }
}

#[test]
fn sum_of_a_crowd_below_a_peak_passes_standard() {
    let failures = failures(&crowd_below_a_peak(), &IN_LANES);
    assert_eq!(failures, [Vec::<String>::new(), Vec::new()]);
}

#[test]
fn sum_of_a_crowd_with_twice_its_error_is_rejected() {
    let failures = failures(&crowd_below_a_peak(), &[LaneKernel { error_factor: 2.0, ..RIGHT }]);
    assert!(!failures[0].is_empty());
}

#[test]
fn sum_with_32_terms_left_out_is_rejected() {
    for regime in EVEN.into_iter().chain([Regime::Small, Regime::LongTail]) {
        let kernels = IN_LANES.map(|kernel| LaneKernel { left_out: 32, ..kernel });
        for (failures, lanes) in failures(&problem(regime, Dtype::F32, 1), &kernels).iter().zip([8, 16]) {
            assert!(!failures.is_empty(), "{regime}, {lanes} lanes");
        }
        if regimes_apart() > 1 && regime != Regime::Sampled {
            continue;
        }
        // The last 32 columns of `sampled` weigh more than next to nothing where one of them is an id.
        let seed = if regime == Regime::Sampled { 2 } else { 1 };
        for (failures, lanes) in head_failures(&head_problem(regime, Dtype::F32, seed), &kernels).iter().zip([8, 16]) {
            assert!(!failures.is_empty(), "a head of {regime}, {lanes} lanes");
        }
    }
}

#[test]
fn sum_of_coarse_terms_or_with_a_coarse_carry_is_rejected() {
    let coarse = [
        ("f16", LaneKernel { round: to_f16, ..RIGHT }),
        ("TF32", LaneKernel { round: to_tf32, ..RIGHT }),
        ("bf16 carry", LaneKernel { carry: to_bf16, ..RIGHT }),
    ];
    let kernels = coarse.map(|(_, kernel)| kernel);
    for regime in EVEN {
        let on_logits = failures(&problem(regime, Dtype::F32, 3), &kernels);
        let behind_a_head = head_failures(&head_problem(regime, Dtype::F32, 3), &kernels);
        for (failures, (what, _)) in on_logits.iter().chain(&behind_a_head).zip(coarse.iter().cycle()) {
            assert!(!failures.is_empty(), "{what}, {regime}");
        }
    }
}
