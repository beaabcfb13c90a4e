//! `assay check`: a campaign before a kernel in a process of its own, or one of this project's.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::deck_choice::DeckChoice;
use super::spec_choice::SpecChoice;
use super::{CliError, Details, Passed, PluginChoice, Printing, code_lines, output, output_of, stop_flag};
use crate::campaign::{AskedInvariance, Campaign, CampaignProgress, LocalKernel, Subject, TextForm, markdown, text};
use crate::implementation::{Implementation, Workload};
use crate::problem::{HeadProblem, Problem};
use crate::registry::{FoundImplementation, find, find_head};
use crate::report::junit::{campaign_cases, junit};
use crate::report::{Input, render};
use crate::schema::campaign::CampaignReport;
use crate::schema::verdicts::Grade;
use crate::text::{ForeignText, ShownNumber, shown_lines};
use crate::worker::{RankedWorker, ShardCut, Worker, WorkerLaunch};

#[derive(Args)]
pub(super) struct CheckCommand {
    /// The kernel: a command that speaks the protocol `assay-check/1`, quoted as for a shell
    #[arg(long, value_name = "CMD", required_unless_present = "implementation")]
    exec: Option<String>,
    /// Or one of this project's implementations
    #[arg(long = "impl", value_name = "ID", conflicts_with = "exec")]
    implementation: Option<String>,
    #[command(flatten)]
    spec: SpecChoice,
    #[command(flatten)]
    deck: DeckChoice,
    #[command(flatten)]
    standards: CampaignStandards,
    /// Run the command in N processes, of which each computes a share of every problem
    #[arg(long, value_name = "N", requires = "cut", requires = "exec", value_parser = clap::value_parser!(u64).range(1..=64))]
    ranks: Option<u64>,
    /// The axis that the ranks share: `vocabulary`, `batch` or `tokens`
    #[arg(long, value_name = "AXIS", requires = "ranks", value_parser = cut_of)]
    cut: Option<ShardCut>,
    /// Seconds after which its first line, or an answer, is waited for no longer [default: 60 for the line, 30 for an answer]
    #[arg(long, value_name = "S")]
    timeout: Option<f64>,
    /// Seconds after which no problem more is tried
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// Leave problems that fail as large as they are
    #[arg(long)]
    no_shrink: bool,
    /// Do not count how many wrong kernels would be caught
    #[arg(long)]
    no_power: bool,
    /// Ask whether a token has the same numbers in another call: each relation by its usual grade, all by `bits` or by `limits`, or
    /// the relations that are named: `repeat`, `order`, `neighbours`, `batch`, `length`, `packing`, `vocabulary`, `alignment`, `chunk`
    #[arg(long, value_name = "GRADE|RELATION", value_delimiter = ',', num_args = 0..=1, default_missing_value = "usual")]
    invariant: Option<Vec<String>>,
    /// Keep problems that fail here, and try those first that are
    #[arg(long, value_name = "DIR")]
    repros: Option<PathBuf>,
    #[command(flatten)]
    plugin: PluginChoice,
    #[command(flatten)]
    pages: Pages,
    #[command(flatten)]
    details: Details,
    #[command(flatten)]
    printing: Printing,
}

/// The pages that a report is written to as well.
#[derive(Args)]
pub(super) struct Pages {
    /// Also write an HTML page; `-` is stdout
    #[arg(long, value_name = "PAGE.html")]
    pub(super) html: Option<PathBuf>,
    #[command(flatten)]
    pub(super) summaries: Summaries,
}

/// The forms of a report that services for continuous integration show.
#[derive(Args)]
pub(super) struct Summaries {
    /// Also write the report as Markdown, as for the summary of a job; `-` is stdout
    #[arg(long, value_name = "REPORT.md")]
    markdown: Option<PathBuf>,
    /// Also write the report as JUnit XML, a test case for each gate, cause or group of problems; `-` is stdout
    #[arg(long, value_name = "REPORT.xml")]
    junit: Option<PathBuf>,
}

/// The standards of a campaign.
#[derive(Args)]
pub(super) struct CampaignStandards {
    /// Accuracy to demand: `standard`, as textbook formulas are, carefully evaluated in f32; `exact`, with every
    /// avoidable cancellation avoided
    #[arg(long, value_name = "GRADE", default_value_t = Grade::Standard)]
    pub(super) grade: Grade,
    /// Failure to allow: an edge (`overflow`, `minus_infinity`, `lowest_float`, `masked`), a wrong kernel that it is
    /// like, `not-reproducible` or `stale-memory`
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(super) allow: Vec<String>,
}

