//! The reference against what published implementations returned: results of `assay parity`.

use maud::{Markup, html};
use serde::Deserialize;

use super::number::{clipped, or_dash};
use super::part::Part;
use super::plot::{Strip, strips};

#[derive(Deserialize)]
pub(super) struct Parity {
    pass: bool,
    files: Vec<Run>,
    worst: Vec<Worst>,
    #[serde(default)]
    refused: Vec<String>,
}

/// An error is absent where it is no number.
#[derive(Deserialize)]
struct Run {
    file: String,
    peer: String,
    dtype: String,
    loss_rel: Option<f64>,
    dlogits_rel: Option<f64>,
    limit: f64,
    #[serde(default)]
    caught_by: Vec<String>,
    verdict: Verdict,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    Pass,
    Fail,
    KnownDifference,
}

#[derive(Deserialize)]
struct Worst {
    peer: String,
    dtype: String,
    files: u64,
    loss_rel: Option<f64>,
    dlogits_rel: Option<f64>,
}

impl Parity {
    fn strips(&self) -> Vec<Strip> {
        let share = |rel: Option<f64>, limit: f64| rel.map_or(f64::INFINITY, |rel| rel / limit);
        let of = |worst: &Worst, what: &str, rel: fn(&Run) -> Option<f64>| {
            let theirs = |run: &&Run| {
                run.peer == worst.peer && run.dtype == worst.dtype && run.verdict != Verdict::KnownDifference
            };
            Strip {
                name: format!("{} {}, {what}", worst.peer, worst.dtype),
                shares: self.files.iter().filter(theirs).map(|run| share(rel(run), run.limit)).collect(),
            }
        };
        let both = |worst| [of(worst, "loss", |run| run.loss_rel), of(worst, "dlogits", |run| run.dlogits_rel)];
        self.worst.iter().flat_map(both).collect()
    }
}

fn runs<'r>(runs: impl Iterator<Item = &'r Run>) -> Markup {
    html! {
        div.scroll { table {
            thead { tr {
                th { "run" } th { "project" } th { "dtype" } th.number { "loss" } th.number { "dlogits" } th.number { "limit" }
                th { "fails the gates" } th { "verdict" }
            } }
            tbody { @for run in runs { tr {
                td { (clipped(&run.file)) } td { (clipped(&run.peer)) } td { (clipped(&run.dtype)) }
                td.number { (or_dash(run.loss_rel)) } td.number { (or_dash(run.dlogits_rel)) } td.number { (or_dash(Some(run.limit))) }
                td { (clipped(&run.caught_by.join(", "))) }
                @match run.verdict {
                    Verdict::Pass => td.well { "pass" },
                    Verdict::Fail => td.bad { "fail" },
                    Verdict::KnownDifference => td { "known difference" },
                }
            } } }
        } }
    }
}

impl Part for Parity {
    fn passed(&self) -> Option<bool> {
        Some(self.pass)
    }

    fn summary(&self) -> String {
        let count = |verdict| self.files.iter().filter(|run| run.verdict == verdict).count();
        format!(
            "{} recorded runs agree, {} do not, {} known differences, {} could not be compared",
            count(Verdict::Pass),
            count(Verdict::Fail),
            count(Verdict::KnownDifference),
            self.refused.len(),
        )
    }

    fn body(&self) -> Markup {
        let apart: Vec<&Run> = self.files.iter().filter(|run| run.verdict != Verdict::Pass).collect();
        html! {
            p { "What functions of other projects returned, against the reference. Errors are relative." }
            (strips(&self.strips(), &html! { "error / limit, by project and dtype; known differences left out" }))
            div.scroll { table {
                thead { tr { th { "project" } th { "dtype" } th.number { "runs" } th.number { "worst loss" } th.number { "worst dlogits" } } }
                tbody { @for worst in &self.worst { tr {
                    td { (clipped(&worst.peer)) } td { (clipped(&worst.dtype)) } td.number { (worst.files) }
                    td.number { (or_dash(worst.loss_rel)) } td.number { (or_dash(worst.dlogits_rel)) }
                } } }
            } }
            @if !apart.is_empty() {
                h3 { "Runs that differ" }
                (runs(apart.into_iter()))
            }
            @if !self.refused.is_empty() {
                h3 { "Could not be compared" }
                ul { @for refused in &self.refused { li { (clipped(refused)) } } }
            }
            details { summary { "All " (self.files.len()) " runs" } (runs(self.files.iter())) }
        }
    }
}
