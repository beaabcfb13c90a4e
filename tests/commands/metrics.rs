//! `assay metrics`: what trainers would log of a problem.

use std::path::Path;

use super::workplace::{Workplace, read_json};
use crate::common::command::{assay, assert_refused};

#[test]
fn metrics_go_by_the_names_and_definitions_of_each_project() {
    let workplace = Workplace::new();
    let problem = workplace.path("problem.safetensors");
    let json = workplace.path("metrics.json");
    for (names, metric) in [
        ("trl", "clip_ratio/low_mean"),
        ("verl", "actor/pg_clipfrac"),
        ("tunix", "is_ratio/mean"),
        ("liger", "clip_ratio"),
    ] {
        let output = assay(&["metrics", "--problem", &problem, "--names", names, "--json", &json]);
        assert_eq!(output.code, 0, "{}", output.stderr);
        let metrics = read_json(Path::new(&json));
        let metrics = metrics.as_array().unwrap();
        assert!(metrics.iter().any(|found| found["name"] == metric), "{metric} is not among {metrics:?}");
        for found in metrics {
            assert!(found["value"].is_number(), "{found}");
            assert!(output.stdout.contains(found["name"].as_str().unwrap()), "{}", output.stdout);
        }
    }
    let missing = workplace.path("nothing.safetensors");
    assert_refused(&["metrics", "--problem", &missing], &["nothing.safetensors"]);
}
