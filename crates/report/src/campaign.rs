//! One kernel before many problems: what `assay check` and `assay.check` in Python found.

use assay_schema::campaign::{CampaignReport, DeckCoverage, FailureCause, FeatureCoverage, MemoryFinding, MutantName};
use assay_schema::invariance::RelationFinding;
use assay_schema::number::quotient;
use maud::{Markup, html};

use super::number::{clipped, short};
use super::part::ReportPart;
use super::plot::places;

impl ReportPart for CampaignReport {
    fn passed(&self) -> Option<bool> {
        Some(self.passed)
    }

    fn summary(&self) -> String {
        let Self { kernel, tried, failed, grade, seed, packed, causes, .. } = self;
        let packed = if *packed { " packed" } else { "" };
        let causes = match causes.len() {
            1 => "1 cause".to_string(),
            n => format!("{n} causes"),
        };
        format!("{kernel}: {tried}{packed} problems at grade {grade}, seed {seed}, {failed} failed by {causes}")
    }

    fn body(&self) -> Markup {
        html! {
            @if let Some(why) = &self.stopped {
                p.bad { "Stopped after " (self.tried) " of " (self.cases) " problems: " (clipped(why)) }
            }
            @for cause in &self.causes { (draw_cause(cause, "cause")) }
            @if !self.allowed.is_empty() {
                h3 { "Allowed by name, or noted" }
                @for cause in &self.allowed { (draw_cause(cause, "cause noted")) }
            }
            @for skipped in &self.skipped {
                p.note { (skipped.cases) " problems were not tried: " (clipped(&skipped.why)) }
            }
            @if !self.invariance.is_empty() { (relations(&self.invariance)) }
            @if !self.memory.is_empty() { (memory(&self.memory)) }
            (covered(&self.coverage))
            @if let Some(power) = &self.power {
                p {
                    (power.rejected) " of the " (power.exercised) " wrong kernels that show under this loss are rejected, on "
                    (power.cases) " problems."
                }
                @if !power.accepted.is_empty() { p.note { "Accepted: " (names(&power.accepted)) } }
            }
            details { summary { "The loss" } pre { (self.spec) } }
        }
    }
}

/// Draws the memory of a call for each dtype, in units of the logits.
fn memory(found: &[MemoryFinding]) -> Markup {
    html! {
        div.scroll { table {
            thead { tr { th { "memory, × the logits" } th { "forward" } th { "backward" } th { "peak" } th { "kept" } th { "allowed" } } }
            tbody { @for one in found {
                @let of = |n: Option<u64>| n.map_or("–".to_string(), |n| format!("{:.2}", n as f64 / one.logits_bytes as f64));
                @let call = one.call.as_ref();
                tr {
                    th { (clipped(&one.problem)) }
                    td.number { (of(call.and_then(|call| call.forward))) }
                    td.number { (of(call.and_then(|call| call.backward))) }
                    td.number { (of(call.map(|call| call.peak))) }
                    td.number { (of(call.and_then(|call| call.kept))) }
                    td.number { (short(one.limit)) }
                }
                @if let Some(why) = &one.raised {
                    tr { td colspan="6" { (clipped(why)) } }
                }
            } }
        } }
    }
}

/// Draws one cause in a box of this class: the sentence in large type, the values, the place of the errors, and the rest folded.
fn draw_cause(cause: &FailureCause, class: &str) -> Markup {
    let FailureCause {
        gate,
        sentence,
        cases,
        first,
        in_common,
        like,
        diagnoses,
        computes,
        picture,
        values,
        verdict,
        fault,
        repro,
        ..
    } = cause;
    let line = |name: &str, text: &str| html! { tr { td { (clipped(name)) } td { (clipped(text)) } } };
    // The diagnosis that is the headline is left out of the list below it.
    let others = diagnoses.iter().filter(|diagnosis| *diagnosis != sentence);
    let problems = if *cases == 1 { "problem" } else { "problems" };
    html! {
        div class=(class) {
            h3.sentence { (clipped(sentence)) }
            p.note { (clipped(gate)) ", in " (cases) " " (problems) }
            @if let Some(property) = in_common { p { "In common: " (clipped(property)) } }
            @if let Some(fault) = fault.as_ref().filter(|fault| fault.contains('\n')) { pre { (fault) } }
            (table_of_values(cause))
            @if let Some(picture) = picture { (places(picture)) }
            @if let Some(repro) = repro {
                pre { code { "problem = assay.load(" (format!("{repro:?}")) ")"
                    @if let Some(values) = values { "\n# " (values) }
                } }
            } @else if let Some(values) = values {
                pre { code { (values) } }
            }
            details {
                summary { "Details" }
                div.scroll { table { tbody {
                    @for other in others { (line("also", other)) }
                    @for MutantName { mutant, does } in like { (line("like mutant", &format!("{mutant}: {does}"))) }
                    @for names in computes { (line("computes", &format!("the numbers of {}", names.join(" or ")))) }
                    (line("first", first))
                    @for of in verdict.iter().flat_map(|verdict| verdict.lines.iter().chain(&verdict.details)) {
                        (line(&of.name, &of.text))
                    }
                } } }
            }
        }
    }
}

