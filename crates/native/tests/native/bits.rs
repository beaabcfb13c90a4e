//! What the CPU kernel promises beside the right answer: the same bits on every instruction set that the machine has, for
//! any number of threads and any order of rows, in place or not; logits anywhere; nothing read under the mask.
//!
//! That the answer is right is shown elsewhere, on the fastest instruction set, and so holds for all.

use assay_core::implementation::{Implementation, RunError};
use assay_core::problem::{Advantages, Dtype, FloatArray, Problem, ProblemError};
use assay_core::spec::{
    Kl, KlEstimator, LogitsTransform, LossSpec, RatioLevel, Support, Temperature, TemperatureDivides,
};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::trial::JudgedProblem;
use assay_native::{Isa, Native, NativeElement, NativeOutputs, OutputCotangents};
use assay_suites::cases;
use half::bf16;
use ndarray::{Array2, Array3, ArrayView3, ArrayViewMut3, Axis, ShapeBuilder, s};
use proptest::prelude::*;
use rayon::ThreadPoolBuilder;

/// Dlogits and the rest, as bits; every NaN is the same.
fn bits<E: NativeElement>(evaluation: &NativeOutputs, dlogits: ArrayView3<E>) -> (Vec<u32>, Vec<u32>) {
    let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    let of_tokens = [&evaluation.logp, &evaluation.entropy, &evaluation.token_loss];
    let rest = std::iter::once(evaluation.loss).chain(of_tokens.into_iter().flatten().copied()).map(bits).collect();
    (rest, dlogits.iter().map(|x| bits(x.to_f64() as f32)).collect())
}

/// Calls `$body` with `$logits` bound to the array inside.
macro_rules! with_logits {
    ($problem:expr, $logits:ident => $body:expr) => {
        match &$problem.logits {
            FloatArray::F64($logits) => unreachable!("no kernel takes {:?} of f64", $logits.shape()),
            FloatArray::F32($logits) => $body,
            FloatArray::Bf16($logits) => $body,
            FloatArray::F16($logits) => $body,
        }
    };
}

fn in_place<E: NativeElement>(
    native: &Native,
    spec: &LossSpec,
    problem: &Problem,
    logits: &Array3<E>,
) -> (Vec<u32>, Vec<u32>) {
    let mut dlogits = logits.clone();
    let evaluation = native
        .forward_backward_in_place(spec, dlogits.view_mut(), problem.tokens(), OutputCotangents::default())
        .expect("supported");
    bits(&evaluation, dlogits.view())
}

fn recipe(shape: [usize; 3], dtype: Dtype, regime: Regime, seed: u64) -> Recipe {
    Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true }
}

/// All that shapes how a row is walked: exponentials kept or made again, one softmax or two, with a bonus or without.
fn walks() -> Vec<LossSpec> {
    let mut specs = Vec::new();
    for entropy_coef in [0.0, 0.03] {
        for (temperature, temperature_divides) in
            [(1.0, TemperatureDivides::Logits), (0.7, TemperatureDivides::Logits), (1.4, TemperatureDivides::Logp)]
        {
            for level in [RatioLevel::Token, RatioLevel::Sequence] {
                let mut spec = LossSpec {
                    temperature: Temperature::Number(temperature),
                    temperature_divides,
                    entropy_coef,
                    kl: Some(Kl::plain(0.05, KlEstimator::K3)),
                    ..LossSpec::default()
                };
                spec.ratio.level = level;
                specs.push(spec);
            }
        }
    }
    specs
}

/// All that is done to logits before their softmax, at the first columns of blocks and at their last ones, with a softmax of
/// which most columns are far below the largest, and with one whose columns beside its cap are all one.
fn transforms() -> Vec<LossSpec> {
    let transform = |scale, softcap, bias| LogitsTransform { scale, softcap, bias };
    let mut specs = Vec::new();
    for (i, logits) in [
        transform(1.0, None, false),
        transform(0.5, None, true),
        transform(-0.7, None, false),
        transform(1.3, Some(5.0), false),
        transform(-0.5, Some(30.0), true),
    ]
    .into_iter()
    .enumerate()
    {
        for (vocab, excluded_ids) in
            [(None, vec![]), (Some(513), vec![]), (None, vec![600, 0, 511, 512, 0]), (Some(512), vec![31, 32])]
        {
            let support = Support { vocab, excluded_ids, keep_sampled: true, kept: None };
            for (temperature, spec) in [1.0, 0.05].into_iter().zip(walks().into_iter().cycle().skip(specs.len() + i)) {
                specs.push(LossSpec {
                    logits: logits.clone(),
                    support: support.clone(),
                    temperature: temperature.into(),
                    ..spec
                });
            }
        }
    }
    specs
}

