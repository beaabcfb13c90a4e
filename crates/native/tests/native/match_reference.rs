//! The kernel against the reference, through the judge, over random specs and problems. Those that compile a program for
//! each shape are in `tests/devices`.

use assay_suites::supported;
use std::env;
use std::io::{self, Write};

use assay_core::implementation::Implementation;
use assay_core::problem::{Dtype, FloatArray, Problem};
use assay_core::spec::{LogitsTransform, LossSpec, TemperatureDivides};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::trial::{JudgedProblem, hindrance};
use assay_native::Native;
use assay_suites as suites;
use assay_suites::cases;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence};

fn expect_right(spec: &LossSpec, recipe: &Recipe) {
    let problem = recipe.problem(spec).unwrap_or_else(|error| panic!("{error}"));
    expect_problem_right(spec, &problem, recipe);
}

/// Whether it was judged: not where it is not supported.
fn expect_problem_right(spec: &LossSpec, problem: &Problem, recipe: &Recipe) -> bool {
    let failures = failures(spec, problem, recipe);
    if let Some(first) = failures.iter().flatten().next() {
        panic!("{first}");
    }
    failures.is_some()
}

/// The gates that it fails, in words; `None` where it is not supported.
fn failures(spec: &LossSpec, problem: &Problem, recipe: &Recipe) -> Option<Vec<String>> {
    let native = Native::default();
    if hindrance(&native, spec, problem, 1).is_some() {
        return None;
    }
    let known = JudgedProblem::new(spec, problem).expect("a valid problem");
    let judged = known.run(&native, 1).expect("supported");
    let config = serde_json::json!({
        "reason": "…",
        "batch": { "generate": recipe },
        "spec": spec,
        "kernel": { "enabled": true, "impl": native.id() },
    });
    let replay = format!("save as fixtures/regressions/NAME.json and run `assay gradcheck --config` on it: {config}");
    Some(known.failures(&judged, native.id(), &replay))
}

/// Failures of one run are the first cases of the next.
fn config(cases: u32) -> Config {
    let persistence = FileFailurePersistence::Direct(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../fixtures/regressions/proptest-seeds.txt"
    ));
    Config { failure_persistence: Some(Box::new(persistence)), ..cases::config(cases) }
}

/// Tokens whose own logit is −∞: their ratio is 0, their logp −∞.
#[test]
fn target_at_minus_infinity_matches_reference() {
    let bonus = LossSpec { entropy_coef: 0.01, ..LossSpec::default() };
    let of_logp = LossSpec { temperature: 0.7.into(), temperature_divides: TemperatureDivides::Logp, ..bonus.clone() };
    for spec in [LossSpec::default(), bonus, of_logp] {
        for dtype in Dtype::KERNEL {
            let recipe = Recipe {
                shape: [8, 3, 2049],
                dtype,
                regime: Regime::TargetHoles,
                seed: 3,
                old_logp_noise_scale: 0.3,
                masked_garbage: true,
            };
            let problem = recipe.problem(&spec).unwrap();
            let of_reference = JudgedProblem::new(&spec, &problem).unwrap().reference;
            assert!(of_reference.loss().is_finite(), "else this shows little");
            let logp = Native::default().run(&spec, problem.clone(), 1).unwrap().logp.expect("it returns logp");
            let counting = problem.mask.indexed_iter().filter(|(_, counts)| **counts).map(|(at, _)| at);
            let holes = counting.filter(|&(b, t)| of_reference.token(b, t).unwrap().inputs.logp == f64::NEG_INFINITY);
            let found: Vec<f64> = holes.map(|(b, t)| logp.at(b, t)).collect();
            assert!(!found.is_empty() && found.iter().all(|&logp| logp == f64::NEG_INFINITY), "{dtype}: {found:?}");
            expect_problem_right(&spec, &problem, &recipe);
        }
    }
}

/// Label smoothing reads the mean of all logits, the target's among them, which the sums of a softmax leave out. Under a bias or a cap
/// a block is copied without it.
#[test]
fn smoothing_under_a_transform_matches_reference() {
    for (softcap, bias) in [(None, true), (Some(3.0), false), (Some(3.0), true)] {
        let logits = LogitsTransform { scale: 0.5, softcap, bias };
        let spec = LossSpec { logits, ..LossSpec::cross_entropy(0.5, 0.0) };
        for dtype in Dtype::KERNEL {
            let recipe = Recipe {
                shape: [2, 3, 1023],
                dtype,
                regime: Regime::Peaked,
                seed: 5,
                old_logp_noise_scale: 0.0,
                masked_garbage: false,
            };
            expect_right(&spec, &recipe);
        }
    }
}

