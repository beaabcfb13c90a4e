//! The reference against what published implementations returned: results of `assay peers`.

use assay_schema::peers::{PeerErrors, PeerRun, PeerVerdict, PeersReport};
use maud::{Markup, html};

use super::number::{clipped, or_dash};
use super::part::ReportPart;
use super::plot::{Strip, strips};

/// An error, where it is a number.
fn finite(error: f64) -> Option<f64> {
    error.is_finite().then_some(error)
}

fn errors(peers: &PeersReport) -> Vec<Strip> {
    let share = |error: f64, limit: f64| finite(error).map_or(f64::INFINITY, |error| error / limit);
    let of = |worst: &PeerErrors, what: &str, error: fn(&PeerRun) -> f64| {
        let theirs = |run: &&PeerRun| {
            run.peer == worst.peer && run.dtype == worst.dtype && run.verdict != PeerVerdict::KnownDifference
        };
        Strip {
            name: format!("{} {}, {what}", worst.peer, worst.dtype),
            shares: peers.files.iter().filter(theirs).map(|run| share(error(run), run.limit)).collect(),
        }
    };
    let both = |worst| [of(worst, "loss", |run| run.loss_rel), of(worst, "dlogits", |run| run.dlogits_rel)];
    peers.worst.iter().flat_map(both).collect()
}

fn runs<'r>(runs: impl Iterator<Item = &'r PeerRun>) -> Markup {
    html! {
        div.scroll { table {
            thead { tr {
                th { "run" } th { "project" } th { "dtype" } th.number { "loss" } th.number { "dlogits" } th.number { "limit" }
                th { "fails the gates" } th { "verdict" }
            } }
            tbody { @for run in runs { tr {
                td { (clipped(&run.file)) } td { (clipped(&run.peer)) } td { (clipped(&run.dtype)) }
                td.number { (or_dash(finite(run.loss_rel))) } td.number { (or_dash(finite(run.dlogits_rel))) } td.number { (or_dash(Some(run.limit))) }
                td { (clipped(&run.caught_by.join(", "))) }
                @match run.verdict {
                    PeerVerdict::Pass => td.well { "pass" },
                    PeerVerdict::Fail => td.bad { "fail" },
                    PeerVerdict::KnownDifference => td { "known difference" },
                }
            } } }
        } }
    }
}

impl ReportPart for PeersReport {
    fn passed(&self) -> Option<bool> {
        Some(self.pass)
    }

    fn summary(&self) -> String {
        let count = |verdict| self.files.iter().filter(|run| run.verdict == verdict).count();
        format!(
            "{} recorded runs agree, {} do not, {} known differences, {} could not be compared",
            count(PeerVerdict::Pass),
            count(PeerVerdict::Fail),
            count(PeerVerdict::KnownDifference),
            self.refused.len(),
        )
    }

    fn body(&self) -> Markup {
        // Runs that differ are listed at once; the table of all runs is folded away.
        let apart: Vec<&PeerRun> = self.files.iter().filter(|run| run.verdict != PeerVerdict::Pass).collect();
        html! {
            p { "What functions of other projects returned, against the reference. Errors are relative." }
            (strips(&errors(self), &html! { "error / limit, by project and dtype; known differences left out" }))
            div.scroll { table {
                thead { tr { th { "project" } th { "dtype" } th.number { "runs" } th.number { "worst loss" } th.number { "worst dlogits" } } }
                tbody { @for worst in &self.worst { tr {
                    td { (clipped(&worst.peer)) } td { (clipped(&worst.dtype)) } td.number { (worst.files) }
                    td.number { (or_dash(finite(worst.loss_rel))) } td.number { (or_dash(finite(worst.dlogits_rel))) }
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
