//! `assay judge`: the outputs of a kernel of the user's own.

use std::path::PathBuf;

use clap::Args;

use super::problem_choice::ProblemChoice;
use super::{CliError, Passed, Printing};
use crate::conformance::judge::{Status, judge};
use crate::conformance::report::{Check, Ignored, Report, explain};
use crate::conformance::tolerance::Tolerances;
use crate::fixture::read_candidate;
use crate::problem::Candidate;
use crate::reference;

/// The class whose limits hold for kernels that are not ours.
pub(super) const CLASS: &str = "external";

#[derive(Args)]
pub(super) struct Judge {
    #[command(flatten)]
    choice: ProblemChoice,
    /// What it put out: `loss` and `dlogits`, and `logp`, `entropy`, `token_loss` where it has them
    #[arg(long, value_name = "CANDIDATE.safetensors")]
    candidate: PathBuf,
    #[command(flatten)]
    printing: Printing,
}

impl Judge {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let (spec, problem) = self.choice.read()?;
        let candidate = read_candidate(&self.candidate)?;
        let reference = reference::evaluate(&spec, &problem).map_err(|reason| self.choice.wrong(reason))?;

        let label = self.choice.problem.file_stem().unwrap_or_default().to_string_lossy();
        let name = self.candidate.file_stem().unwrap_or_default().to_string_lossy();
        let mut checks = Vec::new();
        for verdict in judge(&reference, &candidate, CLASS, Tolerances::builtin())? {
            if verdict.status != Status::Pass {
                super::print(&format!("{}\n", explain(&verdict, &reference, &problem, &name, &self.command())))?;
            }
            checks.push(Check::new(&label, &name, &verdict.gate.to_string(), &verdict));
        }
        let report = Report::new(checks, absent(&candidate));
        self.printing.finish(&report.table(), &report)?;
        Ok(report.pass.into())
    }

    fn command(&self) -> String {
        format!("assay judge {} --candidate {}", self.choice.options(), self.candidate.display())
    }
}

/// The outputs that a candidate may have and this one lacks.
fn absent(candidate: &Candidate) -> Vec<Ignored> {
    let optional = [("logp", &candidate.logp), ("entropy", &candidate.entropy), ("token_loss", &candidate.token_loss)];
    let lacking = optional.into_iter().filter(|(_, array)| array.is_none());
    lacking.map(|(name, _)| Ignored { what: name.into(), why: "not in the candidate".into() }).collect()
}
