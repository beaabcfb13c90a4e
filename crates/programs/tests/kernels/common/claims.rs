//! Claims about kernels of either language, each made once: `check` runs the kernel of one pass or of two and judges it.

use super::batch::token_by_token;
use super::impossible_targets;
use assay_core::problem::{Candidate, Dtype, FloatArray, Problem, Shape};
use assay_core::spec::{LogitsTransform, LossSpec, Support, Temperature};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_judge::variants::variants;
use assay_programs::{LossProgram, Programs as _};

/// A recipe with garbage in masked tokens.
pub(crate) fn recipe(shape: [usize; 3], dtype: Dtype, regime: Regime, seed: u64) -> Recipe {
    Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.1, masked_garbage: true }
}

/// A bonus and a temperature, so that all sums of a row are used.
pub(crate) fn with_bonus() -> LossSpec {
    LossSpec { entropy_coef: 0.02, temperature: 0.8.into(), ..LossSpec::default() }
}

/// Every named choice of a spec that the program of one pass computes, alone.
pub(crate) fn expect_every_variant(id: &str, check: impl Fn(usize, &LossSpec, &Recipe)) {
    let all = LossProgram::all();
    let one_pass = all.iter().find(|program| program.id() == id).unwrap();
    let (mut judged, mut forms) = (0, std::collections::BTreeSet::new());
    for (i, variant) in variants().into_iter().enumerate() {
        let shape = Shape { batch: 3, tokens: 4, vocab: 33 };
        let around_here = token_by_token(variant.spec.clone()) == variant.spec;
        if one_pass.supports(&variant.spec, shape, Dtype::F32, 1).is_ok() && around_here {
            let regime = Regime::FINITE[i % Regime::FINITE.len()];
            let drawn = recipe([3, 4, 33], Dtype::F32, regime, i as u64);
            check(i, &variant.spec, &Recipe { old_logp_noise_scale: 0.3, ..drawn });
            judged += 1;
            forms.insert(format!("{:?}", std::mem::discriminant(&variant.spec.objective)));
        }
    }
    assert!(judged > 55 && forms.len() == 14, "{judged} variants of {} objectives", forms.len());
}

/// Logp and entropy without a loss, whose cotangents are given, in each dtype.
pub(crate) fn expect_given_cotangents(noise: f64, check: impl Fn(&LossSpec, &Recipe)) {
    for (seed, entropy, temperature) in [(1, true, Temperature::Given), (2, false, 0.7.into())] {
        let spec = LossSpec { temperature, ..LossSpec::from_cotangents(entropy) };
        for (dtype, regime) in
            [(Dtype::F32, Regime::Confident), (Dtype::Bf16, Regime::Holes), (Dtype::F16, Regime::Sampled)]
        {
            let drawn = recipe([2, 3, 1031], dtype, regime, seed);
            check(&spec, &Recipe { old_logp_noise_scale: noise, ..drawn });
        }
    }
}

/// A loss with an entropy bonus on each of `shapes`, in each dtype.
pub(crate) fn expect_awkward_shapes(shapes: &[[usize; 3]], check: impl Fn(&LossSpec, &Recipe)) {
    for (&shape, regime) in shapes.iter().zip(Regime::FINITE.into_iter().cycle()) {
        for dtype in Dtype::KERNEL {
            check(&with_bonus(), &recipe(shape, dtype, regime, 7));
        }
    }
}

/// A target that no column can be has `logp` −∞, in every dtype: what stands for −∞ while a row is walked is another number in each.
pub(crate) fn expect_targets_at_minus_infinity(check: impl Fn(usize, &LossSpec, &Recipe)) {
    let spec = LossSpec { entropy_coef: 0.02, ..LossSpec::default() };
    for dtype in Dtype::KERNEL {
        for (i, (shape, seed)) in [([2, 5, 131], 3), ([1, 12, 2049], 5)].into_iter().enumerate() {
            let recipe = recipe(shape, dtype, Regime::TargetHoles, seed);
            assert!(impossible_targets(&recipe.problem(&spec).unwrap(), &spec) > 0, "{recipe:?} shows nothing");
            check(i, &spec, &recipe);
        }
    }
}

/// Columns outside the support hold NaN and infinities, and have gradients of exactly 0.
pub(crate) fn expect_zeros_outside_the_support(
    class: &str,
    seed: u64,
    run: impl Fn(usize, &LossSpec, &Problem) -> Vec<(&'static str, Candidate)>,
) {
    let support = Support { vocab: Some(60), excluded_ids: vec![7], ..Support::default() };
    for (i, softcap) in [None, Some(4.0)].into_iter().enumerate() {
        let logits = LogitsTransform { softcap, ..LogitsTransform::default() };
        let spec = LossSpec { logits, support: support.clone(), entropy_coef: 0.01, ..LossSpec::default() };
        let mut problem = recipe([1, 3, 131], Dtype::F32, Regime::Normal, seed).problem(&spec).unwrap();
        let FloatArray::F32(logits) = &mut problem.logits else { unreachable!("asked for f32") };
        let outside = |j: usize| j == 7 || j >= 60;
        for ((_, _, j), x) in logits.indexed_iter_mut().filter(|((_, _, j), _)| outside(*j)) {
            *x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][j % 3];
        }
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        for (id, candidate) in run(i, &spec, &problem) {
            let FloatArray::F32(dlogits) = &candidate.gradient else { unreachable!("as the logits") };
            let beyond = dlogits.indexed_iter().filter(|((_, _, j), _)| outside(*j));
            assert!(beyond.map(|(_, dx)| *dx).all(|dx| dx == 0.0), "{id} {softcap:?}");
            assert!(dlogits.iter().any(|dx| *dx != 0.0), "{id} {softcap:?}");
            let judged = known.judge(candidate, &Limits::for_class(class).unwrap()).unwrap();
            assert_eq!(known.failures(&judged, id, "cargo test --test kernels"), [""; 0], "{id} {softcap:?}");
        }
    }
}
