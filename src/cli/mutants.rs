//! `assay mutants`: deliberately wrong kernels before the judge.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;

use super::document::{self, Marks};
use super::{CliError, Passed, Printing};
use crate::fixture::{ProblemFile, manifest_files, verify};
use crate::judge::recorded::recorded_spec;
use crate::judge::report;
use crate::project;
use crate::schema::{self, mutants::Width, verdicts::Grade, verdicts::IgnoredCheck};
use crate::suites::mutants::{
    BANK, Kill, Mutant, MutantCase, MutantOutcome, PROJECTS, PeerProject, ProductionRun, Trial, head_cases,
    property_cases,
};
use crate::text::{ForeignText, ShownPath};

/// The folder of fixtures that is used when none is named.
const DEFAULT_FOLDER: &str = "fixtures";

/// The lines that stand around the tables in a document.
const MARKS: Marks = ["<!-- assay mutants --markdown -->", "<!-- end of tables -->"];

#[derive(Args)]
pub(super) struct MutantsCommand {
    /// Recorded problems to run as well; `fixtures` where it is there, if none is named
    #[arg(long, value_name = "DIR")]
    fixtures: Option<PathBuf>,
    /// Mutants to run, instead of all
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Accuracy to demand: `standard`, as of anybody's kernels, or `exact`
    #[arg(long, value_name = "GRADE", default_value_t = Grade::Standard)]
    grade: Grade,
    /// Only run each class of mutants at the widths that kernels are made for: 16 tokens over 151,936 columns, heads of 4096 × 4,099
    /// and of 896 × 151,936
    #[arg(long, conflicts_with_all = ["only", "fixtures", "markdown", "into"])]
    production: bool,
    /// Print the tables as Markdown
    #[arg(long)]
    markdown: bool,
    /// Also put a summary between its marks in a document, such as docs/mutants.md, and the tables into data/mutants.csv next to it
    #[arg(long, value_name = "FILE.md", requires = "markdown", conflicts_with = "only")]
    into: Option<PathBuf>,
    #[command(flatten)]
    printing: Printing,
}

