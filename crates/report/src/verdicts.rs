//! The part of the page about verdicts: results of `assay replay`, `gradcheck` and `judge`.

use std::collections::{BTreeMap, BTreeSet};

use assay_schema::verdicts::{GateCheck, Grade, IgnoredCheck, Status, Verdicts};
use maud::{Markup, html};

use super::number::{clipped, or_dash, ran, short};
use super::part::ReportPart;
use super::plot::{Strip, Tone, histogram, key, strips};

/// Id under which the reference itself is compared with recorded values.
const REFERENCE: &str = "reference";

fn name(check: &GateCheck) -> String {
    ran(&check.implementation, check.devices, check.lowering.as_deref())
}

/// `error / limit`; beyond everything where the judge rejected a value that has no error.
fn share(check: &GateCheck) -> f64 {
    match (check.worst, check.limit) {
        (Some(worst), Some(limit)) if worst > 0.0 && limit >= 0.0 => worst / limit,
        _ if check.verdict.failed() => f64::INFINITY,
        _ => 0.0,
    }
}

/// The class of a verdict's cell.
fn looks(status: Status) -> &'static str {
    match status {
        Status::Pass => "well",
        Status::Fail | Status::Nonfinite => "bad",
        Status::NotCompared | Status::Waived => "none",
    }
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Pass => "pass",
        Status::Fail => "fail",
        Status::Nonfinite => "nonfinite",
        Status::NotCompared => "not compared",
        Status::Waived => "waived",
    }
}

/// The values of `of`, each once, in order of first appearance.
fn distinct<'c>(checks: &[&'c GateCheck], of: impl Fn(&'c GateCheck) -> String) -> Vec<String> {
    let mut seen = BTreeSet::new();
    checks.iter().map(|check| of(check)).filter(|name| seen.insert(name.clone())).collect()
}

/// The function that names a row or a column.
type Named = fn(&GateCheck) -> String;

/// The worst check of every row and column: how many times smaller its error is than it may be.
fn matrix(checks: &[&GateCheck], corner: &str, row_of: Named, column_of: Named) -> Markup {
    let columns = distinct(checks, column_of);
    let mut cells: BTreeMap<(String, String), &GateCheck> = BTreeMap::new();
    for check in checks {
        let cell = cells.entry((row_of(check), column_of(check))).or_insert(check);
        // The worst check of a cell fails, or is a pass with the largest share of its limit; checks without a verdict
        // are shown only where the cell has nothing else.
        let rank = |check: &GateCheck| (check.verdict.failed(), check.verdict == Status::Pass, share(check));
        let worse = rank(check) > rank(cell);
        if worse {
            *cell = check;
        }
    }
    html! {
        div.scroll { table.matrix {
            thead { tr { th { (corner) } @for column in &columns { th.number { (clipped(column)) } } } }
            tbody {
                @for row in distinct(checks, row_of) {
                    tr {
                        th { (clipped(&row)) }
                        @for column in &columns {
                            @match cells.get(&(row.clone(), column.clone())) {
                                Some(check) => (cell(check)),
                                None => td.number.none { "·" },
                            }
                        }
                    }
                }
            }
        } }
    }
}

fn cell(check: &GateCheck) -> Markup {
    let share = share(check);
    let place = format!("{}: error {}, limit {}", check.fixture, or_dash(check.worst), or_dash(check.limit));
    let (class, text) = match check.verdict {
        Status::Nonfinite => ("bad", "NaN or ∞".into()),
        Status::Fail if share.is_finite() => ("bad", format!("{}×", short(1.0 / share))),
        Status::Fail => ("bad", "fail".into()),
        Status::NotCompared => ("none", "·".into()),
        Status::Waived => ("none", "waived".into()),
        Status::Pass if share == 0.0 => ("exact", "exact".into()),
        Status::Pass if share > 0.5 => ("tight", format!("{}×", short(1.0 / share))),
        Status::Pass => ("well", format!("{}×", short(1.0 / share))),
    };
    html! { td class={ "number " (class) } title=(clipped(&place)) { (text) } }
}

/// Draws a table of checks, one in each line.
fn lines(checks: &[&GateCheck]) -> Markup {
    html! {
        div.scroll { table {
            thead { tr {
                th { "problem" } th { "implementation" } th { "output" } th.number { "worst error" } th.number { "limit" }
                th { "at" } th { "verdict" } th { "grade" }
            } }
            tbody {
                @for check in checks {
                    tr {
                        td { (clipped(&check.fixture)) } td { (clipped(&name(check))) } td { (clipped(&check.output)) }
                        td.number { (or_dash(check.worst)) } td.number { (or_dash(check.limit)) }
                        td { (clipped(&check.at)) }
                        td class=(looks(check.verdict)) { (word(check.verdict)) }
                        td { (check.grade.map_or("–", Grade::name)) }
                    }
                }
            }
        } }
    }
}

/// Draws the list of checks that were not made.
pub(super) fn not_checked(ignored: &[IgnoredCheck]) -> Markup {
    html! {
        @if !ignored.is_empty() {
            details {
                summary { (ignored.len()) " not checked, and why" }
                div.scroll { table {
                    thead { tr { th { "what" } th { "why" } } }
                    tbody { @for IgnoredCheck { what, why, .. } in ignored { tr { td { (clipped(what)) } td { (clipped(why)) } } } }
                } }
            }
        }
    }
}