/// One temperature for all is the same as an array of it, of sequences or of tokens, whose bits under the mask are any.
#[test]
fn temperature_given_everywhere_has_bits_of_number() {
    let native = Native::default();
    let specs = walks().into_iter().filter(|spec| spec.temperature_divides == TemperatureDivides::Logits);
    for (i, spec) in specs.enumerate() {
        for logits in [LogitsTransform::default(), LogitsTransform { scale: 1.3, softcap: Some(5.0), bias: false }] {
            let of_number = LossSpec { logits, ..spec.clone() };
            let mut problem =
                recipe([2, 4, 600], Dtype::KERNEL[i % 3], Regime::Normal, i as u64).problem(&of_number).unwrap();
            let number = of_number.temperature.number().unwrap();
            let expected = native.run(&of_number, problem.clone(), 1).unwrap();
            let given = LossSpec { temperature: Temperature::Given, ..of_number };
            let of_tokens = problem.mask.mapv(|counts| if counts { number } else { f64::NAN });
            for temperatures in [Array2::from_elem((2, 1), number), of_tokens] {
                problem.extra.temperature = Some(temperatures);
                let found = native.run(&given, problem.clone(), 1).unwrap();
                assert_eq!((&found.loss, &found.logp), (&expected.loss, &expected.logp), "{given:?}");
                assert_eq!((&found.entropy, &found.gradient), (&expected.entropy, &expected.gradient), "{given:?}");
            }
        }
    }
}

#[test]
fn softcap_scale_and_bias_same_bits_match_reference() {
    for (i, spec) in transforms().into_iter().enumerate() {
        for (regime, dtype) in Regime::FINITE.into_iter().zip(Dtype::KERNEL.into_iter().cycle().skip(i)) {
            let problem = recipe([1, 4, 1100], dtype, regime, i as u64).problem(&spec).expect("a valid recipe");
            let what = format!("{dtype} {regime:?}, {spec:?}");
            expect_the_same_bits(&spec, &problem, &what);
            expect_right(&spec, &problem, &what);
        }
    }
}

/// Whatever stands outside the support, in place or not.
#[test]
fn support_garbage_outside_changes_no_bit() {
    for spec in transforms().into_iter().filter(|spec| !spec.support.is_whole()) {
        let mut problem = recipe([1, 3, 1100], Dtype::F32, Regime::Peaked, 5).problem(&spec).expect("a valid recipe");
        problem.ids.fill(7);
        let FloatArray::F32(logits) = &problem.logits else { unreachable!("f32 was asked for") };
        let expected = in_place(&Native::default(), &spec, &problem, logits);
        let mut garbage = logits.clone();
        for j in (0..1100)
            .filter(|&j| spec.support.vocab.is_some_and(|vocab| j >= vocab))
            .chain(spec.support.excluded_ids.clone())
        {
            let what = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX][j % 4];
            garbage.slice_mut(s![.., .., j]).fill(what);
        }
        assert!(in_place(&Native::default(), &spec, &problem, &garbage) == expected, "{spec:?}");
        let mut dlogits = logits.clone();
        let evaluation = Native::default()
            .forward_backward(&spec, garbage.view(), dlogits.view_mut(), problem.tokens(), OutputCotangents::default())
            .expect("supported");
        assert!(bits(&evaluation, dlogits.view()) == expected, "beside them, {spec:?}");
    }
}

