//! The LM head with the loss: its reference against other ways to the same numbers, and every implementation that runs any
//! shape at once against the reference, through the judge.

use std::sync::Arc;

use assay::implementation::Implementation;
use assay::judge::generate::HeadRecipe;
use assay::judge::invariance::Invariance;
use assay::judge::judge::Verdict;
use assay::judge::lm_head::judge_head;
use assay::judge::tolerance::Tolerances;
use assay::native::NativeHead;
use assay::problem::{Dtype, FloatArray, HeadCandidate, HeadLayout, HeadProblem, HeadShape};
use assay::reference::{evaluate, evaluate_head};
use assay::spec::{Head, LossSpec, Ratio, RatioLevel};
use assay::suites::cases;
use ndarray::{Array2, Ix2, Ix3, s};
use proptest::prelude::*;

fn described(verdict: &Verdict) -> String {
    format!("{} {}: {:?}, {:?}", verdict.gate, verdict.dtype, verdict.status, verdict.tally)
}

fn expect_right(spec: &LossSpec, recipe: &HeadRecipe) {
    let problem = recipe.problem(spec).unwrap_or_else(|error| panic!("{error}"));
    let reference = evaluate_head(spec, &problem).unwrap();
    // Chunks that the tokens do not fill; the one registered takes so few at once.
    let in_chunks: Arc<dyn Implementation<HeadProblem>> = Arc::new(NativeHead::default().chunk(3));
    for implementation in assay::registry::immediate_heads().into_iter().chain([in_chunks]) {
        if implementation.supports(spec, recipe.shape(), problem.dtype(), 1).is_err() {
            continue;
        }
        let outcome = implementation.run(spec, problem.clone(), 1).unwrap();
        let verdicts =
            judge_head(&reference, &problem, &outcome, implementation.class(), Tolerances::builtin()).unwrap();
        let failed: Vec<_> = verdicts.iter().filter(|verdict| !verdict.passed()).map(described).collect();
        assert!(failed.is_empty(), "{}: {failed:#?}\n{recipe:?}\n{spec:?}", implementation.id());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_outputs_any_spec_any_head_match_reference(spec in cases::any_spec(), recipe in cases::any_head_recipe()) {
        expect_right(&spec, &recipe);
    }
}

/// Dlogits beyond 65504 are ∞ where they go into the products in f16, and then `dlm_head` may be; where they go in f32, not.
#[test]
fn dlm_head_may_be_infinite_where_dlogits_overflow_the_dtype_of_the_products() {
    let spec = LossSpec { scale: 1e7, ..LossSpec::default() };
    let mut recipe = cases::head_recipe(HeadShape { batch: 2, tokens: 3, hidden: 4, vocab: 7 });
    recipe.recipe.dtype = Dtype::F16;
    let problem = recipe.problem(&spec).unwrap();
    let reference = evaluate_head(&spec, &problem).unwrap();
    let mut outcome = NativeHead::default().run(&spec, problem.clone(), 1).unwrap();
    let FloatArray::F32(dlm_head) = &mut outcome.dlm_head else { panic!("f32 whatever the head") };
    dlm_head[[0, 0]] = f32::INFINITY;
    for (dtype, honest) in [(Dtype::F16, true), (Dtype::Bf16, false), (Dtype::F32, false)] {
        outcome.dlogits_dtype = dtype;
        let verdicts = judge_head(&reference, &problem, &outcome, "native-lm-head", Tolerances::builtin()).unwrap();
        let failed: Vec<_> = verdicts.iter().filter(|verdict| !verdict.passed()).map(described).collect();
        assert_eq!(failed.is_empty(), honest, "{dtype}: {failed:#?}");
    }
}

/// Central differences of the loss by every hidden state and every weight.
#[test]
fn gradients_of_the_reference_are_those_of_its_loss() {
    let head = Head { scale: 0.7, softcap: Some(3.0), bias: true };
    let specs = [
        LossSpec { entropy_coef: 0.03, temperature: 0.8, ..LossSpec::default() },
        LossSpec { head, ..LossSpec::default() },
    ];
    for spec in specs {
        for layout in [HeadLayout::HiddenByVocab, HeadLayout::VocabByHidden] {
            let problem = f64_problem(&spec, layout);
            let outcome = evaluate_head(&spec, &problem).unwrap().outcome();
            let loss = |problem: &HeadProblem| evaluate_head(&spec, problem).unwrap().on_logits().loss();
            let step = 1e-5;
            let difference = |change: &dyn Fn(&mut HeadProblem, f64)| {
                let [mut up, mut down] = [problem.clone(), problem.clone()];
                change(&mut up, step);
                change(&mut down, -step);
                (loss(&up) - loss(&down)) / (2.0 * step)
            };
            for ((b, t, h), &x) in outcome.dhidden.to_f64().indexed_iter() {
                let expected = difference(&|problem, by| {
                    let FloatArray::F64(hidden) = &mut problem.logits.hidden else { unreachable!("made of f64") };
                    hidden[[b, t, h]] += by;
                });
                assert!((x - expected).abs() < 1e-8, "dhidden[{b},{t},{h}]: {x} but the loss says {expected}");
            }
            for ((i, j), &x) in outcome.dlm_head.to_f64().indexed_iter() {
                let expected = difference(&|problem, by| {
                    let FloatArray::F64(lm_head) = &mut problem.logits.lm_head else { unreachable!("made of f64") };
                    lm_head[[i, j]] += by;
                });
                assert!((x - expected).abs() < 1e-8, "dlm_head[{i},{j}]: {x} but the loss says {expected}");
            }
        }
    }
}

fn f64_problem(spec: &LossSpec, layout: HeadLayout) -> HeadProblem {
    let mut recipe = cases::head_recipe(HeadShape { batch: 2, tokens: 3, hidden: 4, vocab: 7 });
    recipe.layout = layout;
    let mut problem = recipe.problem(spec).unwrap();
    problem.logits.hidden = problem.logits.hidden.to_f64().into();
    problem.logits.lm_head = problem.logits.lm_head.to_f64().into();
    problem
}

/// Logits, loss and log-probabilities are those of the logits-level reference on the product.
#[test]
fn the_reference_is_that_of_its_logits() {
    let spec = LossSpec::default();
    for layout in [HeadLayout::HiddenByVocab, HeadLayout::VocabByHidden] {
        let problem = f64_problem(&spec, layout);
        let HeadShape { batch, tokens, hidden: width, vocab } = problem.shape();
        let hidden = problem.logits.hidden.to_f64();
        let lm_head = problem.logits.lm_head.to_f64();
        let logits = ndarray::Array3::from_shape_fn((batch, tokens, vocab), |(b, t, v)| {
            (0..width).map(|h| hidden[[b, t, h]] * lm_head[layout.at(h, v)]).sum::<f64>()
        });
        let on_logits = problem.with_logits(FloatArray::F64(logits));
        let expected = evaluate(&spec, &on_logits).unwrap();
        let reference = evaluate_head(&spec, &problem).unwrap();
        assert!((reference.on_logits().loss() - expected.loss()).abs() < 1e-14);
        for (at, &x) in reference.outcome().logp.to_f64().indexed_iter() {
            let token = expected.token(at.0, at.1).map_or(0.0, |token| token.inputs.logp);
            assert!((x - token).abs() < 1e-13, "{at:?}");
        }
    }
}

/// Five tiles of a 16-bit head, chunks that are not full, and a ratio that a sequence shares.
#[test]
fn results_have_the_same_bits_for_any_number_of_threads() {
    let ratio = Ratio { level: RatioLevel::Sequence, ..LossSpec::default().ratio };
    for spec in [LossSpec::default(), LossSpec { ratio, entropy_coef: 0.01, ..LossSpec::default() }] {
        for (dtype, layout) in Dtype::KERNEL.into_iter().zip([
            HeadLayout::HiddenByVocab,
            HeadLayout::VocabByHidden,
            HeadLayout::HiddenByVocab,
        ]) {
            let mut recipe = cases::head_recipe(HeadShape { batch: 3, tokens: 7, hidden: 130, vocab: 17_001 });
            (recipe.recipe.dtype, recipe.layout) = (dtype, layout);
            let problem = recipe.problem(&spec).unwrap();
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| NativeHead::default().chunk(4).run(&spec, problem.clone(), 1).unwrap())
            };
            let one = run(1);
            let reference = evaluate_head(&spec, &problem).unwrap();
            let verdicts = judge_head(&reference, &problem, &one, "native-lm-head", Tolerances::builtin()).unwrap();
            for verdict in &verdicts {
                assert!(verdict.passed(), "{dtype} {}", described(verdict));
            }
            for threads in [2, 3] {
                let more = run(threads);
                let other = Invariance::between_heads(&one, &more).other;
                assert!(other.is_empty(), "{dtype}, {threads} threads: {other:?}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let spec = LossSpec::default();
    let good = cases::head_recipe("2x3x4x5".parse().unwrap()).problem(&spec).unwrap();
    let refused = |change: &dyn Fn(&mut HeadProblem)| {
        let mut problem = good.clone();
        change(&mut problem);
        NativeHead::default().run(&spec, problem, 1).unwrap_err().to_string()
    };
    let narrow = refused(&|problem| problem.logits.lm_head = FloatArray::zeros((3, 5), Dtype::F32));
    assert_eq!(narrow, "`lm_head`: got shape [3, 5], expected [H,V] with H = 4, that of `hidden`");
    let other = refused(&|problem| problem.logits.lm_head = FloatArray::zeros((4, 5), Dtype::Bf16));
    assert_eq!(other, "`lm_head`: got dtype bf16, expected f32, that of `hidden`");
    let empty = refused(&|problem| problem.logits.hidden = FloatArray::zeros((2, 3, 0), Dtype::F32));
    assert!(empty.contains("`hidden`: got shape [2, 3, 0], expected [B,T,H] with H ≥ 1"), "{empty}");
    let fewer = refused(&|problem| problem.logits.lm_head = FloatArray::zeros((4, 1), Dtype::F32));
    assert!(fewer.contains("expected 0 ≤ id < V = 1"), "{fewer}");
    let f64s = refused(&|problem| {
        problem.logits.hidden = FloatArray::zeros((2, 3, 4), Dtype::F64);
        problem.logits.lm_head = FloatArray::zeros((4, 5), Dtype::F64);
    });
    assert!(f64s.contains("native-lm-head does not support hidden dtype f64"), "{f64s}");
}

/// What goes wrong in fused heads, each alone, on f32 and on bf16.
#[test]
fn wrong_gradients_are_rejected() {
    let spec = LossSpec::default();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut recipe = cases::head_recipe(HeadShape { batch: 2, tokens: 9, hidden: 24, vocab: 131 });
        (recipe.recipe.dtype, recipe.rounds_logits) = (dtype, true);
        let problem = recipe.problem(&spec).unwrap();
        let reference = evaluate_head(&spec, &problem).unwrap();
        let right = HeadCandidate { dlogits_dtype: dtype, ..reference.outcome().into() };
        let failed = |outcome: &HeadCandidate| -> Vec<String> {
            let verdicts = judge_head(&reference, &problem, outcome, "native-lm-head", Tolerances::builtin()).unwrap();
            verdicts.iter().filter(|verdict| !verdict.passed()).map(|verdict| verdict.gate.to_string()).collect()
        };
        assert_eq!(failed(&right), Vec::<String>::new());

        let dlogits = reference.dlogits();
        let dhidden = |dlogits: &Array2<f64>| -> FloatArray<Ix3> {
            reference.dhidden(dlogits).into_shape_with_order((2, 9, 24)).unwrap().into()
        };
        let dlm_head = |dlogits: &Array2<f64>| -> FloatArray<Ix2> {
            reference.dlm_head(dlogits).reversed_axes().as_standard_layout().into_owned().into()
        };
        let without_tail = {
            let mut dlogits = dlogits.clone();
            dlogits.slice_mut(s![.., 128..]).fill(0.0);
            dlogits
        };
        let without_last_token = {
            let mut dlogits = dlogits.clone();
            let last = problem.mask.as_slice().unwrap().iter().rposition(|counts| *counts).unwrap();
            dlogits.row_mut(last).fill(0.0);
            dlogits
        };
        let bf16_sums = right.dlm_head.to_f64().mapv(|x| Dtype::Bf16.round(Dtype::Bf16.round(x * 0.5) + x * 0.5));
        let masked = problem.mask.indexed_iter().find(|(_, counts)| !**counts).unwrap().0;
        let of_masked = {
            let mut dhidden = right.dhidden.to_f64();
            dhidden[[masked.0, masked.1, 0]] = 1e-30;
            dhidden
        };
        let unrounded = {
            let mut problem = problem.clone();
            problem.logits.rounds_logits = false;
            evaluate_head(&spec, &problem).unwrap().outcome()
        };
        let wrong = [
            ("dhidden without the last columns", HeadCandidate { dhidden: dhidden(&without_tail), ..right.clone() }),
            ("dlm_head without the last columns", HeadCandidate { dlm_head: dlm_head(&without_tail), ..right.clone() }),
            ("the last token in no chunk", HeadCandidate { dlm_head: dlm_head(&without_last_token), ..right.clone() }),
            ("dlm_head summed in bf16", HeadCandidate { dlm_head: bf16_sums.into(), ..right.clone() }),
            ("a masked token with a gradient", HeadCandidate { dhidden: of_masked.into(), ..right.clone() }),
            ("logits not rounded", HeadCandidate { logp: Some(unrounded.logp), ..right.clone() }),
        ];
        for (what, outcome) in wrong {
            let exact_anyway = dtype == Dtype::F32 && what == "logits not rounded";
            assert_eq!(failed(&outcome).is_empty(), exact_anyway, "{dtype}: {what}");
        }
    }
}
