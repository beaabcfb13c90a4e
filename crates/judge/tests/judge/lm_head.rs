//! The judge of the LM head with the loss.

use assay_core::implementation::Implementation;
use assay_core::problem::{Advantages, Dtype, FloatArray, HeadCandidate, HeadGradient, HeadProblem, HeadShape};
use assay_core::spec::{Kl, KlEstimator, KlImportance, LossSpec, Objective, OldLogp, PpoClip, Reduction, Temperature};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::judge::Verdict;
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::Limits;
use assay_native::NativeHead;
use assay_reference::HeadReference;
use assay_suites::cases;
use ndarray::{Array1, Array2, ArrayView1, Ix2, Ix3, s};

fn described(verdict: &Verdict) -> String {
    format!("{} {}: {:?}, {:?}", verdict.gate, verdict.dtype, verdict.status, verdict.tally)
}

/// Dlogits beyond 65504 are ∞ where they go into the products in f16, and then `dlm_head` may be; where they go in f32, not.
#[test]
fn dlm_head_may_be_infinite_where_dlogits_overflow_products() {
    let spec = LossSpec { scale: 1e7, ..LossSpec::default() };
    let mut recipe = cases::head_recipe(HeadShape { batch: 2, tokens: 3, hidden: 4, vocab: 7 });
    recipe.recipe.dtype = Dtype::F16;
    let problem = recipe.problem(&spec).unwrap();
    let reference = problem.evaluate(&spec).unwrap();
    let mut outcome = NativeHead::default().run(&spec, problem.clone(), 1).unwrap();
    let FloatArray::F32(dlm_head) = &mut outcome.gradient.dlm_head else { panic!("f32 whatever the head") };
    dlm_head[[0, 0]] = f32::INFINITY;
    for (dtype, honest) in [(Dtype::F16, true), (Dtype::Bf16, false), (Dtype::F32, false)] {
        outcome.gradient.dlogits_dtype = dtype;
        let verdicts =
            problem.judge(&reference, &outcome.lend(), &Limits::for_class("native-lm-head").unwrap()).unwrap();
        let failed: Vec<_> = verdicts.iter().filter(|verdict| !verdict.passed()).map(described).collect();
        assert_eq!(failed.is_empty(), honest, "{dtype}: {failed:#?}");
    }
}

/// A ratio's derivative takes what k3's own one adds, and leaves `−β·ρ·(ref_logp − ℓ)` of `e^42`: f32 leaves what it happens to, which
/// may overflow f16 where the exact dlogits do not.
#[test]
fn lm_head_infinite_where_dlogits_error_overflows_passes() {
    let kl = Kl { importance: KlImportance::Ratio, ..Kl::plain(0.1, KlEstimator::K3) };
    let spec = LossSpec { old_logp: OldLogp::Current, kl: Some(kl), ..LossSpec::default() };
    let mut recipe = cases::head_recipe(HeadShape { batch: 2, tokens: 3, hidden: 4, vocab: 7 });
    (recipe.recipe.dtype, recipe.recipe.old_logp_noise_scale) = (Dtype::F16, 0.0);
    let mut problem = recipe.problem(&spec).unwrap();
    let (b, t) = problem.mask.indexed_iter().find(|(_, counts)| **counts).unwrap().0;
    problem.ref_logp.as_mut().unwrap()[[b, t]] += 42.0;
    let reference = problem.evaluate(&spec).unwrap();
    let most = reference.dlogits(0..7).iter().fold(0.0, |most, x| f64::max(most, x.abs()));
    assert!(most < 1e3, "{most}");
    let mut candidate: HeadCandidate = reference.outcome().into();
    let FloatArray::F64(dhidden) = &mut candidate.gradient.dhidden else { panic!("the reference's dtype") };
    dhidden[[b, t, 0]] = f64::NAN;
    for (dtype, honest) in [(Dtype::F16, true), (Dtype::Bf16, false), (Dtype::F32, false)] {
        candidate.gradient.dlogits_dtype = dtype;
        let verdicts =
            problem.judge(&reference, &candidate.lend(), &Limits::for_class("native-lm-head").unwrap()).unwrap();
        let failed: Vec<_> = verdicts.iter().filter(|verdict| !verdict.passed()).map(described).collect();
        assert_eq!(failed.is_empty(), honest, "{dtype}: {failed:#?}");
    }
}