/// A strip for each output.
fn errors(checks: &[&GateCheck], caption: &Markup) -> Markup {
    let strip = |output: String| {
        let shares = checks.iter().filter(|check| check.output == output).map(|check| share(check)).collect();
        Strip { name: output, shares }
    };
    let all: Vec<Strip> = distinct(checks, |check| check.output.clone()).into_iter().map(strip).collect();
    strips(&all, caption)
}

fn failed(verdicts: &Verdicts) -> Vec<&GateCheck> {
    verdicts.checks.iter().filter(|check| check.verdict.failed()).collect()
}

/// Errors in ulp of all implementations, by output and dtype; `edges` are the upper ones of all buckets but the last.
fn histograms(edges: &[f64], checks: &[&GateCheck]) -> Markup {
    let buckets = edges.len() + 1;
    // Records of other versions have other buckets, whose counts cannot be added to these.
    let counted = |check: &&&GateCheck| check.ulp.as_ref().is_some_and(|counts| counts.len() == buckets);
    let counted: Vec<&GateCheck> = checks.iter().filter(counted).copied().collect();
    let name = |check: &GateCheck| format!("{}, {}", check.output, check.dtype.as_deref().unwrap_or("dtype unknown"));
    let mut labels: Vec<String> = edges.iter().map(|edge| format!("≤{}", ulps(*edge))).collect();
    labels.push("more".into());
    html! {
        @if !counted.is_empty() {
            h3 { "Errors in ulp" }
            p {
                "Elements by the distance from the exact value, in units in the last place of the output's own dtype, over all "
                "implementations and problems. Up to ½ is the exact value, rounded. The axis is logarithmic: single elements show."
            }
            div.several {
                @for group in distinct(&counted, name) {
                    @let counts = total(counted.iter().filter(|check| name(check) == group), buckets);
                    (histogram(&labels, &counts, &html! { (clipped(&group)) }))
                }
            }
        }
    }
}

fn total<'c>(checks: impl Iterator<Item = &'c &'c GateCheck>, buckets: usize) -> Vec<u64> {
    let mut sum = vec![0u64; buckets];
    for counts in checks.filter_map(|check| check.ulp.as_ref()) {
        sum.iter_mut().zip(counts).for_each(|(sum, n)| *sum = sum.saturating_add(*n));
    }
    sum
}

/// Formats an edge in units in the last place: `½`, `16`, `64k`.
fn ulps(edge: f64) -> String {
    match edge {
        0.5 => "½".into(),
        edge if edge >= 1024.0 => format!("{}k", edge / 1024.0),
        edge => edge.to_string(),
    }
}

impl ReportPart for Verdicts {
    fn passed(&self) -> Option<bool> {
        Some(self.pass)
    }

    fn summary(&self) -> String {
        let failed = failed(self).len();
        format!("{} checks passed, {failed} failed, {} not made", self.checks.len() - failed, self.ignored.len())
    }

    fn body(&self) -> Markup {
        // Checks of the reference are about the recorded values, not about a kernel, so that they are shown apart.
        let of = |reference: bool| -> Vec<&GateCheck> {
            self.checks.iter().filter(|check| (check.implementation == REFERENCE) == reference).collect()
        };
        let (kernels, reference) = (of(false), of(true));
        let failed = failed(self);
        html! {
            @if !failed.is_empty() {
                h3 { "What failed" }
                (lines(&failed))
            }
            @if !kernels.is_empty() {
                h3 { "Verdicts" }
                p {
                    "How many times smaller the worst error of any problem is than its limit. Rounding the exact value to the output's "
                    "dtype is within the limit, and of bf16 it takes nearly all: 1.00× is then a value that was rounded right."
                 }
                (key(&[(Tone::Third, "within half of the limit"), (Tone::Second, "beyond half"), (Tone::Bad, "beyond the limit")]))
                (matrix(&kernels, "implementation", name, |check| check.output.clone()))
                h3 { "Error against limit" }
                p { "A dot for the worst element of each problem and implementation. Left of the line is right." }
                (errors(&kernels, &html! { "error / limit, by output" }))
                (histograms(&self.ulp_edges, &kernels))
            }
            @if !reference.is_empty() {
                h3 { "The reference against recorded values" }
                p { "The answer key itself: what was recorded with each problem, computed again." }
                (matrix(&reference, "output", |check| check.output.clone(), |check| check.fixture.clone()))
            }
            @if !self.invariance.is_empty() {
                h3 { "Bits on other device counts" }
                div.scroll { table {
                    thead { tr { th { "problem" } th { "implementation" } th { "devices" } th { "same bits" } th { "others" } } }
                    tbody { @for compared in &self.invariance { tr {
                        td { (clipped(&compared.fixture)) } td { (clipped(&compared.implementation)) }
                        td { (compared.devices[0]) " and " (compared.devices[1]) }
                        td { (clipped(&compared.same.join(", "))) } td { (clipped(&compared.other.join(", "))) }
                    } } }
                } }
            }
            details {
                summary { "All " (self.checks.len()) " checks" }
                (lines(&self.checks.iter().collect::<Vec<_>>()))
            }
            (not_checked(&self.ignored))
        }
    }
}
