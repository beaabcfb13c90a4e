//! Verdicts as a table and, where one failed, in words; as JSON they are [`Verdicts`]. A summary of many is in
//! [`super::summary`].

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};

use super::gate::{Model, Output};
use super::invariance::Invariance;
use super::judge::{Status, Verdict};
use super::judgeable::Judgeable;
use super::metric::{Position, ULP_EDGES, half_ulp, hex};
use super::tolerance::Grade;
use assay_core::problem::Dtype;
use assay_schema::verdicts::{self as schema, Explanation, Line, Summary, Verdicts};

/// One line of a report.
#[derive(Clone, Debug)]
pub struct Check {
    /// What was evaluated: a fixture with its logits and old log-probabilities, or a generated problem.
    pub fixture: String,
    /// Id of the implementation.
    pub implementation: String,
    /// Devices that it ran on.
    pub devices: usize,
    /// How its tile kernels were written for them: `loops` or `mosaic`.
    pub lowering: Option<&'static str>,
    /// The output and how it was compared.
    pub output: String,
    /// Dtype of the output.
    pub dtype: Dtype,
    /// Dtype that the problem promises for it.
    pub promised: Dtype,
    /// The better of the grades that it reaches; `None` where it reaches none, or nothing was compared.
    pub grade: Option<Grade>,
    /// What keeps it from grade `exact`, where `standard` was asked for and is the better one.
    pub short_of_exact: Option<String>,
    /// Where nothing was compared for it: so many tokens have an entropy that is the quantile of `top_entropy` to within rounding.
    pub open_entropies: Option<usize>,
    /// Error of the comparison closest to its limit, or furthest beyond; `None` where there was nothing to compare.
    pub worst: Option<f64>,
    /// Its limit.
    pub limit: Option<f64>,
    /// Where it stands.
    pub at: String,
    /// The decision.
    pub verdict: Status,
    /// The `κ` that the output needed.
    pub kappa_needed: f64,
    /// The `κ` it is allowed; `None` where no tolerance applies.
    pub kappa_allowed: Option<f64>,
    /// Elements by their error in ulp of that dtype, up to each of the report's `ulp_edges`, and beyond the last; `None`
    /// where the output has no elements, as metrics have none, or was not compared one by one.
    pub ulp: Option<[u64; ULP_EDGES.len()]>,
    /// Whether it held a gradient against a limit; `None` where it is not of a gradient.
    gradient: Option<bool>,
    /// Checks of one family share a row of the table while they pass.
    family: Option<&'static str>,
    /// The first token that is rightly NaN or ∞.
    pub nonfinite_as_in_reference: Option<String>,
    /// Values, or rows, that were not compared.
    pub not_compared: u64,
}

impl Check {
    /// The line for `verdict`.
    pub fn new(fixture: &str, implementation: &str, output: &str, verdict: &Verdict) -> Self {
        let tally = &verdict.tally;
        let odd = tally.nonfinite.or(tally.silent).map(|(at, _)| at);
        let worst = if odd.is_some() { None } else { tally.worst };
        let family = family(verdict.gate.output);
        Self {
            fixture: fixture.into(),
            implementation: implementation.into(),
            devices: 1,
            lowering: None,
            output: output.into(),
            dtype: verdict.dtype,
            promised: verdict.promised,
            grade: verdict.grade,
            short_of_exact: verdict.short_of_exact.map(|short| short.to_string()),
            open_entropies: verdict.open_entropies,
            worst: worst.map(|worst| worst.error),
            limit: worst.map(|worst| worst.limit),
            at: odd.or(worst.map(|worst| worst.at)).map_or_else(String::new, |at| at.to_string()),
            verdict: verdict.status,
            kappa_needed: tally.kappa_seen,
            kappa_allowed: verdict.kappa,
            ulp: (verdict.gate.model == Model::Elementwise && family.is_none()).then_some(tally.histogram),
            gradient: verdict.gate.output.is_gradient().then(|| verdict.compared_a_gradient()),
            family,
            nonfinite_as_in_reference: tally.reported.map(|at| at.to_string()),
            not_compared: tally.not_compared,
        }
    }

