//! The LM head with the loss against the reference, through the judge.

use assay_core::implementation::Implementation;
use assay_core::problem::{Dtype, FloatArray, HeadLayout, HeadProblem, HeadShape};
use assay_core::spec::{
    AdvantageLevel, ImportanceSampling, KeptSupport, Kl, KlCov, KlEstimator, KlGradient, KlImportance, LogClip,
    LossSpec, LossTerms, Objective, Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator, RejectionLevel, Rows,
    Sapo, SoftmaxRange, Support, TemperatureDivides,
};
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::invariance::Invariance;
use assay_judge::tolerance::Limits;
use assay_judge::trial::{JudgedProblem, hindrance};
use assay_native::{HeadDerivatives, NativeHead, OutputCotangents};
use assay_suites::cases;
use proptest::prelude::*;

fn expect_right(spec: &LossSpec, recipe: &HeadRecipe) {
    let problem = recipe.problem(spec).unwrap_or_else(|error| panic!("{error}"));
    let known = JudgedProblem::new(spec, &problem).unwrap();
    // Chunks that the tokens do not fill; the one registered takes so few at once.
    for head in [NativeHead::default(), NativeHead::default().chunk(3)] {
        if hindrance(&head, spec, &problem, 1).is_none() {
            known.expect_right(&head, 1, &format!("{recipe:?} {spec:?}"));
        }
    }
}

fn drawn(shape: [usize; 3], dtype: Dtype, regime: Regime, seed: u64, old_logp_noise_scale: f64) -> Recipe {
    Recipe { shape, dtype, regime, seed, old_logp_noise_scale, masked_garbage: false }
}

proptest! {
    #![proptest_config(cases::config(300))]

    #[test]
    fn lm_head_any_spec_matches_reference(spec in cases::any_spec(), recipe in cases::any_head_recipe()) {
        expect_right(&spec, &recipe);
    }
}

/// Five tiles of a 16-bit head, chunks that are not full, and a ratio that a sequence shares.
#[test]
fn lm_head_any_threads_same_bits() {
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
            let known = JudgedProblem::new(&spec, &problem).unwrap();
            let judged = known.judge(one.clone(), &Limits::for_class("native-lm-head").unwrap()).unwrap();
            assert_eq!(known.failures(&judged, &dtype.to_string(), "this test"), Vec::<String>::new());
            for threads in [2, 3] {
                let more = run(threads);
                let other = Invariance::between(&one, &more).other;
                assert!(other.is_empty(), "{dtype}, {threads} threads: {other:?}");
            }
        }
    }
}

/// A gradient alone has the bits that it has beside the other one, also where few large dlogits are summed apart.
#[test]
fn lm_head_one_gradient_has_the_bits_of_both() {
    let ratio = Ratio { level: RatioLevel::Sequence, ..LossSpec::default().ratio };
    let kept = KeptSupport { entropy: SoftmaxRange::Vocabulary, kl: SoftmaxRange::Set };
    let support = Support { kept: Some(kept), ..Support::default() };
    for spec in [
        LossSpec { entropy_coef: 0.01, ..LossSpec::default() },
        LossSpec { ratio, ..LossSpec::default() },
        LossSpec { support, entropy_coef: 0.01, ..LossSpec::default() },
    ] {
        for dtype in Dtype::KERNEL {
            let mut recipe = cases::head_recipe(HeadShape { batch: 2, tokens: 5, hidden: 12, vocab: 5001 });
            (recipe.recipe.dtype, recipe.layout) = (dtype, HeadLayout::VocabByHidden);
            let problem = recipe.problem(&spec).unwrap();
            let (projection, cotangents) = (problem.logits.view(), OutputCotangents::from_loss(0.3));
            let of = |hidden, lm_head| {
                let (head, asked) = (NativeHead::default().chunk(3), HeadDerivatives { hidden, lm_head });
                head.forward_backward(&spec, &projection, problem.tokens(), cotangents, asked).unwrap()
            };
            let ((outputs, both), (of_hidden, hidden), (of_head, head)) =
                (of(true, true), of(true, false), of(false, true));
            assert_eq!(
                [of_hidden.loss.to_bits(), of_head.loss.to_bits()],
                [outputs.loss.to_bits(); 2],
                "{dtype} {spec:?}"
            );
            assert!(hidden.dlm_head.is_none() && head.dhidden.is_none());
            assert!(both.dhidden.is_some() && both.dlm_head.is_some());
            assert!(hidden.dhidden == both.dhidden && head.dlm_head == both.dlm_head, "{dtype} {spec:?}");
        }
    }
}

