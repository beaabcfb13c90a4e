//! [`Verdicts`]: what the judge says of one candidate.

use pyo3::prelude::*;

use crate::error;
use crate::outputs::{Answered, Returned};
use assay::judge::gate::Edge;
use assay::judge::report::{Check, Ignored, Report};
use assay::judge::tolerance::{EXTERNAL, Grade, Limits};
use assay::judge::trial::Known;
use assay::schema;
use assay::spec::LossSpec;

/// One candidate's verdicts, a gate each. True where all pass.
#[pyclass(frozen, module = "assay")]
pub(crate) struct Verdicts {
    /// Whether every gate passed.
    #[pyo3(get)]
    passed: bool,
    /// Each gate that failed, in words: where, expected and actual, the error against its limit.
    #[pyo3(get)]
    failures: Vec<String>,
    table: String,
    json: String,
}

/// What a candidate is held to.
pub(crate) struct Standards {
    pub(crate) grade: Grade,
    pub(crate) allow: Vec<Edge>,
}

impl Standards {
    /// # Errors
    /// `AssayError` for a grade or an edge that there is not.
    pub(crate) fn of(py: Python<'_>, grade: &str, allow: &[String]) -> PyResult<Self> {
        let grade = grade.parse().map_err(|reason| error::other(py, format!("grade: {reason}")))?;
        let edges = allow.iter().map(|edge| edge.parse::<Edge>());
        let allow = edges.collect::<Result<_, _>>().map_err(|reason| error::other(py, format!("allow: {reason}")))?;
        Ok(Self { grade, allow })
    }
}

/// Judges what was returned for `problem` under `spec`.
///
/// # Errors
/// Why there is no verdict.
pub(crate) fn judge<P: Answered>(
    spec: &LossSpec,
    problem: &P,
    returned: &Returned,
    Standards { grade, allow }: &Standards,
) -> Result<Verdicts, String> {
    let known = Known::of(spec, problem).map_err(|reason| reason.to_string())?;
    let candidate = returned.candidate(problem);
    let limits = Limits::of(EXTERNAL).map_err(|reason| reason.to_string())?.at(*grade);
    let verdicts = known.verdicts(&candidate, &limits).map_err(|reason| reason.to_string())?;
    let verdicts: Vec<_> = verdicts.into_iter().map(|verdict| verdict.waive(allow)).collect();
    let diagnoses = problem.diagnose(&known.reference, &candidate, &verdicts);
    let replay = "problem.save(\"problem.safetensors\"), then assay judge --problem problem.safetensors";
    let failed = verdicts.iter().filter(|verdict| verdict.status.failed());
    let failures = failed.map(|verdict| known.explain(verdict, "kernel", replay).to_string()).collect();
    let checks = verdicts.iter().map(|verdict| Check::new("problem", "kernel", &verdict.gate.to_string(), verdict));
    let absent = [
        ("logp", candidate.logp.is_none()),
        ("entropy", candidate.entropy.is_none()),
        ("token_loss", candidate.token_loss.is_none()),
    ];
    let absent = absent.into_iter().filter(|(_, absent)| *absent);
    let ignored = absent.map(|(name, _)| Ignored { what: name.into(), why: "not returned".into(), not_run: None });
    let diagnoses = diagnoses.iter().map(ToString::to_string).collect();
    let report = Report { diagnoses, ..Report::new(checks.collect(), ignored.collect()) };
    let table = report.table();
    let verdicts = schema::verdicts::Verdicts::from(report);
    let json = serde_json::to_string_pretty(&verdicts).expect("plain data has a JSON form");
    Ok(Verdicts { passed: verdicts.pass, failures, table, json })
}

#[pymethods]
impl Verdicts {
    fn __bool__(&self) -> bool {
        self.passed
    }

    fn __repr__(&self) -> &str {
        self.table.trim_end()
    }

    /// As `assay judge --json` writes them.
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
