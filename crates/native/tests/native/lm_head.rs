//! The LM head with the loss against the reference, through the judge.

use assay_core::implementation::Implementation;
use assay_core::problem::{Dtype, FloatArray, HeadLayout, HeadProblem, HeadShape};
use assay_core::spec::{LossSpec, Ratio, RatioLevel};
use assay_judge::generate::HeadRecipe;
use assay_judge::invariance::Invariance;
use assay_judge::tolerance::Limits;
use assay_judge::trial::{Known, hindrance};
use assay_native::NativeHead;
use assay_suites::cases;
use proptest::prelude::*;

fn expect_right(spec: &LossSpec, recipe: &HeadRecipe) {
    let problem = recipe.problem(spec).unwrap_or_else(|error| panic!("{error}"));
    let known = Known::of(spec, &problem).unwrap();
    // Chunks that the tokens do not fill; the one registered takes so few at once.
    for head in [NativeHead::default(), NativeHead::default().chunk(3)] {
        if hindrance(&head, spec, &problem, 1).is_none() {
            known.expect_right(&head, 1, &format!("{recipe:?} {spec:?}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_outputs_any_spec_any_head_match_reference(spec in cases::any_spec(), recipe in cases::any_head_recipe()) {
        expect_right(&spec, &recipe);
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
            let known = Known::of(&spec, &problem).unwrap();
            let judged = known.judge(one.clone(), &Limits::of("native-lm-head").unwrap()).unwrap();
            assert_eq!(known.failures(&judged, &dtype.to_string(), "this test"), Vec::<String>::new());
            for threads in [2, 3] {
                let more = run(threads);
                let other = Invariance::between(&one, &more).other;
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
