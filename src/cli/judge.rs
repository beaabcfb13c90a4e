//! `assay judge`: the outputs of a kernel of the user's own.

use std::path::PathBuf;

use clap::Args;

use super::{CliError, Passed, Printing, config};
use crate::conformance::judge::{Status, judge};
use crate::conformance::report::{Check, Ignored, Report, explain};
use crate::conformance::tolerance::Tolerances;
use crate::fixture::{ProblemFile, read_candidate, verify};
use crate::problem::Candidate;
use crate::reference;
use crate::spec::{LossSpec, OldLogp};

/// The class whose limits hold for kernels that are not ours.
const CLASS: &str = "external";

#[derive(Args)]
pub(super) struct Judge {
    /// The problem that the kernel was given
    #[arg(long, value_name = "PROBLEM.safetensors")]
    problem: PathBuf,
    /// What it put out: `loss` and `dlogits`, and `logp`, `entropy`, `token_loss` where it has them
    #[arg(long, value_name = "CANDIDATE.safetensors")]
    candidate: PathBuf,
    /// The loss, in YAML, TOML or JSON; a generated problem carries its own
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// The problem's logits tensor
    #[arg(long, value_name = "NAME", default_value = "logits")]
    logits: String,
    /// The problem's old log-probabilities
    #[arg(long, value_name = "NAME", default_value = "old_logps")]
    old_logp: String,
    #[command(flatten)]
    printing: Printing,
}

impl Judge {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        verify(&self.problem)?;
        let file = ProblemFile::open(&self.problem)?;
        let spec = self.spec(&file)?;
        let old_logp = (spec.old_logp == OldLogp::Given).then_some(self.old_logp.as_str());
        let problem = file.problem(&self.logits, old_logp)?;
        let candidate = read_candidate(&self.candidate)?;
        let in_problem = |reason| CliError::Problem { path: self.problem.clone(), reason };
        let reference = reference::evaluate(&spec, &problem).map_err(in_problem)?;

        let label = self.problem.file_stem().unwrap_or_default().to_string_lossy();
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

    /// The spec asked for, or the one that the problem was generated with.
    fn spec(&self, file: &ProblemFile) -> Result<LossSpec, CliError> {
        if let Some(spec) = config::read_spec(self.spec.as_deref())? {
            return Ok(spec);
        }
        config::spec_within(file)?.ok_or_else(|| {
            let reason = "metadata `spec`: not in the file, expected --spec FILE to say which loss is meant".into();
            CliError::Config { path: self.problem.clone(), reason }
        })
    }

    fn command(&self) -> String {
        let (problem, candidate) = (self.problem.display(), self.candidate.display());
        let mut command = format!("assay judge --problem {problem} --candidate {candidate}");
        if let Some(spec) = &self.spec {
            command += &format!(" --spec {}", spec.display());
        }
        command + &format!(" --logits {} --old-logp {}", self.logits, self.old_logp)
    }
}

/// The outputs that a candidate may have and this one lacks.
fn absent(candidate: &Candidate) -> Vec<Ignored> {
    let optional = [("logp", &candidate.logp), ("entropy", &candidate.entropy), ("token_loss", &candidate.token_loss)];
    let lacking = optional.into_iter().filter(|(_, array)| array.is_none());
    lacking.map(|(name, _)| Ignored { what: name.into(), why: "not in the candidate".into() }).collect()
}