#[test]
fn lm_head_misfit_is_refused_by_name() {
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

/// Logits of 12,000 are 8 apart in f16: one that is rounded to the other side changes its probability by more than f64 can say.
#[test]
fn lm_head_logits_rounded_by_whole_nats_no_false_alarm() {
    let recipe = Recipe {
        masked_garbage: true,
        ..drawn([2, 8, 2048], Dtype::F16, Regime::ShiftedUp, 18_128_733_820_678_993_277, 0.388)
    };
    let recipe = HeadRecipe { hidden: 64, layout: HeadLayout::VocabByHidden, rounds_logits: true, recipe };
    let spec = LossSpec { kl: Some(Kl::plain(0.004, KlEstimator::K3)), entropy_coef: 0.06, ..LossSpec::default() };
    expect_right(&spec, &recipe);
}

/// A gradient of 1e-34 is a sum of 4,099 terms of which most are flushed to 0, each in the same direction.
#[test]
fn lm_head_flushed_columns_add_up() {
    let recipe = Recipe {
        masked_garbage: true,
        ..drawn([3, 8, 4099], Dtype::Bf16, Regime::Negative, 14_409_466_002_960_439_639, 5.0)
    };
    let recipe = HeadRecipe { hidden: 128, layout: HeadLayout::VocabByHidden, rounds_logits: false, recipe };
    let sapo = Sapo { tau_positive: 2.198, tau_negative: 1.581 };
    let mut spec = LossSpec { objective: Objective::Sapo(sapo), temperature: 1.845.into(), ..LossSpec::default() };
    spec.reduction = Reduction::FixedLength { rows: Rows::NonEmpty, length: Some(19) };
    spec.ratio.denominator_epsilon = 0.5;
    spec.advantages = AdvantageLevel::Token;
    spec.kl = Some(Kl {
        gradient: KlGradient::K2,
        importance: KlImportance::Ratio,
        value_clamp: Some(6.379),
        clamp_after_importance: true,
        ..Kl::plain(0.123, KlEstimator::K2)
    });
    expect_right(&spec, &recipe);
}

/// What a logit's rounding does to the ratio of a sequence, it does to the gradients of all its tokens.
#[test]
fn lm_head_shared_ratio_errors_add_up_over_tokens() {
    let recipe = drawn([3, 5, 31], Dtype::Bf16, Regime::Normal, 190_976_387_827_755_321, 0.0);
    let recipe = HeadRecipe { hidden: 16, layout: HeadLayout::HiddenByVocab, rounds_logits: true, recipe };
    let objective = Objective::ImportanceSampling(ImportanceSampling { empty_rows: false });
    let mut spec = LossSpec { objective, ..LossSpec::default() };
    spec.ratio.level = RatioLevel::Sequence;
    expect_right(&spec, &recipe);
}

/// The product's error is wider than a clip of 4 %: between its ends lies a piece that neither end is on.
#[test]
fn lm_head_piece_between_kinks_of_one_band_is_found() {
    let recipe = drawn([1, 6, 4099], Dtype::F16, Regime::ShiftedUp, 3_155_012_108_911_663_558, 0.0);
    let recipe = HeadRecipe { hidden: 16, layout: HeadLayout::HiddenByVocab, rounds_logits: false, recipe };
    let objective = Objective::KlCov(KlCov { coefficient: 1.275, selection: None });
    let mut spec = LossSpec { objective, temperature: 0.3.into(), ..LossSpec::default() };
    spec.temperature_divides = TemperatureDivides::Logp;
    spec.ratio.clip = Some(LogClip { low: 0.0, high: 0.0435 });
    spec.rejection = vec![Rejection {
        estimator: RejectionEstimator::K1,
        level: RejectionLevel::Token,
        min: None,
        max: 0.01,
        counts: false,
        drops_from: LossTerms::Policy,
    }];
    expect_right(&spec, &recipe);
}
