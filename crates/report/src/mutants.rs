//! Deliberately wrong kernels and who rejects them: results of `assay mutants`.

use std::collections::{BTreeMap, BTreeSet};

use maud::{Markup, html};
use serde::Deserialize;

use super::number::clipped;
use super::part::Part;
use super::plot::{Bar, Tone, bars, key};
use super::verdicts::{Ignored, not_checked};

#[derive(Deserialize)]
pub(super) struct Mutants {
    survived: Vec<String>,
    cases: u64,
    #[serde(rename = "mutants")]
    all: Vec<Mutant>,
    #[serde(default)]
    ignored: Vec<Ignored>,
}

#[derive(Deserialize)]
struct Mutant {
    name: String,
    class: String,
    does: String,
    gate: Option<String>,
    cases: u64,
    #[serde(default)]
    elsewhere: BTreeMap<String, Cell>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Cell {
    NotExercised,
    Passes,
    Caught,
}

impl Mutants {
    fn projects(&self) -> BTreeSet<&str> {
        self.all.iter().flat_map(|mutant| mutant.elsewhere.keys().map(String::as_str)).collect()
    }

    fn score(&self, project: &str) -> [usize; 3] {
        [Cell::Caught, Cell::Passes, Cell::NotExercised]
            .map(|cell| self.all.iter().filter(|mutant| mutant.elsewhere.get(project) == Some(&cell)).count())
    }

    fn bars(&self) -> Vec<Bar> {
        let bar = |name: &str, [caught, passes, rest]: [usize; 3]| Bar {
            name: name.into(),
            parts: vec![(caught as f64, Tone::Third), (passes as f64, Tone::Bad), (rest as f64, Tone::Rule)],
            note: format!("{caught} of {}", self.all.len()),
        };
        let killed = self.all.iter().filter(|mutant| mutant.gate.is_some()).count();
        let ours = bar("assay", [killed, self.all.len() - killed, 0]);
        std::iter::once(ours)
            .chain(self.projects().into_iter().map(|project| bar(project, self.score(project))))
            .collect()
    }
}

impl Part for Mutants {
    fn passed(&self) -> Option<bool> {
        Some(self.survived.is_empty())
    }

    fn summary(&self) -> String {
        let killed = self.all.iter().filter(|mutant| mutant.gate.is_some()).count();
        format!("{killed} of {} wrong kernels rejected, {} cases", self.all.len(), self.cases)
    }

    fn body(&self) -> Markup {
        let projects = self.projects();
        html! {
            @if !self.survived.is_empty() {
                p.bad { "Accepted though wrong: " (clipped(&self.survived.join(", "))) }
            }
            p { "Each kernel is one small change to a correct one; below, the same under other projects' own inputs and tolerances." }
            (key(&[(Tone::Third, "rejected"), (Tone::Bad, "accepted"), (Tone::Rule, "not exercised: no input reaches the bug")]))
            (bars(&self.bars(), None, &html! { "wrong kernels rejected" }))
            details {
                summary { "All " (self.all.len()) " kernels" }
                div.scroll { table {
                    thead { tr {
                        th { "kernel" } th { "class" } th { "what it does" } th { "rejected by" } th.number { "after cases" }
                        @for project in &projects { th { (clipped(project)) } }
                    } }
                    tbody { @for mutant in &self.all { tr {
                        td { (clipped(&mutant.name)) } td { (clipped(&mutant.class)) } td { (clipped(&mutant.does)) }
                        @match &mutant.gate { Some(gate) => td { (clipped(gate)) }, None => td.bad { "nothing" } }
                        td.number { (mutant.cases) }
                        @for project in &projects {
                            @match mutant.elsewhere.get(*project) {
                                Some(Cell::Caught) => td { "rejected" },
                                Some(Cell::Passes) => td.bad { "accepted" },
                                Some(Cell::NotExercised) | None => td.none { "·" },
                            }
                        }
                    } } }
                } }
            }
            (not_checked(&self.ignored))
        }
    }
}
