//! The operation that frameworks call: gradients of any cotangents against the reference, the same bits with a gradient and
//! without, and what does not fit refused by name.

use assay_core::problem::{Advantages, Candidate, Dtype, FloatArray, Outcome, Problem};
use assay_core::spec::{
    AdvantageLevel, Averaging, KeptSupport, Kl, KlEstimator, LossSpec, Objective, RatioLevel, Reduction, SoftmaxRange,
    Support, TemperatureDivides,
};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_native::op::{Op, OpArguments, OpArray, OpArrayMut};
use assay_native::{NativeOutputs, OutputCotangents};
use ndarray::{Array2, ArrayD, Ix3, arr0};

fn problem(spec: &LossSpec, dtype: Dtype, seed: u64) -> Problem {
    let recipe = Recipe {
        shape: [3, 5, 1025],
        dtype,
        regime: Regime::Sampled,
        seed,
        old_logp_noise_scale: 0.3,
        masked_garbage: true,
    };
    recipe.problem(spec).expect("a valid recipe")
}

fn lent(array: &FloatArray<Ix3>) -> OpArray<'_> {
    match array {
        FloatArray::F64(x) => OpArray::F64(x.view().into_dyn()),
        FloatArray::F32(x) => OpArray::F32(x.view().into_dyn()),
        FloatArray::Bf16(x) => OpArray::Bf16(x.view().into_dyn()),
        FloatArray::F16(x) => OpArray::F16(x.view().into_dyn()),
    }
}

fn lent_mut(array: &mut FloatArray<Ix3>) -> OpArrayMut<'_> {
    match array {
        FloatArray::F64(_) => unreachable!("no kernel takes f64"),
        FloatArray::F32(x) => OpArrayMut::F32(x.view_mut()),
        FloatArray::Bf16(x) => OpArrayMut::Bf16(x.view_mut()),
        FloatArray::F16(x) => OpArrayMut::F16(x.view_mut()),
    }
}

fn floats(array: &Array2<f64>) -> OpArray<'_> {
    OpArray::F64(array.view().into_dyn())
}

fn arguments(problem: &Problem) -> OpArguments<'_> {
    OpArguments {
        ids: OpArray::I64(problem.ids.view().into_dyn()),
        mask: OpArray::Bool(problem.mask.view().into_dyn()),
        advantages: match &problem.advantages {
            Advantages::Sequence(advantages) => OpArray::F64(advantages.view().into_dyn()),
            Advantages::Token(advantages) => floats(advantages),
            Advantages::Dlogp(_) => unreachable!("no spec here is of cotangents"),
        },
        old_logp: problem.old_logp.as_ref().map(floats),
        ref_logp: problem.ref_logp.as_ref().map(floats),
        rollout_logp: problem.extra.rollout_logp.as_ref().map(floats),
        rollout_weights: None,
        token_weights: None,
        selected: None,
        bias: None,
        cu_seqlens: None,
        segment_ids: None,
        dentropy: problem.extra.dentropy.as_ref().map(floats),
        temperature: problem.extra.temperature.as_ref().map(floats),
        kept_ids: problem.extra.kept_ids.as_ref().map(|kept| OpArray::I32(kept.view().into_dyn())),
    }
}

/// Losses with and without what the rows and the walks depend on.
fn specs() -> Vec<LossSpec> {
    let kl = Some(Kl::plain(0.04, KlEstimator::K3));
    let plain = LossSpec { kl, ..LossSpec::default() };
    let mut sequence = LossSpec { entropy_coef: 0.02, ..plain.clone() };
    sequence.ratio.level = RatioLevel::Sequence;
    let two = LossSpec {
        temperature: 1.4.into(),
        temperature_divides: TemperatureDivides::Logp,
        entropy_coef: 0.01,
        ..LossSpec::default()
    };
    vec![plain, sequence, two]
}

fn gradient(spec: &LossSpec, problem: &Problem, cotangents: OutputCotangents) -> (NativeOutputs, FloatArray<Ix3>) {
    let mut dlogits = problem.logits.clone();
    let op = Op::new(spec, &arguments(problem)).expect("arrays that fit");
    let evaluation = op.gradient(&lent(&problem.logits), lent_mut(&mut dlogits), cotangents).expect("supported");
    (evaluation, dlogits)
}

