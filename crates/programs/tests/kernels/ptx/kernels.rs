//! The PTX that a driver is given for every kernel, run by the interpreter and judged against the reference. No plugin takes part.

use super::harness::*;
use crate::common::batch::{plain, token_by_token};
use crate::common::claims;
use crate::common::{PerToken, bytes_of, f32_bytes, logits_bytes, logits_of, per_token};
use assay_core::problem::{Dtype, FloatArray, ProblemPart, Shape};
use assay_core::spec::{LogitsTransform, LossSpec, Support, Temperature, TemperatureDivides};
use assay_fixture::ProblemFile;
use assay_judge::generate::{Recipe, Regime};
use assay_judge::recorded::recorded_spec;
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_programs::{Device, LossProgram, Programs, PtxTarget, StructuredSpec};
use assay_ptx_interpreter::ApproximateUnits;
use assay_suites::cases;
use ndarray::Array3;
use proptest::prelude::*;
use proptest::sample::select;

proptest! {
    #![proptest_config(cases::config(24))]

    #[test]
    fn one_pass_any_spec_matches_reference(
        spec in cases::any_spec(),
        recipe in cases::any_recipe(),
        target in select(&TARGETS),
    ) {
        let spec = token_by_token(spec);
        check(target, "gpu-one-pass", &spec, &recipe).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn two_pass_any_spec_matches_reference(
        spec in cases::any_ppo_spec(),
        changed in proptest::option::of(cases::changed_logits()),
        recipe in cases::any_recipe(),
        target in select(&TARGETS),
    ) {
        let (logits, support) = changed.unwrap_or_default();
        let spec = LossSpec { logits, support, ..plain(&spec) };
        check(target, "gpu-two-pass", &spec, &recipe).map_err(TestCaseError::fail)?;
    }
}

/// What becomes of logits, in rows that begin anywhere, over one CTA and several: a cap, a bias, columns that are left out, and a target
/// among them that is put back.
#[test]
fn softcap_bias_and_support_match_reference() {
    let capped = LogitsTransform { scale: 0.5, softcap: Some(5.0), bias: true };
    let turned = LogitsTransform { scale: -1.7, softcap: None, bias: false };
    let of_first = Support { vocab: Some(100), excluded_ids: vec![0, 3, 64], keep_sampled: true, kept: None };
    let bonus = LossSpec { entropy_coef: 0.02, temperature: 0.8.into(), ..LossSpec::default() };
    let two = LossSpec { temperature_divides: TemperatureDivides::Logp, ..bonus.clone() };
    let specs = [
        LossSpec {
            logits: LogitsTransform { bias: false, ..capped.clone() },
            temperature: Temperature::Given,
            ..LossSpec::default()
        },
        LossSpec { logits: capped, support: of_first.clone(), ..two },
        LossSpec { logits: turned, support: of_first, ..bonus },
    ];
    for (i, (shape, regime)) in SHAPES.into_iter().zip(Regime::FINITE.into_iter().cycle()).enumerate() {
        let dtype = Dtype::KERNEL[i % Dtype::KERNEL.len()];
        let recipe = Recipe { shape, dtype, regime, seed: 11, old_logp_noise_scale: 0.1, masked_garbage: true };
        let units = [ApproximateUnits::Rounded, ApproximateUnits::Above, ApproximateUnits::Below][i / 3 % 3];
        check_by(units, TARGETS[i % 2], "gpu-one-pass", &specs[i % 3], &recipe).unwrap();
        check_by(units, PtxTarget::Sm80, "gpu-two-pass", &specs[(i + 1) % 3], &recipe).unwrap();
    }
}

#[test]
fn support_excluded_columns_have_no_gradient() {
    claims::expect_zeros_outside_the_support("gpu", 5, |i, spec, problem| {
        let around = Around { target: TARGETS[i], ..Around::new(spec, problem) };
        vec![("gpu-one-pass", around.one_pass().unwrap()), ("gpu-two-pass", around.two_pass().unwrap())]
    });
}

#[test]
fn one_pass_every_variant_matches_reference() {
    claims::expect_every_variant("gpu-one-pass", |i, spec, recipe| {
        check(TARGETS[i % 2], "gpu-one-pass", spec, recipe).unwrap();
    });
}

#[test]
fn cotangents_given_match_reference() {
    claims::expect_given_cotangents(0.1, |spec, recipe| check_both(PtxTarget::Sm90, spec, recipe));
}

#[test]
fn shapes_awkward_match_reference() {
    claims::expect_awkward_shapes(&SHAPES, |spec, recipe| {
        for target in TARGETS {
            check(target, "gpu-one-pass", spec, recipe).unwrap();
        }
        check(PtxTarget::Sm80, "gpu-two-pass", spec, recipe).unwrap();
    });
}

#[test]
fn minus_infinity_targets_match_reference() {
    claims::expect_targets_at_minus_infinity(|i, spec, recipe| check_both(TARGETS[i], spec, recipe));
}

/// Rows at the ends of a dtype, beside −∞ too, which no shift brings near 0: lowest, largest, a thousandfold, and the lowest but one.
#[test]
fn dtype_end_rows_match_reference() {
    for dtype in Dtype::KERNEL {
        let largest = match dtype {
            Dtype::F16 => 65_504.0,
            Dtype::Bf16 => f64::from(half::bf16::MAX),
            _ => f64::from(f32::MAX),
        };
        for (temperature, target) in [(1.0, PtxTarget::Sm90), (100.0, PtxTarget::Sm100), (0.01, PtxTarget::Sm90)] {
            let spec = LossSpec { temperature: temperature.into(), ..LossSpec::default() };
            let mut problem = recipe([1, 4, 517], dtype, Regime::Normal).problem(&spec).unwrap();
            problem.mask.fill(true);
            let ids = problem.ids.clone();
            let drawn = problem.logits.to_f64();
            let changed = drawn.indexed_iter().map(|((_, t, v), &x)| {
                let is_target = ids[(0, t)] == v as i64;
                match t {
                    0 if v % 3 == 0 && !is_target => f64::NEG_INFINITY,
                    0 => -largest,
                    1 => largest,
                    2 => (1e3 * x).clamp(-largest, largest),
                    _ if v % 5 == 0 => 0.0,
                    _ if v % 5 == 1 && !is_target => f64::NEG_INFINITY,
                    _ => -largest,
                }
            });
            let changed = Array3::from_shape_vec((1, 4, 517), changed.collect()).unwrap();
            problem.logits = FloatArray::rounded_from(&changed, dtype);
            check_problem(ApproximateUnits::Rounded, target, "gpu-one-pass", &spec, &problem).unwrap();
        }
    }
}

/// Whatever a chip's units give within what the manual allows them.
#[test]
fn units_off_either_way_match_reference() {
    let specs = [LossSpec { entropy_coef: 0.02, temperature: 0.8.into(), ..LossSpec::default() }, LossSpec::default()];
    for units in [ApproximateUnits::Above, ApproximateUnits::Below] {
        for (i, regime) in Regime::FINITE.into_iter().enumerate() {
            let shape = if i % 3 == 0 { [1, 3, 2049] } else { [2, 5, 131] };
            let dtype = if i % 2 == 0 { Dtype::F32 } else { Dtype::Bf16 };
            let recipe = Recipe { shape, dtype, regime, seed: 9, old_logp_noise_scale: 0.1, masked_garbage: true };
            for spec in &specs {
                for id in ["gpu-one-pass", "gpu-two-pass"] {
                    check_by(units, TARGETS[i % 2], id, spec, &recipe).unwrap();
                }
            }
        }
    }
}

/// A recorded row, whole, and one that the mask hides.
#[test]
fn qwen_recorded_row_matches_reference() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/qwen_tiny.safetensors");
    let recorded = ProblemFile::open(path).unwrap().problem("logits", Some("old_logps_stale")).unwrap();
    let part = ProblemPart { batch: vec![1], tokens: vec![2, 3], ..ProblemPart::whole([2, 4, 151_936]) };
    let problem = recorded.select(&part);
    assert_eq!(problem.mask.iter().copied().collect::<Vec<_>>(), [true, false]);
    let spec = LossSpec { entropy_coef: 0.01, ..recorded_spec() };
    let around = Around::new(&spec, &problem);
    let on_b200 = Around { target: PtxTarget::Sm100, ..Around::new(&spec, &problem) };
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    for (id, candidate) in
        [("gpu-one-pass", around.one_pass()), ("gpu-one-pass", on_b200.one_pass()), ("gpu-two-pass", around.two_pass())]
    {
        let judged = known.judge(candidate.unwrap(), &Limits::for_class("gpu").unwrap()).unwrap();
        assert_eq!(known.failures(&judged, id, "cargo test --test kernels ptx::"), [""; 0]);
    }
}
/// Clusters of 2, 4 and 8, bf16 and f32, with a bonus and without, for either chip; and a row of one CTA, which meets at its own barrier.
#[test]
fn meeting_by_stores_every_cluster_matches_reference() {
    let bonus = LossSpec { entropy_coef: 0.02, temperature: 0.8.into(), ..LossSpec::default() };
    let divided = LossSpec { temperature_divides: TemperatureDivides::Logp, ..bonus.clone() };
    let specs = [LossSpec::default(), bonus, divided];
    for (i, (vocab, dtype, cluster)) in [
        (1031, Dtype::Bf16, 1),
        (33_001, Dtype::Bf16, 2),
        (17_000, Dtype::F32, 2),
        (65_001, Dtype::Bf16, 4),
        (33_001, Dtype::F32, 4),
        (131_072, Dtype::Bf16, 8),
        (66_003, Dtype::F32, 8),
    ]
    .into_iter()
    .enumerate()
    {
        let spec = &specs[i % specs.len()];
        let recipe = recipe([1, 2, vocab], dtype, Regime::FINITE[i % Regime::FINITE.len()]);
        let shape = Shape { batch: 1, tokens: 2, vocab };
        for target in TARGETS {
            let kernel = meeting_by_stores(target, spec, shape, dtype);
            assert_eq!(kernel.cluster, cluster, "{vocab} {dtype}");
            assert_eq!(kernel.text.contains("st.async"), cluster > 1);
            assert!(!kernel.text.contains("arrive.release"), "a meeting at the cluster's barrier is left");
            check(target, BY_STORES, spec, &recipe).unwrap();
        }
    }
}

