//! Logp and entropy without a loss: forward, and backward with given cotangents, of a `selective_log_softmax` as trainers have it.

use assay_core::problem::{Advantages, Candidate, Dtype, Float, FloatArray, HeadLayout, Problem};
use assay_core::spec::LossSpec;
use assay_judge::diagnosis::Diagnosis;
use assay_judge::gate::Output;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::judge::{JudgeError, Verdict};
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use half::bf16;
use ndarray::{Array2, Array3};

const TEMPERATURE: f64 = 0.7;

fn spec() -> LossSpec {
    LossSpec { temperature: TEMPERATURE.into(), ..LossSpec::from_cotangents(true) }
}

/// Of so many ids that one stands at two places.
fn of_several() -> LossSpec {
    LossSpec { ids_per_token: 4, ..spec() }
}

fn recipe(dtype: Dtype, regime: Regime) -> Recipe {
    Recipe { shape: [2, 4, 515], dtype, regime, seed: 5, old_logp_noise_scale: 0.3, masked_garbage: true }
}

fn limits() -> Limits<'static> {
    Limits::external(Grade::Standard)
}

/// The ids of a token with their cotangents.
type Ids<'i> = &'i [(usize, f32)];

/// What a kernel makes of the cotangents: the part of an id's own column, and of the probabilities.
type Sent<'s> = (&'s dyn Fn(Ids, usize) -> f32, &'s dyn Fn(Ids) -> f32);

fn sum_of(ids: Ids, id: usize) -> f32 {
    ids.iter().filter(|of| of.0 == id).map(|of| of.1).sum()
}

fn sum(ids: Ids) -> f32 {
    ids.iter().map(|of| of.1).sum()
}

/// What autodiff makes of `x[y] − logsumexp(x)` and of the entropy, in f32, `x` the logits over the temperature.
fn textbook(problem: &Problem) -> Candidate {
    textbook_but(problem, (&sum_of, &sum))
}

/// The same with another backward pass of logp.
fn textbook_but(problem: &Problem, (of_own, of_all): Sent) -> Candidate {
    let (shape, Advantages::Dlogp(dlogp)) = (problem.shape(), &problem.advantages) else { panic!("drawn by the spec") };
    let (dentropy, others) = (problem.extra.dentropy.as_ref().expect("drawn by the spec"), &problem.extra.others);
    let mut logp = Array2::<f32>::zeros((shape.batch, shape.tokens));
    let mut entropy = logp.clone();
    let mut logps = others.as_ref().map(|others| Array3::<f32>::zeros(others.ids.dim()));
    let mut dlogits = Array3::<f64>::zeros((shape.batch, shape.tokens, shape.vocab));
    for ((b, t), _) in problem.mask.indexed_iter().filter(|(_, counts)| **counts) {
        let x: Vec<f32> = problem.logits.row(b, t).iter().map(|x| *x as f32 / TEMPERATURE as f32).collect();
        let max = x.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = x.iter().map(|x| f64::from((x - max).exp())).sum();
        let log_sum = max + sum.ln() as f32;
        let log_p: Vec<f32> = x.iter().map(|x| x - log_sum).collect();
        let first = (problem.ids[[b, t]], dlogp[[b, t]]);
        let ids = std::iter::once(first).chain(others.iter().flat_map(|others| others.at(b, t)));
        let ids: Vec<(usize, f32)> = ids.map(|(id, dlogp)| (usize::try_from(id).unwrap(), dlogp as f32)).collect();
        let h = -log_p.iter().map(|l| f64::from(l.exp() * l.max(f32::MIN))).sum::<f64>() as f32;
        (logp[[b, t]], entropy[[b, t]]) = (log_p[ids[0].0], h);
        for (k, (id, _)) in ids.iter().enumerate().skip(1) {
            logps.as_mut().expect("of several")[[b, t, k - 1]] = log_p[*id];
        }
        let of_entropy = dentropy[[b, t]] as f32;
        for (j, log_p) in log_p.iter().enumerate() {
            let p = log_p.exp();
            let by_entropy = if p == 0.0 { 0.0 } else { of_entropy * p * (log_p + h) };
            let by_logp = of_own(&ids, j) - of_all(&ids) * p;
            dlogits[[b, t, j]] = f64::from((by_logp - by_entropy) / TEMPERATURE as f32);
        }
    }
    Candidate {
        loss: None,
        gradient: FloatArray::rounded_from(&dlogits, problem.logits.dtype()),
        logp: Some(logp.into()),
        logp_of_others: logps.map(Into::into),
        entropy: Some(entropy.into()),
        token_loss: None,
        metrics: None,
    }
}