/// Draws the smallest problem of a cause and its worst: place, expected and actual value, error / limit.
fn table_of_values(cause: &FailureCause) -> Markup {
    let rows = cause.value_rows();
    if rows.is_empty() {
        return html! { p { "Smallest problem: " (clipped(&cause.problem)) } };
    }
    html! {
        div.scroll { table {
            thead { tr {
                th {} th { "Problem" } th { "Place" } th.number { "Expected" } th.number { "Got" } th.number { "Error / limit" }
            } }
            tbody { @for [which, problem, place, expected, actual, over] in rows { tr {
                td { (which) } td { (clipped(&problem)) } td { (place) }
                td.number { (expected) } td.number { (actual) } td.number.bad { (over) }
            } } }
        } }
    }
}

/// Draws a table of the relations in which a token must have the same numbers.
fn relations(findings: &[RelationFinding]) -> Markup {
    let over = |finding: &RelationFinding| finding.difference_over_limit.map_or_else(|| "–".to_string(), quotient);
    html! {
        h3 { "The same token, the same number" }
        div.scroll { table {
            thead { tr {
                th { "When" } th { "Asked for" } th.number { "Problems" } th.number { "Failed" } th.number { "Tokens" }
                th.number { "Other bits" } th.number { "Largest difference / limit" } th { "Notes" }
            } }
            tbody { @for finding in findings { tr {
                td { (finding.relation.words()) } td { (finding.grade) } td.number { (finding.problems) }
                td.number.bad[finding.failed > 0] { (finding.failed) } td.number { (finding.tokens) }
                td.number { (finding.other_bits) } td.number { (over(finding)) }
                td {
                    @if let Some(why) = &finding.not_asked { "not asked: " (clipped(why)) }
                    @if !finding.outputs.is_empty() { "other bits of " (finding.outputs.join(", ")) " " }
                    @if !finding.by_design.is_empty() { "changed by design: " (finding.by_design.join(", ")) }
                }
            } } }
        } }
    }
}

fn covered(coverage: &DeckCoverage) -> Markup {
    let DeckCoverage { tokens, with_gradient, clipped, advantages, first_and_last_tile, empty_rows, features } =
        coverage;
    let rows = [
        ("tokens that count", *tokens),
        ("of them with a gradient", *with_gradient),
        ("clipped low", clipped[0]),
        ("clipped high", clipped[1]),
        ("with A > 0", advantages[0]),
        ("with A < 0", advantages[1]),
        ("targets in the first tile of columns", first_and_last_tile[0]),
        ("targets in the last", first_and_last_tile[1]),
        ("sequences without a token", *empty_rows),
    ];
    html! {
        details {
            summary { "What the problems had in them" }
            div.scroll { table { tbody { @for (name, n) in rows { tr { td { (name) } td.number { (n) } } } } } }
            @if !features.is_empty() {
                div.scroll { table {
                    thead { tr { th { "Feature" } th { "Shows" } th { "Problems" } th { "Regimes" } th { "Dtypes" } } }
                    tbody { @for FeatureCoverage { feature, reason, problems, regimes, dtypes } in features { tr {
                        td { (feature) } td { (reason) } td.number { (problems) } td.number { (regimes) } td { (dtypes.join(", ")) }
                    } } }
                } }
            }
        }
    }
}

fn names(all: &[MutantName]) -> String {
    clipped(&all.iter().map(|name| name.mutant.as_str()).collect::<Vec<_>>().join(", "))
}