/// A loss that is scaled by 1/7, as accumulation does it, or by 2^16, as f16 needs it, has the gradient of a spec whose
/// `scale` is that: rounded once.
#[test]
fn op_scaled_loss_dlogits_match_reference() {
    for (seed, spec) in specs().into_iter().enumerate() {
        for dtype in Dtype::KERNEL {
            for g in [1.0 / 7.0, 65_536.0, -3.0] {
                let problem = problem(&spec, dtype, seed as u64);
                let (_, dlogits) = gradient(&spec, &problem, OutputCotangents::from_loss(g));
                let scaled = LossSpec { scale: spec.scale * g.abs(), ..spec.clone() };
                let sign = |x: f64| if g < 0.0 { -x } else { x };
                let (evaluation, _) = gradient(&scaled, &problem, OutputCotangents::default());
                let outcome = Outcome {
                    loss: arr0(evaluation.loss).into(),
                    logp: evaluation.logp.into(),
                    logp_of_others: None,
                    entropy: evaluation.entropy.into(),
                    token_loss: evaluation.token_loss.into(),
                    gradient: FloatArray::rounded_from(&dlogits.to_f64().mapv(sign), dtype),
                    metrics: evaluation.metrics,
                };
                let known = JudgedProblem::new(&scaled, &problem).unwrap();
                let judged = known.judge(Candidate::from(outcome), &Limits::for_class("native").unwrap()).unwrap();
                let failures = known.failures(&judged, "native", "this test");
                assert_eq!(failures, Vec::<String>::new(), "{g} times, {dtype}, {spec:?}");
            }
        }
    }
}

/// At a scale of 1 most of an f16 gradient are 0; at 2^16 those alone that are so small after it.
#[test]
fn op_f16_dlogits_are_scaled_before_they_underflow() {
    let spec = LossSpec::default();
    let problem = problem(&spec, Dtype::F16, 9);
    let zeros = |dlogits: &FloatArray<Ix3>| dlogits.to_f64().iter().filter(|&&x| x == 0.0).count();
    let of = |g| zeros(&gradient(&spec, &problem, OutputCotangents::from_loss(g)).1);
    let wide = FloatArray::rounded_from(&problem.logits.to_f64(), Dtype::F32);
    let (_, exact) = gradient(&spec, &problem.with_logits(wide), OutputCotangents::default());
    let scaled = FloatArray::rounded_from(&exact.to_f64().mapv(|x| x * 65_536.0), Dtype::F16);
    let (unscaled, left) = (of(1.0), of(65_536.0));
    assert!(unscaled > left + 5000, "{unscaled} zeros, of which {left} are left");
    assert_eq!(left, zeros(&scaled));
}

/// What is sent into logp is the gradient of `Σ c·ℓ`, and into entropy that of `Σ c·H`; beside the loss, their sum.
#[test]
fn op_cotangents_have_dlogits_of_a_loss_made_of_them() {
    for temperature_divides in [TemperatureDivides::Logits, TemperatureDivides::Logp] {
        let sum = Reduction::Normalizer(1.0);
        let base = LossSpec { temperature: 0.8.into(), temperature_divides, reduction: sum, ..LossSpec::default() };
        let problem = problem(&base, Dtype::F32, 4);
        let c = Array2::from_shape_fn(problem.mask.dim(), |(b, t)| (b as f64 - 0.7) * (t as f64 + 0.5) / 8.0);

        let policy_gradient =
            LossSpec { objective: Objective::PolicyGradient, advantages: AdvantageLevel::Token, ..base.clone() };
        let as_advantages = Problem { advantages: Advantages::Token(-&c), ..problem.clone() };
        let (_, expected) = gradient(&policy_gradient, &as_advantages, OutputCotangents::default());
        let into_logp = OutputCotangents { loss: 0.0, logp: Some(&c), entropy: None };
        assert!(gradient(&base, &problem, into_logp).1.same_bits(&expected), "logp");

        let bonus = LossSpec {
            objective: Objective::None,
            entropy_coef: -0.375,
            entropy_averaging: Some(Averaging { reduction: sum, denominator_epsilon: 0.0 }),
            ..base.clone()
        };
        let (_, expected) = gradient(&bonus, &problem, OutputCotangents::default());
        let c = Array2::from_elem(problem.mask.dim(), 0.375);
        let into_entropy = OutputCotangents { loss: 0.0, logp: None, entropy: Some(&c) };
        assert!(gradient(&base, &problem, into_entropy).1.same_bits(&expected), "entropy");

        let both = LossSpec { objective: base.objective.clone(), ..bonus };
        let (_, expected) = gradient(&both, &problem, OutputCotangents::default());
        let beside = OutputCotangents { loss: 1.0, logp: None, entropy: Some(&c) };
        assert!(gradient(&base, &problem, beside).1.same_bits(&expected), "the loss and entropy");
    }
}

