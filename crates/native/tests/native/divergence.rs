//! Divergences from a teacher: right by the judge at grade `exact`, and of the same bits on every instruction set, for any number of
//! threads, in place or not.

use assay_core::implementation::Implementation;
use assay_core::problem::{Dtype, FloatArray, Problem, Shape, Teacher, TeacherTopK};
use assay_core::spec::{Distillation, LossSpec, TopKRest};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::trial::JudgedProblem;
use assay_native::{Isa, Native, NativeDivergence, NativeDivergences, NativeTeacher};
use assay_suites::cases;
use ndarray::{Array2, Array3, arr2, arr3};
use proptest::prelude::*;
use rayon::ThreadPoolBuilder;

fn recipes() -> impl Strategy<Value = Recipe> {
    let widths =
        prop_oneof![3 => 2_usize..70, 2 => prop_oneof![Just(511_usize), Just(512), Just(513), 500_usize..1100]];
    let dtypes = prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::F16)];
    let regimes = proptest::sample::select(Regime::ALL.to_vec());
    (1_usize..3, 1_usize..4, widths, dtypes, regimes, any::<u64>()).prop_map(|(b, t, vocab, dtype, regime, seed)| {
        Recipe { shape: [b, t, vocab], dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true }
    })
}

/// Two tokens of three entries.
fn plain_recipe() -> Recipe {
    Recipe {
        shape: [1, 2, 3],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 0,
        old_logp_noise_scale: 0.3,
        masked_garbage: false,
    }
}

/// The outputs of a problem as numbers, by one instruction set.
fn numbers(isa: Isa, spec: &LossSpec, problem: &Problem) -> (Vec<f64>, Vec<f64>) {
    let candidate = Native::on(isa).run(spec, problem.clone(), 1).expect("supported");
    let of_tokens = candidate.token_loss.expect("a divergence has one").to_f64();
    (of_tokens.into_iter().collect(), candidate.gradient.to_f64().into_iter().collect())
}

fn bits(numbers: &(Vec<f64>, Vec<f64>)) -> [Vec<u64>; 2] {
    let bits = |x: &f64| if x.is_nan() { 0 } else { x.to_bits() };
    [numbers.0.iter().map(bits).collect(), numbers.1.iter().map(bits).collect()]
}

proptest! {
    #![proptest_config(cases::config(400))]

    #[test]
    fn divergence_is_right_at_grade_exact(spec in cases::any_divergence(), recipe in recipes()) {
        let problem = recipe.problem(&spec).expect("a valid recipe");
        let (native, known) = (Native::default(), JudgedProblem::new(&spec, &problem).expect("a valid problem"));
        let judged = known.run(&native, 1).expect("supported");
        let failures = known.failures(&judged, native.id(), &format!("{recipe:?}"));
        prop_assert!(failures.is_empty(), "{}", failures[0]);
    }

    #[test]
    fn divergence_isa_changes_no_bit(spec in cases::any_divergence(), recipe in recipes()) {
        let problem = recipe.problem(&spec).expect("a valid recipe");
        let expected = bits(&numbers(Isa::fastest(), &spec, &problem));
        for isa in Isa::available() {
            prop_assert_eq!(&bits(&numbers(isa, &spec, &problem)), &expected, "{}", isa);
        }
    }
}

/// More logits than one thread computes alone.
#[test]
fn divergence_any_threads_same_bits() {
    let whole = Distillation::default();
    let top = Distillation { top_k: Some(8), rest: Some(TopKRest::Tail), ..whole.clone() };
    for (spec, dtype) in [whole, top].map(LossSpec::distillation).into_iter().zip([Dtype::F32, Dtype::Bf16]) {
        let recipe = Recipe { shape: [2, 9, 1025], dtype, regime: Regime::Peaked, ..plain_recipe() };
        let problem = recipe.problem(&spec).expect("a valid recipe");
        let [one, many] = [1, 3].map(|threads| {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| bits(&numbers(Isa::fastest(), &spec, &problem)))
        });
        assert!(one == many, "{dtype}");
    }
}

