//! `assay panel`: kernels written in Python, honest and wrong, before the judge.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, Command, FromArgMatches as _};
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde::{Deserialize, Serialize};

use super::document::{self, Marks};
use super::generate::json;
use super::{CliError, Passed, Printing};
use crate::campaign::panel::{self, ExpectedOutcome, KernelOutcome, PanelCell, PanelDeck, Panelist};
use crate::config;
use crate::fixture::{SPEC_KEY, write_candidate, write_problem};
use crate::judge::generate::Regime;
use crate::problem::Dtype;
use crate::schema::invariance::RelationFinding;
use crate::schema::number::quotient;
use crate::text::{ForeignText, ShownPath};
use crate::worker::{Worker, WorkerLaunch};

/// The gates of a problem on logits, and what the table calls them.
const GATES: [(&str, &str); 7] = [
    ("loss", "loss"),
    ("logp", "logp"),
    ("entropy", "entropy"),
    ("token_loss", "token_loss"),
    ("dlogits", "dlogits"),
    ("dlogits row_l2", "row_l2"),
    ("dlogits row_sum", "row_sum"),
];

/// The lines that stand around the tables in a document.
const MARKS: Marks = ["<!-- assay panel --markdown -->", "<!-- end of tables -->"];

#[derive(Args)]
pub(super) struct PanelCommand {
    /// List of kernels; the programs that serve them are in the same folder
    #[arg(default_value = "tests/panel/panel.toml")]
    list: PathBuf,
    /// The Python that has what they import; `make panel` makes one
    #[arg(long, value_name = "PATH", default_value = "target/panel/bin/python")]
    python: PathBuf,
    /// Kernels to run, instead of all
    #[arg(long = "kernel", value_name = "NAME")]
    only: Vec<String>,
    /// Problems with a vocabulary up to 4,099; every 264 have each regime with each dtype and each loss
    #[arg(long, value_name = "N", default_value_t = 264)]
    cases: u64,
    /// Problems with a vocabulary of 151,936
    #[arg(long, value_name = "N", default_value_t = 33)]
    wide: u64,
    /// The one problem with this number
    #[arg(long, value_name = "I", conflicts_with_all = ["cases", "wide", "wide_case"])]
    case: Option<u64>,
    /// The one of a large vocabulary with this number
    #[arg(long, value_name = "I", conflicts_with_all = ["cases", "wide"])]
    wide_case: Option<u64>,
    /// Only write what the kernels return for a few small problems, with these, into a folder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["cases", "wide", "case", "wide_case"])]
    record: Option<PathBuf>,
    /// Print the largest error of each dtype and regime over its limit, as Markdown
    #[arg(long)]
    markdown: bool,
    /// Also put that between its marks in a document, such as docs/peers.md
    #[arg(long, value_name = "FILE.md", requires = "markdown", conflicts_with = "only")]
    into: Option<PathBuf>,
    #[command(flatten)]
    printing: Printing,
}

/// The list of kernels in a panel's file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PanelList {
    kernel: Vec<PanelEntry>,
    #[serde(default)]
    cause: Vec<PanelCause>,
}

/// One kernel of the list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PanelEntry {
    /// The name of the kernel in reports.
    name: String,
    /// Module and function that `serve.py` is told.
    serve: [String; 2],
    /// The expected outcome; a published project has none.
    expected: Option<ExpectedOutcome>,
    /// A description of the kernel.
    #[serde(rename = "is")]
    what: String,
}

/// Why kernels fail, as somebody found out.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PanelCause {
    /// The names of the kernels that it concerns.
    kernels: Vec<String>,
    /// The dtypes of the logits.
    dtypes: Vec<Dtype>,
    /// The regimes in which it shows.
    regimes: Vec<Regime>,
    /// The gates that fail; all if none is named.
    #[serde(default)]
    gates: Vec<String>,
    /// The reason, as text.
    why: String,
    /// Whether that is a defect, and not the way textbook formulas are.
    defect: bool,
}