/// Dlogits of a row that goes down to e^-110 of its largest, which is the target, against f64. Its exponentials are `kept` where no
/// token looks at another.
fn dlogits_are_normal_numbers_or_0<E: NativeElement>(isa: Isa, kept: bool, entropy: f64) {
    let (columns, logp) = (562, 1e-3);
    let logits: Vec<E> = (0..columns).map(|j| E::from_f64(-110.0 * j as f64 / columns as f64)).collect();
    let gaps: Vec<f64> = logits.iter().map(|x| -x.to_f64()).collect();
    let mut spec = LossSpec::default();
    spec.ratio.level = if kept { RatioLevel::Token } else { RatioLevel::Sequence };
    let mut problem = recipe([1, 1, columns], E::DTYPE, Regime::Normal, 0).problem(&spec).expect("a valid recipe");
    problem.ids.fill(0);
    problem.mask.fill(true);
    let mut dlogits = Array3::from_shape_vec((1, 1, columns), logits).expect("one row");
    let of_token = |x: f64| Array2::from_elem((1, 1), x);
    let (logp_grad, entropy_grad) = (of_token(logp), of_token(entropy));
    let entropy_grad = (entropy != 0.0).then_some(&entropy_grad);
    let cotangents = OutputCotangents { loss: 0.0, logp: Some(&logp_grad), entropy: entropy_grad };
    Native::on(isa)
        .forward_backward_in_place(&spec, dlogits.view_mut(), problem.tokens(), cotangents)
        .expect("supported");
    let sum: f64 = gaps.iter().map(|a| (-a).exp()).sum();
    let mean_gap = gaps.iter().map(|a| (-a).exp() * a).sum::<f64>() / sum;
    for (j, (&a, dx)) in gaps.iter().zip(dlogits).enumerate().skip(1) {
        let exact = (-a).exp() / sum * (entropy * (a - mean_gap) - logp);
        let (dx, case) = (dx.to_f64() as f32, format!("{isa}, {:?}, column {j}, kept {kept}, {entropy}", E::DTYPE));
        // The part of entropy differs from column to column, so that a few slip through.
        assert!(dx == 0.0 || dx.is_normal() || entropy != 0.0, "{case}: {dx:e}");
        let error = (f64::from(dx) - exact).abs();
        let allowed = if dx == 0.0 {
            f32::MIN_POSITIVE.into()
        } else {
            exact.abs() * if size_of::<E>() == 2 { 2.0_f64.powi(-8) } else { 1e-5 }
        };
        assert!(error <= allowed, "{case}: {dx:e} for {exact:e}");
    }
}

#[test]
fn dlogits_below_normal_numbers_are_0_and_no_others() {
    for isa in Isa::available() {
        for (kept, entropy) in [(true, 0.0), (false, 0.0), (true, 1e-3), (false, 1e-3)] {
            dlogits_are_normal_numbers_or_0::<f32>(isa, kept, entropy);
            dlogits_are_normal_numbers_or_0::<bf16>(isa, kept, entropy);
        }
    }
}

proptest! {
    #![proptest_config(cases::config(300))]

    #[test]
    fn isa_any_spec_has_bits_of_portable(spec in cases::any_spec(), recipe in cases::any_recipe()) {
        let problem = recipe.problem(&spec).unwrap_or_else(|error| panic!("{error}"));
        let native = Native::default();
        prop_assume!(native.supports(&spec, problem.shape(), recipe.dtype, 1).is_ok());
        with_logits!(problem, logits => {
            let [expected, others @ ..] = &Isa::available().into_iter().rev()
                .map(|isa| (isa, in_place(&Native::on(isa), &spec, &problem, logits)))
                .collect::<Vec<_>>()[..] else { unreachable!("portable is always there") };
            prop_assert_eq!(expected.0.name(), "portable");
            for (isa, outcome) in others {
                prop_assert!(outcome == &expected.1, "{isa} differs from {}", expected.0);
            }
        });
    }
}

/// V from 1 to two whole vectors and a column, around a block, and around what the first two caches hold.
#[test]
fn vocabulary_awkward_widths_same_bits_match_reference() {
    let vocabularies = (1..=65).chain([511, 512, 513, 1023, 1025, 8191, 8193, 16_385, 131_073]);
    for (i, vocab) in vocabularies.enumerate() {
        let regime = Regime::FINITE[i % Regime::FINITE.len()];
        for (spec, dtype) in walks().into_iter().zip(Dtype::KERNEL.into_iter().cycle()) {
            let problem = recipe([1, 3, vocab], dtype, regime, i as u64).problem(&spec).expect("a valid recipe");
            let what = format!("V = {vocab} {dtype} {regime:?}, {spec:?}");
            expect_the_same_bits(&spec, &problem, &what);
            expect_right(&spec, &problem, &what);
        }
    }
}

