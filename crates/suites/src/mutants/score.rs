//! The mutation score: the number of mutants that a suite rejects, by what, and those that others would have accepted.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use rayon::prelude::*;

use super::case::MutantCase;
use super::peers::{PROJECTS, PeerOutcome, Tests};
use super::run::{Kill, MutantSuite};

use super::{Mutant, MutantKind, Specimen};
use assay_core::implementation::Implementation;
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::{Grade, Tolerances};
use assay_schema::mutants as schema;

/// Cases that are evaluated before mutants are run through them.
const EVALUATED_AT_ONCE: usize = 64;

/// Mutants, and what has rejected each so far.
///
/// ```
/// use assay_judge::tolerance::Grade;
/// use assay_suites::mutants::{BANK, Trial, property};
///
/// let mutants = [&BANK[0]];
/// let mut trial = Trial::new(&mutants, Grade::Standard);
/// trial.run(&property(mutants[0].kind)[..2]).expect("no false alarm");
/// let score = trial.score(&[]);
/// ```
pub struct Trial {
    mutants: Vec<(&'static Mutant, Option<Kill>)>,
    cases: usize,
    grade: Grade,
}

impl Trial {
    /// Makes a trial of mutants that nothing has rejected yet, held to `grade`.
    pub fn new(mutants: &[&'static Mutant], grade: Grade) -> Self {
        Self { mutants: mutants.iter().map(|mutant| (*mutant, None)).collect(), cases: 0, grade }
    }

    /// Runs those that are left through more cases, as long as there are any.
    ///
    /// # Errors
    /// What rejected the correct kernel: a false alarm.
    pub fn run<P: Judgeable>(&mut self, cases: &[MutantCase<P>]) -> Result<(), Kill>
    where
        Specimen: Implementation<P>,
    {
        for cases in cases.chunks(EVALUATED_AT_ONCE) {
            let mut left: Vec<_> = self.mutants.iter_mut().filter(|(_, kill)| kill.is_none()).collect();
            // The mutants that are left are rejected at the earliest case; later chunks of cases run fewer and fewer of
            // them.
            if left.is_empty() {
                break;
            }
            let suite = MutantSuite::new(cases, self.grade)?;
            let fates = suite.run(&left.iter().map(|(mutant, _)| *mutant).collect::<Vec<_>>());
            for ((_, kill), fate) in left.iter_mut().zip(fates) {
                *kill = fate.kill().map(|kill| Kill { cases: self.cases + kill.cases, ..kill });
            }
            self.cases += suite.len();
        }
        Ok(())
    }

    /// The score, with what the tests of others say of each mutant.
    pub fn score(&self, peers: &[Tests]) -> Score {
        let outcome = |(mutant, kill): &(&'static Mutant, Option<Kill>)| {
            let cells = peers.iter().map(|tests| (tests.project.name, tests.judge(mutant))).collect();
            MutantRecord::new(mutant, kill.as_ref(), self.cases, cells)
        };
        let mutants: Vec<MutantRecord> = self.mutants.par_iter().map(outcome).collect();
        let left: Vec<_> =
            mutants.iter().filter(|mutant| mutant.killed_by.is_none()).map(|mutant| mutant.name).collect();
        let killed = mutants.len() - left.len();
        // A mutant that survives is an error unless the grade admits it by name.
        let by_design = |name: &&str| {
            let admitted = &Tolerances::builtin().admitted;
            self.grade == Grade::Standard && admitted.iter().any(|admitted| admitted.mutant == *name)
        };
        let (admitted, survived) = left.into_iter().partition(by_design);
        Score { grade: self.grade, total: mutants.len(), killed, survived, admitted, cases: self.cases, mutants }
    }
}

/// The mutation score of a suite.
#[derive(Clone, Debug)]
pub struct Score {
    /// The grade that the mutants were held to.
    pub grade: Grade,
    /// The number of mutants.
    pub total: usize,
    /// The number of mutants that the suite rejected.
    pub killed: usize,
    /// The mutants that the suite accepted, and should have rejected.
    pub survived: Vec<&'static str>,
    /// The mutants that the grade admits by design.
    pub admitted: Vec<&'static str>,
    /// Cases that the correct kernel passed, on each number of devices.
    pub cases: usize,
    /// The outcome of each mutant.
    pub mutants: Vec<MutantRecord>,
}

/// The outcome of one mutant.
#[derive(Clone, Debug)]
pub struct MutantRecord {
    /// The name of the bug.
    pub name: &'static str,
    /// The kind of mistake.
    pub class: MutantKind,
    /// The computation in place of the correct one.
    pub does: &'static str,
    /// The place where the bug was seen; empty if it is only conceivable.
    pub seen: &'static str,
    /// The gate and the case that rejected it first; `None` where it survived.
    pub killed_by: Option<String>,
    /// The gate that rejected it, if one did.
    pub gate: Option<String>,
    /// The case that it was rejected on.
    pub case: Option<String>,
    /// Devices that it ran on there.
    pub devices: Option<usize>,
    /// Cases that it was given, the last among them.
    pub cases: usize,
    /// The results of other projects' tests on this mutant.
    pub peers: BTreeMap<&'static str, PeerOutcome>,
    /// The projects whose tests accept it.
    pub passes_peers: Vec<&'static str>,
}

impl MutantRecord {
    fn new(mutant: &Mutant, kill: Option<&Kill>, cases: usize, peers: BTreeMap<&'static str, PeerOutcome>) -> Self {
        let passes = peers.iter().filter(|(_, cell)| **cell == PeerOutcome::Passes);
        Self {
            name: mutant.name,
            class: mutant.kind,
            does: mutant.does,
            seen: mutant.seen,
            killed_by: kill.map(|kill| format!("{} in {} on ×{}", kill.gate, kill.case, kill.devices)),
            gate: kill.map(|kill| kill.gate.clone()),
            case: kill.map(|kill| kill.case.clone()),
            devices: kill.map(|kill| kill.devices),
            // A mutant that survives has been through all cases, and a killed one through those up to its kill.
            cases: kill.map_or(cases, |kill| kill.cases),
            passes_peers: passes.map(|(name, _)| *name).collect(),
            peers,
        }
    }
}

impl From<MutantRecord> for schema::MutantReport {
    fn from(outcome: MutantRecord) -> Self {
        Self {
            name: outcome.name.into(),
            class: outcome.class.name().into(),
            does: outcome.does.into(),
            seen: outcome.seen.into(),
            killed_by: outcome.killed_by,
            gate: outcome.gate,
            case: outcome.case,
            devices: outcome.devices,
            cases: outcome.cases,
            peers: outcome.peers.into_iter().map(|(project, cell)| (project.into(), cell)).collect(),
            passes_peers: outcome.passes_peers.into_iter().map(String::from).collect(),
        }
    }
}

impl From<Score> for schema::MutationReport {
    fn from(score: Score) -> Self {
        Self {
            total: score.total,
            killed: score.killed,
            grade: Some(score.grade),
            survived: score.survived.into_iter().map(String::from).collect(),
            admitted: score.admitted.into_iter().map(String::from).collect(),
            cases: score.cases,
            mutants: score.mutants.into_iter().map(Into::into).collect(),
            ignored: Vec::new(),
        }
    }
}

impl Score {
    /// Adds the outcomes of other mutants.
    #[must_use]
    pub fn and(mut self, other: Score) -> Self {
        self.total += other.total;
        self.killed += other.killed;
        self.cases += other.cases;
        self.survived.extend(other.survived);
        self.admitted.extend(other.admitted);
        self.mutants.extend(other.mutants);
        self
    }

