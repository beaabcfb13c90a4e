//! What the kernels of `tests/panel` returned, recorded, before the judge: no Python is needed here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use assay::campaign::panel::{ExpectedOutcome, KernelOutcome, PanelDeck, Panelist, meet};
use assay::campaign::{Fault, KernelUnderTest};
use assay::fixture::{ProblemFile, read_candidate};
use assay::problem::{Candidate, FloatView, Problem};
use assay::spec::LossSpec;
use ndarray::Ix3;
use serde::Deserialize;

#[derive(Deserialize)]
struct List {
    kernel: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    name: String,
    expected: ExpectedOutcome,
}

/// A kernel that answers one problem with what is recorded in a file.
struct RecordedKernel(PathBuf);

impl KernelUnderTest for RecordedKernel {
    fn answer(
        &mut self,
        _: &LossSpec,
        _: &Arc<Problem>,
        read: &mut dyn FnMut(&Candidate<FloatView<Ix3>>),
    ) -> Result<(), Fault> {
        let recorded: Candidate = read_candidate(&self.0).map_err(|error| Fault::Raised(error.to_string().into()))?;
        read(&recorded.lend());
        Ok(())
    }
}

fn recorded(index: u64, name: &str) -> PathBuf {
    Path::new("fixtures/panel").join(format!("{index}.{name}.safetensors"))
}

/// The outcome of each kernel on the recorded problem of a number.
fn outcomes(index: u64, names: &[&str]) -> Vec<KernelOutcome> {
    let file = ProblemFile::open(recorded(index, "problem")).unwrap();
    let mut case = PanelDeck::Sample.case(index);
    case.spec = file.spec().unwrap().unwrap();
    let panelist = |name: &&str| Panelist::new(name, None, name.to_string(), RecordedKernel(recorded(index, name)));
    let mut kernels: Vec<_> = names.iter().map(panelist).collect();
    meet(&mut kernels, &case, file.problem("logits", Some("old_logps")).unwrap()).unwrap();
    kernels.into_iter().map(|kernel| kernel.found).collect()
}

#[test]
fn panel_honest_kernels_pass_as_recorded_and_wrong_ones_fail() {
    let List { kernel: entries } = toml::from_str(&fs::read_to_string("tests/panel/panel.toml").unwrap()).unwrap();
    let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    // Each kernel has an answer to each problem, and no other file is there.
    let files: BTreeSet<PathBuf> = fs::read_dir("fixtures/panel").unwrap().map(|file| file.unwrap().path()).collect();
    let all =
        (0..PanelDeck::REGIMES).flat_map(|index| names.iter().chain(&["problem"]).map(move |n| recorded(index, n)));
    assert_eq!(files, all.collect(), "`assay panel --record fixtures/panel` records them");
    let mut failed: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for index in 0..PanelDeck::REGIMES {
        for found in outcomes(index, &names) {
            assert_eq!((found.judged, found.unanswered), (1, 0), "{}: {:?}", found.kernel, found.failures);
            failed.entry(found.kernel).or_default().extend((found.failed > 0).then_some(index));
        }
    }
    let expected = |what| entries.iter().filter(move |entry| entry.expected == what);
    let rejected = expected(ExpectedOutcome::Right).map(|entry| (entry.name.as_str(), &failed[&entry.name]));
    let rejected: BTreeMap<_, _> = rejected.filter(|(_, cases)| !cases.is_empty()).collect();
    assert_eq!(rejected, BTreeMap::new(), "honest kernels, and the problems that they fail");
    // Those that are wrong only in a large vocabulary have nothing to show here.
    let accepted = expected(ExpectedOutcome::Wrong).filter(|entry| failed[&entry.name].is_empty());
    assert_eq!(accepted.map(|entry| entry.name.as_str()).collect::<Vec<_>>(), Vec::<&str>::new());
}