/// One token of four entries.
fn one_token(student: [f32; 4], teacher: [f32; 4], distillation: &Distillation) -> (f32, Vec<f32>) {
    let (native, mask) = (Native::default(), arr2(&[[true]]));
    let (student, teacher) = (arr3(&[[student]]), arr3(&[[teacher]]));
    let (shape, temperature) = (Shape { batch: 1, tokens: 1, vocab: 4 }, arr2(&[[1.0]]));
    let teacher = NativeTeacher::Logits(teacher.view());
    let divergence = NativeDivergence::new(&native, distillation, shape, &mask, temperature, teacher).expect("fits");
    let values = divergence.values(&student.view()).expect("dense");
    let mut dlogits = Array3::from_elem((1, 1, 4), 7.0);
    let value = values.values[[0, 0]];
    let kept = NativeDivergences::from_kept(values.kept()).expect("six numbers");
    divergence.gradient(&student.view(), &mut dlogits.view_mut(), &kept, &arr2(&[[1.0]])).expect("fits");
    let mut over = student;
    divergence.gradient_in_place(&mut over.view_mut(), &kept, &arr2(&[[1.0]])).expect("fits");
    let same = over.iter().zip(&dlogits).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
    assert!(same, "in place: {over:?}, apart: {dlogits:?}");
    (value, dlogits.into_iter().collect())
}

#[test]
fn divergence_from_itself_is_0() {
    let row = [1.5, -2.25, 0.75, f32::NEG_INFINITY];
    for distillation in [Distillation::default(), Distillation::reverse_kl(), Distillation::jensen_shannon(0.3)] {
        assert_eq!(one_token(row, row, &distillation), (0.0, vec![0.0; 4]), "{distillation:?}");
    }
}

#[test]
fn divergence_is_infinite_where_one_of_both_lacks_an_entry() {
    let (whole, lacking) = ([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, f32::NEG_INFINITY]);
    let (value, dlogits) = one_token(whole, lacking, &Distillation::reverse_kl());
    assert!(value == f32::INFINITY && dlogits.iter().all(|x| x.is_nan()), "{value} {dlogits:?}");
    // The gradient of an infinite forward KL is p − q all the same.
    let (value, dlogits) = one_token(lacking, whole, &Distillation::default());
    assert!(value == f32::INFINITY && (dlogits[3] + 0.643_914_3).abs() < 1e-6, "{value} {dlogits:?}");
    for (student, teacher) in [(whole, lacking), (lacking, whole)] {
        let (value, dlogits) = one_token(student, teacher, &Distillation::jensen_shannon(0.5));
        assert!(value > 0.0 && value < 0.694 && dlogits.iter().all(|x| x.is_finite()), "{value} {dlogits:?}");
    }
}

/// All that the teacher does not have is less likely than f64 holds: its logarithm is known all the same.
#[test]
fn divergence_of_a_far_tail_is_finite() {
    let logits = FloatArray::F32(arr3(&[[[1500.0, 0.0, 1.0, 2.0]]]));
    let logp = FloatArray::F32(Array3::from_elem((1, 1, 1), -1.0));
    let teacher = Teacher::TopK(TeacherTopK { logp, ids: Array3::zeros((1, 1, 1)) });
    let problem = |spec: &LossSpec| {
        let recipe = Recipe { shape: [1, 1, 4], ..plain_recipe() };
        let mut problem = recipe.problem(spec).expect("a valid recipe");
        (problem.logits, problem.extra.teacher) = (logits.clone(), Some(teacher.clone()));
        problem
    };
    let [q, within] = [(-1_f64).exp(), (2_f64).exp() + 1_f64.exp() + 1.0];
    let tail_logp = within.ln() - 1500.0;
    for (kind, value, dlogits) in [
        (
            Distillation::default(),
            -q + (1.0 - q) * ((1.0 - q).ln() - tail_logp),
            [0.0, 1.0, 2.0].map(|x: f64| -(1.0 - q) * x.exp() / within),
        ),
        (Distillation::reverse_kl(), 1.0, [0.0; 3]),
    ] {
        let spec = LossSpec::distillation(Distillation { top_k: Some(1), rest: Some(TopKRest::Tail), ..kind.clone() });
        let (values, gradient) = numbers(Isa::fastest(), &spec, &problem(&spec));
        assert!((values[0] - value).abs() <= 1e-6 * value, "{kind:?}: {} for {value}", values[0]);
        for (got, expected) in gradient[1..].iter().zip(dlogits) {
            assert!((got - expected).abs() <= 1e-6, "{kind:?}: {gradient:?} for {dlogits:?}");
        }
    }
}

