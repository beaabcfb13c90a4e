//! `assay judge`: the outputs of a kernel of the user's own.

use std::path::PathBuf;

use clap::Args;

use super::check::Pages;
use super::problem_choice::{AnyProblem, Within};
use super::standards::StandardsChoice;
use super::{CliError, Details, Passed, Printing};
use crate::campaign::{ComputedLoss, computed, neighbours, short_name};
use crate::fixture::{StoredCandidate, extra_tensors, read_stored};
use crate::judge::judgeable::Judgeable;
use crate::judge::report;
use crate::judge::tolerance::{EXTERNAL, Limits};
use crate::judge::trial::JudgedProblem;
use crate::problem::{Candidate, Gradient};
use crate::report::junit::{junit, verdict_cases};
use crate::schema::verdicts::{GateCheck, IgnoredCheck, Verdicts};
use crate::spec::LossSpec;
use crate::text::{ForeignText, ShownPath, shell_option};

/// The width of a picture, with two characters before it.
const PICTURE_WIDTH: usize = 76;

#[derive(Args)]
pub(super) struct JudgeCommand {
    /// A folder that `assay suite` wrote, in place of one problem
    #[arg(value_name = "SUITE", requires = "candidates", conflicts_with_all = ["problem", "candidate"])]
    suite: Option<PathBuf>,
    /// Folder with a candidate for each of its problems, under the same name
    #[arg(long, value_name = "DIR", requires = "suite")]
    candidates: Option<PathBuf>,
    /// Problem file to judge by
    #[arg(long, value_name = "PROBLEM.safetensors", required_unless_present = "suite")]
    problem: Option<PathBuf>,
    #[command(flatten)]
    within: Within,
    /// Outputs of the kernel: `loss` and `dlogits`, or `dhidden` and `dlm_head`, and `logp`, `entropy`, `token_loss`
    /// where it has them. Without a gradient the rest is judged; without a loss as well where `logp` is all that the
    /// spec asks for
    #[arg(long, value_name = "CANDIDATE.safetensors", required_unless_present = "suite")]
    candidate: Option<PathBuf>,
    #[command(flatten)]
    standards: StandardsChoice,
    #[command(flatten)]
    pages: Pages,
    #[command(flatten)]
    details: Details,
    #[command(flatten)]
    printing: Printing,
}

impl JudgeCommand {
    pub(super) fn run(self) -> Result<Passed, CliError> {
        let Self { suite, candidates, problem, within, candidate, standards, pages, details, printing } = self;
        match (suite, candidates, problem, candidate) {
            (Some(suite), Some(candidates), ..) => {
                super::suite::judge(&suite, &candidates, standards.for_campaign(), &printing, &details, &pages)
            }
            (_, _, Some(problem), Some(candidate)) => {
                let (spec, given) = within.read(&problem)?;
                let one = JudgedCandidate { problem, within, candidate, standards, pages, details, printing };
                match given {
                    AnyProblem::Logits(given) => one.judge(&spec, &given, &read_stored(&one.candidate, &given)?),
                    AnyProblem::Head(given) => one.judge(&spec, &given, &read_stored(&one.candidate, &given)?),
                }
            }
            _ => unreachable!("clap asks for a folder and candidates, or a problem and a candidate"),
        }
    }
}

/// One candidate and its problem.
struct JudgedCandidate {
    problem: PathBuf,
    within: Within,
    candidate: PathBuf,
    standards: StandardsChoice,
    pages: Pages,
    details: Details,
    printing: Printing,
}

