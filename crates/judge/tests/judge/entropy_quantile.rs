//! Tokens whose entropy is the quantile, or within rounding of it: a right kernel keeps some of them, and counts those.

use assay_core::implementation::Implementation;
use assay_core::problem::{Candidate, Dtype, Problem};
use assay_core::spec::{DroppedTerm, LossSpec, QuantilePrecision, Ratio, RatioLevel, TopEntropy};
use assay_judge::gate::Output;
use assay_judge::generate::{Recipe, Regime};
use assay_judge::judge::Status;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::{JudgedOutcome, JudgedProblem};
use assay_suites::mutants::{BANK, Specimen};
use ndarray::{Array3, arr0};

const GRADES: [Grade; 2] = [Grade::Exact, Grade::Standard];

/// What a loss can make of the tokens that stay: a ratio that they share, a mean over them, or nothing.
fn specs() -> [LossSpec; 3] {
    let of = |drops, spec| LossSpec {
        top_entropy: Some(TopEntropy { fraction: 0.4, drops, precision: QuantilePrecision::Exact }),
        ..spec
    };
    let ratio = Ratio { level: RatioLevel::Sequence, ..Ratio::default() };
    [
        of(DroppedTerm::Ratio, LossSpec { ratio, ..LossSpec::default() }),
        of(DroppedTerm::PolicyTerm, LossSpec { entropy_coef: 0.02, ..LossSpec::default() }),
        of(DroppedTerm::PolicyTerm, LossSpec::default()),
    ]
}

fn problem(spec: &LossSpec, shape: [usize; 3], regime: Regime, seed: u64) -> Problem {
    let recipe = Recipe { shape, dtype: Dtype::F32, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: false };
    recipe.unmasked_problem(spec).unwrap()
}

fn judged(spec: &LossSpec, problem: &Problem, specimen: Specimen, grade: Grade) -> JudgedOutcome {
    let outcome = specimen.run(spec, problem.clone(), 2).unwrap();
    JudgedProblem::new(spec, problem).unwrap().judge(outcome, &Limits::external(grade)).unwrap()
}

/// Logits of −1, 0 and 1: rows that are each other's in another order have one entropy, but for the last bits.
#[test]
fn entropy_quantile_of_equal_entropies_may_differ() {
    for spec in &specs() {
        for seed in 0..12 {
            let problem = problem(spec, [4, 3, 5], Regime::Ties, seed);
            for grade in GRADES {
                let judged = judged(spec, &problem, Specimen::default(), grade);
                let failed: Vec<_> = judged.failed().collect();
                assert!(failed.is_empty(), "{spec:?} {seed} {grade:?}: {failed:?}");
            }
        }
    }
}

/// The threshold is the very number of a token, which is kept.
#[test]
fn entropy_quantile_token_itself_is_kept() {
    let above = BANK.iter().find(|mutant| mutant.name == "top-entropy-above").unwrap();
    for spec in &specs() {
        let problem = problem(spec, [2, 3, 33], Regime::Normal, 1);
        for grade in GRADES {
            assert_eq!(judged(spec, &problem, Specimen::default(), grade).failed().count(), 0, "{spec:?} {grade:?}");
            assert!(
                judged(spec, &problem, Specimen::with(above.bug), grade).failed().count() > 0,
                "{spec:?} {grade:?}"
            );
        }
    }
}

/// A loss that no set of tokens has. Of eight with one entropy every set is tried; of nine nothing is compared, which is said.
#[test]
fn entropy_quantile_of_many_equals_is_not_compared() {
    for spec in &specs()[..2] {
        let of_loss = |tokens: usize| {
            let mut problem = problem(spec, [1, tokens, 5], Regime::Normal, 1);
            problem.logits = Array3::<f32>::zeros((1, tokens, 5)).into();
            let known = JudgedProblem::new(spec, &problem).unwrap();
            let mut outcome = Candidate::from(known.reference.outcome());
            outcome.loss = Some(arr0(100.0_f32).into());
            let judged = known.judge(outcome, &Limits::external(Grade::Standard)).unwrap();
            let of_loss = judged.verdicts.iter().find(|verdict| verdict.gate.output == Output::Loss).unwrap();
            (of_loss.status, of_loss.open_entropies)
        };
        assert_eq!(of_loss(8), (Status::Fail, None), "{spec:?}");
        assert_eq!(of_loss(9), (Status::NotCompared, Some(9)), "{spec:?}");
    }
}
