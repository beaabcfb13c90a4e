//! Kept sets on the CPU kernels, from logits and with an LM head: any loss, against the reference, through the judge.

use assay_core::implementation::Implementation as _;
use assay_core::problem::{Dtype, HeadLayout, Tokens};
use assay_core::spec::{KeptSupport, Kl, KlEstimator, LossSpec, SoftmaxRange, Support};
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::trial::{JudgedProblem, hindrance};
use assay_native::{Native, NativeHead, OutputCotangents};
use assay_suites::cases;
use proptest::prelude::*;

fn expect_right(spec: &LossSpec, recipe: &Recipe) {
    let problem = recipe.problem(spec).unwrap_or_else(|error| panic!("{error}: {recipe:?} {spec:?}"));
    assert_eq!(hindrance(&Native::default(), spec, &problem, 1), None);
    let known = JudgedProblem::new(spec, &problem).unwrap();
    known.expect_right(&Native::default(), 1, &format!("{recipe:?} {spec:?}"));
}

fn expect_head_right(spec: &LossSpec, recipe: &HeadRecipe) {
    let problem = recipe.problem(spec).unwrap_or_else(|error| panic!("{error}: {recipe:?} {spec:?}"));
    let known = JudgedProblem::new(spec, &problem).unwrap();
    for head in [NativeHead::default(), NativeHead::default().chunk(3)] {
        assert_eq!(hindrance(&head, spec, &problem, 1), None);
        known.expect_right(&head, 1, &format!("{recipe:?} {spec:?}"));
    }
}

/// A loss whose entropy and KL penalty are over these.
fn spec(entropy: SoftmaxRange, kl: SoftmaxRange) -> LossSpec {
    let support = Support { kept: Some(KeptSupport { entropy, kl }), ..Support::default() };
    let kl = Some(Kl::plain(0.1, KlEstimator::K3));
    LossSpec { support, kl, entropy_coef: 0.02, ..LossSpec::default() }
}

const RANGES: [SoftmaxRange; 2] = [SoftmaxRange::Set, SoftmaxRange::Vocabulary];

proptest! {
    #![proptest_config(cases::config(300))]

    #[test]
    fn kept_any_spec_matches_reference(spec in cases::any_kept_spec(), recipe in cases::any_recipe()) {
        expect_right(&spec, &recipe);
    }
}

proptest! {
    #![proptest_config(cases::config(150))]

    #[test]
    fn kept_lm_head_any_spec_matches_reference(
        spec in cases::any_kept_spec(), recipe in cases::any_head_recipe(),
    ) {
        expect_head_right(&spec, &recipe);
    }
}

#[test]
fn kept_every_range_regime_and_dtype_matches_reference() {
    for (entropy, kl) in RANGES.into_iter().flat_map(|entropy| RANGES.map(|kl| (entropy, kl))) {
        for (regime, dtype) in Regime::ALL.into_iter().flat_map(|regime| Dtype::KERNEL.map(|dtype| (regime, dtype))) {
            let shape = [3, 4, 1500];
            let recipe = Recipe { shape, dtype, regime, seed: 5, old_logp_noise_scale: 0.3, masked_garbage: true };
            expect_right(&spec(entropy, kl), &recipe);
        }
    }
}

#[test]
fn kept_qwen_vocabulary_matches_reference() {
    for (entropy, kl) in RANGES.into_iter().flat_map(|entropy| RANGES.map(|kl| (entropy, kl))) {
        for (regime, dtype) in [(Regime::Sampled, Dtype::Bf16), (Regime::LongTail, Dtype::F32)] {
            let shape = [1, 2, 151_936];
            let recipe = Recipe { shape, dtype, regime, seed: 5, old_logp_noise_scale: 0.3, masked_garbage: true };
            expect_right(&spec(entropy, kl), &recipe);
        }
    }
}

/// Most of 151,936 entries have small dlogits, which an f32 sum would lose beside the few large ones of a set.
#[test]
fn kept_lm_head_of_qwen_vocabulary_matches_reference() {
    let layout = HeadLayout::VocabByHidden;
    for seed in [7, 11] {
        let recipe = Recipe {
            shape: [1, 3, 151_936],
            dtype: Dtype::F32,
            regime: Regime::Small,
            seed,
            old_logp_noise_scale: 0.3,
            masked_garbage: false,
        };
        let recipe = HeadRecipe { hidden: 16, layout, rounds_logits: false, recipe };
        expect_head_right(&spec(SoftmaxRange::Vocabulary, SoftmaxRange::Set), &recipe);
    }
}

/// All ways to call the kernel give the same bits: in place or not, without a gradient, on any number of threads.
#[test]
fn kept_every_call_has_the_same_bits() {
    for (entropy, kl) in RANGES.into_iter().flat_map(|entropy| RANGES.map(|kl| (entropy, kl))) {
        let spec = spec(entropy, kl);
        let recipe = Recipe {
            shape: [4, 6, 700],
            dtype: Dtype::F32,
            regime: Regime::Normal,
            seed: 8,
            old_logp_noise_scale: 0.3,
            masked_garbage: true,
        };
        let problem = recipe.problem(&spec).unwrap();
        let native = Native::default();
        let in_place = native.run(&spec, problem.clone(), 1).unwrap();
        let assay_core::problem::FloatArray::F32(logits) = &problem.logits else { panic!("f32") };
        let tokens: Tokens = problem.tokens();
        let mut dlogits = logits.clone();
        dlogits.fill(7.0);
        let (view, cotangents) = (dlogits.view_mut(), OutputCotangents::default());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let apart = pool.install(|| native.forward_backward(&spec, logits.view(), view, tokens, cotangents)).unwrap();
        assert_eq!(in_place.gradient, dlogits.into());
        assert_eq!(in_place.logp, Some(apart.logp.clone().into()));
        let evaluated = native.evaluate(&spec, logits.view(), tokens).unwrap();
        assert_eq!((evaluated.loss.to_bits(), &evaluated.logp), (apart.loss.to_bits(), &apart.logp));
        let forward = native.forward(&spec, logits.view(), tokens).unwrap();
        assert_eq!((forward.logp, forward.entropy), (apart.logp, apart.entropy));
    }
}
