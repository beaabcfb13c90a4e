//! The losses as candle's operations: their gradients are the reference's, and those of candle's own autograd.

use assay::judge::generate::{Recipe, Regime};
use assay::judge::judgeable::Judgeable;
use assay::judge::tolerance::Limits;
use assay::problem::{
    Advantages, Candidate, Dtype, Extra, FloatArray, HeadCandidate, HeadGradient, HeadLayout, HeadShape, Problem,
};
use assay::reference::evaluate;
use assay::spec::{LossSpec, Reduction, Rows};
use assay::suites::cases;
use assay::train::candle_core::{DType, Device, Tensor, Var};
use assay::train::{Baseline, GrpoLoss, TrainBatch, TrainError};
use assay_testkit::JudgedProblem;
use ndarray::{Array3, Dimension, arr0};

fn recipe(dtype: Dtype) -> Recipe {
    Recipe {
        shape: [3, 5, 97],
        dtype,
        regime: Regime::Normal,
        seed: 3,
        old_logp_noise_scale: 0.5,
        masked_garbage: false,
    }
}

fn batch<L>(problem: &Problem<L>) -> TrainBatch {
    problem.with_logits(())
}

fn candle_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::Bf16 => DType::BF16,
        Dtype::F16 => DType::F16,
    }
}

/// `array` in its own dtype, or in `dtype`.
fn variable<D: Dimension>(array: &FloatArray<D>, dtype: Dtype) -> Var {
    let wide = Tensor::from_iter(array.to_f64(), &Device::Cpu).unwrap().reshape(array.shape()).unwrap();
    Var::from_tensor(&wide.to_dtype(candle_dtype(dtype)).unwrap()).unwrap()
}

fn array<D: Dimension>(tensor: &Tensor, dtype: Dtype, shape: D) -> FloatArray<D> {
    let wide = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    FloatArray::rounded_from(&ndarray::Array::from_shape_vec(shape, wide).unwrap(), dtype)
}

fn three(shape: [usize; 3]) -> ndarray::Ix3 {
    ndarray::Dim(shape)
}

/// Masked tokens, both signs of the advantage and both sides of the clip are in the batch.
fn specs() -> [LossSpec; 2] {
    let of_sequences = Reduction::SequenceMean { rows: Rows::NonEmpty };
    [LossSpec::default(), LossSpec { entropy_coef: 0.01, reduction: of_sequences, ..LossSpec::default() }]
}

#[test]
fn dlogits_all_dtypes_pass_the_judge() {
    for spec in specs() {
        for dtype in Dtype::KERNEL {
            let problem = recipe(dtype).problem(&spec).unwrap();
            let logits = variable(&problem.logits, dtype);
            let evaluated = GrpoLoss::native(spec.clone()).on_logits(&logits, &batch(&problem)).unwrap();
            let dlogits = evaluated.loss.backward().unwrap().remove(&logits).unwrap();
            assert_eq!(dlogits.dtype(), logits.dtype());
            let candidate = Candidate {
                loss: Some(arr0(evaluated.loss.to_scalar::<f32>().unwrap()).into()),
                gradient: array(&dlogits, dtype, three(recipe(dtype).shape)),
                logp: None,
                logp_of_others: None,
                entropy: None,
                token_loss: None,
                metrics: evaluated.metrics,
            };
            let known = JudgedProblem::new(&spec, &problem).unwrap();
            let judged = known.judge(candidate, &Limits::for_class("native").unwrap()).unwrap();
            assert_eq!(known.failures(&judged, &dtype.to_string(), "this test"), Vec::<String>::new());
        }
    }
}