/// The two ways of meeting fold the same numbers in the same order.
#[test]
fn meeting_by_stores_returns_the_bits_of_the_barrier() {
    let spec = LossSpec { entropy_coef: 0.02, ..LossSpec::default() };
    let recipe = recipe([1, 3, 33_001], Dtype::Bf16, Regime::Normal);
    let problem = recipe.problem(&spec).unwrap();
    let around = Around::new(&spec, &problem);
    let [numbers, tokens] = around.given_to_one_pass();
    let logits = logits_bytes(&problem.logits);
    let inputs = [("ids", around.ids()), ("numbers", numbers), ("logits", logits), ("tokens", tokens)];
    for target in TARGETS {
        let of_barrier = &kernels(target, "gpu-one-pass", &spec, around.shape, Dtype::Bf16)[0];
        let of_stores = &meeting_by_stores(target, &spec, around.shape, Dtype::Bf16);
        let [of_barrier, of_stores] =
            [of_barrier, of_stores].map(|kernel| run(kernel, ApproximateUnits::Rounded, &inputs).unwrap());
        assert!(of_barrier == of_stores, "{target:?}: other bits");
    }
}

#[test]
fn grid_has_a_cluster_for_each_row() {
    let spec = LossSpec::default();
    let shape = Shape { batch: 1000, tokens: 100, vocab: 151_643 };
    let kernel = &kernels(PtxTarget::Sm90, "gpu-one-pass", &spec, shape, Dtype::Bf16)[0];
    assert_eq!(kernel.grid, [100_000 * kernel.cluster, 1, 1]);
    // The row's offset has 64 bits.
    assert!(kernel.text.contains("mul.wide.u32"), "{}", kernel.text);
}