/// A grid of 65,535 blocks, and a row number of 16 bits, are common bounds.
#[test]
fn rows_more_than_65_535_match_reference() {
    let spec = LossSpec::default();
    let problem = recipe([2, 40_000, 5], Dtype::Bf16, Regime::Sampled, 1).problem(&spec).expect("a valid recipe");
    assert!(problem.mask.as_slice().expect("dense").iter().rposition(|counts| *counts).is_some_and(|row| row > 65_535));
    expect_right(&spec, &problem, "2x40000x5");
}

/// Beyond 32 bits of an index, and of an offset in bytes: 4.3 GB, most of it masked rows of zeros.
#[test]
#[ignore = "takes 9 GB: make test-extensive"]
fn elements_more_than_2_31_match_reference() {
    let spec = LossSpec::default();
    let few = recipe([1, 4, 151_936], Dtype::Bf16, Regime::Sampled, 1).unmasked_problem(&spec).expect("a valid recipe");
    let tokens = (1_usize << 31) / 151_936 + 3;
    let at = |t: usize| tokens - 4 + t;
    let mut problem = few.with_logits(FloatArray::zeros((1, tokens, 151_936), Dtype::Bf16));
    let widened = |of: &Array2<f64>| {
        let mut wide = Array2::zeros((1, tokens));
        of.iter().enumerate().for_each(|(t, x)| wide[[0, at(t)]] = *x);
        wide
    };
    (problem.old_logp, problem.ref_logp) = (few.old_logp.as_ref().map(widened), few.ref_logp.as_ref().map(widened));
    problem.mask = Array2::from_elem((1, tokens), false);
    problem.ids = Array2::zeros((1, tokens));
    for t in 0..4 {
        problem.mask[[0, at(t)]] = true;
        problem.ids[[0, at(t)]] = few.ids[[0, t]];
        problem.logits.set_row(0, at(t), &few.logits.row(0, t));
    }
    assert!(problem.logits.shape().iter().product::<usize>() > 1 << 31);
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    known.expect_right(&Native::default(), 1, "1x14136x151936");
}

/// On every instruction set.
fn expect_the_same_bits(spec: &LossSpec, problem: &Problem, what: &str) {
    with_logits!(problem, logits => {
        let on = |isa| in_place(&Native::on(isa), spec, problem, logits);
        let all: Vec<_> = Isa::available().into_iter().map(|isa| (isa, on(isa))).collect();
        for (isa, outcome) in &all[1..] {
            assert!(outcome == &all[0].1, "{isa} differs from {}: {what}", all[0].0);
        }
    });
}

/// On the fastest.
fn expect_right(spec: &LossSpec, problem: &Problem, what: &str) {
    JudgedProblem::new(spec, problem).expect("a valid problem").expect_right(&Native::default(), 1, what);
}

#[test]
fn threads_any_number_same_bits() {
    for (spec, dtype) in walks().into_iter().zip(Dtype::KERNEL.into_iter().cycle()) {
        let problem = recipe([4, 9, 2049], dtype, Regime::Peaked, 3).problem(&spec).expect("a valid recipe");
        with_logits!(problem, logits => {
            let with_threads = |threads| {
                let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
                pool.install(|| in_place(&Native::default(), &spec, &problem, logits))
            };
            let one = with_threads(1);
            for threads in [2, 3, 7] {
                assert!(with_threads(threads) == one, "{threads} threads");
            }
        });
    }
}

#[test]
fn rows_any_order_same_bits() {
    let spec = LossSpec { kl: Some(Kl::plain(0.05, KlEstimator::K3)), entropy_coef: 0.02, ..LossSpec::default() };
    let problem = recipe([6, 5, 1000], Dtype::Bf16, Regime::Normal, 5).problem(&spec).expect("a valid recipe");
    let FloatArray::Bf16(logits) = &problem.logits else { unreachable!("bf16 was asked for") };
    let order = [4, 0, 5, 2, 1, 3];
    let of = |array: &ndarray::Array2<f64>| array.select(Axis(0), &order);
    let shuffled = Problem {
        logits: logits.select(Axis(0), &order).into(),
        ids: problem.ids.select(Axis(0), &order),
        mask: problem.mask.select(Axis(0), &order),
        advantages: match &problem.advantages {
            Advantages::Sequence(a) => Advantages::Sequence(a.select(Axis(0), &order)),
            Advantages::Token(a) => Advantages::Token(of(a)),
            Advantages::Dlogp(a) => Advantages::Dlogp(of(a)),
        },
        old_logp: problem.old_logp.as_ref().map(of),
        ref_logp: problem.ref_logp.as_ref().map(of),
        extra: problem.extra.clone(),
    };
    let run = |problem: Problem| -> (Vec<f64>, Array3<f64>) {
        let outcome = Native::default().run(&spec, problem, 1).expect("supported");
        (outcome.logp.expect("ours return it").to_f64().iter().copied().collect(), outcome.gradient.to_f64())
    };
    let (logp, dlogits) = run(problem);
    let (shuffled_logp, shuffled_dlogits) = run(shuffled);
    assert_eq!(shuffled_dlogits, dlogits.select(Axis(0), &order));
    let expected: Vec<f64> = order.iter().flat_map(|b| logp[b * 5..(b + 1) * 5].to_vec()).collect();
    assert_eq!(shuffled_logp, expected);
}

