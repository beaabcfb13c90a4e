//! `assay gradcheck`: one implementation on one batch.

use std::fs;
use std::path::PathBuf;

use super::workplace::{Workplace, read_json};
use crate::common::command::{assay, assert_refused};
use serde_json::Value;
use tempfile::TempDir;

#[test]
fn gradcheck_writes_the_keys_of_the_seed_project() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("gradcheck.json");
    let output = assay(&["gradcheck", "--config", "configs/gradcheck_qwen.yaml", "--json", json.to_str().unwrap()]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    let result = read_json(&json);
    let number = |key: &str| result[key].as_f64().unwrap_or_else(|| panic!("{key} is a number"));
    assert!((number("loss_ref") - 0.320_339_144_479_898_5).abs() < 1e-12, "the recorded loss");
    assert_eq!((number("loss_ref") - number("loss_kernel")).abs(), number("abs_diff_loss"));
    assert!(number("max_abs_diff_dlogits") > 0.0 && number("max_abs_diff_dlogits") < 1e-3);
    assert!(number("max_rel_diff_dlogits") > 0.0 && number("max_rel_diff_dlogits") < 4e-3, "half an ulp of bf16");
    assert!(number("mean_abs_diff_dlogits") > 0.0);
    assert_eq!((&result["pass"], &result["impl"]), (&Value::from(true), &Value::from("native")));
}

#[test]
fn gradcheck_of_the_baseline_runs_the_best_one_here() {
    let workplace = Workplace::new();
    let config = "batch: {generate: {shape: [2, 3, 65], dtype: f32, regime: small}}\nkernel: {enabled: false}\n";
    let output = assay(&["gradcheck", "--config", &workplace.write("c.yaml", config)]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
}

#[test]
fn gradcheck_configs_shipped_pass() {
    for entry in fs::read_dir("configs").unwrap() {
        let path: PathBuf = entry.unwrap().path();
        if !path.file_name().unwrap().to_string_lossy().starts_with("gradcheck_") {
            continue;
        }
        let output = assay(&["gradcheck", "--quiet", "--config", path.to_str().unwrap()]);
        assert_eq!((output.code, output.stdout.as_str()), (0, ""), "{}: {}", path.display(), output.stderr);
    }
}

#[test]
fn gradcheck_bad_configs_are_refused() {
    let workplace = Workplace::new();
    let batch = "batch: {generate: {shape: [1, 2, 3], dtype: f32, regime: small}}\n";
    let cases: [(&str, String, &[&str]); 6] = [
        ("unknown.yaml", format!("{batch}kernels: {{}}\n"), &["kernels", "kernel"]),
        ("implementation.yaml", format!("{batch}kernel: {{enabled: true, impl: cuda}}\n"), &["`cuda`", "native"]),
        ("regime.yaml", batch.replace("small", "smalll"), &["smalll", "small"]),
        ("empty.yaml", batch.replace("[1, 2, 3]", "[1, 0, 3]"), &["`shape`", "[1, 0, 3]", "≥ 1"]),
        ("nothing.yaml", String::new(), &["nothing.yaml", "end of input"]),
        ("fixture.yaml", "batch: {fixture: {path: gone.safetensors}}\n".into(), &["gone.safetensors"]),
    ];
    for (name, text, parts) in cases {
        let path = workplace.write(name, &text);
        assert_refused(&["gradcheck", "--config", &path], parts);
    }
}