impl CheckCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let name = self.implementation.as_ref().or(self.exec.as_ref()).map_or("", String::as_str);
        let (spec, deck) = (self.spec.read()?, self.deck.deck()?);
        let asked = self.invariant.as_ref().map(|words| AskedInvariance::from_words(words, &spec, &deck));
        let campaign = Campaign {
            invariance: asked.transpose().map_err(|why| CliError::usage(format!("--invariant: {why}")))?,
            project: self.spec.project(),
            grade: self.standards.grade,
            allow: self.standards.allow.clone(),
            shrink: !self.no_shrink,
            power: !self.no_power,
            time: self.seconds.map(|s| seconds("--seconds", s)).transpose()?,
            repros: self.repros.clone(),
            deck,
            stop: stop_flag()?,
            ..Campaign::new(name, spec)
        };
        let bar = self.printing.progress(usize::try_from(campaign.deck.cases).unwrap_or(usize::MAX));
        let mut progress = |CampaignProgress { tried, failed, .. }: CampaignProgress| {
            bar.set_position(tried);
            bar.set_message(format!("{failed} failed"));
        };
        let plugin = self.plugin.checked_path()?;
        // The kernel is a command that answers over a pipe, or an implementation of this program; its problems have
        // logits or an LM head.
        let found = match (&campaign.deck.head, &self.exec) {
            (None, Some(command)) => self.run_command::<Problem>(command, &campaign, &mut progress)?,
            (Some(_), Some(command)) => self.run_command::<HeadProblem>(command, &campaign, &mut progress)?,
            (None, None) => {
                let implementation = available(find(name, plugin))?;
                campaign.run(&mut LocalKernel(&*implementation), &mut progress)?
            }
            (Some(_), None) => {
                let implementation = available(find_head(name, plugin))?;
                campaign.run(&mut LocalKernel(&*implementation), &mut progress)?
            }
        };
        bar.finish_and_clear();
        show(&found, &self.printing, &self.details, &self.pages)
    }

    /// Runs the campaign on a command, in one process or in one for each rank.
    fn run_command<P: Subject>(
        &self,
        command: &str,
        campaign: &Campaign,
        progress: &mut dyn FnMut(CampaignProgress),
    ) -> Result<CampaignReport, CliError> {
        let launch = self.launch(command, campaign)?;
        Ok(match self.ranks.zip(self.cut) {
            None => campaign.run::<P>(&mut Worker::start(launch)?, progress)?,
            Some((ranks, cut)) => {
                let ranks = usize::try_from(ranks).expect("at most 64");
                campaign.run::<P>(&mut RankedWorker::start(launch, ranks, cut)?, progress)?
            }
        })
    }

    fn launch(&self, command: &str, campaign: &Campaign) -> Result<WorkerLaunch, CliError> {
        let [start, answer] = [60.0, 30.0].map(|usual| seconds("--timeout", self.timeout.unwrap_or(usual)));
        let (start, answer) = (start?, answer?);
        Ok(WorkerLaunch { start, answer, stop: Arc::clone(&campaign.stop), ..WorkerLaunch::new(words(command)?) })
    }
}

/// Splits a command into its words, as a shell would.
pub(super) fn words(command: &str) -> Result<Vec<String>, CliError> {
    shlex::split(command).filter(|words| !words.is_empty()).ok_or_else(|| {
        let given = ForeignText::from(command);
        CliError::Usage(format!("--exec: got `{given}`, expected a command, quoted as for a shell").into())
    })
}

/// Returns an implementation that runs here. One that does not is no kernel that fails.
fn available<P: Workload>(found: FoundImplementation<P>) -> Result<Arc<dyn Implementation<P>>, CliError> {
    let implementation = found.map_err(CliError::usage)?;
    let refused = implementation.available().err();
    refused
        .map_or(Ok(Arc::clone(&implementation)), |why| Err(CliError::usage(format!("{}: {why}", implementation.id()))))
}

/// Reads the axis that ranks share.
fn cut_of(name: &str) -> Result<ShardCut, String> {
    let names = || ShardCut::ALL.map(|(_, name)| name).join(", ");
    ShardCut::ALL
        .into_iter()
        .find(|(_, other)| *other == name)
        .map(|(cut, _)| cut)
        .ok_or_else(|| format!("expected one of {}", names()))
}

/// A time, from a number of an option.
pub(super) fn seconds(option: &str, given: f64) -> Result<Duration, CliError> {
    let time = Duration::try_from_secs_f64(given).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| {
        let given = ShownNumber(given);
        CliError::Usage(format!("{option}: got {given}, expected a number of seconds above 0").into())
    })
}

impl Pages {
    /// Writes the pages that are asked for, of a `result` that is called `name`.
    pub(super) fn write(
        &self,
        name: &str,
        result: &impl Serialize,
        markdown: impl FnOnce() -> String,
        junit: impl FnOnce() -> String,
    ) -> Result<(), CliError> {
        if let Some(path) = &self.html {
            let made = output_of(result);
            // The page is made from the same JSON that `--json` writes, so that the two cannot differ.
            let json = serde_json::to_vec(&made).expect("plain data has a JSON form");
            write_text(path, &render(&[Input::parse(Path::new(name), &json)?], &made.command))?;
        }
        self.summaries.write(markdown, junit)
    }
}

impl Summaries {
    /// Writes the forms that are asked for.
    pub(super) fn write(
        &self,
        markdown: impl FnOnce() -> String,
        junit: impl FnOnce() -> String,
    ) -> Result<(), CliError> {
        self.markdown.as_deref().map_or(Ok(()), |path| write_text(path, &markdown()))?;
        self.junit.as_deref().map_or(Ok(()), |path| write_text(path, &junit()))
    }
}

fn write_text(path: &Path, text: &str) -> Result<(), CliError> {
    output::write(path, |out| out.write_all(shown_lines(text).as_bytes()))
}

/// Prints what a campaign found, and writes it where that is asked for.
pub(super) fn show(
    found: &CampaignReport,
    printing: &Printing,
    details: &Details,
    pages: &Pages,
) -> Result<Passed, CliError> {
    let cases = || junit(&found.kernel, Some(found.seconds), &campaign_cases(found));
    pages.write(&found.kernel, found, || markdown(found), cases)?;
    let mut text = text(found, &TextForm { details: details.shown, python_call: None });
    if details.shown {
        text += &code_lines();
    }
    if printing.quiet && !found.passed {
        super::print(&text)?;
    }
    printing.finish(&text, found)?;
    Ok(found.passed.into())
}