#[test]
fn cluster_too_small_or_device_too_old_is_refused() {
    let all = LossProgram::all();
    let one_pass = all.iter().find(|implementation| implementation.id() == "gpu-one-pass").unwrap();
    let spec = LossSpec::default();
    let refused = |vocab, dtype| {
        let shape = Shape { batch: 1, tokens: 8, vocab };
        one_pass.supports(&spec, shape, dtype, 1).err().map(|error| error.to_string())
    };
    assert_eq!(refused(256_000, Dtype::F32), None);
    assert_eq!(refused(800_000, Dtype::Bf16), None);
    let error = refused(1_000_000, Dtype::Bf16).unwrap();
    assert!(error.contains("vocabulary 1000000") && error.contains("shared memory"), "{error}");
    assert!(refused(64, Dtype::F64).unwrap().contains("f32, bf16 and f16"));
    for (device, given) in [
        (Device::gpu(PtxTarget::Sm80), "sm_80"),
        (Device::ANY, "loops"),
        (Device::from_platform("tpu", "TPU v6e").unwrap(), "mosaic"),
    ] {
        let error = one_pass.expect_device(device).unwrap_err().to_string();
        assert!(error.contains(given) && error.contains("sm_90"), "{error}");
    }
    assert!(one_pass.expect_device(Device::from_platform("cuda", "NVIDIA H100 80GB HBM3").unwrap()).is_ok());
}

