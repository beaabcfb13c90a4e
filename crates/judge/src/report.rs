//! Verdicts as JSON ([`Verdicts`]), as a table, and in words. The table of a whole replay is in [`super::summary`].
//!
//! ```
//! use assay_judge::report::{check, table, verdicts};
//! # use assay_core::problem::{Candidate, Dtype, FloatArray};
//! # use assay_core::spec::LossSpec;
//! # use assay_judge::generate::{Recipe, Regime};
//! # use assay_judge::judgeable::Judgeable;
//! # use assay_judge::tolerance::Limits;
//! # let spec = LossSpec::default();
//! # let recipe = Recipe {
//! #     shape: [2, 3, 32],
//! #     dtype: Dtype::F32,
//! #     regime: Regime::Normal,
//! #     seed: 0,
//! #     old_logp_noise_scale: 0.3,
//! #     masked_garbage: false,
//! # };
//! # let problem = recipe.problem(&spec)?;
//! # let reference = problem.evaluate(&spec)?;
//! let candidate: Candidate = reference.outcome().into();
//! let judged = problem.judge(&reference, &candidate.lend(), &Limits::for_class("external")?)?;
//! let checks = judged.iter().map(|verdict| check("problem", "kernel", &verdict.gate.to_string(), verdict)).collect();
//! let verdicts = verdicts(checks, Vec::new());
//! assert!(verdicts.pass && table(&verdicts).ends_with("failed, 0 ignored\n"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};

use super::error_map::most_telling;
use super::gate::{Gate, Model, Output};
use super::invariance::Invariance;
use super::judge::{Status, Verdict};
use super::judgeable::Judgeable;
use super::metric::{Position, ULP_EDGES, half_ulp, hex};
use super::tolerance::Grade;
use assay_schema::number::{distinct, quotient as quotient_in_words, six};
use assay_schema::picture::ErrorPicture;
use assay_schema::verdicts::{BitComparison, Explanation, ExplanationLine, GateCheck, IgnoredCheck, Verdicts};

pub use assay_schema::verdicts::{on_devices, with_lowering};

/// Describes `verdict` as one check of `implementation` on `fixture`; `output` names what was judged.
pub fn check(fixture: &str, implementation: &str, output: &str, verdict: &Verdict) -> GateCheck {
    let tally = &verdict.tally;
    // A value that is NaN or ∞, or is not and should be, is the worst of all: it has a place, but no error.
    let odd = tally.nonfinite.or(tally.silent).map(|(at, _)| at);
    let worst = if odd.is_some() { None } else { tally.worst };
    let family = family(verdict.gate.output);
    GateCheck {
        fixture: fixture.into(),
        implementation: implementation.into(),
        devices: 1,
        lowering: None,
        output: output.into(),
        dtype: Some(verdict.dtype.to_string()),
        promised: Some(verdict.promised.to_string()),
        grade: verdict.grade,
        short_of_exact: verdict.short_of_exact.map(|short| short.to_string()),
        open_entropies: verdict.open_entropies,
        error_over_limit: worst.map(|worst| worst.error_over_limit()),
        worst: worst.map(|worst| worst.error),
        limit: worst.map(|worst| worst.limit),
        at: odd.or(worst.map(|worst| worst.at)).map_or_else(String::new, |at| at.to_string()),
        verdict: verdict.status,
        kappa_needed: tally.kappa_seen,
        kappa_allowed: verdict.kappa,
        ulp: (verdict.gate.model == Model::Elementwise && family.is_none()).then(|| tally.histogram.to_vec()),
        nonfinite_as_in_reference: tally.reported.map(|at| at.to_string()),
        not_compared: tally.not_compared,
        compared_gradient: verdict.gate.output.is_gradient().then(|| verdict.compared_a_gradient()),
        family,
    }
}

/// Describes a check that was not made.
pub fn ignored(what: impl Into<String>, why: impl Into<String>) -> IgnoredCheck {
    IgnoredCheck { what: what.into(), why: why.into(), not_run: None }
}