    /// The same check of a run on `devices` devices, for which tile kernels were written as `lowering` says.
    #[must_use]
    pub fn on_devices(self, devices: usize, lowering: Option<&'static str>) -> Self {
        Self { devices, lowering, ..self }
    }

    /// What ran: `tile-two-pass ×4, loops`.
    pub fn ran(&self) -> String {
        with_lowering(on_devices(&self.implementation, self.devices), self.lowering)
    }

    /// `error / limit`; `None` where nothing was compared, or a value is NaN or ∞ that should not be.
    pub fn share(&self) -> Option<f64> {
        let (worst, limit) = self.worst.zip(self.limit)?;
        Some(if worst > 0.0 { worst / limit } else { 0.0 })
    }
}

/// `xla-rows ×4`; one device goes without saying.
pub fn on_devices(id: &str, devices: usize) -> String {
    if devices == 1 { id.into() } else { format!("{id} ×{devices}") }
}

/// `tile-one-pass, loops`
pub fn with_lowering(name: String, lowering: Option<&str>) -> String {
    lowering.map_or(name.clone(), |lowering| format!("{name}, {lowering}"))
}

/// All checks of one command.
#[derive(Clone, Debug)]
pub struct Report {
    /// Whether every check passed.
    pub pass: bool,
    /// Upper edges of the histograms in the checks, of every bucket but the last.
    pub ulp_edges: &'static [f64],
    /// The checks, in the order they were made.
    pub checks: Vec<Check>,
    /// What was not checked, and why.
    pub ignored: Vec<Ignored>,
    /// What failures are likely of.
    pub diagnoses: Vec<String>,
    /// What each implementation came to, where a command runs several.
    pub implementations: Vec<Summary>,
    /// Runs on one device count against runs on another.
    pub invariance: Vec<Compared>,
}

/// Two runs of one implementation: on different device counts, or of a batch padded and packed.
#[derive(Clone, Debug)]
pub struct Compared {
    /// What was evaluated.
    pub fixture: String,
    /// Id of the implementation.
    pub implementation: String,
    /// Devices of the two runs.
    pub devices: [usize; 2],
    /// Whether the first was of the padded batch, and the other of the packed one.
    pub packed: bool,
    /// Which outputs have the same bits.
    pub invariance: Invariance,
}

impl Compared {
    /// What the other run has, or lacks, the bits of the first of.
    pub(super) fn runs(&self) -> String {
        let [one, many] = self.devices;
        if self.packed {
            format!("packed on ×{many} has those of padded")
        } else {
            format!("×{many} has those of ×{one}")
        }
    }
}

/// Something that was not checked.
#[derive(Clone, Debug)]
pub struct Ignored {
    /// What it would have been.
    pub what: String,
    /// Why it was not.
    pub why: String,
    /// The implementation, with its devices, that was not run.
    pub not_run: Option<String>,
}

impl From<Check> for schema::Check {
    fn from(check: Check) -> Self {
        let share = check.share();
        Self {
            fixture: check.fixture,
            implementation: check.implementation,
            devices: check.devices,
            lowering: check.lowering.map(String::from),
            output: check.output,
            dtype: Some(check.dtype.to_string()),
            promised: Some(check.promised.to_string()),
            grade: check.grade,
            short_of_exact: check.short_of_exact,
            share,
            worst: check.worst,
            limit: check.limit,
            at: check.at,
            verdict: check.verdict,
            kappa_needed: check.kappa_needed,
            kappa_allowed: check.kappa_allowed,
            ulp: check.ulp.map(Vec::from),
            nonfinite_as_in_reference: check.nonfinite_as_in_reference,
            not_compared: check.not_compared,
        }
    }
}

impl From<Ignored> for schema::Ignored {
    fn from(Ignored { what, why, .. }: Ignored) -> Self {
        Self { what, why }
    }
}

