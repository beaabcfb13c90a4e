//! `assay tolerances`: the law, and its figures measured again.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;

use clap::Args;
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use time::OffsetDateTime;

use super::{CliError, Passed, Printing};
use crate::judge::tolerance::{Tolerance, Tolerances};
use crate::problem::{HeadProblem, Problem};
use crate::registry::{compiled, immediate, registry};
use crate::suites::measure::{self, CASES, Compiled, Measured, Measurement};
use crate::suites::revise::{Change, Figures, Reason, ReviseError, Revision};

/// Where the law stands in the project.
const FILE: &str = "tolerances.toml";

#[derive(Args)]
pub(super) struct Limits {
    /// Measure what correct implementations need, and write it to the file
    #[arg(long)]
    measure: bool,
    /// The one class to measure
    #[arg(long, value_name = "CLASS", requires = "measure")]
    class: Option<String>,
    /// Random cases; with fewer than in the default, all other cases are fewer in proportion, and less is seen
    #[arg(long, value_name = "N", requires = "measure", default_value_t = CASES, value_parser = at_least_one)]
    cases: usize,
    /// Why figures may be raised; recorded in each entry that is
    #[arg(long, value_name = "REASON", requires = "measure")]
    accept: Option<Reason>,
    /// PJRT plugin to measure on, once for each; the CPU plugins that `make setup` installed if none is given
    #[arg(long = "plugin", value_name = "FILE.so", requires = "measure")]
    plugins: Vec<PathBuf>,
    /// The tolerance file; `tolerances.toml` is measured, and the law that is built in is shown, if none is given
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    #[command(flatten)]
    printing: Printing,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| *n >= 1);
    number.ok_or_else(|| "expected a whole number, 1 or more".into())
}

impl Limits {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        if self.measure { self.measure() } else { self.show() }
    }

    fn show(&self) -> Result<Passed, CliError> {
        let read;
        let tolerances = match &self.file {
            None => Tolerances::builtin(),
            Some(path) => {
                read = parse(path, &read_text(path)?)?;
                &read
            }
        };
        let entries: Vec<&Tolerance> = tolerances.entries().collect();
        self.printing.finish_list(&table(&entries), &entries)?;
        Ok(Passed::Yes)
    }

    fn measure(&self) -> Result<Passed, CliError> {
        let path = self.file.as_deref().unwrap_or(Path::new(FILE));
        let text = read_text(path)?;
        let tolerances = parse(path, &text)?;
        let plugins = self.plugins()?;
        let on = |plugin: PathBuf| {
            let (on_logits, heads) = (compiled::<Problem>(&plugin), compiled::<HeadProblem>(&plugin));
            Compiled { plugin, on_logits, heads }
        };
        let measured = Measured {
            immediate: immediate::<Problem>(),
            immediate_heads: immediate::<HeadProblem>(),
            compiled: plugins.into_iter().map(on).collect(),
        };
        let classes = measure::classes(&measured);
        self.check_class(&classes)?;

        let cases = measure::cases(self.class.as_deref(), self.cases, &measured);
        let progress = self.printing.progress(cases.len());
        let mut measurement = Measurement::default();
        for case in &cases {
            measurement.add(case)?;
            progress.inc(1);
        }
        progress.finish_and_clear();

        let revision = Revision::of(&tolerances, &measurement);
        self.printing.finish(&changes(&revision, &classes), &revision)?;
        let measured_on = |class: &str| {
            let covered = measurement.covered(class)?;
            Some(format!("assay tolerances --measure: {covered}; {}", machine()))
        };
        let rewritten = match revision.rewrite(&text, measured_on, self.accept.as_ref()) {
            Ok(rewritten) => rewritten,
            Err(refused @ (ReviseError::Raised(_) | ReviseError::Beyond(_))) => {
                // Nothing is left to do where even stderr is closed.
                let _ = writeln!(io::stderr(), "assay: {}: {refused}", path.display());
                return Ok(Passed::No);
            }
            Err(error) => return Err(CliError::Config { path: path.into(), reason: error.to_string() }),
        };
        crate::fixture::persist(path, |out| out.write_all(rewritten.as_bytes())).map_err(|reason| CliError::Io {
            path: path.into(),
            action: "write",
            reason,
        })?;
        Ok(Passed::Yes)
    }

    /// Whether the class that was asked for can be measured here.
    fn check_class(&self, classes: &BTreeMap<String, Option<String>>) -> Result<(), CliError> {
        let Some(class) = &self.class else { return Ok(()) };
        let wrong = match classes.get(class) {
            Some(None) => return Ok(()),
            Some(Some(hindrance)) => format!("--class {class}: not available here: {hindrance}"),
            None => {
                let known: Vec<&str> = classes.keys().map(String::as_str).collect();
                format!("--class: got `{class}`, expected one that is measured: {}", known.join(", "))
            }
        };
        Err(CliError::Usage(wrong))
    }

    #[cfg(feature = "pjrt")]
    fn plugins(&self) -> Result<Vec<PathBuf>, CliError> {
        use crate::implementation::RunError;
        use crate::runtime::{Client, asked_for, find_installed};

        let given = if self.plugins.is_empty() { asked_for(None).into_iter().collect() } else { self.plugins.clone() };
        for plugin in &given {
            Client::shared(plugin).map_err(RunError::from)?;
        }
        if !given.is_empty() {
            return Ok(given);
        }
        // Where neither is installed, the name of the first says so.
        let older = find_installed("pjrt_cpu_0_81.so").ok();
        Ok([find_installed("pjrt_cpu.so").unwrap_or_else(|_| "pjrt_cpu.so".into())].into_iter().chain(older).collect())
    }

    #[cfg(not(feature = "pjrt"))]
    fn plugins(&self) -> Result<Vec<PathBuf>, CliError> {
        self.plugins.first().map_or(Ok(Vec::new()), |path| {
            Err(CliError::Usage(format!("--plugin {}: this build has no PJRT (feature `pjrt`)", path.display())))
        })
    }
}

