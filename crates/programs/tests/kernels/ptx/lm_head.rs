//! The kernels that an LM head's program calls in its loop, on chunks of logits whose products are made here, in f64.

use super::harness::Around;
use assay_core::implementation::ProblemFormat;
use assay_core::problem::{
    Candidate, Dtype, FloatArray, HeadCandidate, HeadForm, HeadGradient, HeadLayout, HeadProblem, Problem,
};
use assay_core::spec::{LogitsTransform, LossSpec, Ratio, RatioLevel, Support};
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_programs::{Device, HeadProgram, Programs, PtxTarget, StructuredSpec};
use ndarray::{Array2, Array3};

fn head(id: &str) -> HeadProgram {
    HeadProgram::all().into_iter().find(|head| head.id() == id).unwrap()
}

/// One of all tokens of a sequence.
fn sequence() -> Ratio {
    Ratio { level: RatioLevel::Sequence, ..Ratio::default() }
}

/// Hidden states of tokens that count, 0 of the others.
fn unmasked(problem: &HeadProblem) -> Array3<f64> {
    let mut hidden = problem.logits.hidden.to_f64();
    for ((b, t, _), x) in hidden.indexed_iter_mut() {
        if !problem.mask[[b, t]] {
            *x = 0.0;
        }
    }
    hidden
}

/// The batch with the logits that its head makes, as the kernels are given them.
fn with_logits(problem: &HeadProblem) -> Problem {
    let (hidden, weights, layout) = (unmasked(problem), problem.logits.lm_head.to_f64(), problem.logits.layout);
    let shape = problem.shape();
    let logits = Array3::from_shape_fn((shape.batch, shape.tokens, shape.vocab), |(b, t, v)| {
        (0..shape.hidden).map(|h| hidden[[b, t, h]] * weights[layout.at(h, v)]).sum()
    });
    let dtype = if problem.logits.rounds_logits { problem.dtype() } else { Dtype::F32 };
    let HeadProblem { ids, mask, advantages, old_logp, ref_logp, extra, .. } = problem.clone();
    Problem { logits: FloatArray::rounded_from(&logits, dtype), ids, mask, advantages, old_logp, ref_logp, extra }
}

/// What comes of dlogits in the products after the kernel.
fn with_gradients(problem: &HeadProblem, candidate: Candidate) -> HeadCandidate {
    let Candidate { loss, gradient, logp, logp_of_others, entropy, token_loss, metrics } = candidate;
    let (shape, dtype, layout) = (problem.shape(), problem.dtype(), problem.logits.layout);
    let (hidden, weights) = (unmasked(problem), problem.logits.lm_head.to_f64());
    let dlogits = gradient.to_f64().mapv(|x| dtype.round(x));
    let dhidden = Array3::from_shape_fn((shape.batch, shape.tokens, shape.hidden), |(b, t, h)| {
        (0..shape.vocab).map(|v| dlogits[[b, t, v]] * weights[layout.at(h, v)]).sum()
    });
    let mut dlm_head = Array2::zeros(layout.extents(shape.hidden, shape.vocab));
    for ((b, t, v), &x) in dlogits.indexed_iter() {
        (0..shape.hidden).for_each(|h| dlm_head[layout.at(h, v)] += hidden[[b, t, h]] * x);
    }
    let gradient = HeadGradient {
        dhidden: FloatArray::rounded_from(&dhidden, dtype),
        dlm_head: FloatArray::rounded_from(&dlm_head, Dtype::F32),
        dlogits_dtype: dtype,
    };
    Candidate { loss, gradient, logp, logp_of_others, entropy, token_loss, metrics }
}