impl PanelCause {
    fn explains(&self, kernel: &str, cell: &PanelCell) -> bool {
        let PanelCell { dtype, regime, gate, failed, .. } = cell;
        let gate = self.gates.is_empty() || self.gates.contains(gate);
        let given = gate && self.dtypes.contains(dtype) && self.regimes.contains(regime);
        *failed > 0 && given && self.kernels.iter().any(|name| name == kernel)
    }
}

/// The outcome of all kernels.
#[derive(Serialize)]
struct PanelOutcome {
    cases: u64,
    wide: u64,
    seconds: f64,
    kernels: Vec<OfKernel>,
}

#[derive(Serialize)]
struct OfKernel {
    #[serde(rename = "is")]
    what: String,
    expected: Option<ExpectedOutcome>,
    as_expected: bool,
    #[serde(flatten)]
    found: KernelOutcome,
}

impl PanelCommand {
    /// The project's own, as it is run where nothing is asked for; why not, where it cannot be.
    pub(super) fn from_project_files() -> Result<Self, String> {
        let matches = Self::augment_args(Command::new("panel")).get_matches_from(["panel"]);
        let panel = Self::from_arg_matches(&matches).expect("every argument has a default");
        let missing = [&panel.list, &panel.python].into_iter().find(|path| !path.exists()).cloned();
        missing.map_or(Ok(panel), |path| Err(format!("there is no {} here; `make panel` runs it", ShownPath(&path))))
    }

    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let PanelList { kernel: entries, cause: causes } = self.chosen()?;
        let mut kernels = entries.iter().map(|entry| self.start(entry)).collect::<Result<Vec<_>, _>>()?;
        if let Some(folder) = &self.record {
            return record(&mut kernels, folder);
        }
        let started = Instant::now();
        let [narrow, wide] = self.indices();
        let progress = self.printing.progress(narrow.clone().chain(wide.clone()).count());
        let cases = narrow.clone().map(|index| PanelDeck::Narrow.case(index));
        let cases = cases.chain(wide.clone().map(|index| PanelDeck::Wide.case(index)));
        panel::run(&mut kernels, cases, || progress.inc(1))?;
        progress.finish_and_clear();

        let of_kernel = |(entry, kernel): (PanelEntry, Panelist<Worker>)| {
            let (PanelEntry { what, expected, .. }, found) = (entry, kernel.found);
            OfKernel { what, expected, as_expected: found.is_as(expected, !wide.is_empty()), found }
        };
        let kernels: Vec<OfKernel> = entries.into_iter().zip(kernels).map(of_kernel).collect();
        let seconds = started.elapsed().as_secs_f64();
        let count = |indices: &Range<u64>| indices.end - indices.start;
        let outcome = PanelOutcome { cases: count(&narrow), wide: count(&wide), seconds, kernels };
        for OfKernel { expected, found, .. } in &outcome.kernels {
            let told = *expected == Some(ExpectedOutcome::Right) || found.unanswered > 0;
            for failure in found.failures.iter().filter(|_| told) {
                super::print(&format!("{}\n", failure.words))?;
            }
        }
        let text = if self.markdown { markdown(&outcome, &causes) } else { table(&outcome) };
        if let Some(path) = &self.into {
            document::put_into(path, [(MARKS, text.as_str())])?;
        }
        self.printing.finish(&text, &outcome)?;
        Ok(outcome.kernels.iter().all(|kernel| kernel.as_expected).into())
    }

    /// The numbers of the problems: of small vocabularies, and of a large one.
    fn indices(&self) -> [Range<u64>; 2] {
        match (self.case, self.wide_case) {
            (Some(index), _) => [index..index.saturating_add(1), 0..0],
            (_, Some(index)) => [0..0, index..index.saturating_add(1)],
            _ => [0..self.cases, 0..self.wide],
        }
    }

    fn chosen(&self) -> Result<PanelList, CliError> {
        let mut list: PanelList = config::read(&self.list)?;
        if let Some(unknown) = self.only.iter().find(|name| !list.kernel.iter().any(|entry| entry.name == **name)) {
            let names: Vec<&str> = list.kernel.iter().map(|entry| entry.name.as_str()).collect();
            return Err(CliError::Usage(
                format!("--kernel: got `{}`, expected one of: {}", ForeignText::from(unknown), names.join(", ")).into(),
            ));
        }
        list.kernel.retain(|entry| self.only.is_empty() || self.only.contains(&entry.name));
        Ok(list)
    }

    fn start(&self, entry: &PanelEntry) -> Result<Panelist<Worker>, CliError> {
        let [module, function] = &entry.serve;
        let serve = self.list.parent().unwrap_or(Path::new("")).join("serve.py");
        let command = [self.python.as_os_str(), serve.as_os_str(), module.as_ref(), function.as_ref()];
        let mut launch = WorkerLaunch::new(command);
        // Kernels run side by side.
        launch.environment.push(("OMP_NUM_THREADS".into(), "1".into()));
        let again = format!("assay panel {} --kernel {}", ShownPath(&self.list), entry.name);
        let worker = Worker::start(launch)?;
        Ok(Panelist::new(&entry.name, worker.hello().about.clone(), again, worker))
    }
}