impl JudgedCandidate {
    fn judge<P: Judgeable>(
        &self,
        spec: &LossSpec,
        problem: &P,
        candidate: &StoredCandidate<P::Gradient>,
    ) -> Result<Passed, CliError> {
        let wrong = |reason| CliError::Problem { path: self.problem.clone().into(), reason };
        let known = JudgedProblem::new(spec, problem).map_err(wrong)?;
        let label = ForeignText::from(self.problem.file_stem().unwrap_or_default().to_string_lossy()).to_string();
        let name = ForeignText::from(self.candidate.file_stem().unwrap_or_default().to_string_lossy()).to_string();
        let (mut checks, mut said) = (Vec::new(), String::new());
        // A whole candidate has a gradient. A candidate without one is judged by the rest, and its missing tensors are
        // listed as not checked.
        let (verdicts, mut diagnoses, mut ignored) = match candidate {
            StoredCandidate::Whole(candidate) => {
                let verdicts = self.standards.standards().judge(&known, candidate, EXTERNAL)?;
                let diagnoses = problem.diagnose(&known.reference, &candidate.lend(), &verdicts);
                (verdicts, diagnoses.iter().map(ToString::to_string).collect::<Vec<String>>(), absent(candidate))
            }
            StoredCandidate::Forward(candidate) => {
                let verdicts = self.standards.standards().judge_forward(&known, candidate, EXTERNAL)?;
                let diagnoses = problem.diagnose_forward(&known.reference, candidate, &verdicts);
                let gradients = P::Gradient::ARRAYS.iter().map(|name| lacking(name));
                (
                    verdicts,
                    diagnoses.iter().map(ToString::to_string).collect(),
                    gradients.chain(absent(candidate)).collect(),
                )
            }
        };
        for verdict in verdicts {
            if verdict.status.failed() {
                let explained = known.explain(&verdict, &name, &self.command());
                let text = if self.details.shown { format!("{explained:#}\n") } else { format!("{explained}\n") };
                super::print(&text)?;
                said += &text;
            }
            checks.push(report::check(&label, &name, &verdict.gate.to_string(), &verdict));
        }
        if let StoredCandidate::Whole(candidate) = candidate {
            let drawn = self.draw(&known, candidate, &checks)?;
            super::print(&drawn)?;
            said += &drawn;
        }
        // A failure that has the numbers of another loss is most likely a wrong option, and no rounding error. The search evaluates some
        // hundred losses, so what failed is printed before it.
        if let StoredCandidate::Whole(candidate) = candidate
            && checks.iter().any(|check| check.verdict.failed())
        {
            diagnoses.extend(self.computed(spec, problem, candidate));
        }
        // A tensor with a name that no output has is most likely misspelt, so it is reported.
        let extra = extra_tensors::<P::Gradient>(&self.candidate)?.into_iter();
        ignored.extend(extra.map(|name| report::ignored(format!("tensor `{name}`"), "no output has this name")));
        let verdicts = Verdicts { diagnoses, ..report::verdicts(checks, ignored) };
        let table = report::table(&verdicts);
        // A fence of four is not closed by what a stranger's file is called.
        let markdown = || format!("````text\n{}{table}````\n", said.replace('`', "'"));
        self.pages.write(&label, &verdicts, markdown, || junit(&name, None, &verdict_cases(&verdicts)))?;
        self.printing.finish(&table, &verdicts)?;
        Ok(verdicts.pass.into())
    }

    /// Draws where the first of the outputs that failed is wrong; empty if it has no axis.
    fn draw<P: Judgeable>(
        &self,
        known: &JudgedProblem<P>,
        candidate: &Candidate<P::Gradient>,
        checks: &[GateCheck],
    ) -> Result<String, CliError> {
        if !checks.iter().any(|check| check.verdict.failed()) {
            return Ok(String::new());
        }
        // Maps take a second judging, which only a failure is worth.
        let limits = Limits::external(self.standards.for_campaign().grade).with_error_maps();
        let verdicts = known.verdicts(&candidate.lend(), &limits)?;
        let mut failed = verdicts.iter().filter(|verdict| verdict.status.failed());
        let label = ShownPath(&self.problem).to_string();
        let picture = failed.find_map(|verdict| report::picture(&verdicts, verdict.gate, &label));
        Ok(picture.map_or_else(String::new, |picture| {
            let lines = picture.lines(PICTURE_WIDTH).join("\n  ");
            format!("{}; {}\n  {lines}\n\n", picture.caption(), picture.beyond_in_words())
        }))
    }

    /// Finds another loss that has these numbers on this problem.
    fn computed<P: Judgeable>(
        &self,
        spec: &LossSpec,
        problem: &P,
        candidate: &Candidate<P::Gradient>,
    ) -> Option<String> {
        let limits = Limits::external(self.standards.for_campaign().grade);
        // Neighbours differ from the spec in one choice each; those that this problem cannot distinguish from each
        // other are named together.
        let losses = neighbours(spec, None);
        let bar = self.printing.progress(losses.len());
        bar.set_message("losses near this one, compared with the candidate");
        let fits = |loss| {
            bar.inc(1);
            computed(vec![loss], &[(problem, candidate)], &limits)
        };
        let all: Vec<ComputedLoss> = losses.into_iter().flat_map(fits).collect();
        bar.finish_and_clear();
        let names: Vec<String> = all.iter().map(|loss| short_name(&loss.names)).collect();
        let more = if names.len() > 1 { ", which this problem does not distinguish" } else { "" };
        (!names.is_empty()).then(|| format!("these are the numbers of another loss: {}{more}", names.join("; or ")))
    }

    fn command(&self) -> String {
        let Self { problem, within, candidate, standards, .. } = self;
        format!(
            "assay judge{}{}{}",
            within.options(problem),
            shell_option("--candidate", candidate),
            standards.options()
        )
    }
}

/// Returns the outputs that the candidate lacks.
fn absent<G>(candidate: &Candidate<G>) -> Vec<IgnoredCheck> {
    let Candidate { loss, logp, entropy, token_loss, .. } = candidate;
    let optional = [("logp", logp), ("entropy", entropy), ("token_loss", token_loss)];
    let optional = optional.into_iter().map(|(name, array)| (name, array.is_none()));
    let absent = [("loss", loss.is_none())].into_iter().chain(optional).filter(|(_, absent)| *absent);
    absent.map(|(name, _)| lacking(name)).collect()
}

fn lacking(name: &str) -> IgnoredCheck {
    report::ignored(name, "not in the candidate")
}
