//! What the kernels of `tests/panel` returned, recorded, before the judge: no Python is needed here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use assay::campaign::panel::judge;
use assay::fixture::{ProblemFile, read_candidate};
use assay::judge::trial::Known;
use assay::spec::LossSpec;
use serde::Deserialize;

#[derive(Deserialize)]
struct List {
    kernel: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    name: String,
    expected: String,
}

/// The problems, by number, that each kernel fails.
fn failures() -> BTreeMap<String, BTreeSet<String>> {
    let mut failures = BTreeMap::new();
    for entry in fs::read_dir("fixtures/panel").unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let [case, kernel, "safetensors"] = name.split('.').collect::<Vec<_>>()[..] else { panic!("{name}") };
        if kernel == "problem" {
            continue;
        }
        let file = ProblemFile::open(Path::new("fixtures/panel").join(format!("{case}.problem.safetensors"))).unwrap();
        let spec: LossSpec = serde_json::from_str(&file.metadata()["spec"]).unwrap();
        let problem = file.problem("logits", Some("old_logps")).unwrap();
        let known = Known::of(&spec, &problem).unwrap();
        let judged = judge(&known, read_candidate(&path).unwrap()).unwrap();
        let failed: &mut BTreeSet<String> = failures.entry(kernel.to_string()).or_default();
        if judged.failed().next().is_some() {
            failed.insert(case.to_string());
        }
    }
    failures
}

#[test]
fn honest_kernels_pass_as_recorded_and_wrong_ones_fail() {
    let List { kernel: entries } = toml::from_str(&fs::read_to_string("tests/panel/panel.toml").unwrap()).unwrap();
    let failures = failures();
    let names: BTreeSet<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(
        names,
        failures.keys().map(String::as_str).collect(),
        "`assay panel --record fixtures/panel` records them"
    );
    let failed = |name: &str| failures[name].iter().map(String::as_str).collect::<Vec<_>>();
    let expected = |what: &'static str| entries.iter().filter(move |entry| entry.expected == what);
    let rejected = expected("right").map(|entry| (entry.name.as_str(), failed(&entry.name)));
    let rejected: BTreeMap<_, _> = rejected.filter(|(_, cases)| !cases.is_empty()).collect();
    assert_eq!(rejected, BTreeMap::new(), "honest kernels, and the problems that they fail");
    // Those that are wrong only in a large vocabulary have nothing to show here.
    let accepted = expected("wrong").filter(|entry| failed(&entry.name).is_empty());
    assert_eq!(accepted.map(|entry| entry.name.as_str()).collect::<Vec<_>>(), Vec::<&str>::new());
}
