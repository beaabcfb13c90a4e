//! `assay judge`: the outputs of a kernel of the user's own.

use std::path::PathBuf;

use clap::Args;

use super::problem_choice::{AnyProblem, ProblemChoice};
use super::{CliError, Passed, Printing};
use crate::fixture::read_candidate;
use crate::judge::judge::Status;
use crate::judge::judgeable::Judgeable;
use crate::judge::report::{Check, Ignored, Report, explain};
use crate::judge::tolerance::Tolerances;
use crate::problem::Candidate;
use crate::schema::verdicts::Verdicts;
use crate::spec::LossSpec;

/// The class whose limits hold for kernels that are not ours.
pub(super) const CLASS: &str = "external";

/// The same of an LM head with the loss.
const HEAD_CLASS: &str = "external-lm-head";

#[derive(Args)]
pub(super) struct Judge {
    #[command(flatten)]
    choice: ProblemChoice,
    /// What it put out: `loss` and `dlogits`, or `dhidden` and `dlm_head`, and `logp`, `entropy`, `token_loss` where it has
    /// them
    #[arg(long, value_name = "CANDIDATE.safetensors")]
    candidate: PathBuf,
    #[command(flatten)]
    printing: Printing,
}

impl Judge {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let (spec, problem) = self.choice.read()?;
        match problem {
            AnyProblem::Logits(problem) => self.judge(&spec, &problem, &read_candidate(&self.candidate)?, CLASS),
            AnyProblem::Head(problem) => self.judge(&spec, &problem, &read_candidate(&self.candidate)?, HEAD_CLASS),
        }
    }

    fn judge<P: Judgeable>(
        &self,
        spec: &LossSpec,
        problem: &P,
        candidate: &Candidate<P::Gradient>,
        class: &str,
    ) -> Result<Passed, CliError> {
        let reference = problem.evaluate(spec).map_err(|reason| self.choice.wrong(reason))?;
        let label = self.choice.problem.file_stem().unwrap_or_default().to_string_lossy();
        let name = self.candidate.file_stem().unwrap_or_default().to_string_lossy();
        let mut checks = Vec::new();
        for verdict in problem.judge(&reference, candidate, class, Tolerances::builtin())? {
            if verdict.status != Status::Pass {
                super::print(&format!("{}\n", explain(&verdict, &reference, problem, &name, &self.command())))?;
            }
            checks.push(Check::new(&label, &name, &verdict.gate.to_string(), &verdict));
        }
        let report = Report::new(checks, absent(candidate));
        let (table, verdicts) = (report.table(), Verdicts::from(report));
        self.printing.finish(&table, &verdicts)?;
        Ok(verdicts.pass.into())
    }

    fn command(&self) -> String {
        format!("assay judge {} --candidate {}", self.choice.options(), self.candidate.display())
    }
}

/// Those that it lacks.
fn absent<G>(candidate: &Candidate<G>) -> Vec<Ignored> {
    let Candidate { logp, entropy, token_loss, .. } = candidate;
    let optional = [("logp", logp), ("entropy", entropy), ("token_loss", token_loss)];
    let lacking = optional.into_iter().filter(|(_, array)| array.is_none());
    lacking.map(|(name, _)| Ignored { what: name.into(), why: "not in the candidate".into(), not_run: None }).collect()
}
