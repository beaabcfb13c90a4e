//! One kernel before many problems: what `assay check` and `assay.check` in Python found.

use assay_schema::campaign::{CampaignReport, DeckCoverage, FailureCause, FeatureCoverage, MutantName, WorstProblem};
use maud::{Markup, html};

use super::number::clipped;
use super::part::ReportPart;

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
            @for cause in &self.causes { (draw_cause(cause)) }
            @if !self.allowed.is_empty() {
                h3 { "Allowed by name, or noted" }
                @for cause in &self.allowed { (draw_cause(cause)) }
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

fn draw_cause(cause: &FailureCause) -> Markup {
    let FailureCause {
        gate,
        cases,
        first,
        problem,
        worst,
        in_common,
        like,
        diagnoses,
        computes,
        verdict,
        fault,
        repro,
        ..
    } = cause;
    let line = |name: &str, text: &str| html! { tr { td { (clipped(name)) } td { (clipped(text)) } } };
    html! {
        h3 { (clipped(gate)) }
        p.lead { (cases) " problems, the smallest " (clipped(problem)) }
        div.scroll { table { tbody {
            (line("first", first))
            @if let Some(WorstProblem { problem, error_over_limit }) = worst {
                (line("worst", &format!("{error_over_limit:.4} times the limit in {problem}")))
            }
            @if let Some(property) = in_common {
                (line("common", property))
            }
            @for MutantName { mutant, does } in like { (line("like", &format!("{mutant}: {does}"))) }
            @for diagnosis in diagnoses { (line("likely", diagnosis)) }
            @for names in computes { (line("computes", &format!("the numbers of {}", names.join(", which is ")))) }
            @if let Some(fault) = fault { (line("fault", fault)) }
            @for of in verdict.iter().flat_map(|verdict| &verdict.lines) { (line(&of.name, &of.text)) }
            @if let Some(repro) = repro { (line("repro", repro)) }
        } } }
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
