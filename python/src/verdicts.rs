//! [`Verdicts`], the judge's result for one candidate.

use pyo3::prelude::*;

use crate::error;
use crate::outputs::Returned;
use assay::judge::gate::Edge;
use assay::judge::judge::Verdict;
use assay::judge::judgeable::Judgeable;
use assay::judge::report;
use assay::judge::tolerance::{EXTERNAL, Grade, Limits};
use assay::judge::trial::JudgedProblem;
use assay::problem::{Candidate, Gradient};
use assay::schema;
use assay::spec::LossSpec;

/// One candidate's verdicts, a gate each. True where all pass.
#[pyclass(frozen, module = "assay")]
pub(crate) struct Verdicts {
    /// Whether every gate of the candidate passed.
    #[pyo3(get)]
    passed: bool,
    /// Each gate that failed, in words: where, expected and actual, the error against its limit.
    #[pyo3(get)]
    failures: Vec<String>,
    table: String,
    json: String,
}

/// The grade and the waivers that a candidate is judged by.
pub(crate) struct Standards {
    pub(crate) grade: Grade,
    pub(crate) allow: Vec<Edge>,
}

impl Standards {
    /// # Errors
    /// `AssayError` for a grade or an edge that there is not.
    pub(crate) fn new(py: Python<'_>, grade: &str, allow: &[String]) -> PyResult<Self> {
        let grade = grade.parse().map_err(|reason| error::other(py, format!("grade: {reason}")))?;
        let edges = allow.iter().map(|edge| edge.parse::<Edge>());
        let allow = edges.collect::<Result<_, _>>().map_err(|reason| error::other(py, format!("allow: {reason}")))?;
        Ok(Self { grade, allow })
    }
}

/// Judges the outputs that were returned for `problem` under `spec`.
///
/// # Errors
/// Why there is no verdict.
pub(crate) fn judge<P: Judgeable>(
    spec: &LossSpec,
    problem: &P,
    returned: &Returned,
    Standards { grade, allow }: &Standards,
) -> Result<Verdicts, String> {
    let known = JudgedProblem::new(spec, problem).map_err(|reason| reason.to_string())?;
    let limits = Limits::for_class(EXTERNAL).map_err(|reason| reason.to_string())?.at(*grade);
    let waived = |verdicts: Vec<Verdict>| verdicts.into_iter().map(|verdict| verdict.waive(allow)).collect::<Vec<_>>();
    // Judge the outputs with a gradient by all gates, and without one by the forward gates only.
    let (diagnoses, absent, verdicts): (Vec<_>, Vec<&str>, _) = if returned.has_gradient() {
        let candidate = returned.candidate(problem);
        let verdicts = waived(known.verdicts(&candidate, &limits).map_err(|reason| reason.to_string())?);
        (problem.diagnose(&known.reference, &candidate, &verdicts), absent(&candidate), verdicts)
    } else {
        let candidate = returned.forward(problem);
        let verdicts = waived(known.verdicts_of_forward(&candidate, &limits).map_err(|reason| reason.to_string())?);
        let diagnosis = problem.diagnose_forward(&known.reference, &candidate, &verdicts);
        let gradient = P::Gradient::ARRAYS.iter().copied();
        (diagnosis.into_iter().collect(), gradient.chain(absent(&candidate)).collect(), verdicts)
    };
    let replay = "problem.save(\"problem.safetensors\"), then assay judge --problem problem.safetensors";
    // Build the same report that `assay judge --json` writes.
    let failed = verdicts.iter().filter(|verdict| verdict.status.failed());
    let failures = failed.map(|verdict| known.explain(verdict, "kernel", replay).to_string()).collect();
    let checks = verdicts.iter().map(|verdict| report::check("problem", "kernel", &verdict.gate.to_string(), verdict));
    let absent = absent.into_iter();
    let ignored = absent.map(|name| report::ignored(name, "not returned"));
    let diagnoses = diagnoses.iter().map(ToString::to_string).collect();
    let verdicts = schema::verdicts::Verdicts { diagnoses, ..report::verdicts(checks.collect(), ignored.collect()) };
    let table = report::table(&verdicts);
    let json = serde_json::to_string_pretty(&verdicts).expect("plain data has a JSON form");
    Ok(Verdicts { passed: verdicts.pass, failures, table, json })
}

/// Returns the names of the outputs that the candidate lacks.
fn absent<G>(Candidate { loss, logp, entropy, token_loss, .. }: &Candidate<G>) -> Vec<&'static str> {
    let of_tokens = [("logp", logp), ("entropy", entropy), ("token_loss", token_loss)];
    let of_tokens = of_tokens.into_iter().map(|(name, array)| (name, array.is_none()));
    let all = [("loss", loss.is_none())].into_iter().chain(of_tokens);
    all.filter_map(|(name, absent)| absent.then_some(name)).collect()
}

#[pymethods]
impl Verdicts {
    fn __bool__(&self) -> bool {
        self.passed
    }

    fn __repr__(&self) -> &str {
        self.table.trim_end()
    }

    /// Returns the verdicts as `assay judge --json` writes them.
    fn to_json(&self) -> &str {
        &self.json
    }

    /// Raises `KernelFailure` with the failures in words, unless all pass.
    fn raise_for_failure(&self, py: Python<'_>) -> PyResult<()> {
        if self.passed {
            return Ok(());
        }
        Err(error::kernel_failed(py, self.failures.join("\n") + "\n" + &self.table))
    }
}
