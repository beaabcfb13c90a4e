//! Logp and entropy without a loss: forward, and backward with given cotangents, of a `selective_log_softmax` as trainers have it.

use assay_core::problem::{Advantages, Candidate, Dtype, Float, FloatArray, HeadLayout, Problem};
use assay_core::spec::LossSpec;
use assay_judge::diagnosis::Diagnosis;
use assay_judge::gate::Output;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::judge::{JudgeError, Verdict};
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::Known;
use half::bf16;
use ndarray::{Array2, Array3};

const TEMPERATURE: f64 = 0.7;

fn spec() -> LossSpec {
    LossSpec { temperature: TEMPERATURE.into(), ..LossSpec::of_cotangents(true) }
}

fn recipe(dtype: Dtype, regime: Regime) -> Recipe {
    Recipe { shape: [2, 4, 515], dtype, regime, seed: 5, old_logp_noise_scale: 0.3, masked_garbage: true }
}

fn limits() -> Limits<'static> {
    Limits::external(Grade::Standard)
}

/// What autodiff makes of `x[y] − logsumexp(x)` and of the entropy, in f32, `x` the logits over the temperature.
fn textbook(problem: &Problem) -> Candidate {
    let (shape, Advantages::Dlogp(dlogp)) = (problem.shape(), &problem.advantages) else { panic!("drawn by the spec") };
    let dentropy = problem.extra.dentropy.as_ref().expect("drawn by the spec");
    let mut logp = Array2::<f32>::zeros((shape.batch, shape.tokens));
    let mut entropy = logp.clone();
    let mut dlogits = Array3::<f64>::zeros((shape.batch, shape.tokens, shape.vocab));
    for ((b, t), _) in problem.mask.indexed_iter().filter(|(_, counts)| **counts) {
        let x: Vec<f32> = problem.logits.row(b, t).iter().map(|x| *x as f32 / TEMPERATURE as f32).collect();
        let max = x.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = x.iter().map(|x| f64::from((x - max).exp())).sum();
        let log_sum = max + sum.ln() as f32;
        let log_p: Vec<f32> = x.iter().map(|x| x - log_sum).collect();
        let id = usize::try_from(problem.ids[[b, t]]).unwrap();
        let h = -log_p.iter().map(|l| f64::from(l.exp() * l.max(f32::MIN))).sum::<f64>() as f32;
        (logp[[b, t]], entropy[[b, t]]) = (log_p[id], h);
        let [of_logp, of_entropy] = [dlogp, dentropy].map(|cotangents| cotangents[[b, t]] as f32);
        for (j, log_p) in log_p.iter().enumerate() {
            let (p, one) = (log_p.exp(), f32::from(u8::from(j == id)));
            let by_entropy = if p == 0.0 { 0.0 } else { of_entropy * p * (log_p + h) };
            dlogits[[b, t, j]] = f64::from((of_logp * (one - p) - by_entropy) / TEMPERATURE as f32);
        }
    }
    Candidate {
        loss: None,
        gradient: FloatArray::rounded_from(&dlogits, problem.logits.dtype()),
        logp: Some(logp.into()),
        entropy: Some(entropy.into()),
        token_loss: None,
        metrics: None,
    }
}

/// The same without its gradient.
fn forward(candidate: &Candidate) -> Candidate<()> {
    let Candidate { logp, entropy, .. } = candidate.clone();
    Candidate { loss: None, gradient: (), logp, entropy, token_loss: None, metrics: None }
}

fn outputs(verdicts: &[Verdict]) -> Vec<Output> {
    let mut outputs: Vec<Output> = verdicts.iter().map(|verdict| verdict.gate.output).collect();
    outputs.dedup();
    outputs
}

fn failed(verdicts: &[Verdict]) -> Vec<Output> {
    outputs(&verdicts.iter().filter(|verdict| !verdict.passed()).cloned().collect::<Vec<_>>())
}

#[test]
fn textbook_passes_forward_and_backward() {
    for dtype in Dtype::KERNEL {
        for regime in
            [Regime::Normal, Regime::Peaked, Regime::Confident, Regime::ShiftedUp, Regime::Holes, Regime::LongTail]
        {
            let (spec, problem) = (spec(), recipe(dtype, regime).problem(&spec()).unwrap());
            let known = Known::of(&spec, &problem).unwrap();
            let candidate = textbook(&problem);
            let whole = known.verdicts(&candidate.lend(), &limits()).unwrap();
            assert_eq!(failed(&whole), [], "{dtype} {regime}");
            assert_eq!(outputs(&whole), [Output::Logp, Output::Entropy, Output::Dlogits], "{dtype} {regime}");
            let alone = known.verdicts_of_forward(&forward(&candidate), &limits()).unwrap();
            assert_eq!(failed(&alone), [], "{dtype} {regime}");
            assert_eq!(outputs(&alone), [Output::Logp, Output::Entropy], "{dtype} {regime}");
        }
    }
}