fn read_text(path: &Path) -> Result<String, CliError> {
    fs::read_to_string(path).map_err(|reason| CliError::Io { path: path.into(), action: "read", reason })
}

fn parse(path: &Path, text: &str) -> Result<Tolerances, CliError> {
    Tolerances::parse(text).map_err(|error| CliError::Config { path: path.into(), reason: error.to_string() })
}

/// `2 cores, avx2, 2026-11-21`
fn machine() -> String {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let isa = registry::<Problem>(None).iter().find_map(|implementation| implementation.isa()).unwrap_or("unknown");
    format!("{cores} cores, {isa}, {}", OffsetDateTime::now_utc().date())
}

fn headed(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(header);
    table
}

/// The entries, what they were measured on in notes below, and the reasons that were accepted.
fn table(entries: &[&Tolerance]) -> String {
    let mut table = headed(&["output", "model", "dtype", "class", "κ", "derived", "worst seen", "measured on"]);
    let mut notes: Vec<&str> = Vec::new();
    let mut accepted = String::new();
    for entry in entries {
        let known = notes.iter().position(|note| *note == entry.measured_on);
        let note = known.unwrap_or_else(|| {
            notes.push(&entry.measured_on);
            notes.len() - 1
        });
        table.add_row([
            entry.output.name().into(),
            entry.model.name().into(),
            entry.dtype.to_string(),
            entry.class.clone(),
            entry.kappa.to_string(),
            entry.derived.to_string(),
            entry.worst_seen.to_string(),
            format!("[{}]", note + 1),
        ]);
        if let Some(reason) = &entry.accepted {
            accepted += &format!("accepted for {} {} {}: {reason}\n", entry.class, entry.gate(), entry.dtype);
        }
    }
    let mut text = format!("{table}\n");
    for (i, note) in notes.iter().enumerate() {
        text += &format!("[{}] {note}\n", i + 1);
    }
    text + &accepted + "|x̂ − x| ≤ ½ ulp + κ · u · scale, κ ≤ min(derived, 4 × worst seen)\n"
}

fn changes(revision: &Revision, classes: &BTreeMap<String, Option<String>>) -> String {
    let mut table = headed(&["output", "dtype", "class", "worst seen", "κ", "change"]);
    let count = |change| revision.entries.iter().filter(|line| line.change == change).count();
    for line in revision.entries.iter().filter(|line| line.change != Change::NotMeasured) {
        let pair = |of: fn(&Figures) -> f64| {
            let (old, new) = (of(&line.old), of(&line.new));
            if old == new { old.to_string() } else { format!("{old} → {new}") }
        };
        table.add_row([
            line.subject.gate.to_string(),
            line.subject.dtype.to_string(),
            line.subject.class.clone(),
            pair(|figures| figures.worst_seen),
            pair(|figures| figures.kappa),
            word(line.change).into(),
        ]);
    }
    let mut text = format!("{table}\n");
    for (class, hindrance) in classes {
        if let Some(hindrance) = hindrance {
            text += &format!("{class}: {hindrance}\n");
        }
    }
    let counted = [Change::Lowered, Change::Stands, Change::Held, Change::Raised, Change::NotMeasured]
        .map(|change| format!("{} {}", count(change), word(change)));
    text + &counted.join(", ") + "\n"
}

fn word(change: Change) -> &'static str {
    match change {
        Change::NotMeasured => "not measured",
        Change::Stands => "unchanged",
        Change::Held => "held by its reason",
        Change::Lowered => "lowered",
        Change::Raised => "raised",
    }
}