/// Writes `DIR/CASE.problem.safetensors`, and what each kernel returns for it to `DIR/CASE.KERNEL.safetensors`.
fn record(kernels: &mut [Panelist<Worker>], folder: &Path) -> Result<Passed, CliError> {
    for index in 0..PanelDeck::REGIMES {
        let case = PanelDeck::Sample.case(index);
        let problem = Arc::new(case.recipe.problem(&case.spec)?);
        let path = |name: &str| folder.join(format!("{index}.{name}.safetensors"));
        for kernel in &mut *kernels {
            let answer = kernel.answer(&case, &problem);
            let KernelOutcome { kernel: name, about, .. } = &kernel.found;
            let candidate =
                answer.map_err(|why| CliError::Usage(format!("--record: {name}: sample {index}: {why}").into()))?;
            let about = about.iter().map(|about| ("about".to_string(), about.clone())).collect();
            write_candidate(path(name), &candidate, &about)?;
        }
        let (spec, recipe) = (json(&case.spec), json(&case.recipe));
        let metadata = [(SPEC_KEY.to_string(), spec), ("recipe".to_string(), recipe)];
        write_problem(path("problem"), &*problem, &metadata.into())?;
    }
    Ok(Passed::Yes)
}

/// A row a kernel: the largest κ that each gate needed. Below it, what they do not compute.
fn table(outcome: &PanelOutcome) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    let gates = GATES.map(|(_, name)| name);
    table.set_header(["kernel", "expected", "judged", "failed", "no answer"].iter().chain(&gates).chain(&[
        "same bits",
        "within limits",
        "ms each",
        "",
    ]));
    for column in 2..8 + gates.len() {
        table.column_mut(column).expect("as in the header").set_cell_alignment(CellAlignment::Right);
    }
    for OfKernel { expected, as_expected, found, .. } in &outcome.kernels {
        let kappa = |gate: &str| match found.kappa(gate) {
            None => "–".into(),
            Some(kappa) if kappa >= 1000.0 => format!("{kappa:.0e}"),
            Some(kappa) => format!("{kappa:.2}"),
        };
        let expected = match expected {
            None => "–",
            Some(ExpectedOutcome::Right) => "right",
            Some(ExpectedOutcome::Wrong) => "wrong",
            Some(ExpectedOutcome::WrongIfWide) => "wrong if wide",
        };
        let mut row = vec![found.kernel.clone(), expected.into()];
        row.extend([found.judged, found.failed, found.unanswered].map(|count| count.to_string()));
        row.extend(GATES.map(|(gate, _)| kappa(gate)));
        let [in_bits, in_limits, in_neither] = by_invariance(found).map(|findings| findings.len());
        let asked = in_bits + in_limits + in_neither;
        row.extend([in_bits, in_bits + in_limits].map(|count| format!("{count} of {asked}")));
        row.push(format!("{:.1}", 1e3 * found.answer_s / (found.judged.max(1) as f64)));
        row.push(if *as_expected { String::new() } else { "UNEXPECTED".into() });
        table.add_row(row);
    }
    let unexpected = outcome.kernels.iter().filter(|kernel| !kernel.as_expected).count();
    let PanelOutcome { cases, wide, seconds, kernels } = outcome;
    let mut unsupported = String::new();
    for OfKernel { found, .. } in kernels {
        for (what, problems) in &found.unsupported {
            let _ = writeln!(unsupported, "{} does not compute {what}: {problems} problems", found.kernel);
        }
    }
    format!(
        "{table}\nκ needed, the largest of each gate, at the better grade that it reaches: one near the limit has just reached exact; ∞ where a value is NaN or ∞ that should not be\nsame bits, within limits: of the relations of docs/invariance.md that were asked, those that hold so\n{unsupported}{}  {} kernels, {cases} problems and {wide} of V = 151,936 each, {unexpected} kernels not as expected, {seconds:.0} s\n",
        if unexpected == 0 { "PASS" } else { "FAIL" },
        kernels.len(),
    )
}

