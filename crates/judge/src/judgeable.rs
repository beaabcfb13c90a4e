//! [`Judgeable`]: what can be done with a problem, whether its logits are given or a product.

use std::fmt::Write as _;

use super::diagnosis::{self, Diagnosis};
use super::gate::Output;
use super::judge::{self, JudgeError, Verdict};
use super::lm_head;
use super::metric::Position;
use super::tolerance::Limits;
use assay_core::implementation::Workload;
use assay_core::problem::{
    Advantages, Candidate, FloatView, HeadCandidate, HeadGradientView, HeadProblem, Problem, ProblemError,
};
use assay_core::spec::{LossSpec, Temperature};
use assay_reference::{self as reference, HeadReference, Reference};
use assay_schema::number::six;
use ndarray::Ix3;

/// A problem that there is a reference for, and a judge.
pub trait Judgeable: Workload {
    /// It, evaluated.
    type Reference<'p>: Send + Sync;

    /// Evaluates it under `spec`.
    ///
    /// # Errors
    /// [`ProblemError`] where the spec is out of range or the problem does not fit it.
    fn evaluate<'p>(&'p self, spec: &'p LossSpec) -> Result<Self::Reference<'p>, ProblemError>;

    /// Returns all outputs of the reference.
    fn outcome(reference: &Self::Reference<'_>) -> Candidate<Self::Gradient>;

    /// The loss on logits, in a reference of it.
    fn on_logits<'r>(reference: &'r Self::Reference<'_>) -> &'r Reference<'r>;

    /// Judges `candidates` against `reference`, by `limits`: verdicts a candidate. What follows from the problem alone, and is most of
    /// the work, is done once for all of them.
    ///
    /// # Errors
    /// [`JudgeError`] where an output has the wrong shape.
    fn judge_all(
        &self,
        reference: &Self::Reference<'_>,
        candidates: &[Candidate<Self::View<'_>>],
        limits: &Limits,
    ) -> Result<Vec<Vec<Verdict>>, JudgeError>;

    /// The same of one.
    ///
    /// # Errors
    /// As [`judge_all`](Self::judge_all).
    fn judge(
        &self,
        reference: &Self::Reference<'_>,
        candidate: &Candidate<Self::View<'_>>,
        limits: &Limits,
    ) -> Result<Vec<Verdict>, JudgeError> {
        let of_one = self.judge_all(reference, std::slice::from_ref(candidate), limits)?;
        Ok(of_one.into_iter().next().expect("verdicts a candidate"))
    }

    /// Judges a candidate without a gradient: on what else it has.
    ///
    /// # Errors
    /// As [`judge_all`](Self::judge_all).
    fn judge_forward(
        &self,
        reference: &Self::Reference<'_>,
        candidate: &Candidate<()>,
        limits: &Limits,
    ) -> Result<Vec<Verdict>, JudgeError>;

    /// What the `verdicts` on an outcome are likely of.
    fn diagnose(
        &self,
        reference: &Self::Reference<'_>,
        outcome: &Candidate<Self::View<'_>>,
        verdicts: &[Verdict],
    ) -> Vec<Diagnosis>;

    /// The same of one without a gradient.
    fn diagnose_forward(
        &self,
        reference: &Self::Reference<'_>,
        candidate: &Candidate<()>,
        verdicts: &[Verdict],
    ) -> Option<Diagnosis> {
        diagnosis::diagnose_tokens(Self::on_logits(reference), candidate, verdicts)
    }

    /// What went into an output at `at`, in words; `None` where it is of no one place.
    fn inputs(&self, reference: &Self::Reference<'_>, at: Position) -> Option<String>;
}

impl Judgeable for Problem {
    type Reference<'p> = Reference<'p>;

    fn evaluate<'p>(&'p self, spec: &'p LossSpec) -> Result<Reference<'p>, ProblemError> {
        reference::evaluate(spec, self)
    }

    fn outcome(reference: &Reference<'_>) -> Candidate {
        reference.outcome().into()
    }

    fn on_logits<'r>(reference: &'r Reference<'_>) -> &'r Reference<'r> {
        reference
    }

    fn judge_all(
        &self,
        reference: &Reference<'_>,
        candidates: &[Candidate<Self::View<'_>>],
        limits: &Limits,
    ) -> Result<Vec<Vec<Verdict>>, JudgeError> {
        judge::judge_all(reference, candidates, limits)
    }

    fn judge_forward(
        &self,
        reference: &Reference<'_>,
        candidate: &Candidate<()>,
        limits: &Limits,
    ) -> Result<Vec<Verdict>, JudgeError> {
        judge::judge_forward(reference, candidate, limits, &[])
    }

    fn diagnose(
        &self,
        reference: &Reference<'_>,
        outcome: &Candidate<FloatView<Ix3>>,
        verdicts: &[Verdict],
    ) -> Vec<Diagnosis> {
        diagnosis::diagnose_logits(reference, outcome, verdicts)
    }

    fn inputs(&self, reference: &Reference<'_>, at: Position) -> Option<String> {
        let (b, t) = at.b.zip(at.t)?;
        let logit = at.v.map(|v| ("logit", self.logits.row(b, t)[v]));
        Some(describe_token(self, reference, (b, t), logit))
    }
}

impl Judgeable for HeadProblem {
    type Reference<'p> = HeadReference<'p>;

    fn evaluate<'p>(&'p self, spec: &'p LossSpec) -> Result<HeadReference<'p>, ProblemError> {
        reference::evaluate_head(spec, self)
    }

    fn outcome(reference: &HeadReference<'_>) -> HeadCandidate {
        reference.outcome().into()
    }

    fn on_logits<'r>(reference: &'r HeadReference<'_>) -> &'r Reference<'r> {
        reference.on_logits()
    }

    fn judge_all(
        &self,
        reference: &HeadReference<'_>,
        candidates: &[Candidate<Self::View<'_>>],
        limits: &Limits,
    ) -> Result<Vec<Vec<Verdict>>, JudgeError> {
        lm_head::judge_all(reference, self, candidates, limits)
    }

    fn judge_forward(
        &self,
        reference: &HeadReference<'_>,
        candidate: &Candidate<()>,
        limits: &Limits,
    ) -> Result<Vec<Verdict>, JudgeError> {
        lm_head::judge_forward(reference, self, candidate, limits)
    }

    fn diagnose(
        &self,
        reference: &HeadReference<'_>,
        outcome: &Candidate<HeadGradientView>,
        verdicts: &[Verdict],
    ) -> Vec<Diagnosis> {
        let failed = |output| verdicts.iter().any(|verdict| verdict.gate.output == output && verdict.status.failed());
        let gradient = &outcome.gradient;
        let stored = [
            failed(Output::Dhidden).then(|| diagnosis::stored_wider(Output::Dhidden, &gradient.dhidden)),
            failed(Output::DlmHead).then(|| diagnosis::stored_wider(Output::DlmHead, &gradient.dlm_head)),
        ];
        let of_tokens = diagnosis::diagnose_tokens(reference.on_logits(), outcome, verdicts);
        // Wrong probabilities make a factor of each token, which is no cause of its own.
        let factors = (failed(Output::Dhidden) && !failed(Output::Logp)).then(|| {
            let exact = Self::outcome(reference).gradient.dhidden;
            let row = |b, t| (exact.row(b, t), gradient.dhidden.row(b, t));
            diagnosis::diagnose_factors(reference.on_logits(), Output::Dhidden, gradient.dhidden.dtype(), row)
        });
        of_tokens.into_iter().chain(stored.into_iter().flatten().flatten()).chain(factors.flatten()).collect()
    }

    /// A weight's gradient is a sum over tokens: of those that count there is a number.
    fn inputs(&self, reference: &HeadReference<'_>, at: Position) -> Option<String> {
        if let Some((b, t)) = at.b.zip(at.t) {
            let hidden = at.h.map(|h| ("hidden", self.logits.hidden.row(b, t)[h]));
            return Some(describe_token(self, reference.on_logits(), (b, t), hidden));
        }
        let v = at.v?;
        let weight = at.h.map_or(String::new(), |h| format!("weight {}, ", six(reference.columns(v..v + 1)[[0, h]])));
        let tokens = reference.on_logits().count();
        Some(format!("{weight}column {v} of a head {}, {tokens} tokens that count", self.logits.layout.name()))
    }
}

/// Describes the inputs of token `[b,t]`, and the element that the output is a gradient of.
fn describe_token<L>(
    problem: &Problem<L>,
    reference: &Reference,
    (b, t): (usize, usize),
    element: Option<(&str, f64)>,
) -> String {
    let mut text = format!(
        "mask {}, id {}, {} {}",
        problem.mask[[b, t]],
        problem.ids[[b, t]],
        match &problem.advantages {
            Advantages::Dlogp(_) => "dlogp",
            Advantages::Sequence(_) | Advantages::Token(_) => "advantage",
        },
        six(problem.advantage((b, t))),
    );
    let given_at = |(name, array): (&'static str, &Option<ndarray::Array2<f64>>)| Some((name, array.as_ref()?[[b, t]]));
    let dentropy = if reference.spec().dentropy { &problem.extra.dentropy } else { &None };
    let reads_rollout_logp = reference.spec().reads_rollout_logp();
    let rollout_logp = if reads_rollout_logp { &problem.extra.rollout_logp } else { &None };
    let given = [
        ("dentropy", dentropy),
        ("old_logp", &problem.old_logp),
        ("ref_logp", &problem.ref_logp),
        ("rollout_logp", rollout_logp),
    ];
    let given = given.into_iter().filter_map(given_at);
    if let Some(others) = &problem.extra.others {
        let (ids, dlogp): (Vec<i64>, Vec<f64>) = others.at(b, t).unzip();
        let _ = write!(text, ", other ids {ids:?}, their dlogp {dlogp:?}");
    }
    let temperature = problem.tokens().temperature(reference.spec(), (b, t));
    let temperature = (reference.spec().temperature == Temperature::Given).then_some(("temperature", temperature));
    for (name, x) in given.chain(temperature).chain(element) {
        let _ = write!(text, ", {name} {}", six(x));
        if name == "rollout_logp" && x.is_nan() {
            text += " (not scored)";
        }
    }
    if let Some(token) = reference.token(b, t) {
        let _ = write!(text, "; in the reference logp {}", six(token.inputs.logp));
        // Log-probabilities alone have no ratio.
        if !reference.spec().is_from_cotangents() {
            let _ = write!(text, ", ratio {}", six(token.inputs.ratio(reference.spec())));
        }
    }
    text
}