/// The judge finds no fault with correct implementations: the first cases of a fixed seed, 1,000 or as many as
/// `ASSAY_CASES` asks for.
#[test]
fn native_random_cases_have_no_false_alarms() {
    let cases = env::var("ASSAY_CASES").map_or(1000, |text| text.parse().expect("ASSAY_CASES is a number of cases"));
    let seed = suites::SEED;
    let implementation = Native::default();
    let (mut judged, mut alarms) = (0, Vec::new());
    for (spec, recipe) in suites::random_cases(seed).take(cases) {
        let problem = recipe.problem(&spec).unwrap_or_else(|error| panic!("{error}"));
        let failed = failures(&spec, &problem, &recipe);
        judged += usize::from(failed.is_some());
        alarms.extend(failed.into_iter().flatten());
    }
    let id = implementation.id();
    assert_eq!(judged, cases, "{id}");
    let found = format!("{} false alarms of {id} in {judged} cases of seed {seed}", alarms.len());
    assert!(alarms.is_empty(), "{found}\n{}", alarms.concat());
    // Past the harness, which keeps what a passing test prints.
    writeln!(io::stderr(), "{found}").unwrap();
}

proptest! {
    #![proptest_config(config(500))]

    #[test]
    fn spec_any_regime_matches_reference(spec in cases::any_spec(), recipe in cases::any_recipe()) {
        expect_right(&spec, &recipe);
    }
}

/// Every named choice of a spec, alone, in every regime.
#[test]
fn variants_every_one_matches_reference() {
    let implementation = Native::default();
    let supported = supported::supported(&implementation, 1);
    assert!(supported.len() > 80, "{} variants", supported.len());
    for (i, variant) in supported.iter().enumerate() {
        for step in 0..9 {
            let recipe = supported::recipe(i, step);
            let problem = recipe.problem(&variant.spec).unwrap_or_else(|error| panic!("{variant:?}: {error}"));
            let judged = expect_problem_right(&variant.spec, &problem, &recipe);
            assert!(judged, "{} is left out", variant.choice);
        }
    }
}

/// Qwen's vocabulary, 151,936 = 128 × 1187: no tile divides it evenly.
fn qwen_vocabulary(dtype: Dtype) {
    for (regime, seed) in [(Regime::Small, 1), (Regime::Peaked, 2), (Regime::Confident, 3)] {
        let recipe =
            Recipe { shape: [1, 3, 151_936], dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true };
        let spec = LossSpec { entropy_coef: 0.01, temperature: 0.7.into(), ..LossSpec::default() };
        expect_right(&spec, &recipe);
        expect_right(&LossSpec::default(), &recipe);
    }
}

#[test]
fn vocabulary_qwen_f32_matches_reference() {
    qwen_vocabulary(Dtype::F32);
}

#[test]
fn vocabulary_qwen_bf16_matches_reference() {
    qwen_vocabulary(Dtype::Bf16);
}

#[test]
fn vocabulary_qwen_f16_matches_reference() {
    qwen_vocabulary(Dtype::F16);
}

#[test]
fn threads_any_count_same_bits_in_the_pool() {
    let recipe = Recipe {
        shape: [4, 7, 1025],
        dtype: Dtype::Bf16,
        regime: Regime::Peaked,
        seed: 9,
        old_logp_noise_scale: 0.3,
        masked_garbage: true,
    };
    let spec = LossSpec { entropy_coef: 0.01, ..LossSpec::default() };
    let problem = recipe.problem(&spec).unwrap();
    let implementation = Native::default();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| implementation.run(&spec, problem.clone(), 1).unwrap())
    };
    let one = run(1);
    for threads in [2, 3, 8] {
        let many = run(threads);
        assert_eq!(one.loss, many.loss, "{} with {threads} threads", implementation.id());
        assert_eq!(one.logp, many.logp);
        assert_eq!(one.entropy, many.entropy);
        assert_eq!(one.gradient, many.gradient);
        assert_eq!(one.metrics, many.metrics);
    }
}

#[test]
fn dtype_f64_logits_are_refused_by_name() {
    let recipe = Recipe {
        shape: [1, 1, 3],
        dtype: Dtype::F64,
        regime: Regime::Normal,
        seed: 0,
        old_logp_noise_scale: 0.3,
        masked_garbage: false,
    };
    let problem = recipe.problem(&LossSpec::default()).unwrap();
    assert!(matches!(problem.logits, FloatArray::F64(_)));
    let error = Native::default().run(&LossSpec::default(), problem, 1).unwrap_err();
    assert_eq!(error.to_string(), "native does not support logits dtype f64; it supports f32, bf16 and f16");
}