/// Describes a comparison of two runs of `implementation`, on `devices` each; `packed` if the second was of the packed batch.
pub fn bit_comparison(
    fixture: &str,
    implementation: &str,
    devices: [usize; 2],
    packed: bool,
    Invariance { same, other }: &Invariance,
) -> BitComparison {
    let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect();
    BitComparison {
        fixture: fixture.into(),
        implementation: implementation.into(),
        devices,
        packed,
        same: owned(same),
        other: owned(other),
    }
}

/// Says which run has the bits of which: `×4 has those of ×1`.
pub(super) fn compared_runs(BitComparison { devices: [one, many], packed, .. }: &BitComparison) -> String {
    if *packed { format!("packed on ×{many} has those of padded") } else { format!("×{many} has those of ×{one}") }
}

/// Collects checks into verdicts. They do not pass without a check, nor if a run with gradients compared none of them.
pub fn verdicts(checks: Vec<GateCheck>, ignored: Vec<IgnoredCheck>) -> Verdicts {
    let failed = checks.iter().any(|check| check.verdict.failed());
    Verdicts {
        pass: !checks.is_empty() && !failed && without_gradient(&checks).is_empty(),
        ulp_edges: ULP_EDGES[..ULP_EDGES.len() - 1].to_vec(),
        checks,
        ignored,
        ..Verdicts::default()
    }
}

/// Draws the table, with the ignored checks and the total line below.
pub fn table(verdicts: &Verdicts) -> String {
    checks_table(verdicts) + &below_table(verdicts)
}

/// Draws the table with a line per check; metrics and recorded values that pass share one.
pub fn checks_table(verdicts: &Verdicts) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(["fixture", "impl", "output", "worst error", "limit", "error / limit", "at", "verdict", "grade"]);
    for column in 3..6 {
        table.column_mut(column).expect("nine columns").set_cell_alignment(CellAlignment::Right);
    }
    let number = |x: Option<f64>| x.map_or("–".into(), |x| format!("{x:.2e}"));
    // Metrics and recorded values are many and hardly ever fail, so the line of a family names its size and its worst
    // member.
    for (check, count) in table_lines(&verdicts.checks) {
        let output =
            if count == 1 { check.output.clone() } else { format!("{count} {}", check.family.unwrap_or("outputs")) };
        table.add_row([
            check.fixture.clone(),
            check.run(),
            output,
            number(check.worst),
            number(check.limit),
            check.error_over_limit.map_or("–".into(), quotient),
            check.at.clone(),
            check.verdict.word().into(),
            check.grade.map_or("–", Grade::name).into(),
        ]);
    }
    format!("{table}\n")
}

/// Lists every ignored check, every comparison of two runs, and the total.
pub fn below_table(verdicts: &Verdicts) -> String {
    let mut text = String::new();
    let mut said = Vec::new();
    // The checks of one output fall short for one reason on many fixtures: each pair of output and reason is written
    // once.
    for check in &verdicts.checks {
        let Some(short) = &check.short_of_exact else { continue };
        if !said.contains(&(&check.output, short)) {
            said.push((&check.output, short));
            let _ = writeln!(text, "short of grade exact  {}: {short}", check.output);
        }
    }
    for check in &verdicts.checks {
        let Some(open) = check.open_entropies else { continue };
        let why = "have the quantile's entropy to within rounding, more than sets of are told apart";
        let _ = writeln!(text, "not compared  {}: {open} tokens {why}", check.output);
    }
    for diagnosis in &verdicts.diagnoses {
        let _ = writeln!(text, "likely   {diagnosis}");
    }
    for IgnoredCheck { what, why, .. } in &verdicts.ignored {
        let _ = writeln!(text, "ignored  {what}: {why}");
    }
    for compared @ BitComparison { fixture, implementation, same, other, .. } in &verdicts.invariance {
        let list = |names: &[String]| if names.is_empty() { "nothing".into() } else { names.join(", ") };
        let (same, other) = (list(same), list(other));
        let _ = writeln!(
            text,
            "bits     {fixture} with {implementation}: {} in {same}; others in {other}",
            compared_runs(compared)
        );
    }
    let _ = writeln!(text, "{}", total(verdicts));
    text
}

