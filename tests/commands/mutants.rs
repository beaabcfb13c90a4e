//! `assay mutants`.

use std::fs;

use crate::common::command;
use assert_cmd::Command;
use assert_cmd::cargo::cargo_bin;
use serde_json::Value;

#[test]
fn mutants_json_has_the_score_and_reports_absent_fixtures() {
    // The project's fixtures are found from any working directory, but not by an executable that lies elsewhere.
    let folder = tempfile::tempdir().unwrap();
    let elsewhere = folder.path().join("assay");
    // By another process: a file that is written here is busy as long as one that another test starts has inherited it.
    Command::new("cp").args([cargo_bin!("assay"), &elsewhere]).assert().success();
    let args = ["mutants", "--quiet", "--only", "max-starts-at-zero", "--only", "length-factor", "--json", "out.json"];
    Command::new(elsewhere).current_dir(&folder).args(args).assert().success().stdout("");
    let json: Value = serde_json::from_str(&fs::read_to_string(folder.path().join("out.json")).unwrap()).unwrap();
    assert_eq!((&json["total"], &json["killed"]), (&2.into(), &2.into()));
    assert_eq!(json["survived"], Value::Array(vec![]));
    assert_eq!(json["ignored"][0]["what"], "recorded problems");
    let mutant = &json["mutants"][0];
    assert_eq!(mutant["name"], "max-starts-at-zero");
    assert_eq!(mutant["class"], "maximum");
    assert!(mutant["killed_by"].as_str().unwrap().contains(mutant["gate"].as_str().unwrap()));
    assert!(mutant["cases"].as_u64().unwrap() > 0);
    assert!(mutant["seen"].as_str().unwrap().contains("verl"));
    assert!(mutant["passes_peers"].is_array());
}

#[test]
fn mutants_unknown_name_or_absent_folder_is_refused() {
    command::assert_refused(&["mutants", "--only", "nobody"], &["--only", "`nobody`", "last-tile-skipped"]);
    let args = ["mutants", "--only", "length-factor", "--fixtures", "/nowhere"];
    command::assert_refused(&args, &["/nowhere/manifest.toml"]);
}
