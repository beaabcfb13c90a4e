//! `assay suite`: a deck in files, for kernels that are driven by something else; `assay judge DIR` reads what came of it.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::check::{CampaignStandards, Pages, Summaries, show};
use super::deck_choice::DeckChoice;
use super::generate::json;
use super::spec_choice::SpecChoice;
use super::{CliError, Details, Passed, Printing, output};
use crate::campaign::{Campaign, Deck, Fault, KernelUnderTest, Subject};
use crate::config;
use crate::fixture::{FixtureError, SPEC_KEY, read_answer, write_problem};
use crate::problem::{Candidate, HeadProblem, Problem};
use crate::report::junit::{JunitCase, junit};
use crate::spec::LossSpec;
use crate::spec::presets::Preset;
use crate::text::{ForeignText, ShownPath, shell_path};

/// The number of problems of a suite that is judged without any answer.
const MOST_UNANSWERED: u64 = 1000;

/// The file that describes the problems of a folder.
const SUITE: &str = "suite.json";

#[derive(Args)]
pub(super) struct SuiteCommand {
    #[command(flatten)]
    spec: SpecChoice,
    #[command(flatten)]
    deck: DeckChoice,
    /// The folder to write: `0000.safetensors`, and so on, and what they are of
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    summaries: Summaries,
    #[command(flatten)]
    printing: Printing,
}

/// The description of the problems of a folder.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SuiteDescription {
    /// The version of the command that wrote them, as another draws other problems.
    version: ForeignText,
    spec: LossSpec,
    project: Option<(String, Vec<String>)>,
    deck: Deck,
}

fn version() -> String {
    format!("grpo-assay {}", env!("CARGO_PKG_VERSION"))
}

/// Returns the file name of a problem: `0000.safetensors`.
fn file_name(index: u64) -> String {
    format!("{index:04}.safetensors")
}

impl SuiteCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let (spec, mut deck) = (self.spec.read()?, self.deck.deck()?);
        // Files are answered once: whether garbage alone made a kernel fail cannot be asked.
        deck.masked_garbage.get_or_insert(false);
        deck.check()?;
        let listed = match &deck.head {
            None => self.write::<Problem>(&spec, &deck)?,
            Some(_) => self.write::<HeadProblem>(&spec, &deck)?,
        };
        let project = self.spec.project().map(|(preset, options)| (preset.to_string(), options));
        let suite = SuiteDescription { version: version().into(), spec, project, deck };
        self.make_folder()?;
        output::write_json(&self.output.join(SUITE), &suite)?;
        let written = listed.iter().filter(|listed| listed.description.is_some()).count();
        let text = format!(
            "{}: {written} problems; answer each into a folder of its own, under the same name, and judge them: \
             assay judge {} --candidates DIR\n",
            ShownPath(&self.output),
            shell_path(&self.output)
        );
        let cases = || listed.iter().map(ListedProblem::case).collect::<Vec<_>>();
        let name = ShownPath(&self.output).to_string();
        self.summaries.write(|| table(&listed), || junit(&name, None, &cases()))?;
        self.printing.finish(&text, &suite)?;
        Ok(Passed::Yes)
    }

    /// Makes the folder, as late as its first file: what is refused leaves none behind.
    fn make_folder(&self) -> Result<(), CliError> {
        let io = |reason| CliError::Io { path: self.output.clone().into(), action: "make", reason };
        std::fs::create_dir_all(&self.output).map_err(io)
    }

    /// Writes those in which a token has a gradient, and lists all.
    fn write<P: Subject>(&self, spec: &LossSpec, deck: &Deck) -> Result<Vec<ListedProblem>, CliError> {
        let mut listed = Vec::new();
        // A problem is drawn again from its index: without a gradient in any token it would test nothing, and is left
        // out.
        for index in 0..deck.cases {
            let Some((recipe, problem)) = deck.problem::<P>(index, spec)? else {
                listed.push(ListedProblem { index, description: None });
                continue;
            };
            let metadata = [
                (SPEC_KEY.to_string(), json(spec)),
                ("recipe".to_string(), json(&recipe)),
                ("generator".to_string(), version()),
            ];
            self.make_folder()?;
            write_problem(self.output.join(file_name(index)), &problem, &BTreeMap::from(metadata))?;
            listed.push(ListedProblem { index, description: Some(recipe.label()) });
        }
        Ok(listed)
    }
}

/// A problem of a suite, as its summaries list it.
struct ListedProblem {
    index: u64,
    /// The extents, the dtype, the regime and the seed; `None` if the problem was left out.
    description: Option<String>,
}

/// The reason why a problem is left out of a suite.
const LEFT_OUT: &str = "left out: no token has a gradient, so that it would test nothing";