/// Groups the checks into lines: those of one family that pass one after another become one line, the one closest to its limit, with
/// their number.
fn table_lines(checks: &[GateCheck]) -> Vec<(&GateCheck, usize)> {
    // Only neighbours are joined, so that the table keeps the order in which checks were made.
    let joins = |a: &GateCheck, b: &GateCheck| {
        let same = |of: fn(&GateCheck) -> (&str, &str)| of(a) == of(b);
        a.family.is_some()
            && a.family == b.family
            && same(|check| (&check.fixture, &check.implementation))
            && [a, b].iter().all(|check| check.verdict == Status::Pass)
    };
    let closest = |checks: &[GateCheck]| {
        let quotient = |check: &GateCheck| check.error_over_limit.unwrap_or(0.0);
        checks.iter().enumerate().max_by(|(_, a), (_, b)| quotient(a).total_cmp(&quotient(b))).map_or(0, |(i, _)| i)
    };
    let groups = checks.chunk_by(joins);
    groups.map(|group| (&group[closest(group)], group.len())).collect()
}

/// Writes one line: the number of checks, and how they ended.
pub fn total(Verdicts { pass, checks, ignored, .. }: &Verdicts) -> String {
    let count = |of: &dyn Fn(Status) -> bool| checks.iter().filter(|check| of(check.verdict)).count();
    let verdict = if *pass { "PASS" } else { "FAIL" };
    let (passed, failed) = (count(&|status| status == Status::Pass), count(&Status::failed));
    let mut line = format!("{verdict}  {passed} checks passed, {failed} failed, {} ignored", ignored.len());
    for (status, words) in [(Status::Waived, "waived"), (Status::NotCompared, "not compared")] {
        let n = count(&|other| other == status);
        if n > 0 {
            let _ = write!(line, ", {n} {words}");
        }
    }
    for run in without_gradient(checks) {
        let _ = write!(line, "; no gradient of {run} was compared");
    }
    line
}

/// Names the outputs that share a line of the table while they pass.
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

/// Names the runs that have gradients among their checks, and compared none of them though a token counts.
fn without_gradient(checks: &[GateCheck]) -> Vec<String> {
    // A run is a fixture with an implementation: one compared gradient among its checks is enough.
    let mut runs: Vec<(String, ComparedGradients)> = Vec::new();
    for check in checks {
        let Some(compared) = check.compared_gradient else { continue };
        let run = format!("{} with {}", check.fixture, check.run());
        let place = runs.iter().position(|(other, _)| *other == run).unwrap_or_else(|| {
            runs.push((run, ComparedGradients::default()));
            runs.len() - 1
        });
        let of_run = &mut runs[place].1;
        of_run.any |= compared;
        // Only the gradient of masked tokens passes without being a compared one.
        of_run.masked |= !compared && check.verdict == Status::Pass;
        of_run.left_out |= check.not_compared > 0 || check.nonfinite_as_in_reference.is_some();
    }
    runs.into_iter().filter(|(_, gradients)| !gradients.are_compared()).map(|(run, _)| run).collect()
}

/// The gradients of one run that were compared.
#[derive(Clone, Copy, Default)]
struct ComparedGradients {
    /// Whether the gradient of a token that counts was held against a limit.
    any: bool,
    /// Whether the gradient of masked tokens is 0, as it must be.
    masked: bool,
    /// Whether a token that counts was left out, as its values are rightly NaN or ∞.
    left_out: bool,
}

impl ComparedGradients {
    /// Whether the run's gradients were compared: in a batch in which no token counts those of masked tokens are all that there is.
    fn are_compared(self) -> bool {
        self.any || (self.masked && !self.left_out)
    }
}

/// Writes a quotient to three digits; 0 is `exact`.
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

/// Explains a verdict in words: its place and inputs, the expected and the actual value in decimal and hexadecimal, the error against
/// its limit, the histogram of all errors in ulp, and the command that repeats it.
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