/// candle's autograd in f64, through `log_softmax`, `gather` and the clip, to f64's own precision.
#[test]
fn dlogits_f64_of_candles_autograd_are_the_references() {
    let spec = LossSpec { scale: 0.5, ..LossSpec::default() };
    let shape = [6, 9, 97];
    let mut problem = Recipe { shape, ..recipe(Dtype::F32) }.problem(&spec).unwrap();
    problem.advantages = Advantages::Sequence([1.5, -0.5, 1.0, -1.0, 0.5, -1.5].into_iter().collect());
    let logits = variable(&problem.logits, Dtype::F64);
    let evaluated = Baseline::from_spec(&spec).unwrap().on_logits(&logits, &batch(&problem)).unwrap();
    let dlogits = evaluated.loss.backward().unwrap().remove(&logits).unwrap();
    let expected = evaluate(&spec, &problem).unwrap();
    assert!((evaluated.loss.to_scalar::<f64>().unwrap() - expected.loss()).abs() < 1e-14);
    let (dlogits, outcome) = (array(&dlogits, Dtype::F64, three(shape)), expected.outcome());
    let expected_dlogits = outcome.gradient.to_f64();
    assert!(expected_dlogits.iter().any(|x| x.abs() > 1e-3), "there is something to compare");
    for (at, &x) in dlogits.to_f64().indexed_iter() {
        assert!((x - expected_dlogits[at]).abs() < 1e-15, "dlogits{at:?}: {x}, expected {}", expected_dlogits[at]);
    }
    let (given, expected) = (evaluated.metrics.unwrap(), outcome.metrics);
    let pairs = [
        (given.clip_low, expected.clip_low),
        (given.clip_high, expected.clip_high),
        (given.clip_region, expected.clip_region),
        (given.entropy_mean, expected.entropy_mean),
        (given.ratio_mean, expected.ratio_mean),
    ];
    assert!(pairs.iter().all(|(given, expected)| (given - expected).abs() < 1e-13), "{pairs:?}");
    assert!(expected.clip_low > 0.0 && expected.clip_high > 0.0, "both sides are clipped: {pairs:?}");
}

#[test]
fn lm_head_gradients_of_all_dtypes_pass_the_judge() {
    let shape = HeadShape { batch: 3, tokens: 5, hidden: 16, vocab: 97 };
    for spec in specs() {
        for dtype in Dtype::KERNEL {
            let mut recipe = cases::head_recipe(shape);
            recipe.layout = HeadLayout::VocabByHidden;
            recipe.recipe.dtype = dtype;
            let problem = recipe.problem(&spec).unwrap();
            let hidden = variable(&problem.logits.hidden, dtype);
            let lm_head = variable(&problem.logits.lm_head, dtype);
            let reference = problem.evaluate(&spec).unwrap();
            for grpo in [GrpoLoss::native_lm_head(spec.clone()), GrpoLoss::native(spec.clone())] {
                let evaluated = grpo.on_hidden(&hidden, &lm_head, &batch(&problem)).unwrap();
                let mut gradients = evaluated.loss.backward().unwrap();
                let (dhidden, dlm_head) = (gradients.remove(&hidden).unwrap(), gradients.remove(&lm_head).unwrap());
                assert_eq!((dhidden.dtype(), dlm_head.dtype()), (hidden.dtype(), lm_head.dtype()));
                let mut outcome = HeadCandidate {
                    loss: Some(arr0(evaluated.loss.to_scalar::<f32>().unwrap()).into()),
                    gradient: HeadGradient {
                        dhidden: array(&dhidden, dtype, three([3, 5, 16])),
                        dlm_head: array(&dlm_head, dtype, ndarray::Dim([97, 16])),
                        dlogits_dtype: Dtype::F32,
                    },
                    metrics: evaluated.metrics,
                    // The operation does not return these.
                    logp: None,
                    logp_of_others: None,
                    entropy: None,
                    token_loss: None,
                };
                let expect_right = |outcome: &HeadCandidate, class: &str| {
                    for verdict in
                        problem.judge(&reference, &outcome.lend(), &Limits::for_class(class).unwrap()).unwrap()
                    {
                        assert!(verdict.passed(), "{dtype}, {class}: {verdict:?}");
                    }
                };
                if dtype != Dtype::F32 {
                    // Implementations return f32, whatever the head is: only what comes from elsewhere has limits in 16 bits.
                    let metrics = outcome.metrics.take();
                    expect_right(&outcome, "external-lm-head");
                    outcome.metrics = metrics;
                    outcome.gradient.dlm_head =
                        FloatArray::rounded_from(&reference.outcome().gradient.dlm_head.to_f64(), Dtype::F32);
                }
                expect_right(&outcome, "native-lm-head");
            }
        }
    }
}