impl From<Compared> for schema::Compared {
    fn from(Compared { fixture, implementation, devices, packed, invariance }: Compared) -> Self {
        let owned = |names: Vec<&str>| names.into_iter().map(String::from).collect();
        let (same, other) = (owned(invariance.same), owned(invariance.other));
        Self { fixture, implementation, devices, packed, same, other }
    }
}

impl From<Report> for Verdicts {
    fn from(report: Report) -> Self {
        Self {
            pass: report.pass,
            ulp_edges: report.ulp_edges.into(),
            checks: report.checks.into_iter().map(Into::into).collect(),
            ignored: report.ignored.into_iter().map(Into::into).collect(),
            diagnoses: report.diagnoses,
            implementations: report.implementations,
            invariance: report.invariance.into_iter().map(Into::into).collect(),
        }
    }
}

impl Report {
    /// A report over `checks`. One without a check does not pass, nor one of a run all of whose gradients compared nothing.
    pub fn new(checks: Vec<Check>, ignored: Vec<Ignored>) -> Self {
        let failed = checks.iter().any(|check| check.verdict.failed());
        Self {
            pass: !checks.is_empty() && !failed && without_gradient(&checks).is_empty(),
            ulp_edges: &ULP_EDGES[..ULP_EDGES.len() - 1],
            checks,
            ignored,
            diagnoses: Vec::new(),
            implementations: Vec::new(),
            invariance: Vec::new(),
        }
    }

    /// The table, the ignored checks and the total line.
    pub fn table(&self) -> String {
        self.checks_table() + &self.below_table()
    }

    /// A row a check.
    pub fn checks_table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header([
            "fixture",
            "impl",
            "output",
            "worst error",
            "limit",
            "error/limit",
            "at",
            "verdict",
            "grade",
        ]);
        for column in 3..6 {
            table.column_mut(column).expect("nine columns").set_cell_alignment(CellAlignment::Right);
        }
        let number = |x: Option<f64>| x.map_or("–".into(), |x| format!("{x:.2e}"));
        for (check, count) in self.rows() {
            let output = if count == 1 {
                check.output.clone()
            } else {
                format!("{count} {}", check.family.unwrap_or("outputs"))
            };
            table.add_row([
                check.fixture.clone(),
                check.ran(),
                output,
                number(check.worst),
                number(check.limit),
                check.share().map_or("–".into(), quotient),
                check.at.clone(),
                check.verdict.word().into(),
                check.grade.map_or("–", Grade::name).into(),
            ]);
        }
        format!("{table}\n")
    }

    /// Every ignored check, every comparison of two runs, and the total line.
    pub fn below_table(&self) -> String {
        let mut text = String::new();
        let mut said = Vec::new();
        for check in &self.checks {
            let Some(short) = &check.short_of_exact else { continue };
            if !said.contains(&(&check.output, short)) {
                said.push((&check.output, short));
                let _ = writeln!(text, "short of grade exact  {}: {short}", check.output);
            }
        }
        for check in &self.checks {
            let Some(open) = check.open_entropies else { continue };
            let why = "have the quantile's entropy to within rounding, more than sets of are told apart";
            let _ = writeln!(text, "not compared  {}: {open} tokens {why}", check.output);
        }
        for diagnosis in &self.diagnoses {
            let _ = writeln!(text, "likely   {diagnosis}");
        }
        for Ignored { what, why, .. } in &self.ignored {
            let _ = writeln!(text, "ignored  {what}: {why}");
        }
        for compared @ Compared { fixture, implementation, invariance, .. } in &self.invariance {
            let list = |names: &[&str]| if names.is_empty() { "nothing".into() } else { names.join(", ") };
            let (same, other) = (list(&invariance.same), list(&invariance.other));
            let _ = writeln!(
                text,
                "bits     {fixture} with {implementation}: {} in {same}; others in {other}",
                compared.runs()
            );
        }
        let _ = writeln!(text, "{}", self.total());
        text
    }

    /// The checks as the table shows them: those of one family that passed in a row become one, the closest to its limit.
    fn rows(&self) -> Vec<(&Check, usize)> {
        let joins = |a: &Check, b: &Check| {
            let same = |of: fn(&Check) -> (&str, &str)| of(a) == of(b);
            a.family.is_some()
                && a.family == b.family
                && same(|check| (&check.fixture, &check.implementation))
                && [a, b].iter().all(|check| check.verdict == Status::Pass)
        };
        let closest = |checks: &'_ [Check]| {
            let share = |check: &Check| check.share().unwrap_or(0.0);
            checks.iter().enumerate().max_by(|(_, a), (_, b)| share(a).total_cmp(&share(b))).map_or(0, |(i, _)| i)
        };
        let groups = self.checks.chunk_by(joins);
        groups.map(|group| (&group[closest(group)], group.len())).collect()
    }

    /// One line: how many checks there were and how they ended.
    pub fn total(&self) -> String {
        let count = |of: &dyn Fn(Status) -> bool| self.checks.iter().filter(|check| of(check.verdict)).count();
        let verdict = if self.pass { "PASS" } else { "FAIL" };
        let (passed, failed) = (count(&|status| status == Status::Pass), count(&Status::failed));
        let mut line = format!("{verdict}  {passed} checks passed, {failed} failed, {} ignored", self.ignored.len());
        for (status, words) in [(Status::Waived, "waived"), (Status::NotCompared, "not compared")] {
            let n = count(&|other| other == status);
            if n > 0 {
                let _ = write!(line, ", {n} {words}");
            }
        }
        for run in without_gradient(&self.checks) {
            let _ = write!(line, "; no gradient of {run} was compared");
        }
        line
    }
}

