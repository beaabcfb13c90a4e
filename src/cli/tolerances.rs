//! `assay tolerances`: the limits of the judge, and what correct implementations have needed of them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::thread;

use clap::Args;
use comfy_table::{Table, TableStyle, presets::ASCII_MARKDOWN, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;
use time::OffsetDateTime;

use super::document::{self, Marks};
use super::panel::PanelCommand;
use super::{CliError, Passed, Printing};
use crate::files::read_named_text;
use crate::judge::tolerance::Tolerances;
use crate::registry::{compiled, compiled_heads, immediate, immediate_heads, registry};
use crate::suites::measure::{
    self, CASES, CompiledImplementations, MeasuredGate, MeasuredImplementations, Measurement, NeededKappa,
};
#[cfg(not(feature = "pjrt"))]
use crate::text::ShownPath;

/// The lines that stand around the figures in a document.
const MARKS: Marks = ["<!-- assay tolerances --measure -->", "<!-- end of figures -->"];

#[derive(Args)]
pub(super) struct TolerancesCommand {
    /// Measure what correct implementations need, and run the panel of kernels of others where its Python is
    #[arg(long)]
    measure: bool,
    /// The one class to measure
    #[arg(long, value_name = "CLASS", requires = "measure", conflicts_with = "into")]
    class: Option<String>,
    /// Random cases; with fewer than in the default, all other cases are fewer in proportion, and less is seen
    #[arg(long, value_name = "N", requires = "measure", default_value_t = CASES, value_parser = at_least_one)]
    cases: usize,
    /// PJRT plugin to measure on, once for each; the CPU plugins that `make setup` installed if none is given
    #[arg(long = "plugin", value_name = "FILE.so", requires = "measure")]
    plugins: Vec<PathBuf>,
    /// Also put the figures between their marks in a document, such as docs/tolerances.md
    #[arg(long, value_name = "FILE.md", requires = "measure")]
    into: Option<PathBuf>,
    /// The tolerance file to show, instead of the one that is built in
    #[arg(long, value_name = "PATH", conflicts_with = "measure")]
    file: Option<PathBuf>,
    #[command(flatten)]
    printing: Printing,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| *n >= 1);
    number.ok_or_else(|| "expected a whole number, 1 or more".into())
}

/// The measurement of one gate.
#[derive(Serialize)]
struct Figure<'m> {
    #[serde(flatten)]
    subject: &'m MeasuredGate,
    #[serde(flatten)]
    needed: &'m NeededKappa,
}

impl TolerancesCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        if self.measure { self.measure() } else { self.show() }
    }

    fn show(&self) -> Result<Passed, CliError> {
        let read;
        let tolerances = match &self.file {
            None => Tolerances::builtin(),
            Some(path) => {
                read = read_file(path)?;
                &read
            }
        };
        self.printing.finish(&in_words(tolerances), tolerances)?;
        Ok(Passed::Yes)
    }

    fn measure(&self) -> Result<Passed, CliError> {
        let plugins = self.plugins()?;
        let on = |plugin: PathBuf| {
            let (on_logits, heads) = (compiled(&plugin), compiled_heads(&plugin));
            CompiledImplementations { plugin, on_logits, heads }
        };
        let measured = MeasuredImplementations {
            immediate: immediate(),
            immediate_heads: immediate_heads(),
            compiled: plugins.into_iter().map(on).collect(),
        };
        // The class is checked before anything is measured, which takes minutes.
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

        let figures: Vec<Figure> = measurement.needed().map(|(subject, needed)| Figure { subject, needed }).collect();
        let mut notes = String::new();
        for (class, covered) in measurement.classes() {
            let _ = writeln!(notes, "- {class}: {covered}; {}", machine());
        }
        for (class, hindrance) in &classes {
            if let Some(hindrance) = hindrance {
                let _ = writeln!(notes, "- {class}: not measured: {hindrance}");
            }
        }
        if let Some(path) = &self.into {
            let whole = table(&figures, ASCII_MARKDOWN).to_string();
            document::put_with_data(path, MARKS, "kappas", &whole, &format!("{}\n\n{notes}", summary(&figures)))?;
        }
        // A measurement beyond its limit fails the command: it is a bug of an implementation or of the derivation.
        let beyond: Vec<&Figure> = figures.iter().filter(|of| of.needed.kappa > of.needed.allowed).collect();
        let mut text = format!("{}\n{notes}", table(&figures, UTF8_FULL_CONDENSED));
        for Figure { subject, needed } in &beyond {
            let NeededKappa { kappa, allowed, case } = needed;
            let _ = writeln!(text, "{subject}: κ = {kappa} was needed, {allowed} is allowed: {case}");
        }
        // The panel judges kernels of other projects by the same limits, and needs a Python with theirs.
        let panel =
            if self.class.is_none() { PanelCommand::from_project_files() } else { Err("one class is measured".into()) };
        if let Err(why) = &panel {
            let _ = writeln!(text, "ignored  the panel of kernels of others: {why}");
        }
        self.printing.finish_list(&text, &figures)?;
        let others = panel.map_or(Ok(Passed::Yes), |panel| panel.run())?;
        Ok((beyond.is_empty() && others == Passed::Yes).into())
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
        Err(CliError::Usage(wrong.into()))
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
        // If neither is installed, the path of the first appears in the message. It is whole: a bare name would be loaded from the
        // working directory.
        let absent = |looked: Vec<PathBuf>| looked.into_iter().next().unwrap_or_else(|| "/pjrt_cpu.so".into());
        let older = find_installed("pjrt_cpu_0_81.so").ok();
        Ok([find_installed("pjrt_cpu.so").unwrap_or_else(absent)].into_iter().chain(older).collect())
    }

    #[cfg(not(feature = "pjrt"))]
    fn plugins(&self) -> Result<Vec<PathBuf>, CliError> {
        self.plugins.first().map_or(Ok(Vec::new()), |path| {
            Err(CliError::usage(format!("--plugin {}: {}", ShownPath(path), crate::registry::LACKS_PLUGINS)))
        })
    }
}