#[test]
fn divergence_of_rows_without_a_distribution_is_nan() {
    let good = [0.0, 1.0, 2.0, 3.0];
    for bad in [[0.0, f32::NAN, 1.0, 2.0], [0.0, f32::INFINITY, 1.0, 2.0], [f32::NEG_INFINITY; 4]] {
        for distillation in [Distillation::default(), Distillation::reverse_kl(), Distillation::jensen_shannon(0.3)] {
            for (student, teacher) in [(bad, good), (good, bad)] {
                let (value, dlogits) = one_token(student, teacher, &distillation);
                assert!(value.is_nan() && dlogits.iter().all(|x| x.is_nan()), "{student:?} {teacher:?}: {value}");
            }
        }
    }
}

#[test]
fn divergence_names_what_does_not_fit() {
    let native = Native::default();
    let distillation = Distillation::default();
    let shape = Shape { batch: 1, tokens: 2, vocab: 3 };
    let (mask, temperature) = (Array2::from_elem((1, 2), true), Array2::from_elem((1, 2), 1.0));
    let narrow = Array3::<f32>::zeros((1, 2, 2));
    let teacher = NativeTeacher::Logits(narrow.view());
    let error = NativeDivergence::new(&native, &distillation, shape, &mask, temperature.clone(), teacher).err();
    let expected = "`teacher_logits`: got shape [1, 2, 2], expected [1, 2, 3], that of the student's logits";
    assert_eq!(error.expect("of another vocabulary").to_string(), expected);

    let top = |ids: [[[i64; 2]; 2]; 1]| TeacherTopK {
        logp: FloatArray::F32(Array3::from_elem((1, 2, 2), -1.0)),
        ids: arr3(&ids),
    };
    let distillation = Distillation { top_k: Some(2), rest: Some(TopKRest::Tail), ..distillation };
    for (ids, expected) in [
        ([[[0, 1], [2, 3]]], "`teacher_ids[0,1,1]`: got 3, expected 0 ≤ id < V = 3 on an unmasked token"),
        ([[[0, 1], [2, 2]]], "`teacher_ids[0,1,1]`: got 2, expected an id that is not at `teacher_ids[0,1,0]` too"),
    ] {
        let top = top(ids);
        let teacher = NativeTeacher::<f32>::TopK(&top);
        let error = NativeDivergence::new(&native, &distillation, shape, &mask, temperature.clone(), teacher).err();
        let error = error.expect("an id that does not fit").to_string();
        assert!(error.starts_with(expected), "{error}");
    }

    // Entries without a word on the others, temperatures of other tokens, and a student of another vocabulary.
    let (entries, logits) = (top([[[0, 1], [1, 2]]]), Array3::<f32>::zeros((1, 2, 3)));
    let silent = Distillation { rest: None, ..distillation.clone() };
    let teacher = NativeTeacher::<f32>::TopK(&entries);
    let error = NativeDivergence::new(&native, &silent, shape, &mask, temperature.clone(), teacher).err();
    assert!(error.expect("no rest").to_string().contains("`objective.distillation.rest`: got none, expected tail"));
    let plain = Distillation::default();
    let of_logits = || NativeTeacher::Logits(logits.view());
    let short = Array2::from_elem((1, 1), 1.0);
    let error = NativeDivergence::new(&native, &plain, shape, &mask, short, of_logits()).err();
    assert_eq!(error.expect("one token").to_string(), "`temperature`: got shape [1, 1], expected [1, 2]");
    let divergence = NativeDivergence::new(&native, &plain, shape, &mask, temperature, of_logits()).expect("fits");
    let error = divergence.values(&narrow.view()).expect_err("of another vocabulary").to_string();
    assert_eq!(error, "`logits`: got shape [1, 2, 2], expected [1, 2, 3]");

    // A problem whose teacher has another dtype, by its name.
    let recipe = plain_recipe();
    let spec = LossSpec::distillation(Distillation::default());
    let mut problem = recipe.problem(&spec).expect("a valid recipe");
    problem.extra.teacher = Some(Teacher::Logits(FloatArray::zeros((1, 2, 3), Dtype::Bf16)));
    let error = native.run(&spec, problem, 1).expect_err("of another dtype").to_string();
    assert!(error.contains("teacher_logits dtype") && error.contains("bf16"), "{error}");
}