    /// A line for each mutant, and the total.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["mutant", "class", "killed by", "in", "devices", "cases", "would pass"]);
        table.column_mut(5).expect("seven columns").set_cell_alignment(CellAlignment::Right);
        for mutant in &self.mutants {
            table.add_row([
                mutant.name.to_string(),
                mutant.class.name().into(),
                mutant.gate.clone().unwrap_or_else(|| {
                    if self.admitted.contains(&mutant.name) { "admitted" } else { "SURVIVED" }.into()
                }),
                mutant.case.clone().unwrap_or_default(),
                mutant.devices.map_or_else(String::new, |devices| format!("×{devices}")),
                mutant.cases.to_string(),
                mutant.passes_peers.join(", "),
            ]);
        }
        let mut text = format!("{table}\n");
        for (project, [caught, passes, not_exercised]) in self.peers() {
            let _ = writeln!(text, "{project:<10} {caught} caught, {passes} pass, {not_exercised} not exercised");
        }
        let verdict = if self.survived.is_empty() { "PASS" } else { "FAIL" };
        let Self { grade, killed, total, cases, .. } = self;
        let _ = write!(text, "{verdict}  {killed} of {total} mutants killed at grade {grade} in {cases} cases");
        let _ = match self.admitted.as_slice() {
            [] => writeln!(text),
            admitted => writeln!(text, "; by design it admits {}", admitted.join(", ")),
        };
        text
    }

