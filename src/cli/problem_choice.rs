//! The problem and the loss that a command is about.

use std::path::{Path, PathBuf};

use clap::Args;

use super::CliError;
use crate::case::{CaseBatch, beside};
use crate::config;
use crate::fixture::{ProblemFile, verify};
use crate::problem::{HeadProblem, Problem, ProblemError};
use crate::spec::LossSpec;
use crate::text::shell_option;

/// A problem of either kind.
pub(super) enum AnyProblem {
    Logits(Problem),
    Head(HeadProblem),
}

impl AnyProblem {
    /// Reads the problem of `file`: with `logits`, or with its LM head.
    pub(super) fn read(file: &ProblemFile, logits: &str, old_logp: Option<&str>) -> Result<Self, CliError> {
        if file.has_head() {
            return Ok(Self::Head(file.head_problem(old_logp)?));
        }
        Ok(Self::Logits(file.problem(logits, old_logp)?))
    }

    /// Reads or draws the problem of a case, which the file `case` describes.
    pub(super) fn from_batch(batch: &CaseBatch, spec: &LossSpec, case: &Path) -> Result<Self, CliError> {
        match batch {
            CaseBatch::Generate(recipe) => Ok(Self::Logits(recipe.problem(spec)?)),
            CaseBatch::GenerateHead(recipe) => Ok(Self::Head(recipe.problem(spec)?)),
            CaseBatch::Fixture(batch) => {
                let path = beside(case, &batch.path);
                verify(&path)?;
                Self::read(&ProblemFile::open(&path)?, &batch.logits, batch.old_logp.as_deref())
            }
        }
    }
}

/// A problem in a file.
#[derive(Args)]
pub(super) struct ProblemChoice {
    /// Problem file to read
    #[arg(long, value_name = "PROBLEM.safetensors")]
    problem: PathBuf,
    #[command(flatten)]
    within: Within,
}

/// The choice of a loss and of tensors within a problem's file.
#[derive(Args)]
pub(super) struct Within {
    /// The loss, in YAML, TOML or JSON; a generated problem carries its own
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// The problem's logits tensor, where it has no LM head
    #[arg(long, value_name = "NAME", default_value = "logits")]
    logits: String,
    /// Name of the problem's old log-probabilities
    #[arg(long, value_name = "NAME", default_value = "old_logps")]
    old_logp: String,
}

impl ProblemChoice {
    /// Reads the loss and the problem.
    pub(super) fn read(&self) -> Result<(LossSpec, AnyProblem), CliError> {
        self.within.read(&self.problem)
    }

    /// An error of the problem's, with its path.
    pub(super) fn wrong(&self, reason: ProblemError) -> CliError {
        CliError::Problem { path: self.problem.clone().into(), reason }
    }
}

impl Within {
    /// Reads the loss, and the problem that is in the file `path`.
    pub(super) fn read(&self, path: &Path) -> Result<(LossSpec, AnyProblem), CliError> {
        verify(path)?;
        let file = ProblemFile::open(path)?;
        let spec = self.spec(&file, path)?;
        // A loss without a ratio reads no old log-probabilities, and the file then need not have them.
        let old_logp = spec.reads_old_logp().then_some(self.old_logp.as_str());
        let problem = match AnyProblem::read(&file, &self.logits, old_logp)? {
            AnyProblem::Logits(problem) => AnyProblem::Logits(problem.with_advantages_for(&spec)),
            AnyProblem::Head(problem) => AnyProblem::Head(problem.with_advantages_for(&spec)),
        };
        Ok((spec, problem))
    }

    /// The spec asked for, or the one that the problem was generated with.
    fn spec(&self, file: &ProblemFile, path: &Path) -> Result<LossSpec, CliError> {
        if let Some(spec) = config::read_spec(self.spec.as_deref())? {
            return Ok(spec);
        }
        file.spec()?.ok_or_else(|| {
            let reason = "metadata `spec`: not in the file, expected --spec FILE to say which loss is meant".into();
            CliError::Config { path: path.into(), reason }
        })
    }

    /// The options that choose the same again.
    pub(super) fn options(&self, path: &Path) -> String {
        let spec = self.spec.as_ref().map_or(String::new(), |spec| shell_option("--spec", spec));
        let names = shell_option("--logits", &self.logits) + &shell_option("--old-logp", &self.old_logp);
        shell_option("--problem", path) + &spec + &names
    }
}
