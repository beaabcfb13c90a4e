//! `assay generate`: a problem in a file, and specs that are refused.

use std::fs;
use std::path::Path;

use super::workplace::Workplace;
use crate::common::command::{assay, assert_refused};

#[test]
fn generate_writes_the_same_bytes_for_the_same_seed() {
    let workplace = Workplace::new();
    for (name, seed) in [("a", "1"), ("b", "1"), ("c", "2")] {
        let path = workplace.path(name);
        let output = assay(&["generate", "--shape", "2x3x65", "--dtype", "f16", "--seed", seed, "-o", &path]);
        assert_eq!(output.code, 0, "{}", output.stderr);
    }
    let bytes = |name| fs::read(workplace.path(name)).unwrap();
    assert_eq!(bytes("a"), bytes("b"));
    assert_ne!(bytes("a"), bytes("c"));
}

#[test]
fn spec_file_that_says_nothing_is_refused() {
    let workplace = Workplace::new();
    let kinds = [("yaml", ""), ("yaml", "\n# a comment\n---\n"), ("yaml", "null"), ("toml", " \n"), ("json", "")];
    for (extension, text) in kinds {
        let path = workplace.write(&format!("empty.{extension}"), text);
        assert_refused(
            &["spec", "--spec", &path],
            &[&format!("empty.{extension}: got an empty spec, expected a field")],
        );
    }
    let said = workplace.write("said.yaml", "{}");
    assert_eq!(assay(&["spec", "--spec", &said, "-q"]).code, 0);
}

#[test]
fn generate_bad_specs_are_refused_by_file_and_field() {
    let workplace = Workplace::new();
    let cases: [(&str, &str, &[&str]); 12] = [
        ("unknown.yaml", "temprature: 1.0\n", &["temprature", "temperature"]),
        ("unknown.toml", "temprature = 1.0\n", &["temprature", "temperature"]),
        ("unknown.json", "{\"temprature\": 1.0}", &["temprature", "temperature"]),
        ("typed.yaml", "temperature: warm\n", &["a number > 0 or `given`", "`temperature: warm`"]),
        ("nested.yaml", "objective: {ppo_clip: {epsilon: 0.2}}\n", &["epsilon", "epsilon_low"]),
        ("cold.yaml", "temperature: 0.0\n", &["`temperature`", "got 0", "> 0"]),
        ("hot.yaml", "temperature: .inf\n", &["`temperature`", "got inf", "finite"]),
        ("clip.yaml", "objective: {ppo_clip: {epsilon_low: -0.1}}\n", &["epsilon_low", "got -0.1", "≥ 0"]),
        ("dual.yaml", "objective: {ppo_clip: {dual_clip: 1.0}}\n", &["dual_clip", "got 1", "> 1"]),
        ("kl.yaml", "kl: {beta: .nan}\n", &["kl.beta", "got NaN", "≥ 0"]),
        ("norm.yaml", "reduction: {normalizer: 0.0}\n", &["reduction.normalizer", "got 0", "> 0"]),
        ("length.yaml", "reduction: {fixed_length: {rows: all, length: 0}}\n", &["length", "got 0", "≥ 1"]),
    ];
    for (name, text, parts) in cases {
        let path = workplace.write(name, text);
        let args = ["generate", "--spec", &path, "--shape", "1x2x3", "-o", &workplace.path("never.safetensors")];
        assert_refused(&args, &[&[name][..], parts].concat());
    }
    assert!(!Path::new(&workplace.path("never.safetensors")).exists());
}
