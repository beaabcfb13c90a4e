//! The textbook's entropy `−Σ p·log p` at Qwen's vocabulary, whose terms are added up in f32, one after another in lanes, and the gradient
//! that automatic differentiation makes of it. It passes at grade `standard`, which says so, and what is wrong besides does not.

use assay_core::problem::{Dtype, HeadLayout, Problem};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::judge::{Cancellation, Verdict};
use assay_judge::trial::JudgedProblem;

use super::lane_kernel::{
    EntropyForm, LaneKernel, RIGHT, VOCAB, failed, judged, regimes_apart, to_bf16, to_f16, to_tf32,
};

const AUTOGRAD: LaneKernel = LaneKernel { entropy: EntropyForm::Autograd { shared: false }, ..RIGHT };
const SHARED: LaneKernel = LaneKernel { entropy: EntropyForm::Autograd { shared: true }, ..RIGHT };

/// The textbook's closed gradient, and that of automatic differentiation from separate log-probabilities and from one array.
const FORMS: [LaneKernel; 4] = [RIGHT, AUTOGRAD, SHARED, LaneKernel { lanes: 16, ..SHARED }];

fn recipe(regime: Regime, dtype: Dtype, seed: u64, tokens: usize) -> Recipe {
    Recipe { shape: [1, tokens, VOCAB], dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: false }
}

/// Judges the outputs of each kernel.
fn verdicts(problem: &Problem, kernels: &[LaneKernel]) -> Vec<Vec<Verdict>> {
    let spec = LossSpec::from_cotangents(true);
    let known = JudgedProblem::new(&spec, problem).unwrap();
    let candidates: Vec<_> = kernels.iter().map(|kernel| kernel.run(problem)).collect();
    judged(&known, &candidates)
}

/// Returns a token at Qwen's vocabulary.
fn problem(regime: Regime, dtype: Dtype, seed: u64) -> Problem {
    recipe(regime, dtype, seed, 1).unmasked_problem(&LossSpec::from_cotangents(true)).unwrap()
}

/// Counts the verdicts that name the sum of the entropy's terms.
fn named(verdicts: &[Verdict]) -> usize {
    let why = verdicts.iter().filter_map(|verdict| Some(verdict.short_of_exact?.cancellation));
    why.filter(|why| *why == Cancellation::EntropySum).count()
}

/// Whether a gate fails.
fn fails(verdicts: &[Verdict], gate: &str) -> bool {
    verdicts.iter().any(|verdict| verdict.gate.to_string() == gate && !verdict.passed())
}

#[test]
fn entropy_sum_in_lanes_passes_standard_and_is_named() {
    let mut count = 0;
    let regimes = Regime::FINITE.into_iter().zip(30..).step_by(regimes_apart());
    let every = regimes.chain((40..43).map(|seed| (Regime::Ties, seed)));
    for (regime, seed) in every {
        let dtype = if seed % 2 == 0 { Dtype::F32 } else { Dtype::Bf16 };
        for (i, verdicts) in verdicts(&problem(regime, dtype, seed), &FORMS).iter().enumerate() {
            assert_eq!(failed(verdicts), Vec::<String>::new(), "{regime} {dtype}, seed {seed}, form {i}");
            count += named(verdicts);
        }
    }
    assert!(count > 6, "{count}");
}

#[test]
fn entropy_gradient_with_that_of_logp_passes_in_short_rows() {
    // The cotangent of logp is the largest term of its lane, at whose size all others are rounded.
    let (spec, mut count) = (LossSpec::from_cotangents(true), 0);
    for (vocab, seed) in [512, 1000, 2048, 4096].into_iter().flat_map(|vocab| [(vocab, 70), (vocab, 71)]) {
        for regime in [Regime::Ties, Regime::Small] {
            let recipe = Recipe { shape: [1, 16, vocab], ..recipe(regime, Dtype::F32, seed, 16) };
            let problem = recipe.unmasked_problem(&spec).unwrap();
            for (i, verdicts) in verdicts(&problem, &FORMS).iter().enumerate() {
                assert_eq!(failed(verdicts), Vec::<String>::new(), "{regime}, V = {vocab}, seed {seed}, form {i}");
                count += named(verdicts);
            }
        }
    }
    assert!(count > 0, "{count}");
}

#[test]
fn entropy_sum_in_lanes_passes_standard_behind_an_lm_head() {
    let spec = LossSpec::from_cotangents(true);
    for (regime, seed) in [Regime::Ties, Regime::Sampled, Regime::Small].into_iter().zip(50..).step_by(regimes_apart())
    {
        let recipe = recipe(regime, Dtype::F32, seed, 1);
        let head = HeadRecipe { hidden: 4, layout: HeadLayout::VocabByHidden, rounds_logits: false, recipe };
        let problem = head.unmasked_problem(&spec).unwrap();
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        let candidates = [AUTOGRAD, SHARED].map(|kernel| kernel.run_head(&known));
        for (i, verdicts) in judged(&known, &candidates).iter().enumerate() {
            assert_eq!(failed(verdicts), Vec::<String>::new(), "{regime}, form {i}");
        }
    }
}

#[test]
fn entropy_sum_with_four_times_its_error_is_rejected() {
    // A sum's error may be any between 0 and its bound: at its largest in a few problems it is above a quarter of what is forgiven.
    let mut rejected = [("logp", 0), ("entropy", 0), ("dlogits", 0)];
    let seeds = 62..68;
    for problem in seeds.clone().map(|seed| problem(Regime::Ties, Dtype::F32, seed)) {
        let kernels = [AUTOGRAD, SHARED].map(|kernel| LaneKernel { error_factor: 4.0, ..kernel });
        for verdicts in verdicts(&problem, &kernels) {
            for (gate, count) in &mut rejected {
                *count += usize::from(fails(&verdicts, gate));
            }
        }
    }
    let kernels = 2 * seeds.count();
    assert!(rejected.iter().all(|(_, count)| 6 * count >= kernels), "{rejected:?} of {kernels}");
}

#[test]
fn entropy_sum_of_wrong_terms_is_rejected() {
    let wrong = |right: LaneKernel| {
        [
            ("32 terms left out", LaneKernel { left_out: 32, ..right }),
            ("p of f16", LaneKernel { round: to_f16, ..right }),
            ("p of TF32", LaneKernel { round: to_tf32, ..right }),
            ("bf16 carry", LaneKernel { carry: to_bf16, ..right }),
            ("f16 carry", LaneKernel { carry: to_f16, ..right }),
            ("largest term left out", LaneKernel { skips_largest: true, ..right }),
        ]
    };
    let wrong = wrong(SHARED);
    for regime in [Regime::Ties, Regime::Sampled, Regime::Normal] {
        let (what, kernels): (Vec<_>, Vec<_>) = wrong.into_iter().unzip();
        for (verdicts, what) in verdicts(&problem(regime, Dtype::F32, 3), &kernels).iter().zip(what) {
            // One of the equal terms of `ties` weighs less than the sum loses.
            let within = regime == Regime::Ties && what == "largest term left out";
            assert!(!failed(verdicts).is_empty() || within, "{what}, {regime}");
            // What is coarse or large shows in the values alone.
            let of_values = fails(verdicts, "logp") || fails(verdicts, "entropy");
            let in_gradient_alone =
                what.starts_with("p of") || (regime == Regime::Sampled && what == "32 terms left out");
            assert!(of_values || within || in_gradient_alone, "{what}, {regime}");
        }
    }
}
