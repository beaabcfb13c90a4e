//! `assay tolerances`: what a person decided is shown, and what correct implementations need is measured.

use std::fs;

use crate::common::command::{assay, assert_refused};
use serde_json::Value;
use tempfile::TempDir;

#[test]
fn tolerances_are_shown_with_their_reasons() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("tolerances.json");
    let output = assay(&["tolerances", "--json", json.to_str().unwrap()]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    for part in ["κ of logp", "native", "external", "grade standard admits target-collapses"] {
        assert!(output.stdout.contains(part), "`{part}` not in: {}", output.stdout);
    }
    let shown: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(shown["class"]["external"]["gradient"], 35.0);

    let other = folder.path().join("other.toml");
    let text = fs::read_to_string("tolerances.toml").unwrap();
    fs::write(&other, text.replace("offset = 4", "offset = 2.5")).unwrap();
    let output = assay(&["tolerances", "--file", other.to_str().unwrap()]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert!(output.stdout.contains("an offset of 2.5 u"), "{}", output.stdout);
}

#[test]
fn tolerances_measured_name_each_gates_need_and_its_case() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("needed.json");
    let measure = ["tolerances", "--measure", "--class", "native", "--cases", "40"];
    let output = assay(&[&measure[..], &["--json", json.to_str().unwrap()]].concat());
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    let figures: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let figures = figures.as_array().unwrap();
    let logp = figures.iter().find(|of| of["output"] == "logp").expect("measured");
    assert_eq!((&logp["class"], &logp["allowed"]), (&"native".into(), &3.0.into()));
    assert!(logp["kappa"].as_f64().is_some_and(|kappa| kappa > 0.0 && kappa < 3.0), "{logp}");
    assert!(logp["case"].as_str().is_some_and(|case| case.starts_with("native on 1")), "{logp}");
    assert!(figures.iter().all(|of| of["class"] == "native"), "{figures:?}");
    assert!(output.stdout.contains("ignored  the panel of kernels of others: one class"), "{}", output.stdout);
    assert!(output.stdout.contains("- native: ") && output.stdout.contains(" cases, V = "), "{}", output.stdout);
}

#[test]
fn tolerances_bad_input_is_refused() {
    let measure = ["tolerances", "--measure"];
    assert_refused(&[&measure[..], &["--class", "cuda"]].concat(), &["--class", "`cuda`", "native"]);
    assert_refused(&["tolerances", "--file", "nowhere.toml"], &["nowhere.toml", "cannot read"]);
    assert_refused(&["tolerances", "--file", "Cargo.toml"], &["Cargo.toml", "tolerances"]);
    for args in [["--cases", "0"], ["--cases", "many"]] {
        let output = assay(&[&measure[..], &args].concat());
        assert_eq!(output.code, 2, "{args:?}");
        assert!(output.stderr.contains("1 or more"), "{}", output.stderr);
    }
    assert_eq!(assay(&["tolerances", "--class", "native"]).code, 2, "--class is of --measure");
    assert_eq!(assay(&["tolerances", "--into", "docs/tolerances.md"]).code, 2, "--into is of --measure");
}