/// Writes four tables: what was driven; the result of each kernel by dtype and regime; why it fails; which relations of invariance hold.
fn markdown(outcome: &PanelOutcome, causes: &[PanelCause]) -> String {
    let regimes = Regime::FINITE.map(|regime| regime.to_string());
    let mut driven = String::from("| | what is driven | with |\n|---|---|---|\n");
    let mut worst = format!("| | logits | {} |\n|---|---|{}\n", regimes.join(" | "), "---|".repeat(regimes.len()));
    for OfKernel { found, what, .. } in &outcome.kernels {
        let about = found.about.as_deref().unwrap_or("–");
        driven += &format!("| {} | {what} | {about} |\n", found.kernel);
        for dtype in Dtype::KERNEL {
            let of = |regime| found.cells.iter().filter(move |cell| (cell.dtype, cell.regime) == (dtype, regime));
            let row = Regime::FINITE.map(|regime| of(regime).max_by(|a, b| badness(a).total_cmp(&badness(b))));
            worst +=
                &format!("| {} | {dtype} | {} |\n", found.kernel, row.map(|c| c.map_or("–".into(), grade)).join(" | "));
        }
    }
    let invariant = invariance(outcome);
    let PanelOutcome { cases, wide, .. } = outcome;
    let asked = format!("{cases} problems of a vocabulary up to 4,099 and {wide} of one of 151,936.");
    format!("{asked}\n\n{driven}\n{worst}\n{}\n{invariant}", explained(outcome, causes))
}

/// Returns the relations that hold in bits, those that hold within limits, and those that do not, of a kernel's findings.
fn by_invariance(found: &KernelOutcome) -> [Vec<&RelationFinding>; 3] {
    let asked = || found.invariance.iter().filter(|finding| finding.problems > 0);
    let (in_bits, moved): (Vec<_>, Vec<_>) = asked().partition(|finding| finding.other_bits == 0);
    // Values that are not finite differ by no number.
    let is_within = |finding: &&RelationFinding| finding.failed == 0 && finding.difference_over_limit.is_some();
    let (in_limits, in_neither) = moved.into_iter().partition(is_within);
    [in_bits, in_limits, in_neither]
}