/// Rows that begin anywhere: no alignment, gaps between them, and an order of their own.
fn anywhere<E: NativeElement>(logits: &Array3<E>) -> (Array3<E>, usize) {
    let (b, t, v) = logits.dim();
    // [T, B, V + 3], from the third element on.
    let mut room = Array3::from_elem((t, b, v + 3), E::from_f64(f64::NAN));
    room.slice_mut(s![.., .., 2..2 + v]).assign(&logits.view().permuted_axes([1, 0, 2]));
    (room, v)
}

fn view<E>(room: &Array3<E>, v: usize) -> ArrayView3<'_, E> {
    room.slice(s![.., .., 2..2 + v]).permuted_axes([1, 0, 2])
}

fn view_mut<E>(room: &mut Array3<E>, v: usize) -> ArrayViewMut3<'_, E> {
    room.slice_mut(s![.., .., 2..2 + v]).permuted_axes([1, 0, 2])
}

#[test]
fn strides_in_place_or_not_same_bits() {
    for (spec, dtype) in walks().into_iter().zip(Dtype::KERNEL.into_iter().cycle()) {
        let problem = recipe([3, 5, 1234], dtype, Regime::Holes, 7).problem(&spec).expect("a valid recipe");
        let native = Native::default();
        with_logits!(problem, logits => {
            let expected = in_place(&native, &spec, &problem, logits);
            let (mut room, v) = anywhere(logits);
            let before = room.clone();

            let (mut elsewhere, _) = anywhere(&Array3::from_elem(logits.raw_dim(), logits[[0, 0, 0]]));
            let evaluation = native
                .forward_backward(&spec, view(&room, v), view_mut(&mut elsewhere, v), problem.tokens(), OutputCotangents::default())
                .expect("supported");
            assert!(bits(&evaluation, view(&elsewhere, v)) == expected, "out of place");
            assert!(same(&room, &before), "the logits stay");

            let forward = native.forward(&spec, view(&room, v), problem.tokens()).expect("supported");
            assert_eq!((forward.logp, forward.entropy), (evaluation.logp, evaluation.entropy), "forward alone");

            let evaluation = native
                .forward_backward_in_place(&spec, view_mut(&mut room, v), problem.tokens(), OutputCotangents::default())
                .expect("supported");
            assert!(bits(&evaluation, view(&room, v)) == expected, "in place");
            for (around, before) in [(&room, &before), (&elsewhere, &before)] {
                for gap in [s![.., .., 0..2], s![.., .., v + 2..]] {
                    assert!(same(&around.slice(gap).to_owned(), &before.slice(gap).to_owned()), "nothing beside the rows");
                }
            }
        });
    }
}

fn same<E: NativeElement>(a: &Array3<E>, b: &Array3<E>) -> bool {
    a.iter().zip(b).all(|(a, b)| a == b || a.to_f64().is_nan() && b.to_f64().is_nan())
}