#[test]
fn wrong_backward_is_rejected_where_forward_is_right() {
    let (spec, problem) = (spec(), recipe(Dtype::F32, Regime::Normal).problem(&spec()).unwrap());
    let known = Known::of(&spec, &problem).unwrap();
    let of = |edit: &dyn Fn(&mut Problem)| {
        let mut other = problem.clone();
        edit(&mut other);
        Candidate { gradient: textbook(&other).gradient, ..textbook(&problem) }
    };
    let flipped = |array: &mut Array2<f64>| array.mapv_inplace(|x| -x);
    let wrong: [(&str, Candidate); 4] = [
        ("dentropy dropped", of(&|other| other.extra.dentropy.as_mut().unwrap().fill(0.0))),
        ("dentropy's sign", of(&|other| flipped(other.extra.dentropy.as_mut().unwrap()))),
        (
            "dlogp's sign",
            of(&|other| {
                let Advantages::Dlogp(dlogp) = &mut other.advantages else { panic!("drawn by the spec") };
                flipped(dlogp);
            }),
        ),
        ("no temperature", {
            let scaled = textbook(&problem).gradient.to_f64() * TEMPERATURE;
            Candidate { gradient: FloatArray::rounded_from(&scaled, Dtype::F32), ..textbook(&problem) }
        }),
    ];
    for (what, candidate) in wrong {
        let verdicts = known.verdicts(&candidate.lend(), &limits()).unwrap();
        assert_eq!(failed(&verdicts), [Output::Dlogits], "{what}");
    }
}

#[test]
fn garbage_in_masked_rows_is_rejected() {
    let (spec, problem) = (spec(), recipe(Dtype::F32, Regime::Normal).problem(&spec()).unwrap());
    let known = Known::of(&spec, &problem).unwrap();
    let (masked, _) = problem.mask.indexed_iter().find(|(_, counts)| !**counts).expect("masks are ragged");
    let mut candidate = textbook(&problem);
    candidate.gradient.fill_row(masked.0, masked.1, f64::NAN);
    assert_eq!(failed(&known.verdicts(&candidate.lend(), &limits()).unwrap()), [Output::Dlogits]);
}

#[test]
fn logits_of_bf16_that_are_not_upcast_are_rejected_by_name() {
    let (spec, problem) = (spec(), recipe(Dtype::Bf16, Regime::Normal).problem(&spec()).unwrap());
    let known = Known::of(&spec, &problem).unwrap();
    let rounded = |array: Option<FloatArray<ndarray::Ix2>>| {
        array.map(|array| array.to_f64().mapv(|x| bf16::from_f64(Float::to_f64(bf16::from_f64(x)))).into())
    };
    let Candidate { logp, entropy, .. } = textbook(&problem);
    let candidate = Candidate {
        loss: None,
        gradient: (),
        logp: rounded(logp),
        entropy: rounded(entropy),
        token_loss: None,
        metrics: None,
    };
    let verdicts = known.verdicts_of_forward(&candidate, &limits()).unwrap();
    assert_eq!(failed(&verdicts), [Output::Logp, Output::Entropy]);
    assert_eq!(
        problem.diagnose_forward(&known.reference, &candidate, &verdicts),
        Some(Diagnosis::NotUpcast(Dtype::Bf16))
    );
}

#[test]
fn forward_of_an_lm_head_is_judged_with_the_errors_of_its_product() {
    let (spec, recipe) = (spec(), recipe(Dtype::Bf16, Regime::Normal));
    let recipe = HeadRecipe { hidden: 65, layout: HeadLayout::VocabByHidden, rounds_logits: false, recipe };
    let problem = recipe.problem(&spec).unwrap();
    let known = Known::of(&spec, &problem).unwrap();
    let outcome = known.reference.outcome();
    let narrowed = |by: f64| Some((outcome.logp.to_f64() * by).mapv(|x| x as f32).into());
    let of = |by: f64| Candidate {
        loss: None,
        gradient: (),
        logp: narrowed(by),
        entropy: Some(outcome.entropy.to_f64().mapv(|x| x as f32).into()),
        token_loss: None,
        metrics: None,
    };
    assert_eq!(failed(&known.verdicts_of_forward(&of(1.0), &limits()).unwrap()), []);
    assert_eq!(failed(&known.verdicts_of_forward(&of(1.001), &limits()).unwrap()), [Output::Logp]);
}

#[test]
fn what_a_spec_asks_for_must_be_there() {
    let (spec, problem) = (spec(), recipe(Dtype::F32, Regime::Normal).problem(&spec()).unwrap());
    let known = Known::of(&spec, &problem).unwrap();
    let candidate = Candidate { logp: None, ..textbook(&problem) };
    let missing = |error| matches!(error, JudgeError::Missing { output: "logp", .. });
    assert!(missing(known.verdicts(&candidate.lend(), &limits()).unwrap_err()));
    assert!(missing(known.verdicts_of_forward(&forward(&candidate), &limits()).unwrap_err()));

    let loss = LossSpec::default();
    let problem = recipe(Dtype::F32, Regime::Normal).problem(&loss).unwrap();
    let known = Known::of(&loss, &problem).unwrap();
    let candidate = Candidate { loss: None, ..Candidate::from(known.reference.outcome()) };
    let error = known.verdicts(&candidate.lend(), &limits()).unwrap_err();
    assert!(matches!(error, JudgeError::Missing { output: "loss", .. }), "{error}");
}