fn same(a: &NativeOutputs, b: &NativeOutputs) -> bool {
    let bits = |of: &NativeOutputs| {
        let arrays = [&of.logp, &of.entropy, &of.token_loss];
        let tokens: Vec<u32> = arrays.into_iter().flatten().map(|x| x.to_bits()).collect();
        (of.loss.to_bits(), tokens)
    };
    bits(a) == bits(b) && a.metrics == b.metrics
}

#[test]
fn op_gradient_in_place_or_not_same_bits() {
    for (seed, spec) in specs().into_iter().enumerate() {
        for dtype in Dtype::KERNEL {
            let problem = problem(&spec, dtype, seed as u64);
            let c = Array2::from_elem(problem.mask.dim(), 0.01);
            for entropy in [None, Some(&c)] {
                let cotangents = OutputCotangents { entropy, ..OutputCotangents::from_loss(0.3) };
                let (evaluation, dlogits) = gradient(&spec, &problem, cotangents);
                let op = Op::new(&spec, &arguments(&problem)).unwrap();
                assert!(same(&op.loss(&lent(&problem.logits)).unwrap(), &evaluation), "without, {dtype}, {spec:?}");
                let scored = op.logp_and_entropy(&lent(&problem.logits)).unwrap();
                assert_eq!((scored.logp, scored.entropy), (evaluation.logp.clone(), evaluation.entropy.clone()));
                let mut over = problem.logits.clone();
                let in_place = op.gradient_in_place(lent_mut(&mut over), cotangents).unwrap();
                assert!(same(&in_place, &evaluation) && over.same_bits(&dlogits), "in place, {dtype}, {spec:?}");
            }
        }
    }
}

#[test]
fn op_concurrent_calls_get_the_bits_of_one() {
    let spec = &specs()[1];
    let problem = &problem(spec, Dtype::Bf16, 7);
    let (evaluation, dlogits) = &gradient(spec, problem, OutputCotangents::default());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(move || {
                let (own, own_dlogits) = gradient(spec, problem, OutputCotangents::default());
                assert!(same(&own, evaluation) && own_dlogits.same_bits(dlogits));
            });
        }
    });
}

/// 32-bit ids, a mask of numbers, narrow log-probabilities and advantages of a sequence where the spec has one a token.
#[test]
fn op_arrays_of_other_dtypes_are_taken_exactly() {
    let spec = LossSpec { advantages: AdvantageLevel::Token, ..specs().remove(0) };
    let mut problem = problem(&spec, Dtype::F32, 2);
    let narrow = |array: Option<Array2<f64>>| array.map(|array| array.mapv(|x| f64::from(x as f32)));
    (problem.old_logp, problem.ref_logp) = (narrow(problem.old_logp), narrow(problem.ref_logp));
    let of_rows = ndarray::arr1(&[0.5_f32, -1.25, 2.0]);
    problem.advantages = Advantages::Sequence(of_rows.mapv(f64::from));
    problem = problem.with_advantages_for(&spec);
    let (expected, expected_dlogits) = gradient(&spec, &problem, OutputCotangents::default());

    let ids = problem.ids.mapv(|id| id as i32);
    let mask = problem.mask.mapv(i64::from);
    let [old_logp, ref_logp] = [&problem.old_logp, &problem.ref_logp].map(|x| x.as_ref().unwrap().mapv(|x| x as f32));
    let arguments = OpArguments {
        ids: OpArray::I32(ids.view().into_dyn()),
        mask: OpArray::I64(mask.view().into_dyn()),
        advantages: OpArray::F32(of_rows.view().into_dyn()),
        old_logp: Some(OpArray::F32(old_logp.view().into_dyn())),
        ref_logp: Some(OpArray::F32(ref_logp.view().into_dyn())),
        ..arguments(&problem)
    };
    let mut dlogits = problem.logits.clone();
    let op = Op::new(&spec, &arguments).unwrap();
    let evaluation = op.gradient(&lent(&problem.logits), lent_mut(&mut dlogits), OutputCotangents::default()).unwrap();
    assert!(same(&evaluation, &expected) && dlogits.same_bits(&expected_dlogits));
}