/// A hidden unit whose weights are all 64 has a gradient of 0, the sum of what f32 cannot add up; another's it can. And of one that no
/// logit depends on the target's column gets more than half of f32's largest number, others little.
#[test]
fn lm_head_infinite_passes_only_where_sums_may_overflow() {
    let recipe = cases::head_recipe(HeadShape { batch: 2, tokens: 3, hidden: 4, vocab: 4099 });
    let mut spec = LossSpec::default();
    let mut problem = recipe.problem(&spec).unwrap();
    let FloatArray::F32(lm_head) = &mut problem.logits.lm_head else { panic!("the recipe's dtype") };
    lm_head.row_mut(0).fill(64.0);
    lm_head.row_mut(1).fill(0.0);
    let size = |dlogits: ArrayView1<f64>| dlogits.iter().map(|x| x.abs()).sum::<f64>();
    let dlogits = problem.evaluate(&spec).unwrap().dlogits(0..4099);
    let sizes: Vec<f64> = dlogits.rows().into_iter().map(size).collect();
    let most = (0..6).max_by(|a, b| sizes[*a].total_cmp(&sizes[*b])).unwrap();
    let (b, t) = (most / 3, most % 3);
    spec.scale = 3e38 / 64.0 / sizes[most];
    let target = usize::try_from(problem.ids[[b, t]]).unwrap();
    let FloatArray::F32(hidden) = &mut problem.logits.hidden else { panic!("the recipe's dtype") };
    hidden[[b, t, 1]] = (2.5e38 / (spec.scale * dlogits[[most, target]].abs())) as f32;

    let reference = problem.evaluate(&spec).unwrap();
    let failed = |of_hidden: Option<usize>, of_head: Option<usize>| -> Vec<String> {
        let mut candidate: HeadCandidate = reference.outcome().into();
        let HeadGradient { dhidden: FloatArray::F64(dhidden), dlm_head: FloatArray::F64(dlm_head), .. } =
            &mut candidate.gradient
        else {
            panic!("the reference's dtype")
        };
        if let Some(h) = of_hidden {
            dhidden[[b, t, h]] = f64::INFINITY;
        }
        if let Some(v) = of_head {
            dlm_head[[1, v]] = f64::INFINITY;
        }
        let verdicts =
            problem.judge(&reference, &candidate.lend(), &Limits::for_class("native-lm-head").unwrap()).unwrap();
        verdicts.iter().filter(|verdict| !verdict.passed()).map(described).collect()
    };
    for (of_hidden, of_head, failures) in [
        (None, None, 0),
        (Some(0), None, 0),
        (Some(1), None, 1),
        (None, Some(target), 0),
        (None, Some((target + 1) % 4099), 1),
    ] {
        let failed = failed(of_hidden, of_head);
        assert_eq!(failed.len(), failures, "{of_hidden:?} {of_head:?}: {failed:#?}");
    }
}

/// What goes wrong in fused heads, each alone, on f32 and on bf16.
#[test]
fn lm_head_wrong_gradients_are_rejected() {
    let spec = LossSpec::default();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut recipe = cases::head_recipe(HeadShape { batch: 2, tokens: 9, hidden: 24, vocab: 131 });
        (recipe.recipe.dtype, recipe.rounds_logits) = (dtype, true);
        let problem = recipe.problem(&spec).unwrap();
        let reference = problem.evaluate(&spec).unwrap();
        let mut right: HeadCandidate = reference.outcome().into();
        right.gradient.dlogits_dtype = dtype;
        let failed = |outcome: &HeadCandidate| -> Vec<String> {
            let verdicts =
                problem.judge(&reference, &outcome.lend(), &Limits::for_class("native-lm-head").unwrap()).unwrap();
            verdicts.iter().filter(|verdict| !verdict.passed()).map(|verdict| verdict.gate.to_string()).collect()
        };
        assert_eq!(failed(&right), Vec::<String>::new());

        let dlogits = reference.dlogits(0..131);
        let dhidden = |dlogits: &Array2<f64>| -> FloatArray<Ix3> {
            reference
                .dhidden(|columns| dlogits.slice(s![.., columns]).to_owned())
                .into_shape_with_order((2, 9, 24))
                .unwrap()
                .into()
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
        let bf16_sums =
            right.gradient.dlm_head.to_f64().mapv(|x| Dtype::Bf16.round(Dtype::Bf16.round(x * 0.5) + x * 0.5));
        let masked = problem.mask.indexed_iter().find(|(_, counts)| !**counts).unwrap().0;
        let of_masked = {
            let mut dhidden = right.gradient.dhidden.to_f64();
            dhidden[[masked.0, masked.1, 0]] = 1e-30;
            dhidden
        };
        let unrounded = {
            let mut problem = problem.clone();
            problem.logits.rounds_logits = false;
            problem.evaluate(&spec).unwrap().outcome()
        };
        let of_right = || right.gradient.clone();
        let wrong = [
            ("dhidden without the last columns", HeadGradient { dhidden: dhidden(&without_tail), ..of_right() }),
            ("dlm_head without the last columns", HeadGradient { dlm_head: dlm_head(&without_tail), ..of_right() }),
            ("the last token in no chunk", HeadGradient { dlm_head: dlm_head(&without_last_token), ..of_right() }),
            ("dlm_head summed in bf16", HeadGradient { dlm_head: bf16_sums.into(), ..of_right() }),
            ("a masked token with a gradient", HeadGradient { dhidden: of_masked.into(), ..of_right() }),
        ];
        let wrong = wrong.map(|(what, gradient)| (what, HeadCandidate { gradient, ..right.clone() }));
        let not_rounded = ("logits not rounded", HeadCandidate { logp: Some(unrounded.logp), ..right.clone() });
        for (what, outcome) in wrong.into_iter().chain([not_rounded]) {
            let exact_anyway = dtype == Dtype::F32 && what == "logits not rounded";
            assert_eq!(failed(&outcome).is_empty(), exact_anyway, "{dtype}: {what}");
        }
    }
}