/// Chunks of eight tokens of eighteen, the last not full: by one pass where a row stays whole on a chip that has clusters, by two
/// elsewhere, and where the tokens of a sequence share a ratio.
#[test]
fn lm_head_gradients_by_chunks_match_reference() {
    let plain = LossSpec::default();
    let bonus = LossSpec {
        entropy_coef: 0.02,
        temperature: 0.8.into(),
        logits: LogitsTransform { softcap: Some(6.0), ..LogitsTransform::default() },
        support: Support { vocab: Some(700), excluded_ids: vec![3], keep_sampled: true, kept: None },
        ..LossSpec::default()
    };
    let by_token = [&plain, &bonus];
    let [of_sequence, of_sequence_with_bonus] = by_token.map(|spec| LossSpec { ratio: sequence(), ..spec.clone() });
    let by_sequence = [&of_sequence, &of_sequence_with_bonus];
    for (place, (id, devices, target, specs, kernels)) in [
        ("gpu-lm-head", 1, PtxTarget::Sm90, by_token, 1),
        ("gpu-lm-head", 1, PtxTarget::Sm100, by_token, 1),
        ("gpu-lm-head", 1, PtxTarget::Sm80, by_token, 2),
        ("gpu-lm-head", 1, PtxTarget::Sm90, by_sequence, 2),
        ("gpu-lm-head-vocab", 2, PtxTarget::Sm90, by_token, 2),
        ("gpu-lm-head-vocab", 4, PtxTarget::Sm100, by_sequence, 2),
    ]
    .into_iter()
    .enumerate()
    {
        for turn in 0..2 {
            let dtype = Dtype::KERNEL[(place + turn) % 3];
            let layout = [HeadLayout::HiddenByVocab, HeadLayout::VocabByHidden][(place + turn) % 2];
            let rounds_logits = turn != place % 3;
            let regime = [Regime::Normal, Regime::Peaked, Regime::Confident, Regime::LongTail][(place + turn) % 4];
            let recipe = Recipe {
                shape: [2, 9, 1031],
                dtype,
                regime,
                seed: place as u64,
                old_logp_noise_scale: 0.1,
                masked_garbage: true,
            };
            let recipe = HeadRecipe { hidden: 16, layout, rounds_logits, recipe };
            let spec = specs[(place + turn) % 2];
            let problem = recipe.problem(spec).unwrap();
            let given =
                ProblemFormat { shape: problem.shape(), dtype, form: HeadForm { layout, rounds_logits }, packed: None };
            let program = head(id).chunk_bytes(1);
            let called = program.gpu_kernels_for(StructuredSpec::new(spec), given, devices, target).unwrap();
            assert_eq!(called.len(), kernels, "{id} for {target:?}");
            assert!(called.iter().all(|kernel| kernel.text.contains(target.name())), "{id} for {target:?}");
            let logits = with_logits(&problem);
            let around = Around::new(spec, &logits);
            let candidate = match &called[..] {
                [one_pass] => around.one_pass_by(one_pass),
                two_pass => around.two_pass_by(two_pass, devices),
            };
            let candidate = with_gradients(&problem, candidate.unwrap());
            let known = JudgedProblem::new(spec, &problem).unwrap();
            let judged = known.judge(candidate, &Limits::for_class(program.class()).unwrap()).unwrap();
            let name = format!("{id} on {devices} devices for {target:?}, {recipe:?}");
            assert_eq!(known.failures(&judged, &name, "cargo test --test kernels ptx::"), [""; 0]);
        }
    }
}

/// The text calls the kernels that are said to be its own, in place, on a chunk's logits and never on all.
#[test]
fn lm_head_program_calls_its_kernels_on_a_chunk() {
    let sequence = LossSpec { ratio: sequence(), ..LossSpec::default() };
    let shape = "1x8192x4096x151936".parse().unwrap();
    let form = HeadForm { layout: HeadLayout::HiddenByVocab, rounds_logits: true };
    let given = ProblemFormat { shape, dtype: Dtype::Bf16, form, packed: None };
    for (spec, target, kernels) in [
        (&LossSpec::default(), PtxTarget::Sm90, 1),
        (&LossSpec::default(), PtxTarget::Sm80, 2),
        (&sequence, PtxTarget::Sm90, 2),
    ] {
        let program = head("gpu-lm-head");
        let device = Device::gpu(target);
        let text = program.text(StructuredSpec::new(spec), given, 1, device).unwrap();
        let called = program.gpu_kernels_for(StructuredSpec::new(spec), given, 1, target).unwrap();
        assert_eq!(called.len(), kernels);
        assert_eq!(text.matches("custom_call @__gpu$xla.gpu.ptx").count(), kernels);
        for kernel in called {
            let logits = kernel.inputs().find(|input| input.name == "logits").unwrap();
            assert_eq!(logits.shape, [1, 2048, 151_936], "a quarter");
            let escaped = kernel.text.replace('\n', "\\0A").replace('\t', "\\09");
            assert!(text.contains(&escaped), "{} is another in the program", kernel.name);
        }
        // Sums are rounded by the product itself: a chunk's logits are never there in f32.
        assert!(!text.contains("2048x151936xf32") && text.contains("-> tensor<2048x151936xbf16>"));
        assert!(!text.contains("8192x151936"));
    }
}

#[test]
fn lm_head_for_gpus_is_refused_elsewhere() {
    let shape = "1x8x16x64".parse().unwrap();
    let form = HeadForm { layout: HeadLayout::HiddenByVocab, rounds_logits: true };
    let given = ProblemFormat { shape, dtype: Dtype::Bf16, form, packed: None };
    let (spec, tpu) = (LossSpec::default(), Device::from_platform("tpu", "TPU v6e").unwrap());
    for device in [Device::ANY, tpu] {
        let error = head("gpu-lm-head").text(StructuredSpec::new(&spec), given, 1, device).unwrap_err().to_string();
        assert!(error.contains("gpu-lm-head") && error.contains("sm_80"), "{error}");
    }
    let error =
        head("gpu-lm-head").program_for(StructuredSpec::new(&spec), given, 1, tpu.machine).unwrap_err().to_string();
    assert!(error.contains("mosaic") && error.contains("sm_80"), "{error}");
    let wide = ProblemFormat { shape: "1x8x16x2147483647".parse().unwrap(), ..given };
    let error = head("gpu-lm-head").text(StructuredSpec::new(&spec), wide, 1, Device::gpu(PtxTarget::Sm90));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("vocabulary 2147483647") && error.contains("bytes"), "{error}");
}