/// Of 127 columns the second of two devices has 63, and NaN where the first has its last.
#[test]
fn vocab_shard_statistics_are_of_its_real_columns() {
    let all = LossProgram::all();
    let cut = all.iter().find(|implementation| implementation.id() == "gpu-two-pass-vocab").unwrap();
    let spec = LossSpec { entropy_coef: 0.01, ..LossSpec::default() };
    let shape = Shape { batch: 1, tokens: 2, vocab: 127 };
    for dtype in Dtype::KERNEL {
        let [statistics, dlogits] =
            &cut.gpu_kernels_for(StructuredSpec::new(&spec), shape, dtype, 2, PtxTarget::Sm80).unwrap()[..]
        else {
            panic!("two kernels")
        };
        let local = Shape { vocab: 64, ..shape };
        // Numbers that every dtype has. The first row's target is here, the second's elsewhere.
        let x = |row: usize, column: usize| ((row * 5 + column * 7) % 11) as f64 - 4.0;
        let padded = |row: usize, column: usize| if column < 63 { x(row, column) } else { f64::NAN };
        let logits = Array3::from_shape_fn((1, 2, 64), |(_, row, column)| padded(row, column));
        let logits = logits_bytes(&FloatArray::rounded_from(&logits, dtype));
        let ids = bytes_of([17_i32, -1].map(i32::to_le_bytes));
        let columns_here = bytes_of([63_i32.to_le_bytes()]);
        let shared = vec![
            ("inverse_temperature", f32_bytes([1.0])),
            ("columns", columns_here),
            ("logits", logits),
            ("ids", ids),
        ];
        let outputs = run(statistics, ApproximateUnits::Rounded, &shared).unwrap();
        let names = columns("gpu-two-pass", &spec, "statistics");
        let found = PerToken::new(&outputs[0], &names);
        for (row, target) in [(0, Some(17)), (1, None)] {
            let max = (0..63).map(|column| x(row, column)).fold(f64::NEG_INFINITY, f64::max);
            let others = || (0..63).filter(|column| Some(*column) != target).map(|column| x(row, column) - max);
            let weighted: f64 = others().map(|gap| gap.exp() * gap * std::f64::consts::LOG2_E).sum();
            let expected = [
                ("max", max),
                ("target_logit", target.map_or(0.0, |column| x(row, column))),
                ("others", others().map(f64::exp).sum()),
                ("weighted", weighted),
            ];
            for (name, expected) in expected {
                let error = (found.at(name, row) - expected).abs();
                assert!(error <= 1e-5 * expected.abs(), "{dtype} {name} {row}: {} {expected}", found.at(name, row));
            }
        }
        // What is no column gets no gradient.
        let scales = columns("gpu-two-pass", &spec, "scales");
        let scales = per_token(&scales, 2, |name, row| match name {
            "max" => found.at("max", row),
            "mask" => 1.0,
            _ => 0.125,
        });
        let mut given = shared;
        given.push(("scales", scales));
        let outputs = run(dlogits, ApproximateUnits::Rounded, &given).unwrap();
        let gradients = logits_of(&outputs[0], local, dtype).to_f64();
        assert!(gradients.iter().all(|x| x.is_finite()), "{gradients}");
        assert!((0..2).all(|row| gradients[[0, row, 63]] == 0.0 && gradients[[0, row, 62]] != 0.0), "{gradients}");
        let bonus = |gap: f64| 0.125 * (-gap).exp() * (gap - 0.125);
        let gap = found.at("max", 0) - x(0, 17);
        let expected = -0.125 * 0.125 + bonus(gap);
        assert!(
            (gradients[[0, 0, 17]] - expected).abs() <= 1e-2 * expected.abs(),
            "{} {expected}",
            gradients[[0, 0, 17]]
        );
    }
}
