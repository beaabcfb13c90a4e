//! Entropy as `lse − Σ p·x`, as TRL's chunked function and verl compute it: two numbers of the size of the largest logit cancel. It
//! passes at grade `standard`, which says so, and wrong entropies of this form do not.

use assay_core::problem::{Dtype, HeadLayout, Problem};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::judge::{Cancellation, Verdict};
use assay_judge::trial::JudgedProblem;

use super::lane_kernel::{EntropyForm, LaneKernel, RIGHT, VOCAB, failed, judged, regimes_apart, to_bf16, to_f16};

/// verl's form in both numbers of lanes, and TRL's with its own size of chunks.
const FORMS: [LaneKernel; 3] = [
    LaneKernel { entropy: EntropyForm::Difference, ..RIGHT },
    LaneKernel { entropy: EntropyForm::Difference, lanes: 16, ..RIGHT },
    LaneKernel { entropy: EntropyForm::Chunked(8192), lanes: 16, ..RIGHT },
];

fn spec() -> LossSpec {
    LossSpec::from_cotangents(true)
}

fn recipe(regime: Regime, dtype: Dtype, seed: u64, vocab: usize) -> Recipe {
    let tokens = if vocab > 4096 { 2 } else { 8 };
    Recipe { shape: [1, tokens, vocab], dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: false }
}

fn problem(regime: Regime, dtype: Dtype, seed: u64, vocab: usize) -> Problem {
    recipe(regime, dtype, seed, vocab).unmasked_problem(&spec()).unwrap()
}

/// Judges what each kernel computes of a problem.
fn verdicts(problem: &Problem, kernels: &[LaneKernel]) -> Vec<Vec<Verdict>> {
    let spec = spec();
    let known = JudgedProblem::new(&spec, problem).unwrap();
    let candidates: Vec<_> = kernels.iter().map(|kernel| kernel.run(problem)).collect();
    judged(&known, &candidates)
}

/// Counts the verdicts that name what cancels.
fn named(verdicts: &[Verdict]) -> usize {
    let why = verdicts.iter().filter_map(|verdict| Some(verdict.short_of_exact?.cancellation));
    why.filter(|why| matches!(why, Cancellation::EntropyDifference { .. })).count()
}

#[test]
fn entropy_difference_passes_at_standard_and_is_named() {
    let mut count = 0;
    for vocab in [97, 4099, VOCAB] {
        for (regime, seed) in Regime::FINITE.into_iter().zip(10..) {
            // Both dtypes where a row is short, and by turns where it is not.
            let dtypes = [Dtype::F32, Dtype::Bf16].into_iter().skip(usize::try_from(seed % 2).unwrap());
            for dtype in dtypes.take(if vocab == VOCAB { 1 } else { 2 }) {
                for (i, verdicts) in verdicts(&problem(regime, dtype, seed, vocab), &FORMS).iter().enumerate() {
                    assert_eq!(failed(verdicts), Vec::<String>::new(), "{regime} {dtype} V = {vocab}, form {i}");
                    count += named(verdicts);
                }
            }
        }
    }
    assert!(count > 3, "{count}");
}

#[test]
fn entropy_difference_says_which_numbers_cancel() {
    let problem = problem(Regime::Sampled, Dtype::F32, 3, VOCAB);
    let verdicts = verdicts(&problem, &FORMS[1..2]);
    let entropy = verdicts[0].iter().find(|verdict| verdict.gate.to_string() == "entropy").unwrap();
    let text = entropy.short_of_exact.expect("grade `exact` is missed").to_string();
    assert!(text.contains("entropy is lse − Σ p·x: two numbers near 1"), "{text}");
}

#[test]
fn entropy_difference_behind_an_lm_head_passes_at_standard() {
    let spec = spec();
    let regimes = Regime::FINITE.into_iter().filter(|regime| !regime.has_holes());
    for (regime, seed) in regimes.zip(20..).step_by(regimes_apart()) {
        let dtype = if seed % 2 == 0 { Dtype::F32 } else { Dtype::Bf16 };
        let recipe = Recipe { shape: [1, 1, VOCAB], ..recipe(regime, dtype, seed, VOCAB) };
        let head = HeadRecipe { hidden: 4, layout: HeadLayout::VocabByHidden, rounds_logits: false, recipe };
        let problem = head.unmasked_problem(&spec).unwrap();
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        let candidates = FORMS.map(|kernel| kernel.run_head(&known));
        for (i, verdicts) in judged(&known, &candidates).iter().enumerate() {
            assert_eq!(failed(verdicts), Vec::<String>::new(), "{regime} {dtype}, form {i}");
        }
    }
}

#[test]
fn entropy_difference_of_wrong_numbers_is_rejected() {
    let wrong = |right: LaneKernel| {
        [
            ("32 terms left out", LaneKernel { left_out: 32, ..right }),
            ("p of f16", LaneKernel { round: to_f16, ..right }),
            ("p of bf16", LaneKernel { round: to_bf16, ..right }),
            ("logits of bf16", LaneKernel { logit: to_bf16, ..right }),
            ("1.001 times", LaneKernel { factor: 1.001, ..right }),
        ]
    };
    let wrong: Vec<_> = [FORMS[1], FORMS[2]].into_iter().flat_map(wrong).collect();
    for regime in [Regime::Ties, Regime::Sampled, Regime::Normal] {
        // The last 32 columns of `sampled` weigh more than next to nothing where one of them is an id.
        let problem = problem(regime, Dtype::F32, 1, VOCAB);
        let (what, kernels): (Vec<_>, Vec<_>) = wrong.iter().copied().unzip();
        for (verdicts, what) in verdicts(&problem, &kernels).iter().zip(what) {
            // Each logit of `ties` is a number of bf16.
            let right = regime == Regime::Ties && what == "logits of bf16";
            assert_eq!(failed(verdicts).is_empty(), right, "{what}, {regime}");
            let entropy = verdicts.iter().find(|verdict| verdict.gate.to_string() == "entropy").unwrap();
            // Roundings of 151,936 columns alike cancel in a sum, and show in the gradient; a factor shows in the entropy alone.
            assert!(what != "1.001 times" || !entropy.passed(), "{what}, {regime}");
        }
    }
}