#[test]
fn op_kept_sets_have_the_bits_of_the_batch() {
    let kept = KeptSupport { entropy: SoftmaxRange::Vocabulary, kl: SoftmaxRange::Set };
    let support = Support { kept: Some(kept), ..Support::default() };
    let spec = LossSpec { support, entropy_coef: 0.1, ..LossSpec::default() };
    let problem = problem(&spec, Dtype::F32, 4);
    let (expected, expected_dlogits) = gradient(&spec, &problem, OutputCotangents::default());
    let wide = problem.extra.kept_ids.as_ref().unwrap().mapv(i64::from);
    for kept_ids in [None, Some(OpArray::I64(wide.view().into_dyn()))] {
        let as_drawn = arguments(&problem);
        let kept_ids = kept_ids.or(as_drawn.kept_ids.clone());
        let op_arguments = OpArguments { kept_ids, ..as_drawn };
        let mut dlogits = problem.logits.clone();
        let op = Op::new(&spec, &op_arguments).unwrap();
        let given = op.gradient(&lent(&problem.logits), lent_mut(&mut dlogits), OutputCotangents::default()).unwrap();
        assert!(same(&given, &expected) && dlogits.same_bits(&expected_dlogits));
    }
    let refused = |kept_ids: Option<&ArrayD<i64>>| {
        let kept_ids = kept_ids.map(|kept| OpArray::I64(kept.view().into_dyn()));
        let arguments = OpArguments { kept_ids, ..arguments(&problem) };
        let called = Op::new(&spec, &arguments).and_then(|op| op.loss(&lent(&problem.logits)));
        called.unwrap_err().to_string()
    };
    assert!(refused(None).starts_with("`kept_ids`: not given, expected [3, 5, K]"));
    let ids = problem.ids.clone().insert_axis(ndarray::Axis(2)).into_dyn();
    assert!(refused(Some(&ids.index_axis(ndarray::Axis(0), 0).to_owned())).starts_with("`kept_ids`: got shape [5, 1]"));
    let far = ids.mapv(|_| i64::MAX);
    assert!(refused(Some(&far)).contains("got 9223372036854775807, expected 0 ≤ id < V"));
    assert!(refused(Some(&ids.mapv(|_| -7))).contains("got -7, expected 0 ≤ id < V"));
}

#[test]
fn op_misfit_is_refused_by_name_and_unwritten() {
    let spec = LossSpec::default();
    let problem = problem(&spec, Dtype::F32, 1);
    let refused = |arguments: OpArguments| {
        let called = Op::new(&spec, &arguments).and_then(|op| op.loss(&lent(&problem.logits)));
        called.unwrap_err().to_string()
    };
    let floats = ArrayD::from_elem(vec![3, 5], 0.5_f32);
    let flat = ArrayD::from_elem(vec![15], 1_i64);
    let (floats, flat, good) = (|| OpArray::F32(floats.view()), || OpArray::I64(flat.view()), || arguments(&problem));
    assert_eq!(refused(OpArguments { ids: floats(), ..good() }), "`ids`: got dtype f32, expected i64 or i32");
    assert_eq!(refused(OpArguments { ids: flat(), ..good() }), "`ids`: got shape [15], expected [B,T]");
    assert_eq!(refused(OpArguments { mask: floats(), ..good() }), "`mask[0,0]`: got 0.5, expected 0 or 1");
    assert_eq!(refused(OpArguments { mask: flat(), ..good() }), "`mask`: got shape [15], expected [B,T]");
    let of_tokens = refused(OpArguments { advantages: floats(), ..good() });
    assert!(of_tokens.starts_with("`advantages`: got shape [3, 5], expected [3] ([B] of the logits"), "{of_tokens}");
    assert_eq!(
        refused(OpArguments { old_logp: Some(flat()), ..good() }),
        "`old_logp`: got dtype i64, expected f32, bf16, f16 or f64"
    );
    assert!(
        refused(OpArguments { old_logp: None, ..good() }).starts_with("`old_logp`: not given, expected shape [3, 5]")
    );

    let op = Op::new(&spec, &arguments(&problem)).unwrap();
    let wide = FloatArray::F64(problem.logits.to_f64());
    assert_eq!(op.loss(&lent(&wide)).unwrap_err().to_string(), "`logits`: got dtype f64, expected f32, bf16 or f16");
    let rows = ArrayD::from_elem(vec![15, 1025], 0.0_f32);
    let rows = op.logp_and_entropy(&OpArray::F32(rows.view())).unwrap_err().to_string();
    assert_eq!(rows, "`logits`: got shape [15, 1025], expected [B,T,V] with B, T, V ≥ 1");
    let mut narrow = FloatArray::zeros((3, 5, 1025), Dtype::Bf16);
    let error = op.gradient(&lent(&problem.logits), lent_mut(&mut narrow), OutputCotangents::default()).unwrap_err();
    assert_eq!(error.to_string(), "`dlogits`: got dtype bf16, expected that of the logits");

    let c = Array2::zeros((5, 3));
    let mut over = problem.logits.clone();
    let turned = OutputCotangents { logp: Some(&c), ..OutputCotangents::default() };
    let error = op.gradient_in_place(lent_mut(&mut over), turned).unwrap_err();
    assert_eq!(error.to_string(), "`cotangent of logp`: got shape [5, 3], expected [3, 5] ([B,T] of the logits)");
    assert!(over.same_bits(&problem.logits), "as they were");
}