/// A row a kernel: the relations that hold in bits, those that hold within limits, and those that do not.
fn invariance(outcome: &PanelOutcome) -> String {
    let mut text = String::from("| | invariant in bits | invariant within limits | not |\n|---|---|---|---|\n");
    for OfKernel { found, .. } in &outcome.kernels {
        let [in_bits, in_limits, in_neither] = by_invariance(found);
        let name = |finding: &&RelationFinding| {
            let RelationFinding { relation, difference_over_limit, .. } = finding;
            difference_over_limit.map_or(relation.to_string(), |over| format!("{relation} {}", quotient(over)))
        };
        let failing = |finding: &&RelationFinding| format!("**{}**: {}", name(finding), finding.outputs.join(", "));
        let cells: [Vec<String>; 3] = [
            in_bits.iter().map(name).collect(),
            in_limits.iter().map(name).collect(),
            in_neither.iter().map(failing).collect(),
        ];
        let cells = cells.map(|names| if names.is_empty() { "–".into() } else { names.join(", ") });
        let _ = writeln!(text, "| {} | {} |", found.kernel, cells.join(" | "));
    }
    text
}

/// A row a cause, where what it explains is still seen; and one for each kernel of what nobody has looked into.
fn explained(outcome: &PanelOutcome, causes: &[PanelCause]) -> String {
    let mut text = String::from("| | logits | regimes | cause | a defect? |\n|---|---|---|---|---|\n");
    let mut row = |kernels: &[&str], cells: &[&PanelCell], cause: &str, defect: &str| {
        let dtypes = Dtype::KERNEL.iter().filter(|dtype| cells.iter().any(|cell| cell.dtype == **dtype));
        let regimes = Regime::FINITE.iter().filter(|regime| cells.iter().any(|cell| cell.regime == **regime));
        let dtypes: Vec<String> = dtypes.map(ToString::to_string).collect();
        let regimes = match regimes.map(ToString::to_string).collect::<Vec<_>>() {
            all if all.len() == Regime::FINITE.len() => "all".into(),
            some => some.join(", "),
        };
        let cause = cause.replace('|', "\\|");
        text += &format!("| {} | {} | {regimes} | {cause} | {defect} |\n", kernels.join(", "), dtypes.join(", "));
    };
    let cells = || {
        outcome
            .kernels
            .iter()
            .flat_map(|kernel| kernel.found.cells.iter().map(move |cell| (&*kernel.found.kernel, cell)))
    };
    for cause in causes {
        let explained: Vec<(&str, &PanelCell)> =
            cells().filter(|(kernel, cell)| cause.explains(kernel, cell)).collect();
        let mut kernels: Vec<&str> = explained.iter().map(|(kernel, _)| *kernel).collect();
        kernels.dedup();
        if !kernels.is_empty() {
            let cells: Vec<&PanelCell> = explained.into_iter().map(|(_, cell)| cell).collect();
            row(&kernels, &cells, &cause.why, if cause.defect { "yes" } else { "no" });
        }
    }
    for OfKernel { found, .. } in &outcome.kernels {
        let known = |cell: &PanelCell| causes.iter().any(|cause| cause.explains(&found.kernel, cell));
        let left: Vec<&PanelCell> = found.cells.iter().filter(|cell| cell.failed > 0 && !known(cell)).collect();
        if !left.is_empty() {
            row(&[&found.kernel], &left, "not looked into", "–");
        }
    }
    text
}

/// Writes the result of a cell: the gate that is worst, its largest error over the limit of the grade that it reaches,
/// and `std` if that is `standard`.
fn grade(cell: &PanelCell) -> String {
    let name = GATES.iter().find(|(gate, _)| *gate == cell.gate).map_or(cell.gate.as_str(), |(_, name)| name);
    let share = match cell.share {
        _ if cell.nonfinite > 0 => "NaN".into(),
        share if share >= 1000.0 => format!("{share:.0e}"),
        share if share >= 10.0 => format!("{share:.0}"),
        share => format!("{share:.1}"),
    };
    let grade = if cell.standard > 0 { " std" } else { "" };
    if cell.failed > 0 { format!("**{name} {share}**") } else { format!("{name} {share}{grade}") }
}

