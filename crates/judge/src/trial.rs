//! One problem before the judge: can it be run, what does it come to, which gates does that fail, and why.

use super::judge::{JudgeError, Verdict};
use super::judgeable::Judgeable;
use super::report::{explain, on_devices};
use super::tolerance::Limits;
use assay_core::implementation::{Implementation, ProblemFormat, RunError, Workload};
use assay_core::problem::{Candidate, Problem, ProblemError};
use assay_core::spec::LossSpec;
use assay_schema::verdicts::Explanation;

/// Why `implementation` cannot be given `problem` on so many devices; `None` where it can.
pub fn hindrance<P: Workload>(
    implementation: &dyn Implementation<P>,
    spec: &LossSpec,
    problem: &P,
    devices: usize,
) -> Option<String> {
    let given = match ProblemFormat::from_problem(spec, problem) {
        Ok(given) => given,
        Err(why) => return Some(why.to_string()),
    };
    let available = implementation.available().map_err(|why| why.to_string());
    let supported = || implementation.supports_given(spec, given, devices).map_err(|why| why.to_string());
    available.and_then(|()| supported()).err()
}

/// A problem with its reference, made once for all that compute it.
pub struct JudgedProblem<'p, P: Judgeable = Problem> {
    /// The loss.
    pub spec: &'p LossSpec,
    /// The batch.
    pub problem: &'p P,
    /// The reference's values for the batch.
    pub reference: P::Reference<'p>,
}

/// What an implementation returned, and what the judge says of it.
pub struct JudgedOutcome<P: Judgeable = Problem> {
    /// What was returned.
    pub outcome: Candidate<P::Gradient>,
    /// One a gate.
    pub verdicts: Vec<Verdict>,
}

/// Why there is no verdict.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NoVerdictReason {
    /// The implementation failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// An output has the wrong shape, or there are no limits for its class.
    #[error(transparent)]
    Judge(#[from] JudgeError),
}

impl<P: Judgeable> JudgedOutcome<P> {
    /// The gates that it fails.
    pub fn failed(&self) -> impl Iterator<Item = &Verdict> {
        self.verdicts.iter().filter(|verdict| !verdict.passed())
    }
}

impl<'p, P: Judgeable> JudgedProblem<'p, P> {
    /// Evaluates the reference for `problem`.
    ///
    /// # Errors
    /// [`ProblemError`] where the spec is out of range or the problem does not fit it.
    pub fn new(spec: &'p LossSpec, problem: &'p P) -> Result<Self, ProblemError> {
        Ok(Self { spec, problem, reference: problem.evaluate(spec)? })
    }

    /// Judges what an implementation returned, by `limits`.
    ///
    /// # Errors
    /// [`JudgeError`] where an output has the wrong shape.
    pub fn judge(&self, outcome: Candidate<P::Gradient>, limits: &Limits) -> Result<JudgedOutcome<P>, JudgeError> {
        let verdicts = self.verdicts(&outcome.lend(), limits)?;
        Ok(JudgedOutcome { outcome, verdicts })
    }

    /// The same of a gradient that is borrowed.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn verdicts(&self, candidate: &Candidate<P::View<'_>>, limits: &Limits) -> Result<Vec<Verdict>, JudgeError> {
        self.problem.judge(&self.reference, candidate, limits)
    }

    /// The same of a candidate without a gradient: on what else it has.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn verdicts_of_forward(&self, candidate: &Candidate<()>, limits: &Limits) -> Result<Vec<Verdict>, JudgeError> {
        self.problem.judge_forward(&self.reference, candidate, limits)
    }

    /// The same of several, verdicts a candidate: much sooner than one after the other.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn verdicts_of_all(
        &self,
        candidates: &[Candidate<P::View<'_>>],
        limits: &Limits,
    ) -> Result<Vec<Vec<Verdict>>, JudgeError> {
        self.problem.judge_all(&self.reference, candidates, limits)
    }

    /// Runs `implementation` on so many devices and judges what comes of it, by the limits of its class that are built in.
    ///
    /// # Errors
    /// [`NoVerdictReason`] where it does not run, or an output cannot be judged.
    pub fn run(
        &self,
        implementation: &dyn Implementation<P>,
        devices: usize,
    ) -> Result<JudgedOutcome<P>, NoVerdictReason> {
        let outcome = implementation.run(self.spec, self.problem.clone(), devices)?;
        Ok(self.judge(outcome, &Limits::for_class(implementation.class()).map_err(JudgeError::from)?)?)
    }

    /// The gates that `judged` fails, in words. `name` is what computed it, `replay` how it is shown again.
    pub fn failures(&self, judged: &JudgedOutcome<P>, name: &str, replay: &str) -> Vec<String> {
        judged.failed().map(|verdict| self.explain(verdict, name, replay).to_string()).collect()
    }

    /// A verdict in words and numbers. `name` is what computed it, `replay` how it is shown again.
    pub fn explain(&self, verdict: &Verdict, name: &str, replay: &str) -> Explanation {
        explain(verdict, &self.reference, self.problem, name, replay)
    }

    /// Runs, judges, and returns the outcome, for tests and benches.
    ///
    /// # Panics
    /// With the first gate that it fails, in words, or with why there is no verdict.
    pub fn expect_right(
        &self,
        implementation: &dyn Implementation<P>,
        devices: usize,
        replay: &str,
    ) -> Candidate<P::Gradient> {
        let name = on_devices(implementation.id(), devices);
        let judged = self.run(implementation, devices).unwrap_or_else(|why| panic!("{name}: {why}: {replay}"));
        if let Some(failure) = self.failures(&judged, &name, replay).first() {
            panic!("{failure}");
        }
        judged.outcome
    }
}
