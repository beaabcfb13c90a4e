//! `assay judge`: the outputs of a kernel of the user's own.

use std::path::PathBuf;

use clap::Args;

use super::problem_choice::{AnyProblem, ProblemChoice};
use super::standards::Standards;
use super::{CliError, Passed, Printing};
use crate::fixture::{StoredGradient, extra_tensors, read_candidate};
use crate::judge::judgeable::Judgeable;
use crate::judge::report::{Check, Ignored, Report, explain};
use crate::judge::tolerance::EXTERNAL;
use crate::problem::Candidate;
use crate::schema::verdicts::Verdicts;
use crate::spec::LossSpec;

#[derive(Args)]
pub(super) struct Judge {
    #[command(flatten)]
    choice: ProblemChoice,
    /// What it put out: `loss` and `dlogits`, or `dhidden` and `dlm_head`, and `logp`, `entropy`, `token_loss` where it has
    /// them
    #[arg(long, value_name = "CANDIDATE.safetensors")]
    candidate: PathBuf,
    #[command(flatten)]
    standards: Standards,
    #[command(flatten)]
    printing: Printing,
}

impl Judge {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let (spec, problem) = self.choice.read()?;
        match problem {
            AnyProblem::Logits(problem) => self.judge(&spec, &problem, &read_candidate(&self.candidate)?),
            AnyProblem::Head(problem) => self.judge(&spec, &problem, &read_candidate(&self.candidate)?),
        }
    }

    fn judge<P: Judgeable<Gradient: StoredGradient>>(
        &self,
        spec: &LossSpec,
        problem: &P,
        candidate: &Candidate<P::Gradient>,
    ) -> Result<Passed, CliError> {
        let reference = problem.evaluate(spec).map_err(|reason| self.choice.wrong(reason))?;
        let label = self.choice.problem.file_stem().unwrap_or_default().to_string_lossy();
        let name = self.candidate.file_stem().unwrap_or_default().to_string_lossy();
        let mut checks = Vec::new();
        let verdicts = self.standards.judge(problem, &reference, candidate, EXTERNAL)?;
        let diagnoses = problem.diagnose(&reference, &candidate.lend(), &verdicts);
        for verdict in verdicts {
            if verdict.status.failed() {
                super::print(&format!("{}\n", explain(&verdict, &reference, problem, &name, &self.command())))?;
            }
            checks.push(Check::new(&label, &name, &verdict.gate.to_string(), &verdict));
        }
        let mut ignored = absent(candidate);
        ignored.extend(extra_tensors::<P::Gradient>(&self.candidate)?.into_iter().map(|name| Ignored {
            what: format!("tensor `{name}`"),
            why: "no output has this name".into(),
            not_run: None,
        }));
        let diagnoses = diagnoses.iter().map(ToString::to_string).collect();
        let report = Report { diagnoses, ..Report::new(checks, ignored) };
        let (table, verdicts) = (report.table(), Verdicts::from(report));
        self.printing.finish(&table, &verdicts)?;
        Ok(verdicts.pass.into())
    }

    fn command(&self) -> String {
        format!(
            "assay judge {} --candidate {}{}",
            self.choice.options(),
            self.candidate.display(),
            self.standards.options()
        )
    }
}

/// Those that it lacks.
fn absent<G>(candidate: &Candidate<G>) -> Vec<Ignored> {
    let Candidate { logp, entropy, token_loss, .. } = candidate;
    let optional = [("logp", logp), ("entropy", entropy), ("token_loss", token_loss)];
    let lacking = optional.into_iter().filter(|(_, array)| array.is_none());
    lacking.map(|(name, _)| Ignored { what: name.into(), why: "not in the candidate".into(), not_run: None }).collect()
}
