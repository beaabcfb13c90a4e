//! One kernel before many problems: results of `assay check`.

use assay_schema::campaign::{Campaign, Cause, Coverage, Power};
use assay_schema::verdicts::Line;
use maud::{Markup, html};

use super::number::clipped;
use super::part::Part;

fn cause(cause: &Cause) -> Markup {
    let Cause { gate, cases, first, problem, like, diagnoses, computes, computes_one_of, verdict, fault, repro } =
        cause;
    let row = |name: &str, text: &str| html! { tr { td { (name) } td { (clipped(text)) } } };
    let computes = computes.iter().map(|names| names.join(", which is ")).collect::<Vec<_>>().join("; or ");
    html! {
        h3 { (clipped(gate)) ": " (cases) @if *cases == 1 { " problem" } @else { " problems" } }
        div.scroll { table { tbody {
            (row("first seen in", first))
            (row("smallest problem", problem))
            @if let Some(fault) = fault { (row("fault", fault)) }
            @for name in like { (row("like", &format!("{}: {}", name.mutant, name.does))) }
            @for diagnosis in diagnoses { (row("likely", diagnosis)) }
            @if !computes.is_empty() {
                (row(if *computes_one_of { "computes one of" } else { "computes" }, &computes))
            }
            @for Line { name, text } in verdict.iter().flat_map(|verdict| &verdict.lines) { (row(name, text)) }
            @if let Some(repro) = repro { (row("repro", repro)) }
        } } }
    }
}

impl Part for Campaign {
    fn passed(&self) -> Option<bool> {
        Some(self.passed)
    }

    fn summary(&self) -> String {
        let Self { kernel, tried, failed, causes, grade, .. } = self;
        format!("{kernel}: {tried} problems at grade {grade}, {failed} failed, {} causes", causes.len())
    }

    fn body(&self) -> Markup {
        let Coverage { tokens, with_gradient, clipped: [low, high], advantages: [above, below], .. } = self.coverage;
        let [first, last] = self.coverage.first_and_last_tile;
        html! {
            p { (clipped(&self.spec)) }
            @if let Some(why) = &self.stopped { p.bad { "Stopped: " (clipped(why)) } }
            @for of in &self.causes { (cause(of)) }
            @if !self.allowed.is_empty() {
                h3 { "Allowed" }
                @for of in &self.allowed { (cause(of)) }
            }
            h3 { "What the problems had in them" }
            p {
                (tokens) " tokens that count, " (with_gradient) " with a gradient, " (low) " clipped low and " (high) " high, "
                (above) " with A > 0 and " (below) " with A < 0; " (first) " targets in the first tile of 128 columns and "
                (last) " in the last; " (self.coverage.empty_rows) " rows without a token."
            }
            @for skipped in &self.skipped { p { (skipped.cases) " problems skipped: " (clipped(&skipped.why)) } }
            @if let Some(Power { rejected, exercised, accepted, cases }) = &self.power {
                p {
                    (rejected) " of the " (exercised) " wrong kernels that show under this loss are rejected, on "
                    (cases) " problems."
                    @for (i, name) in accepted.iter().enumerate() {
                        @if i == 0 { " Accepted: " } @else { ", " }
                        (clipped(&name.mutant))
                    }
                }
            }
        }
    }
}