impl MutantsCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        if self.production {
            return self.at_production_widths();
        }
        let mutants = self.chosen()?;
        let mut ignored = Vec::new();
        let fixtures = self.fixtures(&mut ignored)?;
        // Mutants of heads need problems with a head and the others problems on logits, so that each kind has a trial
        // of its own.
        let (of_heads, on_logits): (Vec<_>, Vec<_>) = mutants.iter().partition(|mutant| mutant.kind.is_of_heads());
        let (mut trial, mut heads) = (Trial::new(&on_logits, self.grade), Trial::new(&of_heads, self.grade));
        let progress = self.printing.progress(2 + fixtures.len());
        // The correct kernel must pass every problem on which mutants are tried, or a rejection would prove nothing:
        // the first false alarm ends the command.
        let mut false_alarm = trial.run(&property_cases()).err();
        progress.inc(1);
        false_alarm = false_alarm.or(heads.run(&head_cases()).err());
        progress.inc(1);
        for path in &fixtures {
            progress.set_message(ShownPath(&path).to_string());
            for_each_case(path, |case| {
                // One at a time: a recorded vocabulary is large.
                false_alarm = false_alarm.take().or(trial.run(&[case]).err());
            })?;
            progress.inc(1);
        }
        progress.finish_and_clear();
        if let Some(kill) = false_alarm {
            return rejected(&kill);
        }

        let peers: Vec<_> = PROJECTS.into_iter().map(PeerProject::prepare).collect();
        let score = trial.score(&peers).and(heads.score(&[]));
        let mut text = if self.markdown { score.markdown() } else { score.table() };
        if let Some(path) = &self.into {
            document::put_with_data(path, MARKS, "mutants", &text, &score.summary())?;
        }
        if !self.markdown {
            text.extend(ignored.iter().map(|IgnoredCheck { what, why, .. }| format!("ignored  {what}: {why}\n")));
        }
        let outcomes = schema::mutants::MutationReport { ignored, ..score.into() };
        self.printing.finish(&text, &outcomes)?;
        for name in &outcomes.survived {
            super::print(&format!("survived {name}\n"))?;
        }
        Ok(outcomes.survived.is_empty().into())
    }

    /// Passes where no width accepts a mutant that is not admitted there by name.
    fn at_production_widths(&self) -> Result<Passed, CliError> {
        let parts: Vec<_> = ProductionRun::Full.parts().collect();
        let progress = self.printing.progress(parts.len());
        let mut fates = Vec::new();
        for part in parts {
            progress.set_message(part.to_string());
            let started = Instant::now();
            let of_part = match part.run(self.grade) {
                Ok(of_part) => of_part,
                // Any part in which the correct kernel is rejected ends the run.
                Err(kill) => return rejected(&kill),
            };
            let killed = of_part.iter().filter(|at| matches!(at.fate, MutantOutcome::Killed(_))).count();
            let (total, seconds) = (of_part.len(), started.elapsed().as_secs_f64());
            if !self.printing.quiet {
                // At once: all parts together take minutes.
                progress.suspend(|| super::print(&format!("{part}: {killed} of {total} killed, {seconds:.1} s\n")))?;
            }
            fates.extend(of_part);
            progress.inc(1);
        }
        progress.finish_and_clear();
        // A mutant may be killed at one width and accepted at another, so fates are listed by width.
        let names: BTreeSet<&String> = fates.iter().map(|at| &at.width).collect();
        let of_width = |width: &String| {
            let named = |of: fn(&MutantOutcome) -> bool| {
                let named = fates.iter().filter(|at| at.width == *width && of(&at.fate));
                named.map(|at| at.mutant.name.to_string()).collect()
            };
            Width {
                width: width.clone(),
                killed: named(|fate| matches!(fate, MutantOutcome::Killed(_))),
                accepted: named(|fate| *fate == MutantOutcome::Accepted),
                not_exercised: named(|fate| *fate == MutantOutcome::NotExercised),
            }
        };
        let widths: Vec<Width> = names.into_iter().map(of_width).collect();
        let mut text = String::new();
        for Width { width, killed, accepted, not_exercised } in &widths {
            let (killed, total) = (killed.len(), killed.len() + accepted.len() + not_exercised.len());
            let _ = writeln!(text, "{width}: {killed} of {total} killed at grade {}", self.grade);
            for (what, names) in [("accepted", accepted), ("not exercised", not_exercised)] {
                if !names.is_empty() {
                    let _ = writeln!(text, "  {what}: {}", names.join(", "));
                }
            }
        }
        self.printing.finish(&text, &schema::mutants::ProductionReport { grade: self.grade, widths })?;
        Ok(fates.iter().all(|at| at.fate != MutantOutcome::Accepted || at.is_admitted(self.grade)).into())
    }

    fn chosen(&self) -> Result<Vec<&'static Mutant>, CliError> {
        if self.only.is_empty() {
            return Ok(BANK.iter().collect());
        }
        let called = |name: &String| {
            BANK.iter().find(|mutant| mutant.name == name).ok_or_else(|| {
                let names: Vec<_> = BANK.iter().map(|mutant| mutant.name).collect();
                CliError::Usage(
                    format!("--only: got `{}`, expected one of: {}", ForeignText::from(name), names.join(", ")).into(),
                )
            })
        };
        self.only.iter().map(called).collect()
    }

    /// The recorded files. A folder that nobody asked for may be absent, and is then said to be.
    fn fixtures(&self, ignored: &mut Vec<IgnoredCheck>) -> Result<Vec<PathBuf>, CliError> {
        let folder = self.fixtures.clone().or_else(|| project::find(DEFAULT_FOLDER).ok());
        let Some(folder) = folder else {
            let why = format!("there is no folder `{DEFAULT_FOLDER}` here; name one with --fixtures");
            ignored.push(report::ignored("recorded problems", why));
            return Ok(Vec::new());
        };
        Ok(manifest_files(folder)?)
    }
}

/// Reports a false alarm of the judge.
fn rejected(Kill { gate, case, devices, .. }: &Kill) -> Result<Passed, CliError> {
    super::print(&format!("the correct kernel was rejected: {gate} in {case} on ×{devices}\n"))?;
    Ok(Passed::No)
}

/// The problems of one file, under the loss that `assay replay` takes for them.
fn for_each_case(path: &Path, mut run: impl FnMut(MutantCase)) -> Result<(), CliError> {
    verify(path)?;
    let file = ProblemFile::open(path)?;
    // A generated file carries its spec; a recorded one has the loss that recorded scalars belong to.
    let spec = file.spec()?.unwrap_or_else(recorded_spec);
    let old_logps: Vec<Option<&str>> = match file.old_logp_names() {
        names if spec.reads_old_logp() => names.into_iter().map(Some).collect(),
        _ => vec![None],
    };
    let stem = ForeignText::from(path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy());
    for logits in file.logits_names() {
        for &old_logp in &old_logps {
            let problem = file.problem(logits, old_logp)?;
            problem.check(&spec).map_err(|reason| CliError::Problem { path: path.into(), reason })?;
            let label = format!("{stem} {logits} {}", old_logp.unwrap_or("current"));
            run(MutantCase { label, spec: spec.clone(), problem });
        }
    }
    Ok(())
}