/// What a table calls outputs that it shows together.
fn family(output: Output) -> Option<&'static str> {
    match output {
        Output::Recorded => Some("recorded values"),
        Output::EntropyMean
        | Output::KlMean
        | Output::RatioMean
        | Output::ClipLow
        | Output::ClipHigh
        | Output::ClipRegion => Some("metrics"),
        Output::Loss
        | Output::Logp
        | Output::Entropy
        | Output::TokenLoss
        | Output::Dlogits
        | Output::Dhidden
        | Output::DlmHead => None,
    }
}

/// The runs that have gradients among their checks, and compared none.
fn without_gradient(checks: &[Check]) -> Vec<String> {
    let mut runs: Vec<(String, bool)> = Vec::new();
    for check in checks {
        let Some(compared) = check.gradient else { continue };
        let run = format!("{} with {}", check.fixture, check.ran());
        match runs.iter_mut().find(|(other, _)| *other == run) {
            Some((_, any)) => *any |= compared,
            None => runs.push((run, compared)),
        }
    }
    runs.into_iter().filter(|(_, compared)| !compared).map(|(run, _)| run).collect()
}

/// A quotient, to three digits.
fn quotient(x: f64) -> String {
    match x {
        0.0 => "exact".into(),
        x if (1e-3..1e6).contains(&x) => {
            let digits = [10.0, 100.0, 1000.0].into_iter().filter(|power| x < *power).count();
            format!("{x:.digits$}")
        }
        x => format!("{x:.2e}"),
    }
}

/// A failed verdict in words: where, from what inputs, expected and actual in decimal and hexadecimal, the error against
/// its limit, the histogram of all errors in ulp, and the command that shows it again.
pub(super) fn explain<P: Judgeable>(
    verdict: &Verdict,
    reference: &P::Reference<'_>,
    problem: &P,
    implementation: &str,
    replay: &str,
) -> Explanation {
    let inputs = |at| problem.inputs(reference, at);
    explained(verdict, &format!("{implementation}: {}", verdict.gate), ["expected", "actual"], inputs, replay)
}

/// The same of a recorded value, `what`, that the reference does not come to.
pub fn explain_recorded(verdict: &Verdict, what: &str, replay: &str) -> Explanation {
    explained(verdict, what, ["reference", "recorded"], |_| None, replay)
}