/// Orders cells: NaN is worst.
fn badness(cell: &PanelCell) -> f64 {
    if cell.nonfinite > 0 { f64::INFINITY } else { cell.share }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::invariance::{InvarianceGrade, InvarianceRelation};

    fn cell(gate: &str, failed: u64, nonfinite: u64, share: f64) -> PanelCell {
        let (dtype, regime) = (Dtype::Bf16, Regime::Holes);
        PanelCell { dtype, regime, gate: gate.into(), judged: 8, failed, standard: 0, nonfinite, kappa: 0.0, share }
    }

    fn outcome(cells: Vec<PanelCell>) -> PanelOutcome {
        let found = KernelOutcome {
            kernel: "k".into(),
            about: Some("k 1.0".into()),
            judged: 8,
            unsupported: std::collections::BTreeMap::new(),
            failed: 1,
            unanswered: 0,
            answer_s: 0.0,
            cells,
            failures: Vec::new(),
            invariance: Vec::new(),
        };
        let kernels = vec![OfKernel { what: "`f`".into(), expected: None, as_expected: true, found }];
        PanelOutcome { cases: 8, wide: 0, seconds: 1.0, kernels }
    }

    fn cause(gate: &str) -> PanelCause {
        PanelCause {
            kernels: vec!["k".into()],
            dtypes: vec![Dtype::Bf16],
            regimes: vec![Regime::Holes],
            gates: vec![gate.into()],
            why: "u·|x|".into(),
            defect: true,
        }
    }

    #[test]
    fn panel_worst_gate_is_the_one_with_nan_and_failures_are_bold() {
        let outcome =
            outcome(vec![cell("loss", 1, 0, 9e9), cell("dlogits row_l2", 1, 2, 0.1), cell("logp", 0, 0, 0.5)]);
        let text = markdown(&outcome, &[]);
        assert!(text.contains("| k | `f` | k 1.0 |"), "{text}");
        assert!(text.contains("| **row_l2 NaN** |"), "{text}");
        assert_eq!(grade(&cell("logp", 0, 0, 0.5)), "logp 0.5");
        assert_eq!(grade(&cell("dlogits", 3, 0, 25_700.0)), "**dlogits 3e4**");
    }

    #[test]
    fn panel_shows_which_relations_hold_in_bits_and_within_limits() {
        let finding = |relation, other_bits, failed, difference_over_limit| RelationFinding {
            problems: 3,
            failed,
            other_bits,
            outputs: vec!["logp".into()],
            difference_over_limit,
            ..RelationFinding::new(relation, InvarianceGrade::Limits)
        };
        let mut outcome = outcome(vec![cell("logp", 0, 0, 0.5)]);
        outcome.kernels[0].found.invariance = vec![
            finding(InvarianceRelation::Repeat, 0, 0, None),
            finding(InvarianceRelation::Batch, 4, 0, Some(0.25)),
            finding(InvarianceRelation::Order, 4, 1, Some(2.0)),
            finding(InvarianceRelation::Length, 4, 0, None),
            RelationFinding::new(InvarianceRelation::Packing, InvarianceGrade::Limits),
        ];
        let row = "| k | repeat | batch 0.25 | **order 2**: logp, **length**: logp |\n";
        assert!(markdown(&outcome, &[]).ends_with(row), "{}", markdown(&outcome, &[]));
        assert!(table(&outcome).contains("1 of 4") && table(&outcome).contains("2 of 4"), "{}", table(&outcome));
    }

    #[test]
    fn panel_shows_causes_that_explain_and_what_none_explains() {
        let failing = outcome(vec![cell("loss", 1, 0, 2.0), cell("logp", 0, 0, 0.5)]);
        let explained_by = |gate| explained(&failing, &[cause(gate)]);
        assert!(explained_by("loss").ends_with("|\n| k | bf16 | holes | u·\\|x\\| | yes |\n"));
        assert!(explained_by("logp").ends_with("|\n| k | bf16 | holes | not looked into | – |\n"));
        assert_eq!(explained(&outcome(vec![cell("loss", 0, 0, 0.5)]), &[cause("loss")]).lines().count(), 2);
    }
}