/// Why `assay ab` shows the errors of candle's operations and does not decide by them: in a long row with a confident target
/// they are many hundred roundings off.
#[test]
fn dlogits_of_a_confident_target_are_right_by_kernel_alone() {
    let (spec, vocab, gap) = (LossSpec::default(), 151_936, 22.6_f32);
    let logits = Array3::from_shape_fn((1, 1, vocab), |(.., v)| if v == 7 { gap } else { 0.0 });
    let problem = Problem {
        logits: logits.into(),
        ids: ndarray::array![[7]],
        mask: ndarray::array![[true]],
        advantages: Advantages::Sequence(ndarray::array![1.0]),
        old_logp: Some(ndarray::array![[0.0]]),
        ref_logp: None,
        extra: Extra::default(),
    };
    let exact = evaluate(&spec, &problem).unwrap().dlogits_row(0, 0)[7];
    let logits = variable(&problem.logits, Dtype::F32);
    let relative_error = |loss: Tensor| {
        let dlogits = loss.backward().unwrap().remove(&logits).unwrap();
        (array(&dlogits, Dtype::F64, three([1, 1, vocab])).to_f64()[[0, 0, 7]] / exact - 1.0).abs()
    };
    let baseline = Baseline::from_spec(&spec).unwrap().on_logits(&logits, &batch(&problem)).unwrap();
    let kernel = GrpoLoss::native(spec.clone()).on_logits(&logits, &batch(&problem)).unwrap();
    let [baseline, kernel] = [baseline.loss, kernel.loss].map(relative_error);
    assert!(baseline > 1e-5 && kernel < 1e-6, "{baseline:e} {kernel:e}");
}

/// A loss within a larger graph: what comes before it and what multiplies it have their part in the gradient.
#[test]
fn dlogits_pass_through_what_is_around() {
    let spec = LossSpec::default();
    let problem = recipe(Dtype::F32).problem(&spec).unwrap();
    let logits = variable(&problem.logits, Dtype::F32);
    let grpo = GrpoLoss::native(spec);
    let alone = grpo.on_logits(&logits, &batch(&problem)).unwrap().loss.backward().unwrap().remove(&logits).unwrap();
    let half = Var::from_tensor(&logits.affine(0.5, 0.0).unwrap()).unwrap();
    let loss =
        grpo.on_logits(&half.affine(2.0, 0.0).unwrap(), &batch(&problem)).unwrap().loss.affine(8.0, 1.0).unwrap();
    // Powers of two round nothing, and a graph may be walked twice.
    for _ in 0..2 {
        let around = loss.backward().unwrap().remove(&half).unwrap();
        let expected: Array3<f64> = array(&alone, Dtype::F64, three([3, 5, 97])).to_f64() * 16.0;
        assert_eq!(array(&around, Dtype::F64, three([3, 5, 97])).to_f64(), expected);
    }
}

#[test]
fn loss_arguments_that_do_not_fit_are_named() {
    let spec = LossSpec::default();
    let problem = recipe(Dtype::F32).problem(&spec).unwrap();
    let (logits, batch) = (variable(&problem.logits, Dtype::F32), batch(&problem));
    let message = |result: Result<assay::train::LossEvaluation, TrainError>| result.unwrap_err().to_string();
    let grpo = GrpoLoss::native(spec.clone());
    let flat = logits.flatten_all().unwrap();
    assert_eq!(message(grpo.on_logits(&flat, &batch)), "`logits`: got shape [1455], expected three extents");
    let wide = logits.to_dtype(DType::F64).unwrap();
    assert_eq!(message(grpo.on_logits(&wide, &batch)), "`logits`: got dtype f64, expected f32, bf16 or f16");
    let fewer = logits.narrow(1, 0, 4).unwrap();
    assert_eq!(
        message(grpo.on_logits(&fewer, &batch)),
        "`ids`: got shape [3, 5], expected [3, 4] ([B,T] of the logits)"
    );
    let head = GrpoLoss::native_lm_head(spec.clone());
    assert!(
        message(head.on_logits(&logits, &batch)).starts_with("kernel `native-lm-head`: got logits, expected hidden")
    );
    let narrow = Tensor::zeros((97, 3), DType::F32, &Device::Cpu).unwrap();
    assert!(message(grpo.on_hidden(&logits, &narrow, &batch)).starts_with("`lm_head`: got shape [97, 3]"));
    let unknown = GrpoLoss::by_id(spec, "pallas", None).err().unwrap().to_string();
    assert!(unknown.starts_with("kernel `pallas`: expected one of: native, ") && unknown.contains("native-lm-head"));
    let sapo = LossSpec { entropy_coef: 0.1, ..LossSpec::default() };
    assert!(Baseline::from_spec(&sapo).unwrap_err().to_string().starts_with("`spec`: candle's own operations"));
}
