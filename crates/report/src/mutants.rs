//! Deliberately wrong kernels and who rejects them: results of `assay mutants`.

use std::collections::BTreeSet;

use assay_schema::mutants::{MutantReport, MutationReport, PeerOutcome};
use maud::{Markup, html};

use super::number::clipped;
use super::part::ReportPart;
use super::plot::{Bar, Tone, bars, key};
use super::verdicts::not_checked;

fn projects(all: &[MutantReport]) -> BTreeSet<&str> {
    all.iter().flat_map(|mutant| mutant.peers.keys().map(String::as_str)).collect()
}

fn killed(all: &[MutantReport]) -> usize {
    all.iter().filter(|mutant| mutant.gate.is_some()).count()
}

fn score(all: &[MutantReport], project: &str) -> [usize; 3] {
    [PeerOutcome::Caught, PeerOutcome::Passes, PeerOutcome::NotExercised]
        .map(|cell| all.iter().filter(|mutant| mutant.peers.get(project) == Some(&cell)).count())
}

fn scores(all: &[MutantReport]) -> Vec<Bar> {
    let bar = |name: &str, [caught, passes, rest]: [usize; 3]| Bar {
        name: name.into(),
        parts: vec![(caught as f64, Tone::Third), (passes as f64, Tone::Bad), (rest as f64, Tone::Rule)],
        note: format!("{caught} of {}", all.len()),
    };
    let ours = bar("assay", [killed(all), all.len() - killed(all), 0]);
    std::iter::once(ours).chain(projects(all).into_iter().map(|project| bar(project, score(all, project)))).collect()
}

impl ReportPart for MutationReport {
    fn passed(&self) -> Option<bool> {
        Some(self.survived.is_empty())
    }

    fn summary(&self) -> String {
        let all = &self.mutants;
        format!("{} of {} wrong kernels rejected, {} cases", killed(all), all.len(), self.cases)
    }

    fn body(&self) -> Markup {
        // One column for each project whose tests were tried on any of the kernels; a kernel that a project was not
        // asked about has a dot there.
        let projects = projects(&self.mutants);
        html! {
            @if !self.survived.is_empty() {
                p.bad { "Accepted though wrong: " (clipped(&self.survived.join(", "))) }
            }
            p { "Each kernel is one small change to a correct one; below, the same under other projects' own inputs and tolerances." }
            (key(&[(Tone::Third, "rejected"), (Tone::Bad, "accepted"), (Tone::Rule, "not exercised: no input reaches the bug")]))
            (bars(&scores(&self.mutants), None, &html! { "wrong kernels rejected" }))
            details {
                summary { "All " (self.mutants.len()) " kernels" }
                div.scroll { table {
                    thead { tr {
                        th { "kernel" } th { "class" } th { "what it does" } th { "rejected by" } th.number { "after cases" }
                        @for project in &projects { th { (clipped(project)) } }
                    } }
                    tbody { @for mutant in &self.mutants { tr {
                        td { (clipped(&mutant.name)) } td { (clipped(&mutant.class)) } td { (clipped(&mutant.does)) }
                        @match &mutant.gate { Some(gate) => td { (clipped(gate)) }, None => td.bad { "nothing" } }
                        td.number { (mutant.cases) }
                        @for project in &projects {
                            @match mutant.peers.get(*project) {
                                Some(PeerOutcome::Caught) => td { "rejected" },
                                Some(PeerOutcome::Passes) => td.bad { "accepted" },
                                Some(PeerOutcome::NotExercised) | None => td.none { "·" },
                            }
                        }
                    } } }
                } }
            }
            (not_checked(&self.ignored))
        }
    }
}