/// The longest file of limits that is read, in bytes.
const LONGEST: u64 = 1 << 20;

fn read_file(path: &Path) -> Result<Tolerances, CliError> {
    let read =
        read_named_text(path, LONGEST).map_err(|reason| CliError::Io { path: path.into(), action: "read", reason });
    let text = read?;
    Tolerances::parse(&text).map_err(|error| CliError::Config { path: path.into(), reason: error.to_string().into() })
}

/// Describes the machine and the day: `2 cores, avx2, 2026-11-21`.
fn machine() -> String {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let isa = registry(None).iter().find_map(|implementation| implementation.isa()).unwrap_or("unknown");
    format!("{cores} cores, {isa}, {}", OffsetDateTime::now_utc().date())
}

fn headed(header: &[&str], style: TableStyle) -> Table {
    let mut table = Table::new();
    table.load_style(style);
    table.set_header(header);
    table
}

/// Writes the decisions of people, with their reasons.
fn in_words(tolerances: &Tolerances) -> String {
    let mut table = headed(&["class", "κ of logp", "entropy", "gradients", "because"], UTF8_FULL_CONDENSED);
    for (name, class) in &tolerances.class {
        let [logp, entropy, gradient] = [class.logp, class.entropy, class.gradient].map(|kappa| kappa.to_string());
        table.add_row([name.clone(), logp, entropy, gradient, class.why.clone()]);
    }
    let Tolerances { standard, sums, recorded, admitted, .. } = tolerances;
    let mut text = format!("{table}\n|x̂ − x| ≤ ½ ulp + κ · u · scale + floor\n");
    let _ = writeln!(text, "grade standard: an offset of {} u: {}", standard.offset, standard.why);
    let _ = writeln!(text, "sums of random signs: {} standard deviations: {}", sums.deviations, sums.why);
    let _ = writeln!(text, "recorded scalars: κ = {}: {}", recorded.kappa, recorded.why);
    for admitted in admitted {
        let _ = writeln!(text, "grade standard admits {}: {}", admitted.mutant, admitted.why);
    }
    text
}

/// Summarises the figures by class: the gate that needs most of what it is allowed.
fn summary(figures: &[Figure]) -> Table {
    let mut table = headed(
        &["class", "gates", "most of what is allowed", "κ needed", "κ allowed", "allowed / needed"],
        ASCII_MARKDOWN,
    );
    let mut classes: BTreeMap<&str, Vec<&Figure>> = BTreeMap::new();
    for figure in figures {
        classes.entry(&figure.subject.class).or_default().push(figure);
    }
    let share = |figure: &&Figure| figure.needed.kappa / figure.needed.allowed;
    for (class, gates) in classes {
        let Some(tightest) = gates.iter().max_by(|a, b| share(a).total_cmp(&share(b))) else { continue };
        let Figure { subject, needed: NeededKappa { kappa, allowed, .. } } = tightest;
        table.add_row([
            class.to_string(),
            gates.len().to_string(),
            format!("{} {}", subject.gate, subject.dtype),
            format!("{kappa:.4}"),
            allowed.to_string(),
            format!("{:.1}", allowed / kappa),
        ]);
    }
    table
}

fn table(figures: &[Figure], style: TableStyle) -> Table {
    let mut table = headed(&["class", "gate", "dtype", "κ needed", "κ allowed", "allowed / needed"], style);
    for Figure { subject, needed } in figures {
        let NeededKappa { kappa, allowed, .. } = needed;
        let times = if *kappa > 0.0 { format!("{:.1}", allowed / kappa) } else { "rounding is enough".into() };
        table.add_row([
            subject.class.clone(),
            subject.gate.to_string(),
            subject.dtype.to_string(),
            format!("{kappa:.4}"),
            allowed.to_string(),
            times,
        ]);
    }
    table
}