#[test]
fn rows_not_dense_or_misfit_are_refused_unwritten() {
    let spec = LossSpec::default();
    let problem = recipe([2, 3, 40], Dtype::F32, Regime::Normal, 1).problem(&spec).expect("a valid recipe");
    let native = Native::default();
    let mut every_other = Array3::from_elem((2, 3, 80).f(), 5.0_f32);
    let error = native
        .forward_backward_in_place(
            &spec,
            every_other.slice_mut(s![.., .., ..;2]),
            problem.tokens(),
            OutputCotangents::default(),
        )
        .expect_err("columns are apart");
    assert_eq!(error, RunError::Problem(ProblemError::StridedRows { field: "logits", stride: 12 }));
    let message = "`logits`: got rows with a stride of 12, expected 1: the elements of a row must be contiguous";
    assert_eq!(error.to_string(), message);
    assert!(every_other.iter().all(|&x| x == 5.0), "as they were");

    let logits = Array3::from_elem((2, 3, 40), 0.5_f32);
    let mut dlogits = Array3::from_elem((2, 3, 41), 5.0_f32);
    let error = native
        .forward_backward(&spec, logits.view(), dlogits.view_mut(), problem.tokens(), OutputCotangents::default())
        .expect_err("a column more");
    let message = "`dlogits`: got shape [2, 3, 41], expected [2, 3, 40], that of the logits";
    assert_eq!(error.to_string(), message);
    assert!(dlogits.iter().all(|&x| x == 5.0), "as they were");

    let logits = Array3::from_elem((2, 4, 40), 0.5_f32);
    let error = native.forward(&spec, logits.view(), problem.tokens()).expect_err("a token more");
    assert!(error.to_string().starts_with("`ids`: got shape [2, 3], expected [2, 4]"), "{error}");
    let logits = Array3::from_elem((2, 3, 40), 0.5_f64);
    let error = native.run(&spec, Problem { logits: logits.into(), ..problem }, 1).expect_err("f64");
    assert!(error.to_string().contains("does not support logits dtype f64"), "{error}");
}

/// What no real model says, and −∞ and NaN where they may stand: every instruction set says the same, and NaN or ∞ is never
/// hidden.
#[test]
fn logits_extreme_same_bits_and_match_reference() {
    let extremes = [
        vec![f32::MAX, f32::MIN, 0.0, -0.0],
        vec![f32::MIN, f32::MIN, 3.0, f32::MIN],
        vec![f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 2.0],
        vec![1e-40, -1e-40, f32::MIN_POSITIVE, 0.0],
        vec![-104.0, -103.0, -88.0, 0.0],
        vec![f32::NAN, 1.0, 2.0, 3.0],
        // NaNs that arithmetic on their bits would make numbers of.
        vec![f32::from_bits(0x7fff_ffff), 1.0, 2.0, 3.0],
        vec![f32::from_bits(0xffc0_0001), 1.0, 2.0, 3.0],
        vec![f32::INFINITY, 1.0, 2.0, 3.0],
        vec![f32::NEG_INFINITY; 4],
    ];
    for (spec, row) in walks().into_iter().flat_map(|spec| extremes.iter().map(move |row| (spec.clone(), row))) {
        for (vocab, dtype) in [4, 600].into_iter().flat_map(|vocab| Dtype::KERNEL.map(|dtype| (vocab, dtype))) {
            let mut problem = recipe([1, 2, vocab], dtype, Regime::Small, 2).problem(&spec).expect("a valid recipe");
            problem.mask.fill(true);
            problem.ids.fill(1);
            let mut logits = Array3::from_elem((1, 2, vocab), -1.0_f32);
            for t in 0..2 {
                logits.slice_mut(s![0, t, ..4]).assign(&ndarray::Array1::from(row.clone()));
            }
            problem.logits = match dtype {
                Dtype::F32 => logits.into(),
                _ => FloatArray::rounded_from(&logits.mapv(f64::from), dtype),
            };
            for array in [&mut problem.old_logp, &mut problem.ref_logp].into_iter().flatten() {
                array.fill(-1.0);
            }
            let what = format!("{row:?}, V = {vocab} {dtype}, {spec:?}");
            expect_the_same_bits(&spec, &problem, &what);
            expect_right(&spec, &problem, &what);
        }
    }
}

/// Gradients so small that a factor times `2^-26` is no normal number any more.
#[test]
fn advantages_tiny_dlogits_f32_match_reference() {
    let spec = LossSpec::default();
    let mut problem = recipe([2, 3, 1000], Dtype::F32, Regime::Normal, 4).problem(&spec).expect("a valid recipe");
    let Advantages::Sequence(advantages) = &mut problem.advantages else { unreachable!("the default") };
    advantages.fill(1e-34);
    expect_right(&spec, &problem, "advantages of 1e-34");
}
