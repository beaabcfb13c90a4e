//! What TRL, verl, Tunix and Liger logged of their recorded runs, against the same names here.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use assay_fixture::PeerFile;
use assay_reference as reference;
use assay_reference::metrics::{Metric, MetricsProject};
use serde_json::{Map, Value};

/// Peers round some of their metrics to f32.
const LIMIT: f64 = 1e-6;

/// float32 files, which carry f32 through every step; worst seen 3e-6.
const LIMIT_F32: f64 = 1e-5;

/// Options that are logged as they are set.
const SETTINGS: [&str; 2] = ["entropy_coef", "kl_coef"];

fn recorded() -> Vec<(String, PeerFile, Map<String, Value>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../fixtures/peers");
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let metrics = |path: &PathBuf| -> Map<String, Value> {
        let value: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        value["expected"]["metrics"].as_object().cloned().unwrap_or_default()
    };
    let named = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    files.iter().map(|path| (named(path), PeerFile::read(path).unwrap(), metrics(path))).collect()
}

fn project(peer: &str) -> Option<MetricsProject> {
    match peer {
        "trl" => Some(MetricsProject::Trl),
        "verl" => Some(MetricsProject::Verl),
        "tunix" => Some(MetricsProject::Tunix),
        "liger" => Some(MetricsProject::Liger),
        _ => None,
    }
}

#[test]
fn metrics_are_what_each_project_logged() {
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for (name, file, logged) in recorded() {
        let Some(project) = project(&file.peer) else { continue };
        // A recorded defect of the loss is one of its metrics too.
        if name.ends_with("_quirk") {
            continue;
        }
        let spec = file.resolve().unwrap().spec;
        let reference = reference::evaluate(&spec, &file.problem).unwrap();
        let ours: Vec<Metric> = project.metrics(&reference);
        let limit = if file.dtype == assay_core::problem::Dtype::F64 { LIMIT } else { LIMIT_F32 };
        for (metric, value) in logged {
            if SETTINGS.contains(&metric.as_str()) {
                continue;
            }
            let expected = value.as_f64().unwrap_or(f64::NAN);
            let Some(found) = ours.iter().find(|ours| ours.name == metric) else {
                wrong.push(format!("{name}: `{metric}` is not logged here"));
                continue;
            };
            let error = (found.value - expected).abs();
            let right = error <= limit * expected.abs().max(1e-2) || (found.value.is_nan() && expected.is_nan());
            if !right {
                wrong.push(format!("{name}: `{metric}` is {} there and {} here", expected, found.value));
            }
            seen.insert((file.peer.clone(), metric));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(seen.len(), 38, "{seen:?}");
}