/// With an entropy bonus dlogits have a minimum as a function of p. In this problem half of a row lies about it, within one step of
/// f16: a kernel that rounds right is off by as much in each of those columns, and one that scales its sums too.
#[test]
fn dlogits_of_a_token_that_share_a_step_round_alike() {
    let spec = LossSpec {
        objective: Objective::PpoClip(PpoClip { epsilon_high: 0.04, dual_clip: Some(1.98), ..PpoClip::default() }),
        old_logp: OldLogp::Current,
        temperature: Temperature::Number(1.932_859_166_440_017),
        entropy_coef: 0.023_377_706_135_705_424,
        reduction: Reduction::Normalizer(198.227_474_578_599_07),
        ..LossSpec::default()
    };
    let mut recipe = cases::head_recipe(HeadShape { batch: 3, tokens: 9, hidden: 65, vocab: 1031 });
    recipe.recipe = Recipe {
        dtype: Dtype::F16,
        regime: Regime::Negative,
        seed: 13_819_931_197_442_770_434,
        old_logp_noise_scale: 0.0,
        masked_garbage: true,
        ..recipe.recipe
    };
    expect_right(&recipe.problem(&spec).unwrap(), &spec);
}

/// Before its first step a head of zeros gives every column the same dlogit, in all tokens of one advantage. In f16 it is flushed to 0.
#[test]
fn dlogits_of_a_column_that_share_a_step_round_alike() {
    let spec = LossSpec {
        scale: 131.0 * 0.9 * f64::exp2(-25.0),
        old_logp: OldLogp::Current,
        reduction: Reduction::Normalizer(1.0),
        ..LossSpec::default()
    };
    let recipe = cases::head_recipe(HeadShape { batch: 4, tokens: 32, hidden: 8, vocab: 131 });
    let mut problem = recipe.problem(&spec).unwrap();
    let (FloatArray::F32(lm_head), FloatArray::F32(hidden)) = (&mut problem.logits.lm_head, &mut problem.logits.hidden)
    else {
        panic!("the recipe's dtype")
    };
    lm_head.fill(0.0);
    hidden.mapv_inplace(|x| x.abs() + 1.0);
    problem.advantages = Advantages::Sequence(Array1::ones(4));
    expect_right(&problem, &spec);
}

/// Expects a kernel to pass whose dlogits are rounded to f16, at several scales, and one to fail whose subnormal numbers are flushed.
fn expect_right(problem: &HeadProblem, spec: &LossSpec) {
    let reference = problem.evaluate(spec).unwrap();
    let failed = |candidate: &HeadCandidate| -> Vec<String> {
        let verdicts =
            problem.judge(&reference, &candidate.lend(), &Limits::for_class("native-lm-head").unwrap()).unwrap();
        verdicts.iter().filter(|verdict| !verdict.passed()).map(described).collect()
    };
    for scale in (0..20).map(|k| 1.0 + f64::from(k) / 20.0) {
        let failed = failed(&with_dlogits(&reference, |x| Dtype::F16.round(x * scale) / scale));
        assert_eq!(failed, Vec::<String>::new(), "rounded at {scale} times its size");
    }
    let flushed = failed(&with_dlogits(&reference, |x| if x.abs() < f64::exp2(-14.0) { 0.0 } else { x }));
    assert_ne!(flushed, Vec::<String>::new());
}

/// The gradients of a head whose dlogits go into exact products as `rounded`, in f16.
fn with_dlogits(reference: &HeadReference, rounded: impl Fn(f64) -> f64) -> HeadCandidate {
    let HeadShape { batch, tokens, hidden, vocab } = reference.shape();
    let dlogits = reference.dlogits(0..vocab).mapv(rounded);
    let dhidden = reference.dhidden(|columns| dlogits.slice(s![.., columns]).to_owned());
    let dlm_head = reference.dlm_head(&dlogits).reversed_axes().as_standard_layout().into_owned();
    let gradient = HeadGradient {
        dhidden: dhidden.into_shape_with_order((batch, tokens, hidden)).unwrap().into(),
        dlm_head: dlm_head.into(),
        dlogits_dtype: Dtype::F16,
    };
    HeadCandidate { gradient, ..reference.outcome().into() }
}