/// Explains a verdict on a recorded value, `what`, that differs from the reference.
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
    let (mut lines, mut details) = (Vec::new(), Vec::new());
    // A scalar has no place: an empty text adds no line.
    let add = |lines: &mut Vec<ExplanationLine>, name: &str, value: &str| {
        if !value.is_empty() {
            lines.push(ExplanationLine { name: name.into(), text: value.into() });
        }
    };
    let of_one_element = verdict.gate.model == Model::Elementwise;
    let odd =
        tally.nonfinite.map(|odd| (odd, "finite")).or(tally.silent.map(|odd| (odd, "NaN or ∞, as the reference")));
    let at = match (odd, tally.worst) {
        (Some(((at, actual), expected)), _) => {
            add(&mut lines, "at", &at.to_string());
            add(&mut lines, of_reference, expected);
            add(&mut lines, judged, &six(actual));
            Some(at)
        }
        (None, Some(worst)) => {
            add(&mut lines, "at", &worst.at.to_string());
            let [expected, actual] = distinct(worst.expected, worst.actual);
            match verdict.gate.model {
                Model::RowL2 => {
                    add(&mut lines, "norm", &format!("{actual} of the difference from the {of_reference} row"));
                }
                Model::RowSum => {
                    add(&mut lines, "sum", &format!("{actual} of the difference from the {of_reference} row"));
                }
                Model::Elementwise | Model::Count => {
                    add(&mut lines, of_reference, &expected);
                    add(&mut lines, judged, &actual);
                }
            }
            let quotient = quotient_in_words(worst.error_over_limit());
            let limit = if worst.limit == 0.0 { "0".into() } else { format!("{:.3e}", worst.limit) };
            add(&mut lines, "error", &format!("{:.3e}, {quotient} times the limit {limit}", worst.error));
            Some(worst.at)
        }
        (None, None) => None,
    };
    if let Some(inputs) = at.and_then(inputs) {
        add(&mut lines, "inputs", &inputs);
    }
    if dtype != promised {
        let note = "a coarser output is judged by the ulp of the promised dtype, a finer one by its own";
        add(&mut lines, "promised", &format!("{promised}; {note}"));
    }
    add(&mut lines, "replay", replay);
    if let Some(kappa) = verdict.kappa {
        add(&mut details, "κ", &format!("{:.3} needed, {kappa} allowed", tally.kappa_seen));
    }
    // A norm or a sum is computed by the judge: its bits say nothing.
    if of_one_element {
        let judged_value = odd.map(|((_, actual), _)| actual).or(tally.worst.map(|worst| worst.actual));
        if let Some(worst) = tally.worst.filter(|_| odd.is_none()) {
            add(&mut details, of_reference, &format!("{:.17e}  {}", worst.expected, hex(worst.expected, *dtype)));
        }
        if let Some(actual) = judged_value {
            add(&mut details, judged, &format!("{actual:.17e}  {}", hex(actual, *dtype)));
        }
        if let Some(worst) = tally.worst {
            add(&mut details, "1 ulp", &format!("{:.3e} in {dtype}", 2.0 * half_ulp(worst.expected, *dtype)));
        }
        add(&mut details, "ulp", &histogram(&tally.histogram));
    }
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
        details,
    }
}

/// Draws where the values of a failed gate are beyond their limits; `None` if its output has no axis, or the verdicts have no
/// [maps](super::tolerance::Limits::with_error_maps).
pub fn picture(verdicts: &[Verdict], gate: Gate, problem: &str) -> Option<ErrorPicture> {
    let output = gate.output.name();
    let maps =
        |gate| verdicts.iter().find(|verdict| verdict.gate == gate).map_or(&[][..], |verdict| &verdict.tally.maps);
    // The single values show more than the norm of a row does, if they are beyond their limits.
    let elementwise = most_telling(maps(Gate { model: Model::Elementwise, ..gate }), output, problem);
    elementwise.or_else(|| most_telling(maps(gate), &gate.to_string(), problem))
}

/// Writes the histogram, `≤0.5: 120  ≤1: 3  …`, without its empty tail.
fn histogram(counts: &[u64]) -> String {
    let filled = counts.iter().rposition(|&n| n > 0).map_or(0, |last| last + 1);
    let bucket =
        |(edge, n): (&f64, &u64)| if edge.is_finite() { format!("≤{edge}: {n}") } else { format!("more: {n}") };
    let buckets: Vec<String> = ULP_EDGES.iter().zip(counts).take(filled).map(bucket).collect();
    if buckets.is_empty() { "nothing compared".into() } else { buckets.join("  ") }
}