fn explained(
    verdict: &Verdict,
    what: &str,
    [of_reference, judged]: [&str; 2],
    inputs: impl Fn(Position) -> Option<String>,
    replay: &str,
) -> Explanation {
    let Verdict { dtype, promised, tally, .. } = verdict;
    let mut lines = Vec::new();
    // A scalar stands nowhere.
    let mut line = |name: &str, value: &str| {
        if !value.is_empty() {
            lines.push(Line { name: name.into(), text: value.into() });
        }
    };
    // A norm, or a sum, is a number of the judge's.
    let of_one_element = verdict.gate.model == Model::Elementwise;
    let both = |x: f64| if of_one_element { format!("{x:.17e}  {}", hex(x, *dtype)) } else { format!("{x:.9e}") };
    let odd =
        tally.nonfinite.map(|odd| (odd, "finite")).or(tally.silent.map(|odd| (odd, "NaN or ∞, as the reference")));
    let at = match (odd, tally.worst) {
        (Some(((at, actual), expected)), _) => {
            line("at", &at.to_string());
            line(of_reference, expected);
            line(judged, &both(actual));
            Some(at)
        }
        (None, Some(worst)) => {
            line("at", &worst.at.to_string());
            match verdict.gate.model {
                Model::RowL2 => {
                    line("norm", &format!("{:.9e} of the difference from the {of_reference} row", worst.actual));
                }
                Model::RowSum => {
                    line("sum", &format!("{:.9e} of the difference from the {of_reference} row", worst.actual));
                }
                Model::Elementwise | Model::Count => {
                    line(of_reference, &both(worst.expected));
                    line(judged, &both(worst.actual));
                }
            }
            line(
                "error",
                &format!("{:.3e}, {:.4} times the limit {:.3e}", worst.error, worst.error_over_limit(), worst.limit),
            );
            Some(worst.at)
        }
        (None, None) => None,
    };
    if let Some(inputs) = at.and_then(inputs) {
        line("inputs", &inputs);
    }
    if let Some(kappa) = verdict.kappa {
        line("κ", &format!("{:.3} needed, {kappa} allowed", tally.kappa_seen));
    }
    if of_one_element {
        if let Some(worst) = tally.worst {
            line("1 ulp", &format!("{:.3e} in {dtype}", 2.0 * half_ulp(worst.expected, *dtype)));
        }
        line("ulp", &histogram(&tally.histogram));
    }
    if dtype != promised {
        let note = "a coarser output is judged by the ulp of the promised dtype, a finer one by its own";
        line("promised", &format!("{promised}; {note}"));
    }
    line("replay", replay);
    let finite = |x: f64| Some(x).filter(|x| x.is_finite());
    let worst = if odd.is_some() { None } else { tally.worst };
    Explanation {
        status: verdict.status,
        of: what.into(),
        gate: verdict.gate.to_string(),
        dtype: dtype.to_string(),
        at: at.map_or_else(String::new, |at| at.to_string()),
        expected: worst.filter(|_| of_one_element).map(|worst| worst.expected),
        actual: odd.map_or(worst.map(|worst| worst.actual), |((_, actual), _)| finite(actual)),
        error: worst.map(|worst| worst.error),
        limit: worst.map(|worst| worst.limit),
        lines,
    }
}

/// `≤½: 120  ≤1: 3  …`, without the empty tail.
fn histogram(counts: &[u64]) -> String {
    let filled = counts.iter().rposition(|&n| n > 0).map_or(0, |last| last + 1);
    let bucket =
        |(edge, n): (&f64, &u64)| if edge.is_finite() { format!("≤{edge}: {n}") } else { format!("more: {n}") };
    let buckets: Vec<String> = ULP_EDGES.iter().zip(counts).take(filled).map(bucket).collect();
    if buckets.is_empty() { "nothing compared".into() } else { buckets.join("  ") }
}