    /// Returns how many mutants the tests of each project catch, accept and do not exercise.
    pub fn peers(&self) -> Vec<(&'static str, [usize; 3])> {
        let count = |project: &str, cell: PeerOutcome| {
            self.mutants.iter().filter(|mutant| mutant.peers.get(project) == Some(&cell)).count()
        };
        let asked = PROJECTS.iter().filter(|project| self.mutants.iter().any(|m| m.peers.contains_key(project.name)));
        let cells = [PeerOutcome::Caught, PeerOutcome::Passes, PeerOutcome::NotExercised];
        asked.map(|project| (project.name, cells.map(|cell| count(project.name, cell)))).collect()
    }

    /// Returns the mutants that each suite catches and accepts, as a table in Markdown.
    fn by_suite(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "| tests | caught | pass | not exercised |\n|---|--:|--:|--:|");
        let passes = self.survived.len() + self.admitted.len();
        let _ = writeln!(text, "| **these, grade {}** | **{}** | **{passes}** | |", self.grade, self.killed);
        for (project, [caught, passes, not_exercised]) in self.peers() {
            let _ = writeln!(text, "| {project} | {caught} | {passes} | {not_exercised} |");
        }
        text
    }

    /// Returns the tables of `docs/mutants.md`: the suites, and the kinds of mutants with an example of each.
    pub fn summary(&self) -> String {
        let mut text = self.by_suite();
        text += "\n| kind | mutants | killed | accepted by a test of others | such as |\n|---|--:|--:|--:|---|\n";
        for class in MutantKind::ALL {
            let of_class: Vec<&MutantRecord> = self.mutants.iter().filter(|mutant| mutant.class == class).collect();
            let Some(first) = of_class.first() else { continue };
            let killed = of_class.iter().filter(|mutant| mutant.gate.is_some()).count();
            let accepted = of_class.iter().filter(|mutant| !mutant.passes_peers.is_empty()).count();
            let (title, n) = (class.title(), of_class.len());
            let _ = writeln!(text, "| {title} | {n} | {killed} | {accepted} | `{}`: {} |", first.name, first.does);
        }
        text
    }

    /// Returns all mutants as tables in Markdown, one for each kind.
    pub fn markdown(&self) -> String {
        let mut text = self.by_suite();
        let projects: Vec<&str> = PROJECTS.iter().map(|project| project.name).collect();
        for class in MutantKind::ALL {
            let _ = writeln!(text, "\n### {}\n", class.title());
            // The tests of other projects have logits as inputs here, so that they do not apply to heads.
            let projects: &[&str] = if class.is_of_heads() { &[] } else { &projects };
            let line = |cells: &[&str]| format!("| {} |", cells.join(" | "));
            let columns = [&["mutant", "what it does", "seen", "killed by", "cases"], projects].concat();
            let _ = writeln!(text, "{}", line(&columns));
            let _ = writeln!(text, "|---|---|---|---|--:|{}", "---|".repeat(projects.len()));
            for mutant in self.mutants.iter().filter(|mutant| mutant.class == class) {
                let word = |project: &&str| match mutant.peers.get(project) {
                    Some(PeerOutcome::Caught) => "caught",
                    Some(PeerOutcome::Passes) => "**passes**",
                    Some(PeerOutcome::NotExercised) | None => "–",
                };
                let killed_by = mutant.gate.as_deref().unwrap_or(if self.admitted.contains(&mutant.name) {
                    "admitted"
                } else {
                    "**survives**"
                });
                let cases = mutant.cases.to_string();
                let mut cells = vec![mutant.name, mutant.does, mutant.seen, killed_by, &cases];
                cells.extend(projects.iter().map(word));
                let _ = writeln!(text, "{}", line(&cells));
            }
        }
        text
    }
}
