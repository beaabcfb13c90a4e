//! A trainer's log-probabilities against a sampler's: what `assay compare-logp` found.

use assay_schema::agreement::{LogpAgreement, SideFinding, TokenPair};
use maud::{Markup, html};

use super::number::{clipped, count, short};
use super::part::ReportPart;
use super::plot::{Dots, Tone, dots, key};

impl ReportPart for LogpAgreement {
    fn passed(&self) -> Option<bool> {
        self.agrees
    }

    fn summary(&self) -> String {
        self.conclusion.clone()
    }

    fn body(&self) -> Markup {
        html! {
            @for side in &self.sides {
                div.cause { h3.sentence { (clipped(&side.side)) ": " (clipped(&finding(side))) }
                    @for other in side.computes.iter().skip(1) { p { "Or " (clipped(other)) ": the same numbers within the limits." } }
                }
            }
            (pictures(self))
            @if let Some(floor) = &self.floor {
                p {
                    "Rounding alone may put the sides " (short(floor.median)) " nats apart in the median, " (short(floor.largest))
                    " at most; " (count(floor.beyond)) " of " (count(self.tokens)) " tokens are farther apart. It can carry at most "
                    (count(floor.may_cross)) " tokens across the ratio's bounds " (floor.bounds[0]) " and " (floor.bounds[1]) "."
                }
            }
            @for trend in &self.trends {
                p { "Rank correlation of the difference with " (clipped(&trend.with)) ": " (short(trend.correlation)) }
            }
            div.scroll { table {
                thead { tr { th { "figure" } th { "value" } th { "definition" } } }
                tbody { @for figure in &self.figures {
                    tr { td { (clipped(&figure.name)) } td { (short(figure.value)) } td { (clipped(&figure.definition)) } }
                } }
            } }
            div.scroll { table {
                thead { tr { th { "worst tokens" } th { "trainer" } th { "sampler" } th { "Δ, nats" } th { "floor, nats" } } }
                tbody { @for pair in self.worst.iter().chain(&self.nonfinite) { (row(pair)) } }
            } }
        }
    }
}

/// Says what one side computes.
fn finding(side: &SideFinding) -> String {
    match (&side.computes[..], side.declared) {
        (_, true) => "what is declared".into(),
        ([first, ..], false) => first.clone(),
        ([], false) => "nothing that is known".into(),
    }
}

fn row(pair: &TokenPair) -> Markup {
    let floor = pair.floor.map_or("–".into(), short);
    html! { tr {
        td { "[" (pair.b) "," (pair.t) "]" } td { (short(pair.trainer)) } td { (short(pair.sampler)) }
        td { (short(pair.trainer - pair.sampler)) } td { (floor) }
    } }
}

/// Draws the size of the difference over the log-probability, over the position, and over the floor.
fn pictures(agreement: &LogpAgreement) -> Markup {
    let beyond = |pair: &TokenPair| pair.floor.is_some_and(|floor| (pair.trainer - pair.sampler).abs() > floor);
    let over = |of: &dyn Fn(&TokenPair) -> Option<f64>| -> Vec<(f64, f64, Tone)> {
        let point = |pair: &TokenPair| {
            let tone = if beyond(pair) { Tone::Bad } else { Tone::First };
            Some((of(pair)?, (pair.trainer - pair.sampler).abs(), tone))
        };
        agreement.points.iter().filter_map(point).collect()
    };
    let by_floor = over(&|pair| pair.floor.map(f64::log10));
    html! {
        (key(&[(Tone::First, "within the floor"), (Tone::Bad, "beyond it")]))
        (dots(&Dots { points: over(&|pair| Some(pair.trainer)) }, &html! { "|trainer − sampler| by the trainer's log-probability, nats" }))
        (dots(&Dots { points: over(&|pair| Some(pair.t as f64)) }, &html! { "|trainer − sampler| by position" }))
        @if !by_floor.is_empty() {
            (dots(&Dots { points: by_floor }, &html! { "|trainer − sampler| by log₁₀ of the floor" }))
        }
    }
}
