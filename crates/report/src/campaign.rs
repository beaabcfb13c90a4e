//! One kernel before many problems: what `assay check` and `assay.check` in Python found.

use assay_schema::campaign::{CampaignReport, DeckCoverage, FailureCause, FeatureCoverage, MutantName};
use assay_schema::number::{distinct, quotient, six};
use maud::{Markup, html};

use super::number::clipped;
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
    // What the headline says is not said again below it.
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
    let FailureCause { problem, worst, verdict, .. } = cause;
    let Some(verdict) = verdict else { return html! { p { "Smallest problem: " (clipped(problem)) } } };
    let row = |which: &str, problem: &str, at: &str, values: [Option<f64>; 2], over: Option<f64>| {
        let [expected, actual] = match values {
            [Some(expected), Some(actual)] => distinct(expected, actual),
            // The judge reports the norm or the sum of a difference, whose exact value is 0.
            [None, Some(actual)] => ["–".into(), six(actual)],
            [_, None] => ["a number".into(), "NaN or ∞".into()],
        };
        html! { tr {
            td { (which) } td { (clipped(problem)) } td { (if at.is_empty() { "–" } else { at }) }
            td.number { (expected) } td.number { (actual) } td.number.bad { (over.map_or("–".into(), quotient)) }
        } }
    };
    let over = verdict.error.zip(verdict.limit).map(|(error, limit)| error / limit).filter(|over| over.is_finite());
    html! {
        div.scroll { table {
            thead { tr {
                th {} th { "Problem" } th { "Place" } th.number { "Expected" } th.number { "Got" } th.number { "Error / limit" }
            } }
            tbody {
                (row("smallest", problem, &verdict.at, [verdict.expected, verdict.actual], over))
                @if let Some(worst) = worst.as_ref().filter(|worst| worst.problem != *problem) {
                    (row("worst", worst.problem.split(',').next().unwrap_or_default(), &worst.at, [worst.expected, worst.actual], Some(worst.error_over_limit)))
                }
            }
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
