//! `assay judge` of logp and entropy without a loss: a `selective_log_softmax` and its backward pass, from files.

use std::collections::BTreeMap;

use crate::common::command::{Output, assay, assert_refused};
use assay::fixture::{ProblemFile, write_candidate};
use assay::problem::{Advantages, Candidate, FloatArray, Gradient, Problem};
use assay::registry::find;
use assay::spec::LossSpec;
use half::bf16;
use tempfile::TempDir;

/// A problem by cotangents, in a file.
struct Workplace {
    folder: TempDir,
}

impl Workplace {
    fn new() -> Self {
        let workplace = Self { folder: TempDir::new().unwrap() };
        let problem = workplace.path("problem.safetensors");
        let shape = ["generate", "--logp", "--shape", "2x3x129", "--regime", "normal", "--seed", "4"];
        let output = assay(&[&shape[..], &["--dtype", "bf16", "-o", &problem]].concat());
        assert_eq!(output.code, 0, "{}", output.stderr);
        workplace
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().into()
    }

    fn problem(&self) -> Problem {
        ProblemFile::open(self.path("problem.safetensors")).unwrap().problem("logits", None).unwrap()
    }

    /// The native kernel's answer.
    fn answer(&self) -> Candidate {
        find("native", None).unwrap().run(&LossSpec::from_cotangents(true), self.problem(), 1).unwrap()
    }

    fn judge<G: Gradient>(&self, candidate: &Candidate<G>) -> Output {
        let (problem, path) = (self.path("problem.safetensors"), self.path("candidate.safetensors"));
        write_candidate(&path, candidate, &BTreeMap::new()).unwrap();
        assay(&["judge", "--problem", &problem, "--candidate", &path])
    }
}

#[test]
fn logp_of_several_ids_goes_through_files() {
    let workplace = Workplace::new();
    let (problem, path) = (workplace.path("several.safetensors"), workplace.path("candidate.safetensors"));
    let shape = ["generate", "--logp", "--ids-per-token", "3", "--shape", "2x3x129", "--seed", "4", "-o", &problem];
    let output = assay(&shape);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let file = ProblemFile::open(&problem).unwrap();
    for name in ["ids", "dlogp"] {
        assert_eq!(file.file().info(name).unwrap().1, [2, 3, 3], "{name}");
    }
    let read = file.problem("logits", None).unwrap();
    let spec = LossSpec { ids_per_token: 3, ..LossSpec::from_cotangents(true) };
    let answer = find("native", None).unwrap().run(&spec, read, 1).unwrap();
    let judge = |candidate: &Candidate| {
        write_candidate(&path, candidate, &BTreeMap::new()).unwrap();
        assay(&["judge", "--problem", &problem, "--candidate", &path])
    };
    let output = judge(&answer);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    let one = judge(&Candidate { logp_of_others: None, ..answer });
    assert!(one.stderr.contains("candidate `logp`: got shape [2, 3], expected [2, 3, 3]"), "{}", one.stderr);
    assert_refused(&["generate", "--logp", "--top", "0", "--shape", "1x1x2", "-o", &path], &["`ids_per_token`: got 0"]);
}

#[test]
fn logp_problem_holds_the_cotangents() {
    let problem = Workplace::new().problem();
    assert!(matches!(problem.advantages, Advantages::Dlogp(_)), "{:?}", problem.advantages);
    assert_eq!(problem.extra.dentropy.map(|dentropy| dentropy.dim()), Some((2, 3)));
}

#[test]
fn logp_candidate_needs_no_loss() {
    let workplace = Workplace::new();
    let candidate = Candidate { loss: None, token_loss: None, metrics: None, ..workplace.answer() };
    let output = workplace.judge(&candidate);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("ignored  loss: not in the candidate"), "{}", output.stdout);
}

#[test]
fn logp_forward_alone_is_judged_on_what_it_has() {
    let workplace = Workplace::new();
    let Candidate { logp, entropy, .. } = workplace.answer();
    let right =
        Candidate { loss: None, gradient: (), logp, logp_of_others: None, entropy, token_loss: None, metrics: None };
    let output = workplace.judge(&right);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    for line in ["ignored  dlogits: not in the candidate", "PASS  2 checks passed, 0 failed, 3 ignored"] {
        assert!(output.stdout.contains(line), "`{line}` not in: {}", output.stdout);
    }

    let in_bf16 =
        |array: Option<FloatArray<ndarray::Ix2>>| array.map(|array| array.to_f64().mapv(bf16::from_f64).into());
    let output = workplace.judge(&Candidate { logp: in_bf16(right.logp.clone()), ..right });
    assert_eq!(output.code, 1, "{}", output.stdout);
    for line in ["FAIL candidate: logp, bf16", "dlogp"] {
        assert!(output.stdout.contains(line), "`{line}` not in: {}", output.stdout);
    }
}

#[test]
fn logp_wrong_backward_is_named_by_the_loss_that_it_is_of() {
    let workplace = Workplace::new();
    let mut problem = workplace.problem();
    problem.extra.dentropy.as_mut().unwrap().fill(0.0);
    let dropped = find("native", None).unwrap().run(&LossSpec::from_cotangents(true), problem, 1).unwrap();
    let candidate =
        Candidate { loss: None, gradient: dropped.gradient, token_loss: None, metrics: None, ..workplace.answer() };
    let output = workplace.judge(&candidate);
    assert_eq!(output.code, 1, "{}", output.stdout);
    for line in ["FAIL candidate: dlogits, bf16", "no cotangent of the entropy"] {
        assert!(output.stdout.contains(line), "`{line}` not in: {}", output.stdout);
    }
}

#[test]
fn logp_files_that_do_not_fit_are_refused() {
    let workplace = Workplace::new();
    let (problem, candidate) = (workplace.path("problem.safetensors"), workplace.path("candidate.safetensors"));
    let Candidate { logp, .. } = workplace.answer();
    let forward = Candidate {
        loss: None,
        gradient: (),
        logp,
        logp_of_others: None,
        entropy: None,
        token_loss: None,
        metrics: None,
    };
    write_candidate(&candidate, &forward, &BTreeMap::new()).unwrap();
    let loss = workplace.path("loss.yaml");
    std::fs::write(&loss, "objective: policy_gradient\nadvantages: token\nold_logp: current\n").unwrap();
    let args = ["judge", "--problem", &problem, "--spec", &loss, "--candidate", &candidate];
    assert_refused(&args, &["candidate `loss`: not given, expected it: only logp and entropy by themselves have none"]);

    std::fs::write(&loss, "dentropy: true\nentropy_coef: 0.1\n").unwrap();
    let both = ["`dentropy`: got true, expected false with an `entropy_coef`"];
    assert_refused(&["spec", "--spec", &loss], &both);
    assert_eq!(assay(&["generate", "--logp", "--spec", &loss, "--shape", "1x1x2", "-o", &candidate]).code, 2);
}