impl ListedProblem {
    /// Returns the test case: a problem that was written passed.
    fn case(&self) -> JunitCase {
        match &self.description {
            Some(description) => JunitCase::passed(format!("{}: {description}", file_name(self.index))),
            None => JunitCase::skipped(file_name(self.index), LEFT_OUT),
        }
    }
}

/// Formats the problems of a suite as a Markdown table.
fn table(listed: &[ListedProblem]) -> String {
    let heading = String::from("| file | problem |\n|---|---|\n");
    listed.iter().fold(heading, |table, problem| {
        let description = problem.description.as_deref().unwrap_or(LEFT_OUT);
        table + &format!("| {} | {description} |\n", file_name(problem.index))
    })
}

/// One verdict on the candidates of a suite's problems.
pub(super) fn judge(
    suite: &Path,
    candidates: &Path,
    standards: CampaignStandards,
    printing: &Printing,
    details: &Details,
    pages: &Pages,
) -> Result<Passed, CliError> {
    let path = suite.join(SUITE);
    let SuiteDescription { version: by, spec, project, deck } = config::read_found(&path)?;
    let refused = |reason: String| CliError::Config { path: path.clone().into(), reason: reason.into() };
    // The problems are drawn again from the deck, not read: another version may draw others, and the answers would be
    // of different problems.
    if by.raw() != version() {
        return Err(refused(format!("version: got `{by}`, expected `{}`: write the suite again", version())));
    }
    deck.check().map_err(|reason| refused(format!("deck.{reason}")))?;
    // A stranger's suite does not decide for how long missing answers are counted.
    let answers = std::fs::read_dir(candidates).map_or(0, |entries| entries.count() as u64);
    let most = answers.saturating_mul(10).saturating_add(MOST_UNANSWERED);
    if deck.cases > most {
        let folder = ShownPath(candidates);
        let reason =
            format!("deck.cases: got {}, expected at most {most} for {answers} answers in {folder}", deck.cases);
        return Err(refused(reason));
    }
    let project = project.map(|(preset, options)| Ok((preset.parse::<Preset>()?, options)));
    let campaign = Campaign {
        project: project.transpose().map_err(|reason: crate::spec::presets::PresetError| CliError::Preset(reason))?,
        grade: standards.grade,
        allow: standards.allow,
        // Candidates are files: a second answer to one problem, or one to a smaller problem, does not exist.
        repeats: false,
        shrink: false,
        deck,
        ..Campaign::new(&ShownPath(candidates).to_string(), spec)
    };
    let (deck, spec) = (&campaign.deck, &campaign.spec);
    let dealt = Cell::new(0);
    let mut answers = Answers { folder: candidates, spec, deck, dealt: &dealt, found: HashMap::new() };
    let mut count = |_| dealt.set(dealt.get() + 1);
    let found = match &deck.head {
        None => campaign.run::<Problem>(&mut answers, &mut count)?,
        Some(_) => campaign.run::<HeadProblem>(&mut answers, &mut count)?,
    };
    show(&found, printing, details, pages)
}

/// A kernel that has answered already: a file for each problem of the deck.
struct Answers<'a> {
    folder: &'a Path,
    spec: &'a LossSpec,
    deck: &'a Deck,
    /// The number of the problem that the campaign deals now.
    dealt: &'a Cell<u64>,
    /// The numbers of the problems that were dealt, by their content: a campaign asks by problem, and asks for earlier ones again.
    found: HashMap<u64, u64>,
}

impl Answers<'_> {
    /// Returns the file that answers `problem`. The problem that is dealt now is drawn again; none is drawn before its turn.
    fn file<P: Subject>(&mut self, problem: &P) -> Option<PathBuf> {
        let asked = problem.fingerprint();
        let index = self.dealt.get();
        if !self.found.contains_key(&asked)
            && index < self.deck.cases
            && let Ok(Some((_, drawn))) = self.deck.problem::<P>(index, self.spec)
        {
            self.found.insert(drawn.fingerprint(), index);
        }
        self.found.get(&asked).map(|&index| self.folder.join(file_name(index)))
    }
}

impl<P: Subject> KernelUnderTest<P> for Answers<'_> {
    fn answer(
        &mut self,
        _: &LossSpec,
        problem: &Arc<P>,
        read: &mut dyn FnMut(&Candidate<P::View<'_>>),
    ) -> Result<(), Fault> {
        let path = self.file(&**problem);
        let path = path.ok_or_else(|| Fault::Unsupported("a problem that is none of the suite".into()))?;
        let candidate = read_answer(path, &**problem).map_err(|error| match error {
            // The same words for every problem: a campaign ends if all that it has seen is one fault.
            FixtureError::Io { reason, .. } if reason.kind() == io::ErrorKind::NotFound => {
                Fault::Raised(format!("{}: it has no file for this problem", ShownPath(self.folder)).into())
            }
            error => Fault::Raised(error.to_string().into()),
        })?;
        read(&candidate.lend());
        Ok(())
    }
}