/// The same without its gradient.
fn forward(candidate: &Candidate) -> Candidate<()> {
    let Candidate { logp, logp_of_others, entropy, .. } = candidate.clone();
    Candidate { loss: None, gradient: (), logp, logp_of_others, entropy, token_loss: None, metrics: None }
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
fn logp_textbook_passes_forward_and_backward() {
    for dtype in Dtype::KERNEL {
        for regime in
            [Regime::Normal, Regime::Peaked, Regime::Confident, Regime::ShiftedUp, Regime::Holes, Regime::LongTail]
        {
            for spec in [spec(), of_several()] {
                let problem = recipe(dtype, regime).problem(&spec).unwrap();
                let known = JudgedProblem::new(&spec, &problem).unwrap();
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
}

#[test]
fn logp_wrong_for_several_ids_is_rejected() {
    let (spec, problem) = (of_several(), recipe(Dtype::F32, Regime::Normal).problem(&of_several()).unwrap());
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    let failed = |candidate: &Candidate| failed(&known.verdicts(&candidate.lend(), &limits()).unwrap());
    let last = |ids: Ids, id: usize| ids.iter().rev().find(|of| of.0 == id).map_or(0.0, |of| of.1);
    let first = |ids: Ids, id: usize| if ids[0].0 == id { ids[0].1 } else { 0.0 };
    let shifted = |ids: Ids, id: usize| {
        let next = ids.iter().zip(ids.iter().cycle().skip(1));
        next.filter(|(of, _)| of.0 == id).map(|(_, next)| next.1).sum()
    };
    let wrong: [(&str, Sent); 4] = [
        ("an id's last cotangent overwrites the others", (&last, &sum)),
        ("the first id alone", (&first, &|ids| ids[0].1)),
        ("ids off by one", (&shifted, &sum)),
        ("−p·Σ dlogp forgotten", (&sum_of, &|_| 0.0)),
    ];
    for (what, sent) in wrong {
        assert_eq!(failed(&textbook_but(&problem, sent)), [Output::Dlogits], "{what}");
    }
    let mut off = textbook(&problem);
    off.logp_of_others = off.logp_of_others.map(|logps| (logps.to_f64() * 1.001).mapv(|x| x as f32).into());
    assert_eq!(failed(&off), [Output::Logp]);
    let one = Candidate { logp_of_others: None, ..textbook(&problem) };
    let error = known.verdicts(&one.lend(), &limits()).unwrap_err();
    assert!(matches!(error, JudgeError::Shape { output: "logp", .. }), "{error}");
}

#[test]
fn logp_wrong_backward_is_rejected_with_a_right_forward() {
    let (spec, problem) = (spec(), recipe(Dtype::F32, Regime::Normal).problem(&spec()).unwrap());
    let known = JudgedProblem::new(&spec, &problem).unwrap();
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
fn masked_garbage_in_logp_is_rejected() {
    let (spec, problem) = (spec(), recipe(Dtype::F32, Regime::Normal).problem(&spec()).unwrap());
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    let (masked, _) = problem.mask.indexed_iter().find(|(_, counts)| !**counts).expect("masks are ragged");
    let mut candidate = textbook(&problem);
    candidate.gradient.fill_row(masked.0, masked.1, f64::NAN);
    assert_eq!(failed(&known.verdicts(&candidate.lend(), &limits()).unwrap()), [Output::Dlogits]);
}

#[test]
fn bf16_logits_that_are_not_upcast_are_rejected_by_name() {
    let (spec, problem) = (spec(), recipe(Dtype::Bf16, Regime::Normal).problem(&spec()).unwrap());
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    let rounded = |array: Option<FloatArray<ndarray::Ix2>>| {
        array.map(|array| array.to_f64().mapv(|x| bf16::from_f64(Float::to_f64(bf16::from_f64(x)))).into())
    };
    let Candidate { logp, entropy, .. } = textbook(&problem);
    let candidate = Candidate {
        loss: None,
        gradient: (),
        logp: rounded(logp),
        logp_of_others: None,
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
fn lm_head_forward_is_judged_with_the_errors_of_its_product() {
    let (spec, recipe) = (spec(), recipe(Dtype::Bf16, Regime::Normal));
    let recipe = HeadRecipe { hidden: 65, layout: HeadLayout::VocabByHidden, rounds_logits: false, recipe };
    let problem = recipe.problem(&spec).unwrap();
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    let outcome = known.reference.outcome();
    let narrowed = |by: f64| Some((outcome.logp.to_f64() * by).mapv(|x| x as f32).into());
    let of = |by: f64| Candidate {
        loss: None,
        gradient: (),
        logp: narrowed(by),
        logp_of_others: None,
        entropy: Some(outcome.entropy.to_f64().mapv(|x| x as f32).into()),
        token_loss: None,
        metrics: None,
    };
    assert_eq!(failed(&known.verdicts_of_forward(&of(1.0), &limits()).unwrap()), []);
    assert_eq!(failed(&known.verdicts_of_forward(&of(1.001), &limits()).unwrap()), [Output::Logp]);
}

#[test]
fn logp_outputs_that_a_spec_asks_for_are_required() {
    let (spec, problem) = (spec(), recipe(Dtype::F32, Regime::Normal).problem(&spec()).unwrap());
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    let candidate = Candidate { logp: None, ..textbook(&problem) };
    let missing = |error| matches!(error, JudgeError::Missing { output: "logp", .. });
    assert!(missing(known.verdicts(&candidate.lend(), &limits()).unwrap_err()));
    assert!(missing(known.verdicts_of_forward(&forward(&candidate), &limits()).unwrap_err()));

    let loss = LossSpec::default();
    let problem = recipe(Dtype::F32, Regime::Normal).problem(&loss).unwrap();
    let known = JudgedProblem::new(&loss, &problem).unwrap();
    let candidate = Candidate { loss: None, ..Candidate::from(known.reference.outcome()) };
    let error = known.verdicts(&candidate.lend(), &limits()).unwrap_err();
    assert!(matches!(error, JudgeError::Missing { output: "loss", .. }), "{error}");
}
